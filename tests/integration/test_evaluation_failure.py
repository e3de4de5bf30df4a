"""A run whose evaluations fail trains to its end, says so, and ends as `evaluation.required` asks
for; and what its last lines tell to type works."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
from tests.facts import says
from tests.integration.conftest import Reference
from tests.integration.tiny_run import Run, drillyard, train, write_config, write_rows


def test_failing_evaluations_cost_neither_checkpoints_nor_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl").read_text().splitlines()
    # Python imports this at its start; the evaluation of SQL is what connects to sqlite.
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "sitecustomize.py").write_text(
        "import sqlite3\ndef connect(*unused, **options):\n    raise"
        " KeyError('table')\nsqlite3.connect = connect\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    config = write_config(
        tmp_path,
        "failing",
        # Evaluated on what is trained on, which training warns of.
        data__held_out={"source": str(tmp_path / "rows.jsonl")},
        training__steps=8,
        checkpoint={"every_steps": 4},
        evaluation__every_steps=4,
        evaluation__metrics=["loss", "sql-execution"],
    )
    run = Run(config)
    ended = train(config)
    assert ended.returncode == 0, ended.stderr
    assert (run.directory / "final" / "model.safetensors").exists() and run.summary()[
        "status"
    ] == "completed"
    failed = run.events("evaluation_failed")
    assert [(event["step"], event["metric"]) for event in failed] == [
        (4, "sql-execution"),
        (8, "sql-execution"),
    ]
    assert "KeyError" in failed[0]["reason"] and "Traceback" in failed[0]["stack"]
    assert [
        event["step"] for event in run.events("evaluation") if "loss" in event["results"]["rows"]
    ] == [4, 8]
    shared = next(
        note
        for note in run.events("data")[-1]["notes"]
        if says(note, "held-out ... training source")
    )
    assert f"{len(rows)} of {len(rows)}" in shared and shared in ended.stdout
    assert shared in " ".join((run.directory / "summary.txt").read_text().split())
    assert [one["step"] for one in run.summary()["failed_evaluations"]] == [4, 8]
    order = [event["event"] for event in run.records("events.jsonl") if event.get("step") == 4]
    assert order.index("checkpoint_begin") < order.index("evaluation_begin")
    # Lines for people, though nobody watches; one for each checkpoint.
    saved = [line for line in ended.stdout.splitlines() if line.startswith("Checkpoint: ")]
    assert len(saved) == 2

    required = train(config, "--set", "evaluation.required=true")
    assert required.returncode == 1 and "evaluation.required" in required.stderr


def test_what_the_last_lines_tell_to_type_works(reference: Reference, tmp_path: Path) -> None:
    from drillyard.reporting.summary import closing_lines

    assert "drillyard report " in reference.output.splitlines()[-3]
    run = tmp_path / "runs" / "reference"
    shutil.copytree(reference.run.directory, run)
    lines = closing_lines(json.loads((run / "summary.json").read_text()), run)
    assert reference.output.splitlines()[-len(lines) :] == closing_lines(
        reference.run.summary(), reference.run.directory
    )
    commands = [
        shlex.split(line.partition("drillyard ")[2]) for line in lines if "drillyard " in line
    ]
    assert [command[0] for command in commands] == ["report", "eval", "generate"]
    for command in commands:
        ended = drillyard(*command, input="CREATE TABLE t (a)")
        assert ended.returncode == 0, ended.stderr
