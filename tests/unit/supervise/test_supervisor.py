"""What a run config decides for the supervisor."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest

from drillyard.config.run import RunConfig
from drillyard.launch.agent.exit_report import make_report
from drillyard.supervise import launch_contract
from drillyard.supervise.console_output import PlainOutput
from drillyard.supervise.restart_policy import RestartLimits
from drillyard.supervise.scheduler_restarts import write_claim
from drillyard.supervise.supervisor import _Run, required_metrics_code, threads_per_rank
from drillyard.telemetry.events import read_events


def run_config(**training: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "small",
            "model": {"config": {"architecture": "llama"}, "init": "random"},
            "data": {"source": "a.txt", "sequence_length": 64},
            "training": {"steps": 1, "optimizer": {"learning_rate": 1e-3}, **training},
        }
    )


def test_the_cores_of_the_host_are_shared_among_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert [threads_per_rank(run_config(), ranks) for ranks in (1, 8, 32)] == [16, 2, 1]


def test_configured_threads_are_taken_as_they_are() -> None:
    assert threads_per_rank(run_config(threads_per_rank=3), 8) == 3


def test_a_finished_run_that_lacks_a_required_metric_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model is complete: the launcher hears that this end is final."""
    run = run_config().model_copy(update={"output": str(tmp_path)})
    run = run.model_copy(
        update={"evaluation": run.evaluation.model_copy(update={"required": True})}
    )
    failed = {
        "step": 1,
        "part": "rows/held_out",
        "metric": "sql-execution",
        "reason": "KeyError: 'table'",
    }
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "summary.json").write_text(
        json.dumps({"status": "completed", "failed_evaluations": [failed]})
    )
    record = tmp_path / "exit.json"
    monkeypatch.setenv(launch_contract.EXIT_RECORD, str(record))
    assert required_metrics_code(run) == 1
    report = make_report(0, "host", 1, json.loads(record.read_text()), "", False, None)
    assert report["final"] and "sql-execution of rows/held_out" in report["reason"]
    # Any other end is for the launcher to judge.
    assert not make_report(0, "host", 1, {}, "", False, None)["final"]


def test_a_supervisor_that_has_lost_its_claim_writes_no_event_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(launch_contract.RESTARTED_BY, "jobset")
    monkeypatch.setattr("time.sleep", lambda _: None)
    write_claim(tmp_path)
    run = _Run(tmp_path, True, PlainOutput(io.StringIO()), RestartLimits(0), False)
    run.event("run_start")
    old = os.environ[launch_contract.START]
    write_claim(tmp_path)
    monkeypatch.setenv(launch_contract.START, old)
    run.event("failure", reason="a rank has ended")
    run.event("end", status="failed")
    assert [each["event"] for each in read_events(tmp_path)] == ["run_start"]
    assert capsys.readouterr().err.count("has claimed the run directory") == 1
