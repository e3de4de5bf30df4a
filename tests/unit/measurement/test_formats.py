"""Every format is read right, also from lines of real public logs, and behind every launcher's
prefix."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.measurement.lines import NOON, SECOND, at, perf
from tests.unit.measurement.prefixes import PREFIXES, STAMP, STAMP_US, prefixed

from drillyard.measurement.formats import log_formats
from drillyard.measurement.losses import losses
from drillyard.measurement.parsed_log import NO_TIME, NONFINITE, SKIPPED, ParsedLog
from drillyard.measurement.read_logs import read_logs
from drillyard.measurement.run_result import measure

SAMPLES = Path(__file__).parent / "samples"


@dataclass(frozen=True)
class Expected:
    """What a sample holds; columns that are not named are not looked at."""

    format: str
    columns: dict[str, list[Any]]
    facts: dict[str, Any] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)


EXPECTED = {
    "perflogger.log": Expected(
        "perflogger",
        {
            "step": [1, 2, 3, 4],
            "seconds": [27.02, 15.12, 15.28, 14.53],
            "seconds_precision": [0.005] * 4,
            "printed_tflops_per_gpu": [513.3, 917.7, 907.6, 954.9],
            "printed_tokens_per_second_per_gpu": [1213, 2168, 2144, 2256],
            "loss": [1.3697, 1.3077, 1.1527, 0.9699],
            "line": [3, 4, 5, 6],
        },
        {"parameters": 70.55e9},
    ),
    "maxtext.log": Expected(
        "maxtext",
        {
            "step": [0, 1, 2, 3],
            "seconds": [44.923, 0.319, 5.658, 5.402],
            "printed_tflops_per_gpu": [17.022, 2400.734, 135.158, 141.542],
            "printed_tokens_per_second_per_gpu": [1094.129, 154316.608, 8687.815, 9098.189],
            "loss": [12.038, 12.038, 11.689, 11.379],
        },
        {"parameters": 15.933e9},
        ["evaluation"],
    ),
    "maxtext_glog.log": Expected("maxtext", {"step": [0, 1, 2], "seconds": [31.731, 0.277, 0.215]}),
    "megatron.log": Expected(
        "megatron",
        {
            "step": [1, 2, 3],
            "seconds": [4.0, 1.0, 0.5],
            "seconds_precision": [0.00005] * 3,
            "loss": [3.0, 2.0, 1.5],
            "learning_rate": [1e-4] * 3,
            "samples": [2, 2, 2],
            "grad_norm": [1, 1, 1],
            "window_steps": [1, 1, 1],
        },
        {"num_gpus": 8, "global_batch_size": 2, "sequence_length": 1024},
        ["round_start"],
    ),
    "megatron_openseek.log": Expected(
        "megatron",
        {
            "step": [1],
            "seconds": [271.607],
            "printed_tflops_per_gpu": [40.4],
            "loss": [11.92634],
            "samples": [1024],
        },
    ),
    "megatron_mindspeed.log": Expected(
        "megatron",
        {
            "step": [11],
            "seconds": [52.7281],
            "printed_tflops_per_gpu": [167.52],
            "grad_norm": [459.628],
        },
    ),
    "nemo2.log": Expected(
        "nemo2",
        {
            "step": [45, 46, 47],
            "seconds": [6.08, 6.061, 6.082],
            "seconds_precision": [0.005, 0.0005, 0.0005],
            "window_steps": [0, 0, 0],
            "loss": [11.96] * 3,
            "learning_rate": [6.897e-06, 7.046e-06, 7.196e-06],
            "samples": [128] * 3,
            "printed_tflops_per_gpu": [1249, 1252, 1248],
            "memory_gib": [107.84061] * 3,
        },
    ),
    "nemo2_srun.log": Expected(
        "nemo2",
        {"step": [28, 29, 30], "seconds": [0.189, 0.1903, 0.1915], "loss": [2.778, 2.782, 2.709]},
    ),
    "nemo1.log": Expected(
        "nemo1",
        {
            "step": [5, 6, 7],
            "seconds": [49.5, 49.4, 49.3],
            "elapsed_seconds": [379, 428, 477],
            "loss": [11.5, 11.4, 11.3],
            "samples": [2048] * 3,
            "line": [2, 2, 2],
        },
    ),
    "nemo1_e_notation.log": Expected("nemo1", {"step": [1999], "seconds": [1.9], "loss": [2.6]}),
    "nemo1_no_total.log": Expected(
        "nemo1", {"step": [1], "seconds": [3.37], "elapsed_seconds": [4]}
    ),
    "torchtitan.log": Expected(
        "torchtitan",
        {
            "step": [14, 15, 16],
            "loss": [3.24405, 3.10680, 3.05047],
            "grad_norm": [0.8319, 0.8587, 0.5443],
            "memory_gib": [9.46] * 3,
            "printed_tokens_per_second_per_gpu": [7282, 7334, 7313],
            "printed_mfu": [0.0017] * 3,
            "rank": [0, 0, 0],
            "time_us": [1779120286338000, 1779120287456000, 1779120288577000],
        },
    ),
    "torchtitan_no_grad_norm.log": Expected(
        "torchtitan", {"step": [23, 24], "printed_tokens_per_second_per_gpu": [212462, 209645]}
    ),
    "torchtitan_unnamed_ranks.log": Expected(
        "torchtitan", {"step": [4, 5], "loss": [7.62585, 7.07623]}
    ),
    "torchtune.log": Expected(
        "torchtune",
        {
            "step": [1, 2, 3],
            "loss": [2.0755836725234985, 1.87, 1.75],
            "grad_norm": [3.5, 3.1, 2.5],
            "learning_rate": [2e-5, 2e-5, 1.9e-5],
            "printed_tokens_per_second_per_gpu": [105.04, 405.04, 402.5],
            "memory_gib": [11.25] * 3,
            "window_steps": [1] * 3,
            "flags": [0] * 3,
        },
        {},
        ["round_start", "evaluation", "checkpoint_end"],
    ),
    "torchtune_bar.log": Expected(
        "torchtune", {"step": [4, 5], "elapsed_seconds": [5, 8], "loss": [1.8, 1.7]}
    ),
    "neox.log": Expected(
        "megatron", {"step": [10, 20], "loss": [10.98, math.nan], "flags": [0, NONFINITE]}
    ),
    "hf_trainer.log": Expected(
        "hf_trainer",
        {"step": [1, 2, 3], "loss": [4.75, 2.0312, 0.8984], "memory_gib": [25.45, 34.89, 34.89]},
    ),
    "hf_trainer_bar.log": Expected(
        "hf_trainer",
        {"step": [260], "elapsed_seconds": [1344], "learning_rate": [0.00014229432213209734]},
        {"train_runtime_seconds": 364.4972},
        ["end"],
    ),
    "maxtext_2023.log": Expected(
        "maxtext",
        {
            "step": [0, 1, 2],
            "seconds": [9.5, 0.25, 0.5],
            "printed_tflops_per_gpu": [1.5, 60, 30],
            "loss": [9.25, 9.0, 8.75],
        },
    ),
    "maxtext_without_tokens.log": Expected(
        "maxtext",
        {"step": [0, 1], "seconds": [9.5, 0.25], "printed_tflops_per_gpu": [1.5, 60]},
    ),
    "torchtune_bars.log": Expected(
        "torchtune_bars",
        {"step": [1, 2, 3], "loss": [2.5, 2.25, 2.0], "elapsed_seconds": [4, 8, 12]},
    ),
    "nanogpt.log": Expected(
        "nanogpt",
        {
            "step": [0, 10, 20],
            "loss": [10.9, 8.5, 7.25],
            "seconds": [9.0, 0.25, 0.26],
            "seconds_precision": [5e-6] * 3,
            "printed_mfu": [math.nan, math.nan, 0.315],
            "window_steps": [1] * 3,
        },
        {"tokens_per_step": 32768, "parameters": 124e6},
        ["round_start", "evaluation", "evaluation", "checkpoint_begin"],
    ),
    "litgpt.log": Expected(
        "litgpt",
        {
            # Two micro-batches a step: 0.4 + 0.5 and 0.1 + 0.15 s; of step 4 one is logged.
            "step": [1, 2, 4],
            "seconds": [0.9, 0.25, 0.25],
            "loss": [2.4, 2.2, 2.1],
            "seconds_precision": [1e-5] * 3,
        },
        {"trainable_parameters": 1e6},
        ["evaluation_end", "evaluation"],
    ),
    "litgpt_2023.log": Expected(
        "litgpt", {"step": [1, 2], "seconds": [0.9, 0.25], "loss": [2.4, 2.2]}
    ),
    "llama_factory.jsonl": Expected(
        "llama_factory",
        {
            "step": [10, 20],
            "elapsed_seconds": [100, 200],
            "loss": [1.5, 1.25],
            "learning_rate": [5e-5, 2e-5],
            "tokens": [10240, 10240],
            "window_steps": [10, 10],
        },
        {"total_steps": 25},
        ["evaluation"],
    ),
    "ms_swift.log": Expected(
        "hf_trainer",
        {
            "step": [50, 55],
            "elapsed_seconds": [4089, 4534],
            "loss": [1.5, 1.25],
            "grad_norm": [0.5, 0.5],
            "memory_gib": [63.5, 63.5],
            "window_steps": [5, 5],
        },
        {"total_steps": 176},
    ),
    "ms_swift.jsonl": Expected(
        "ms_swift",
        {
            "step": [50, 55],
            "elapsed_seconds": [4089, 4534],
            "loss": [1.5, 1.25],
            "memory_gib": [63.5, 63.5],
        },
        {"total_steps": 176},
        ["evaluation"],
    ),
    "olmo_core.log": Expected(
        "olmo_core",
        {
            "step": [1, 2, 3],
            "time_us": [NOON + 2 * SECOND, NOON + 4 * SECOND, NOON + 6 * SECOND + SECOND // 2],
            "loss": [10.5, math.nan, 9.25],
            "grad_norm": [1.25, math.nan, math.nan],
            "learning_rate": [1e-5, math.nan, math.nan],
            "seconds": [math.nan, math.nan, 2.5],
            "printed_tokens_per_second_per_gpu": [math.nan, math.nan, 8192],
            "printed_mfu": [math.nan, math.nan, 0.385],
            "flags": [0, 0, NONFINITE | SKIPPED],
            "line": [3, 8, 9],
        },
        {"total_steps": 2000, "peak_flops": 989.5e12, "accelerator": "NVIDIA H100 80GB HBM3"},
        ["round_start", "checkpoint_begin", "checkpoint_end"],
    ),
    "nemo1_nan.log": Expected(
        "nemo1",
        {
            "step": [8999, 9000, 9001],
            "loss": [6.5, math.nan, -math.inf],
            "flags": [0, NONFINITE, NONFINITE],
        },
    ),
    "hf_trainer_no_bars.log": Expected(
        "hf_trainer",
        {
            "step": [10, 20, 30, 40, 50, 60],
            "loss": [2.5, 2.4, 2.3, 2.2, 2.1, 2.0],
            "window_steps": [10] * 6,
        },
        {"train_runtime_seconds": 120, "train_steps_per_second": 0.5, "global_batch_size": 8},
        ["end"],
    ),
    "hf_trainer_foreign_bars.log": Expected(
        "hf_trainer",
        {
            "step": [10, 20, 30, 40, 50, 60],
            "elapsed_seconds": [9, 18, 27, 36, 45, 54],
            "window_steps": [10] * 6,
        },
        {"train_runtime_seconds": 60.12, "global_batch_size": 8},
        ["evaluation", "evaluation", "end"],
    ),
    "dllogger.json": Expected(
        "dllogger",
        {
            "step": [46, 47],
            "seconds": [25.2, 25.115550994873047],
            "seconds_precision": [0, 0],
            "loss": [7.9, 7.890198707580566],
            "samples": [2048, 2048],
            "time_us": [1727463401868971, 1727463426984522],
            "elapsed_seconds": [1620.003606, 1645.119157],
        },
        {"global_batch_size": 2048},
    ),
}


_REDRAWN = ("dllogger", "nemo1", "torchtune_bars")
"""Formats that have times of their own, or whose lines are redrawn: a stamp before such a line is
that of all drawings."""


def check(log: ParsedLog, expected: Expected) -> None:
    assert log.format == expected.format
    for name, values in expected.columns.items():
        np.testing.assert_allclose(getattr(log.steps, name), values, rtol=1e-6, err_msg=name)
    for name, value in expected.facts.items():
        found = getattr(log.facts, name)
        assert found == (value if isinstance(value, str) else pytest.approx(value)), name
    assert [event.kind for event in log.events] == expected.events


@pytest.mark.parametrize("sample", EXPECTED)
def test_sample(sample: str) -> None:
    log = read_logs([SAMPLES / sample])
    check(log, EXPECTED[sample])
    assert all(source.damaged_lines == 0 for source in log.sources)


def test_the_documentation_lists_every_format() -> None:
    text = (Path(__file__).parents[3] / "docs/measure.md").read_text("utf-8")
    assert [name for name in log_formats() if f"| `{name}` |" not in text] == []


def test_every_sample_is_expected_somewhere() -> None:
    assert {path.name for path in SAMPLES.iterdir()} - {"README.md"} == set(EXPECTED)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", PREFIXES)
def test_samples_behind_a_launchers_prefix(launcher: str, tmp_path: Path) -> None:
    prefix = PREFIXES[launcher]
    for sample, expected in EXPECTED.items():
        bare = (SAMPLES / sample).read_bytes()
        (tmp_path / sample).write_bytes(prefixed(bare, prefix))
        log = read_logs([tmp_path / sample])
        own = {"time_us"} if STAMP in prefix and expected.format != "dllogger" else set()
        ours = {name: values for name, values in expected.columns.items() if name not in own}
        check(log, Expected(expected.format, ours, expected.facts, expected.events))
        if STAMP in prefix and expected.format not in _REDRAWN:
            assert (log.steps.time_us == STAMP_US).all(), sample
        if b"rank0" in prefix:
            assert log.ranks[:1] == (0,), sample


def test_the_stamp_before_a_redrawn_line_is_no_drawings_time(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_bytes(
        prefixed((SAMPLES / "nemo1.log").read_bytes(), PREFIXES["kubectl --timestamps"])
    )
    assert read_logs([path]).steps.time_us.tolist() == [NO_TIME] * 3
    bar = b"Epoch 0: :  47%|###| 7/15 [06:19<07:13, global_step=5.000, train_step_timing in s=9.5]"
    path.write_bytes(STAMP + b" " + bar + b"\n")
    assert read_logs([path]).steps.time_us.tolist() == [STAMP_US]


def test_numbered_lines_are_said_to_be(tmp_path: Path) -> None:
    assert "numbered" in read_logs([SAMPLES / "hf_trainer.log"]).warnings[0]
    assert not any(
        "numbered" in text for text in read_logs([SAMPLES / "hf_trainer_bar.log"]).warnings
    )


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_megatron_line_without_its_loss_is_a_step_that_is_not_finite(tmp_path: Path) -> None:
    line = (
        " iteration {0:8}/ 10 | elapsed time per iteration (ms): 500.0 |{1} number of skipped"
        " iterations: {2} |\n"
    )
    text = (
        line.format(1, " lm loss: 2.0E+00 |", 0)
        + line.format(2, "", 0)
        + line.format(3, " lm loss: 1.9E+00 |", 1)
    )
    log = read_logs([write(tmp_path / "run.log", text)])
    assert log.steps.flags.tolist() == [0, NONFINITE, SKIPPED]
    assert math.isnan(log.steps.loss[1])


def test_a_megatron_log_that_never_prints_a_loss_has_no_nonfinite_steps(tmp_path: Path) -> None:
    text = "".join(
        f" iteration {step}/ 9 | elapsed time per iteration (ms): 500.0 |\n" for step in (1, 2)
    )
    assert read_logs([write(tmp_path / "run.log", text)]).steps.flags.tolist() == [0, 0]


def _megatron(step: int, loss: str, skipped: int, nan: int) -> str:
    return (
        f" iteration {step:8}/ 100 | elapsed time per iteration (ms): 500.0 |{loss} loss scale:"
        f" 65536.0 | number of skipped iterations: {skipped:3} | number of nan iterations:"
        f" {nan:3} |\n"
    )


@pytest.mark.parametrize(
    ("lines", "skipped", "not_finite"),
    [
        # Ten steps of a loss scale that is too high: no loss is printed, and none was NaN.
        ([("", 10, 0), (" lm loss: 2.0E+00 |", 0, 0)], {10: 10}, {}),
        ([(" lm loss: 2.0E+00 |", 0, 0), ("", 10, 0)], {20: 10}, {}),
        ([(" lm loss: 2.0E+00 |", 3, 3), (" lm loss: 2.0E+00 |", 0, 0)], {10: 3}, {10: 3}),
        ([(" lm loss: 2.0E+00 |", 0, 0), ("", 10, 10)], {20: 10}, {20: 10}),
        # Seven steps were applied, and their mean is not printed: one of them was NaN.
        ([(" lm loss: 2.0E+00 |", 0, 0), ("", 3, 0)], {20: 3}, {20: 1}),
    ],
)
def test_megatron_counts_the_steps_of_a_line(
    lines: list[tuple[str, int, int]],
    skipped: dict[int, int],
    not_finite: dict[int, int],
    tmp_path: Path,
) -> None:
    text = "".join(_megatron(10 * (index + 1), *line) for index, line in enumerate(lines))
    log = read_logs([write(tmp_path / "run.log", text)])
    found = losses(log)
    assert {one.step: one.steps for one in found.skipped} == skipped
    assert {one.step: one.steps for one in found.nonfinite} == not_finite
    assert measure(log).as_json()["skipped_steps"] == sum(skipped.values())


def test_a_step_line_with_decimal_commas(tmp_path: Path) -> None:
    text = (
        "Step: 3 | Time: 1,5s | TFLOPs/s/GPU: 9,5 | Tokens/s/GPU: 100 | Loss: 2,25\n"
        "Step: 4 | Time: 1,25s | TFLOPs/s/GPU: 9,5 | Tokens/s/GPU: 100 | Loss: 2,0\n"
    )
    steps = read_logs([write(tmp_path / "run.log", text)]).steps
    assert (steps.seconds.tolist(), steps.loss.tolist()) == ([1.5, 1.25], [2.25, 2.0])
    text = "completed step: 3, seconds: 1,5, TFLOP/s/device: 9,5, Tokens/s/device: 10,25, loss: 2,5"
    steps = read_logs([write(tmp_path / "run.log", text + "\n")]).steps
    assert (steps.seconds.tolist(), steps.loss.tolist()) == ([1.5], [2.5])
    text = "[titan] step:  3  loss:  2,5  grad_norm:  1,25  memory: 45,12GiB(57,01%)  tps: 5,762"
    steps = read_logs([write(tmp_path / "run.log", text + "  mfu: 33,75%\n")]).steps
    assert (steps.loss.tolist(), steps.printed_tokens_per_second_per_gpu.tolist()) == (
        [2.5],
        [5762],
    )
    assert steps.printed_mfu.tolist() == [0.3375]


def test_megatrons_window_is_the_number_of_steps_since_the_line_before(tmp_path: Path) -> None:
    line = " iteration {0}/ 99 | elapsed time per iteration (ms): 500.0 | lm loss: 1.0E+00 |\n"
    log = read_logs(
        [write(tmp_path / "run.log", "".join(line.format(step) for step in (10, 20, 30, 35)))]
    )
    assert log.steps.window_steps.tolist() == [10, 10, 10, 5]


@pytest.mark.parametrize(
    "line",
    [
        "completed step: 3, seconds: 1.5e0, TFLOP/s/device: 1.0, Tokens/s/device: 2.0, loss: {}",
        "Step: 3 | Time: 1.5s | TFLOPs/s/GPU: 9.5 | Tokens/s/GPU: 100 | Loss: {}",
        (
            "[titan] step:  3  loss:  {}  grad_norm:  1.2  memory: 45.12GiB(57.01%)  tps: 5,762 "
            " mfu: 33.75%"
        ),
        (
            " iteration 3/ 9 | elapsed time per iteration (ms): 1500.0 | lm loss: {} | grad norm:"
            " 1.2 |"
        ),
        (
            "Training epoch 0, iteration 3/9 | global_step: 3 | reduced_train_loss: {} |"
            " train_step_timing in s: 1.5"
        ),
        "{{'loss': {}, 'grad_norm': 1.2, 'learning_rate': 1e-05, 'epoch': 0.1, 'step': 3}}",
        "Step 3 | loss:{} lr:2e-05 tokens_per_second_per_gpu:405.04 ",
        (
            " samples/sec: 9.1 | iteration 3/ 9 | elapsed time per iteration (ms): 7.0 | lm_loss:"
            " {} | loss scale: 1.0 |"
        ),
        (
            "Epoch 0: :  47%|#| 4/15 [06:19<07:13, reduced_train_loss={}, global_step=3.0,"
            " train_step_timing in s=1.5]"
        ),
        (
            'DLLL {{"type": "LOG", "step": 3, "data": {{"train_loss": "{}", "train_step_timing in'
            ' s": 1.5}}}}'
        ),
    ],
)
@pytest.mark.parametrize(
    ("printed", "value"),
    [
        ("nan", math.nan),
        ("NaN", math.nan),
        ("inf", math.inf),
        ("-inf", -math.inf),
        ("-Infinity", -math.inf),
        ("nan.0", math.nan),
        ("-inf.", -math.inf),
    ],
)
def test_losses_that_are_not_finite(line: str, printed: str, value: float, tmp_path: Path) -> None:
    log = read_logs([write(tmp_path / "run.log", line.format(printed) + "\n")])
    assert log.steps.step.tolist() == [3]
    assert log.steps.loss[0] == pytest.approx(value, nan_ok=True)
    assert log.steps.flags.tolist() == [NONFINITE]


@pytest.mark.parametrize(
    "line",
    [
        (
            "[titan] step:  3  loss:  1.5  grad_norm:  {}  memory: 45.12GiB(57.01%)  tps: 5,762 "
            " mfu: 33.75%"
        ),
        (
            " iteration 3/ 9 | elapsed time per iteration (ms): 1500.0 | lm loss: 1.5 | grad norm:"
            " {} |"
        ),
        (
            " samples/sec: 9.1 | iteration 3/ 9 | elapsed time per iteration (ms): 7.0 | lm_loss:"
            " 1.5 | grad_norm: {} |"
        ),
        (
            "Training epoch 0, iteration 3/9 | global_step: 3 | reduced_train_loss: 1.5 |"
            " grad_norm: {}"
        ),
        (
            "Epoch 0: :  47%|#| 4/15 [06:19<07:13, global_step=3.0, train_step_timing in s=1.5,"
            " grad_norm={}]"
        ),
        "{{'loss': 1.5, 'grad_norm': {}, 'learning_rate': 1e-05, 'epoch': 0.1, 'step': 3}}",
        "Step 3 | loss:1.5 lr:2e-05 tokens_per_second_per_gpu:405.04 grad_norm:{} ",
        'DLLL {{"type": "LOG", "step": 3, "data": {{"train_loss": 1.5, "grad_norm": "{}"}}}}',
    ],
)
@pytest.mark.parametrize("printed", ["nan", "inf", "-inf", "NaN", "nan.0"])
def test_gradient_norms_that_are_not_finite(line: str, printed: str, tmp_path: Path) -> None:
    log = read_logs([write(tmp_path / "run.log", line.format(printed) + "\n")])
    assert log.steps.step.tolist() == [3]
    assert log.steps.flags.tolist() == [NONFINITE]


def test_torchtune_lines_of_other_keys_alone_are_no_steps(tmp_path: Path) -> None:
    text = (
        "Step 1 | lr:2e-05\nStep 1 | loss:2.5\nStep 2 | val_loss:nan \nStep 2 | loss:2.25 lr:2e-05"
        " grad_norm:1.5 \nStep 3 | class_loss:0.5 loss:2.125 rewards/chosen:-0.25 \nStep by step |"
        " loss:1 \n"
    )
    log = read_logs([write(tmp_path / "run.log", text)])
    assert log.steps.step.tolist() == [1, 2, 3]
    assert log.steps.loss.tolist() == [2.5, 2.25, 2.125]
    np.testing.assert_equal(log.steps.grad_norm.tolist(), [math.nan, 1.5, math.nan])


def test_torchtune_writes_a_file_per_start(tmp_path: Path) -> None:
    line = "Step {} | loss:{} lr:2e-05 tokens_per_second_per_gpu:405.04 \n"
    for name, steps in {
        "log_1751444966.txt": range(1, 11),
        "log_1751448888.txt": range(6, 16),
    }.items():
        write(tmp_path / name, "".join(line.format(step, 2 - step / 20) for step in steps))
    log = read_logs([tmp_path])
    assert log.steps.attempt.tolist() == [0] * 10 + [1] * 10
    assert log.steps.again.tolist() == [False] * 10 + [True] * 5 + [False] * 5


def test_torchtitan_without_mfu_and_in_colour(tmp_path: Path) -> None:
    text = (
        "\x1b[32m[titan] 2026-08-01 12:00:00,123 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss: "
        " 8.1  \x1b[38;2;180;60;0mgrad_norm:  1.2  \x1b[38;2;54;234;195mmemory: 45.12GiB(57.01%) "
        " \x1b[34mtps: 5,762  \x1b[36mtflops: 1,333.75  \x1b[35mmfu: N/A\x1b[39m\n"
    )
    log = read_logs([write(tmp_path / "run.log", text)])
    assert log.steps.printed_tflops_per_gpu.tolist() == [1333.75]
    assert not log.steps.has("printed_mfu")


def test_torchtitan_validation_is_no_step(tmp_path: Path) -> None:
    text = (
        "[titan] 2026-08-01 12:00:00,123 - root - INFO - step: 10  loss:  8.1  memory:"
        " 45.12GiB(57.01%)  tps: 5,762\n[titan] 2026-08-01 12:00:05,123 - root - INFO - validate"
        " step: 10  loss:  7.9  memory: 45.12GiB(57.01%)  tps: 9,762\n"
    )
    log = read_logs([write(tmp_path / "run.log", text)])
    assert log.steps.step.tolist() == [10]
    assert [(event.kind, event.step, dict(event.values)) for event in log.events] == [
        ("evaluation", 10, {"loss": 7.9})
    ]


def test_nemo2_numbers_steps_over_epochs(tmp_path: Path) -> None:
    line = (
        "Training epoch {}, iteration {}/1 | lr: 1e-6 | global_step: {} | reduced_train_loss: 1.0\n"
    )
    text = line.format(0, 0, 0) + line.format(0, 1, 1) + line.format(1, 0, 2) + line.format(1, 1, 3)
    log = read_logs([write(tmp_path / "run.log", text)])
    assert log.steps.step.tolist() == [0, 1, 2, 3]
    assert not log.steps.again.any()


def test_dllogger_with_nan_lists_and_other_lines(tmp_path: Path) -> None:
    lines = [
        {"type": "LOG", "step": [0, 1], "data": {"train_loss": 2.0, "step_time": 0.5}},
        {"type": "LOG", "step": [0, 2], "data": {"train_loss": math.nan, "step_time": 0.5}},
        {"type": "LOG", "step": [1, 1], "data": {"train_loss": 1.0, "step_time": 0.5}},
        {"type": "LOG", "step": [], "data": {"train_loss": 1.0}},
        {"type": "METADATA", "metric": "train_loss", "metadata": {"unit": None}},
        {"type": "LOG", "step": 7, "data": {"val_loss": 1.0}},
    ]
    text = (
        "".join("DLLL " + json.dumps(line) + "\n" for line in lines)
        + 'DLLL {"type": "LOG", "step"\n'
    )
    log = read_logs([write(tmp_path / "dllogger.json", text)])
    assert log.steps.step.tolist() == [1, 2, 3]
    assert log.steps.window_steps.tolist() == [1, 1, 1]
    assert log.steps.flags.tolist() == [0, NONFINITE, 0]


def test_hf_lines_with_quoted_numbers_and_bars_on_the_same_line(tmp_path: Path) -> None:
    text = (
        "  0%|          | 0/60 [00:00<?, ?it/s]\r  3%|3         | 2/60 [00:12<05:52, "
        " 6.07s/it]{'loss': '0.6647', 'grad_norm': '0.8371', 'learning_rate': '1.09e-05',"
        " 'num_tokens': '4096'}\n  7%|6         | 4/60 [00:24<05:40,  6.07s/it]{'loss': '0.6347',"
        " 'grad_norm': 'nan', 'learning_rate': '1.05e-05', 'num_tokens': '8192'}\n{'eval_loss':"
        " '0.7', 'eval_runtime': '9.2', 'epoch': '0.19'}\n"
    )
    log = read_logs([write(tmp_path / "run.log", text)])
    assert log.steps.step.tolist() == [2, 4]
    assert log.steps.elapsed_seconds.tolist() == [12, 24]
    assert log.steps.window_steps.tolist() == [2, 2]
    assert log.steps.tokens.tolist() == [2048, 2048]
    assert log.steps.flags.tolist() == [0, NONFINITE]
    assert [dict(event.values) for event in log.events] == [{"loss": 0.7}]
    assert not log.warnings


def test_drillyards_lines(tmp_path: Path) -> None:
    record = {
        "time": "2026-01-02T03:04:05.123456Z",
        "round": 0,
        "step": 1,
        "loss": 2.5,
        "learning_rate": 1e-4,
        "grad_norm": None,
        "step_seconds": 0.25,
        "tokens": 1024,
        "num_gpus": 4,
        "skipped_steps": 0,
        "window_steps": 5,
        "tokens_per_second_per_gpu": 1024.0,
        "mfu": None,
        "memory_gib": 3.5,
        "formula": "6N",
    }
    second = record | {
        "step": 2,
        "round": 1,
        "skipped_steps": 1,
        "loss": None,
        "nonfinite": {"loss": "nan"},
    }
    console = (
        {"event": "step", "total_steps": 10} | record | {"step": 3, "round": 1, "skipped_steps": 1}
    )
    text = "".join(json.dumps(line) + "\n" for line in (record, second, console))
    log = read_logs([write(tmp_path / "metrics.jsonl", text)])
    assert log.format == "drillyard"
    assert log.steps.step.tolist() == [1, 2, 3]
    assert log.steps.attempt.tolist() == [0, 1, 1]
    assert log.steps.flags.tolist() == [0, NONFINITE | SKIPPED, 0]
    assert log.steps.tokens.tolist() == [1024] * 3
    assert log.steps.window_steps.tolist() == [5] * 3
    assert (log.facts.num_gpus, log.facts.formula) == (4, "6N")
    assert log.steps.time_us.tolist() == [STAMP_US] * 3
    assert NO_TIME not in log.steps.time_us


def test_lines_that_end_in_cr_lf_keep_their_times(tmp_path: Path) -> None:
    lines = [f"{at(second)} {perf(second)}" for second in range(1, 9)]
    log = read_logs([write(tmp_path / "run.log", "".join(f"{line}\r\n" for line in lines))])
    assert log.steps.time_us.tolist() == [NOON + second * SECOND for second in range(1, 9)]


@pytest.mark.parametrize(
    "prefix", ["{rank}: ", "[rank{rank}]:", "[pod/job-{rank}-x/main] ", "(w, rank={rank}, pid=7) "]
)
def test_each_ranks_bars_number_its_own_lines(prefix: str, tmp_path: Path) -> None:
    def printed(rank: int, step: int) -> list[str]:
        bar = f" 10%|#  | {step}/60 [00:{step:02}<01:00, 1.00s/it]"
        return [bar, f"{{'loss': {step}.5, 'learning_rate': 1e-05, 'epoch': 0.1}}"]

    def line(rank: int, text: str) -> str:
        return prefix.format(rank=rank) + text + "\n"

    # Rank 1 is a step ahead: its bar comes between rank 0's bar and line.
    text = ""
    for step in range(1, 30):
        (bar, loss), (next_bar, next_loss) = printed(0, step), printed(1, step + 1)
        text += line(0, bar) + line(1, next_bar) + line(0, loss) + line(1, next_loss)
    log = read_logs([write(tmp_path / "run.log", text)])
    assert log.steps.step.tolist() == list(range(1, 31))
    assert log.steps.loss.tolist() == [step + 0.5 for step in range(1, 31)]
    assert log.ranks == (0, 1)
