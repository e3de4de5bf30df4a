"""What logs say besides steps: facts about the run, checkpoints, evaluations, failures, each at its
line and time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.measurement.lines import NOON, SECOND, at, perf, write

from drillyard.measurement.parsed_log import ParsedLog
from drillyard.measurement.read_logs import read_logs

TITAN = "[titan] 2026-08-01 12:00:{:02},000 - root - INFO - {}\n"
TITAN_STEP = (
    "step: {:2}  loss:  8.1  grad_norm:  1.2  memory: 45.12GiB(57.01%)  tps: 5,762  tflops: 333.75 "
    " mfu: 33.75%"
)

LOGS: dict[str, tuple[str, dict[str, Any], list[tuple[Any, ...]]]] = {
    "torchtitan": (
        TITAN.format(0, "Starting job: Llama 3 8B training")
        + TITAN.format(1, "CUDA capacity: NVIDIA H100 80GB HBM3 with 79.10GiB memory")
        + TITAN.format(1, "Peak FLOPS used for computing MFU: 9.890e+14")
        + TITAN.format(1, "Building 2-D device mesh with ['dp_shard', 'tp'], [4, 2]")
        + TITAN.format(2, "Model llama3 8B size: 8,030,261,248 total parameters")
        + TITAN.format(
            3,
            "Training starts at step 1, with local batch size 1, global batch size 8, sequence"
            " length 8192, total steps 1000 (warmup 200)",
        )
        + TITAN.format(5, TITAN_STEP.format(1))
        + TITAN.format(6, "Saving the checkpoint (or staging if async is enabled).")
        + TITAN.format(
            8, "Finished saving the checkpoint (or staging if async is enabled)in 2.25 seconds."
        )
        + TITAN.format(9, "Training completed"),
        {
            "accelerator": "NVIDIA H100 80GB HBM3",
            "peak_flops": 9.89e14,
            "num_gpus": 8,
            "model": "llama3 8B",
            "parameters": 8030261248,
            "global_batch_size": 8,
            "sequence_length": 8192,
            "total_steps": 1000,
        },
        [
            ("round_start", 0, None),
            ("checkpoint_begin", 6, None),
            ("checkpoint_end", 8, 2.25),
            ("end", 9, None),
        ],
    ),
    "megatron": (
        (
            f"{at(0)} using world size: 16, data-parallel size: 16\n  fp8"
            " ............................................. hybrid\n  micro_batch_size"
            " ................................ 2\n  params_dtype"
            " .................................... torch.bfloat16\n  seq_length"
            " ...................................... 4096\n  tokenizer_type"
            f" .................................. Llama3Tokenizer\n{at(5)} iteration        1/    "
            f" 100 | elapsed time per iteration (ms): 900.0 | lm loss: 1.1E+01 |\n{at(6)} "
            " validation loss at iteration 1 | lm loss value: 9.5E+00 | lm loss PPL: 1.3E+04 |\n"
        ),
        {
            "num_gpus": 16,
            "precision": "fp8",
            "micro_batch_size": 2,
            "sequence_length": 4096,
            "tokenizer": "Llama3Tokenizer",
            "total_steps": 100,
        },
        [("round_start", 0, None), ("evaluation", 6, None)],
    ),
    "maxtext": (
        (
            "Config param max_target_length: 2048\nConfig param model_name: llama2-7b\nConfig"
            f" param steps: 30\n{at(1)} Num_devices: 256, shape (64, 4)\nnumber parameters: 6.738"
            f" billion\n{at(2)} completed step: 0, seconds: 1.5, TFLOP/s/device: 9.5,"
            f" Tokens/s/device: 9.5, loss: 9.5\n{at(3)} saved a checkpoint at step 0\n"
        ),
        {
            "sequence_length": 2048,
            "model": "llama2-7b",
            "num_gpus": 256,
            "parameters": 6.738e9,
            "total_steps": 30,
        },
        [("round_start", 1, None), ("checkpoint", 3, None)],
    ),
    "nemo2": (
        (
            f"{at(0)} All distributed processes registered. Starting with 8 processes\n{at(2)}"
            " Training epoch 0, iteration 0/99 | lr: 1e-06 | global_step: 0 | reduced_train_loss:"
            " 11.9\n[NeMo I 2026-08-01 12:00:03 nemo_logging:393] Async checkpoint save for step"
            " 25 (/ckpt/24) finalized successfully.\n"
        ),
        {"num_gpus": 8},
        [("round_start", 0, None), ("checkpoint", 3, None)],
    ),
    "hf_trainer": (
        (
            f"{at(0)} ***** Running training *****\n  Num examples = 480\n  Instantaneous batch"
            " size per device = 2\n  Total train batch size (w. parallel, distributed &"
            " accumulation) = 8\n  Total optimization steps = 60\n  Number of trainable parameters"
            f" = 41,943,040\n{at(4)} {{'loss': 2.5, 'learning_rate': 1e-05, 'epoch': 0.1}}\n{at(5)}"
            f" Saving model checkpoint to out/checkpoint-30\n{at(9)} {{'train_runtime': 9.5,"
            " 'train_loss': 2.25, 'epoch': 0.1}\n"
        ),
        {
            "micro_batch_size": 2,
            "global_batch_size": 8,
            "total_steps": 60,
            "trainable_parameters": 41943040,
            "train_runtime_seconds": 9.5,
        },
        [("round_start", 0, None), ("checkpoint_begin", 5, None), ("end", 9, None)],
    ),
    "perflogger": (
        (
            f"{at(0)} [PerfLogger] Using 70.55B parameters for TFLOPs calculation.\n{at(1)}"
            f" {perf(1)}\n{at(2)} E0801 12:00:02.977000 3766697 torch/distributed/elastic/x.py:914]"
            " failed (exitcode: -9) local_rank: 0 (pid: 3766727) of binary:"
            f" /usr/bin/python\n{at(3)} slurmstepd: error: *** STEP 7.0 ON node1 CANCELLED AT"
            " 2026-08-01T12:00:03 DUE TO PREEMPTION ***\n"
        ),
        {"parameters": 70.55e9},
        [("failure", 2, None), ("failure", 3, None)],
    ),
}


def read_text(text: str, directory: Path) -> ParsedLog:
    return read_logs([write(directory / "run.log", text)])


@pytest.mark.parametrize("format", LOGS)
def test_facts_and_events(format: str, tmp_path: Path) -> None:
    text, facts, events = LOGS[format]
    log = read_text(text, tmp_path)
    assert log.format == format
    assert {name: getattr(log.facts, name) for name in facts} == facts
    assert [
        (event.kind, (event.time_us - NOON) / SECOND, event.seconds)
        for event in log.events
        if event.time_us
    ] == events
    assert len(log.events) == len(events)


def test_a_fact_names_its_place(tmp_path: Path) -> None:
    log = read_text(LOGS["megatron"][0], tmp_path)
    assert log.facts.places["sequence_length"] == f"{tmp_path}/run.log:5"


def test_what_every_rank_says_counts_once(tmp_path: Path) -> None:
    lines = [f"{rank}: {at(1)} saving checkpoint at iteration       5 to /x" for rank in range(4)]
    step = "{}: {} iteration 5/ 9 | elapsed time per iteration (ms): 500.0 | lm loss: 1.0E+00 |"
    log = read_text("\n".join([step.format(0, at(0)), *lines]) + "\n", tmp_path)
    assert [(event.kind, event.step, event.rank) for event in log.events] == [
        ("checkpoint_begin", 5, 0)
    ]


def test_the_text_of_a_mark_is_what_was_said_and_not_by_whom(tmp_path: Path) -> None:
    said = "  successfully loaded checkpoint from /ckpt [ t 1/8, p 1/1 ] at iteration 4"
    step = " iteration 5/ 9 | elapsed time per iteration (ms): 500.0 | lm loss: 1.0E+00 |"
    prefix = "[pod/job-0-x/main] 2026-08-01T12:00:00.123456789Z "
    path = tmp_path / "run.log"
    path.write_text(f"{prefix}{said}\n{prefix}{step}\n")
    assert [event.text for event in read_logs([path]).events] == [said.strip()]
