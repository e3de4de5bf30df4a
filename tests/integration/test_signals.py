"""Stop signals and stopped ranks in real training: what was trained is saved, nothing is lost, not
a bit changes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.facts import says
from tests.integration.conftest import Reference
from tests.integration.held import Holds
from tests.integration.tiny_run import (
    STARTED,
    STEPS,
    TIMEOUT_SECONDS,
    Run,
    train,
    wait_until,
    write_config,
    write_rows,
)

from drillyard.supervise.launch_contract import (
    EXIT_RECORD,
    FailureElsewhere,
    write_failure_elsewhere,
)

LONG_EVALUATION = {"metrics": ["loss", "sql-execution"], "samples": 400, "max_new_tokens": 100}


def test_a_stop_during_evaluations_is_answered_at_once_and_costs_nothing(
    workplace: Path, reference: Reference, tmp_path: Path
) -> None:
    evaluation = {**LONG_EVALUATION, "every_steps": 7}
    run = Run(write_config(workplace, "stopped-while-evaluating", evaluation=evaluation))
    # An evaluation has some thousand forwards.
    holds = Holds(tmp_path, "attempt-0-forward-50")
    first = run.start(holds=holds)
    wait_until(lambda: holds.reached("attempt-0-forward-50", 0, 1), first)
    # While a run is active, nobody else may change what is saved of it.
    saved = (run.directory / "run.yaml").read_bytes()
    intruder = train(run.config, "--set", "logging.every_steps=2")
    assert intruder.returncode == 2 and says(intruder.stderr, f"{run.directory}: ... active")
    assert (run.directory / "run.yaml").read_bytes() == saved
    run.send(signal.SIGUSR1, 1)
    assert first.wait(timeout=TIMEOUT_SECONDS) == 85, first.communicate()[1]
    signalled, ended = run.events("signal")[-1], run.events("end")[-1]
    assert signalled["signal"] == "SIGUSR1" and ended["status"] == "interrupted"
    assert [event["step"] for event in run.events("checkpoint")] == [run.last_step()]
    assert not run.events("evaluation"), "it was left before its end"

    # The next start evaluates only at the end, where it is stopped again: all is saved by then.
    again = write_config(workplace, "stopped-while-evaluating", evaluation=LONG_EVALUATION)
    holds = Holds(tmp_path, "attempt-0-forward-50")
    second = Run(again).start(holds=holds)
    wait_until(lambda: holds.reached("attempt-0-forward-50", 0, 1), second)
    assert run.events("evaluation_begin")[-1]["step"] == STEPS
    second.terminate()
    assert second.wait(timeout=TIMEOUT_SECONDS) == 85, second.communicate()[1]
    assert not (run.directory / "summary.json").exists()

    last = train(again, "--set", "evaluation.metrics=[loss]")
    assert last.returncode == 0, last.stderr
    assert run.events("resume")[-1]["step"] == STEPS
    assert run.figures() == reference.run.figures(), "no step was done twice"
    assert run.weights() == reference.run.weights()


def test_a_stop_before_the_first_step_ends_promptly_and_leaves_whole_caches(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", count=2_000)
    run = Run(write_config(tmp_path, "tokenising", training__steps=2, evaluation__max_sequences=8))
    holds = Holds(tmp_path, "attempt-0-tokenising")
    process = run.start(holds=holds)
    wait_until(lambda: holds.reached("attempt-0-tokenising", 0), process)
    # Rank 1 waits in a store, in C++, for as long as rank 0 tokenises.
    run.send(signal.SIGTERM, 1)
    assert process.wait(timeout=TIMEOUT_SECONDS) == 85, process.communicate()[1]
    assert [event["event"] for event in run.records("events.jsonl")][-1] == "end"
    assert not run.events("round_start")

    ended = train(run.config)
    assert ended.returncode == 0, ended.stderr
    assert run.events("data")[0].get("notes") is None, "nothing was found damaged"


def test_a_rank_stopped_by_sigstop_is_named_and_costs_one_restart(
    workplace: Path, reference: Reference, tmp_path: Path
) -> None:
    # More than what one rank of a busy machine may come later than the other to where they meet.
    timeouts = {"watchdog_seconds": 120, "collective_seconds": 20}
    run = Run(write_config(workplace, "sigstop", checkpoint={"every_steps": 5}, timeouts=timeouts))
    holds = Holds(tmp_path, "attempt-0-step-30")
    process = run.start(holds=holds)
    wait_until(lambda: bool(run.events("checkpoint")) and run.last_step() >= 8, process)
    run.send(signal.SIGSTOP, 1)
    holds.release("attempt-0-step-30")
    _, said = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0, said
    assert says(said, "rank 1: ... SIGSTOP") and "rank 0: exit code 1" in said
    logs = [(run.directory / "logs" / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    assert "Traceback" in logs[0] and "(most recent call first)" in logs[1]
    assert len(run.events("restart")) == 1
    undisturbed = reference.run.figures()
    assert all(figures == undisturbed[figures[0] - 1] for figures in run.figures())
    assert run.weights() == reference.run.weights()


def test_a_stop_because_another_node_failed_saves_and_counts_as_that_failure(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "record.json"
    monkeypatch.setenv(EXIT_RECORD, str(record))
    run = Run(write_config(workplace, "stopped-for-another-node"))
    holds = Holds(tmp_path, "attempt-0-step-9")
    process = run.start(holds=holds)
    wait_until(lambda: holds.reached("attempt-0-step-9", 0, 1), process)
    write_failure_elsewhere(record, FailureElsewhere("lost node 1 (n1)", None, None))
    process.terminate()
    assert process.wait(timeout=TIMEOUT_SECONDS) == 85, process.communicate()[1]
    assert [event["step"] for event in run.events("checkpoint")] == [run.last_step()]
    assert not run.events("signal")
    assert [event["reason"] for event in run.events("failure")] == ["lost node 1 (n1)"]
    assert {event["status"] for event in run.events("end")} == {"failed"}


def test_under_torchrun_the_event_tells_that_a_stopped_run_is_saved(workplace: Path) -> None:
    config = write_config(
        workplace,
        "torchrun-stopped",
        training={
            "steps": 4000,
            "micro_batch_size": 2,
            "precision": "fp32",
            "optimizer": {"learning_rate": 4.0e-3},
            "device": "cpu",
            "threads_per_rank": 1,
        },
    )
    run = Run(config)
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "drillyard",
    ]
    process = subprocess.Popen(
        [*torchrun, "train", str(config), "--console", "none"], stderr=subprocess.PIPE, text=True
    )
    STARTED.append(process)
    wait_until(lambda: run.last_step() >= 3, process)
    process.terminate()
    _, said = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode != 0
    assert [event["step"] for event in run.events("checkpoint")] == [run.last_step()], said
    assert run.events("signal")[-1]["signal"] == "SIGTERM"
    assert json.dumps(run.events("end")[-1]).count("interrupted") == 1


def test_limits_of_time_in_the_wrong_order_are_refused_at_the_start(workplace: Path) -> None:
    config = write_config(workplace, "unordered", timeouts={"collective_seconds": 90})
    refused = train(config, "--watchdog", 60)
    assert refused.returncode == 2
    assert (
        "collective_seconds 90 < watchdog_seconds 60 < launcher_grace_seconds off" in refused.stderr
    )
    assert not (Run(config).directory).exists()
