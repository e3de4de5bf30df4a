"""What a round left in the run directory."""

from __future__ import annotations

import json
from pathlib import Path

from drillyard.supervise.progress_files import ProgressFiles


def add_event(directory: Path, **fields: object) -> None:
    with open(directory / "events.jsonl", "a") as file:
        file.write(json.dumps(fields) + "\n")


def test_the_last_step_is_that_of_this_round_only(tmp_path: Path) -> None:
    add_event(tmp_path, event="step", step=90)
    traces = ProgressFiles(tmp_path)
    assert traces.last_step() is None
    add_event(tmp_path, event="round_start")
    assert traces.last_step() is None
    add_event(tmp_path, event="first_step", step=51)
    add_event(tmp_path, event="step", step=60)
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"event": "step", "st')
    assert traces.last_step() == 60


def test_a_run_without_events_never_got_to_a_step(tmp_path: Path) -> None:
    assert ProgressFiles(tmp_path).last_step() is None


def test_only_a_summary_of_this_round_counts(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{}")
    traces = ProgressFiles(tmp_path)
    assert not traces.summary_written()
    (tmp_path / "new").write_text("{}")
    (tmp_path / "new").rename(tmp_path / "summary.json")
    assert traces.summary_written()


def test_events_and_metrics_are_progress_and_lines_of_logs_are_not(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    traces = ProgressFiles(tmp_path)
    assert not traces.changed()
    (tmp_path / "logs" / "rank-1.log").write_text("a line\n")
    assert not traces.changed()
    add_event(tmp_path, event="step", step=1)
    assert traces.changed()
    assert not traces.changed()
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert traces.changed()
