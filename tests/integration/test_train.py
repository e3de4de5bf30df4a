"""`drillyard train` as its users call it: what a run leaves, and that neither kills nor stops
change a bit of it."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.facts import says
from tests.integration.conftest import Reference
from tests.integration.held import Holds
from tests.integration.tiny_run import (
    BATCH,
    SEQUENCE_LENGTH,
    STEPS,
    TIMEOUT_SECONDS,
    Run,
    contents,
    drillyard,
    train,
    wait_until,
    write_config,
)

STEP_LINE = re.compile(
    r"Step: (\d+) \| Time: (\d+\.\d+)s \| TFLOPs/s/GPU: \d+\.\d+ \| Tokens/s/GPU: \d+(\.\d+)? \|"
    r" Loss: \d+\.\d{4}"
)


@pytest.fixture(scope="module")
def busy(workplace: Path) -> Run:
    """The reference's run with evaluations of both kinds every 2 steps and asynchronous saves every
    3."""
    config = write_config(
        workplace,
        "busy",
        checkpoint={"every_steps": 3, "keep": 2},
        evaluation__every_steps=2,
        evaluation__at_start=True,
        evaluation__metrics=["loss", "sql-execution"],
    )
    ended = train(config)
    assert ended.returncode == 0, ended.stderr
    return Run(config)


@pytest.fixture(scope="module")
def under_torchrun(workplace: Path) -> Run:
    """The reference's run under plain torchrun, logged every 20 steps."""
    config = write_config(workplace, "torchrun", logging={"every_steps": 20, "tensorboard": False})
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    ended = subprocess.run(
        [*launcher, "-m", "drillyard", "train", str(config)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert ended.returncode == 0, ended.stderr
    return Run(config)


def test_the_run_directory_holds_all_that_a_run_leaves(reference: Reference) -> None:
    last = f"checkpoints/step-{STEPS:08d}"
    expected = {
        "run.yaml",
        "data.json",
        "resolved.json",
        "events.jsonl",
        "metrics.jsonl",
        "dllogger.json",
        "summary.json",
        "summary.txt",
        "logs/rank-0.log",
        "logs/rank-1.log",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
        f"{last}/manifest.json",
        f"{last}/.metadata",
        f"{last}/__0_0.distcp",
        f"{last}/__1_0.distcp",
        f"{last}/held_out.json",
        "final/model.safetensors",
        "final/config.json",
        "final/generation_config.json",
        "final/tokenizer.json",
        "final/tokenizer_config.json",
        "final/.drillyard-export.json",
    }
    found = set(contents(reference.run.directory))
    tensorboard = {name for name in found if name.startswith("tensorboard/events.out.tfevents.")}
    assert len(tensorboard) == 1
    assert found - tensorboard == expected


def test_metrics_hold_every_step_at_full_precision(reference: Reference) -> None:
    lines = reference.run.records("metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    # An fp32 loss that is printed with all its digits is rarely a short decimal number.
    assert sum(len(repr(line["loss"])) >= 12 for line in lines) > STEPS / 2
    assert lines[-1]["loss"] < lines[0]["loss"] - 1
    assert all(
        line["tokens"] == BATCH * SEQUENCE_LENGTH and line["num_gpus"] == 2 for line in lines
    )
    assert all(line["mfu"] is None and line["step_seconds"] > 0 for line in lines)


def test_the_console_has_one_line_per_step_after_those_of_formula_estimate_and_length(
    reference: Reference,
) -> None:
    first, estimate, length, *rest = reference.output.splitlines()
    assert estimate.startswith("Estimate: it fits: ") and length.startswith(
        f"{STEPS} steps of {BATCH} sequences"
    )
    assert re.fullmatch(
        r"\[PerfLogger\] Using \d+\.\d\dK parameters for TFLOPs calculation\. Formula \S+: \d+\.\d+"
        r" GFLOPs per token\.",
        first,
    )
    matches = [STEP_LINE.fullmatch(line) for line in rest[:STEPS]]
    assert [match and int(match[1]) for match in matches] == list(range(1, STEPS + 1))
    assert all(match and len(match[2].lstrip("0.").replace(".", "")) >= 4 for match in matches)


def test_the_summary_and_dllogger_tell_of_the_run(reference: Reference) -> None:
    summary = reference.run.summary()
    assert (summary["status"], summary["steps"], summary["restarts"]) == ("completed", STEPS, 0)
    assert summary["final_loss"] == reference.run.figures()[-1][1]
    assert summary["tokens"] == STEPS * BATCH * SEQUENCE_LENGTH
    assert 0 < summary["goodput"] < 1
    assert "reference: completed, 40 steps" in (reference.run.directory / "summary.txt").read_text()
    lines = (reference.run.directory / "dllogger.json").read_text().splitlines()
    assert len(lines) >= STEPS and all(json.loads(line.removeprefix("DLLL ")) for line in lines)
    assert reference.run.events("end")[-1]["status"] == "completed"


def test_a_finished_run_is_left_as_it_is(reference: Reference) -> None:
    before = contents(reference.run.directory)
    again = train(reference.run.config)
    assert again.returncode == 0 and says(
        again.stdout, "finished ... summary.txt ... training.steps"
    )
    assert contents(reference.run.directory) == before


def test_evaluating_and_saving_change_no_bit(reference: Reference, busy: Run) -> None:
    assert len(busy.events("evaluation")) == 1 + STEPS // 2
    assert [event["step"] for event in busy.events("checkpoint")] == [*range(3, STEPS, 3), STEPS]
    compared = drillyard("diff", reference.run.directory, busy.directory)
    assert (compared.returncode, compared.stderr) == (0, "")
    assert says(compared.stdout, f"Equal ... {STEPS} common steps")
    assert busy.weights() == reference.run.weights()


def test_only_the_newest_checkpoints_and_the_best_are_kept(busy: Run) -> None:
    losses = {
        event["step"]: event["results"]["rows/held_out"]["loss"]
        for event in busy.events("evaluation")
    }
    saved = {
        step: loss for step, loss in losses.items() if step and (step % 3 == 0 or step == STEPS)
    }
    kept = {
        int(path.name.removeprefix("step-")) for path in (busy.directory / "checkpoints").iterdir()
    }
    assert kept == {STEPS - 1, STEPS, min(saved, key=lambda step: saved[step])}


def test_one_rank_of_torchrun_is_one_rank_of_the_run_and_rare_logging_changes_no_bit(
    reference: Reference, under_torchrun: Run
) -> None:
    assert under_torchrun.figures() == [reference.run.figures()[step - 1] for step in (20, 40)]
    assert under_torchrun.weights() == reference.run.weights()
    assert under_torchrun.summary()["status"] == "completed"


def test_a_killed_rank_costs_one_restart_and_no_bit(
    workplace: Path, reference: Reference, tmp_path: Path
) -> None:
    run = Run(write_config(workplace, "killed", checkpoint={"every_steps": 5}))
    rank, at = random.SystemRandom().choice([0, 1]), random.SystemRandom().randrange(6, STEPS - 10)
    # Ranks that stand by may still be importing when their turn comes.
    last = f"attempt-0-step-{STEPS}"
    holds = Holds(tmp_path, last)
    process = run.start("--standby", holds=holds)
    wait_until(lambda: bool(run.events("checkpoint")) and run.last_step() >= at, process)
    run.send(signal.SIGKILL, rank)
    holds.release(last)
    _, said = process.communicate(timeout=TIMEOUT_SECONDS)
    drawn = f"rank {rank} was killed after step {at}:\n{said}"
    assert process.returncode == 0, drawn
    assert (len(run.events("failure")), len(run.events("restart")), run.summary()["restarts"]) == (
        1,
        1,
        1,
    ), drawn
    assert run.events("failure")[0]["failed_rank"] == rank, drawn
    assert len(run.events("resume")) == 1 and run.events("resume")[0]["step"] >= 5, drawn
    undisturbed = reference.run.figures()
    assert {step for step, _, _ in run.figures()} == set(range(1, STEPS + 1)), drawn
    assert all(figures == undisturbed[figures[0] - 1] for figures in run.figures()), drawn
    assert run.weights() == reference.run.weights(), drawn


def test_stopped_runs_save_and_go_on_to_the_same_bits(
    workplace: Path, reference: Reference, tmp_path: Path
) -> None:
    run = Run(write_config(workplace, "stopped", checkpoint={"asynchronous": False}))
    first = run.start(holds=Holds(tmp_path, "attempt-0-step-15"))
    wait_until(lambda: run.last_step() >= 4, first)
    run.send(signal.SIGTERM, 1)
    assert first.wait(timeout=TIMEOUT_SECONDS) == 85, first.communicate()[1]
    stopped_at = run.last_step()
    assert [event["step"] for event in run.events("checkpoint")] == [stopped_at]
    assert (
        run.events("end")[-1]["status"] == "interrupted" and not (run.directory / "final").exists()
    )

    second = run.start(holds=Holds(tmp_path, "attempt-0-step-30"))
    wait_until(lambda: run.last_step() >= stopped_at + 3, second)
    second.terminate()
    assert second.wait(timeout=TIMEOUT_SECONDS) == 85, second.communicate()[1]
    assert "exit code 85" in second.communicate()[1]

    ended = train(run.config)
    assert ended.returncode == 0, ended.stderr
    assert [event["step"] for event in run.events("resume")] == [
        e["step"] for e in run.events("checkpoint")[:2]
    ]
    # No step was done twice: each start went on from the very step at which the one before it
    # stopped.
    assert run.figures() == reference.run.figures()
    assert run.weights() == reference.run.weights()
