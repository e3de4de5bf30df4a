"""RunLog: what each call leaves in the run directory and on the console."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from dataclasses import replace

import pytest

from drillyard.errors import UserError
from drillyard.hardware import find_accelerator
from drillyard.telemetry import RunLog, read_events, read_metrics

COUNT = 70_553_706_496


@pytest.fixture
def open_log(tmp_path, config):
    def opened(**arguments) -> RunLog:
        log = RunLog(tmp_path, **{"rank": 0, "config": config, "console": "none", **arguments})
        log.parameters(COUNT, COUNT, "6N", 6.0 * COUNT, find_accelerator("NVIDIA B200"))
        return log

    return opened


def test_a_step_is_written_with_its_rates_and_its_loss_to_the_bit(tmp_path, open_log, record):
    with open_log(attempt=2) as log:
        log.step(record)
    (row,) = read_metrics(tmp_path)
    assert row["loss"] == record.loss
    assert (row["step"], row["round"], row["window_steps"], row["formula"]) == (5, 2, 1, "6N")
    assert row["tokens_per_second_per_gpu"] == pytest.approx(2253.6, abs=0.05)
    assert row["tflops_per_gpu"] == pytest.approx(954.0, abs=0.05)
    assert row["mfu"] == pytest.approx(0.4240, abs=5e-5)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", row["time"])
    event = read_events(tmp_path)[-1]
    assert event == {
        "time": row["time"],
        "event": "step",
        "round": 2,
        "rank": 0,
        "step": 5,
        "step_seconds": 14.54,
        "window_steps": 1,
        "data_seconds": 0.01,
    }


def test_the_dllogger_line_has_dlloggers_keys(tmp_path, open_log, record):
    with open_log() as log:
        log.step(replace(record, epoch=1.7))
    line = (tmp_path / "dllogger.json").read_text()
    assert line.startswith("DLLL {")
    entry = json.loads(line.removeprefix("DLLL "))
    assert list(entry) == ["timestamp", "datetime", "elapsedtime", "type", "step", "data"]
    assert all(isinstance(entry[name], str) for name in ("timestamp", "datetime", "elapsedtime"))
    assert (entry["type"], entry["step"]) == ("LOG", 5)
    assert entry["data"] == {
        "reduced_train_loss": record.loss,
        "lr": 1e-5,
        "global_step": 5,
        "consumed_samples": 5 * 128,
        "train_step_timing in s": 14.54,
        "grad_norm": 1.25,
        "epoch": 1,
    }


def test_without_a_known_peak_there_is_no_mfu(tmp_path, config, record):
    with RunLog(tmp_path, rank=0, config=config, console="none") as log:
        log.parameters(1000, 1000, "6N", 6000.0, None)
        log.step(record)
    (row,) = read_metrics(tmp_path)
    assert row["mfu"] is None
    assert row["tflops_per_gpu"] > 0
    assert "accelerator" not in read_events(tmp_path)[0]


def test_a_nan_loss_is_strict_json_and_read_as_nan(tmp_path, open_log, record):
    with open_log() as log:
        log.step(replace(record, loss=math.nan, grad_norm=math.inf))
    line = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in line and "Infinity" not in line
    (row,) = read_metrics(tmp_path)
    assert math.isnan(row["loss"]) and row["grad_norm"] == math.inf


def test_a_resumed_run_appends_and_the_last_occurrence_of_a_step_counts(tmp_path, open_log, record):
    with open_log(attempt=0) as log:
        for step in (1, 2, 3):
            log.step(replace(record, step=step, loss=float(step)))
    with open_log(attempt=1) as log:
        log.event("resume", 1, path="checkpoints/step-00000001")
        for step in (2, 3, 4):
            log.step(replace(record, step=step, loss=10.0 * step))
    rows = read_metrics(tmp_path)
    assert [(row["step"], row["loss"], row["round"]) for row in rows] == [
        (1, 1, 0),
        (2, 20, 1),
        (3, 30, 1),
        (4, 40, 1),
    ]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 6


def test_the_text_console_prints_the_perf_loggers_lines(open_log, record, capsys):
    with open_log(console="text") as log:
        log.step(record)
        log.evaluation(5, {"sql": {"loss": 0.5}})
        for name in ("checkpoint_begin", "checkpoint_end", "checkpoint"):
            log.event(name, 5, path="runs/a/checkpoints/step-00000005", seconds=0.1)
        log.event(
            "evaluation_failed",
            5,
            part="sql",
            metric="loss",
            reason="rank 1: out of memory",
            stack="...",
        )
    assert capsys.readouterr().out.splitlines() == [
        (
            "[PerfLogger] Using 70.55B parameters for TFLOPs calculation. Formula 6N: 423.3 GFLOPs"
            " per token."
        ),
        "Step: 5 | Time: 14.54s | TFLOPs/s/GPU: 954.0 | Tokens/s/GPU: 2254 | Loss: 0.6620",
        "Evaluation after step 5",
        "  sql | Loss: 0.5000",
        "Checkpoint: step 5 saved to runs/a/checkpoints/step-00000005",
        "WARNING: loss of sql was not measured after step 5: rank 1: out of memory",
    ]


def test_optional_work_that_fails_is_a_warning_and_signals_are_not_caught(tmp_path, open_log):
    with open_log() as log:
        for _ in range(2):
            with log.optional("the estimate"):
                raise AssertionError("no such term")
        with pytest.raises(KeyboardInterrupt), log.optional("the estimate"):
            raise KeyboardInterrupt
        with pytest.raises(TypeError), log.optional("writing data.json", OSError):
            raise TypeError
        with log.optional("writing data.json", OSError):
            raise PermissionError(13, "Permission denied")
    estimate, record = [
        event["text"] for event in read_events(tmp_path) if event["event"] == "warning"
    ]
    assert estimate == "the estimate failed: AssertionError: no such term"
    assert record == "writing data.json failed: PermissionError: [Errno 13] Permission denied"


def test_the_json_console_prints_one_object_a_line(open_log, record, capsys):
    with open_log(console="json") as log:
        log.step(record)
        log.message("done")
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events] == ["parameters", "step", "message"]
    assert (events[1]["step"], events[1]["total_steps"], events[1]["loss"]) == (5, 100, record.loss)


def test_a_closed_console_does_not_end_the_run(tmp_path, open_log, record, monkeypatch):
    def closed(*_: object, **__: object) -> None:
        raise BrokenPipeError

    with open_log(console="text") as log:
        monkeypatch.setattr(sys.stdout, "write", closed)
        log.step(record)
        monkeypatch.undo()
        log.step(replace(record, step=6))
    assert [row["step"] for row in read_metrics(tmp_path)] == [5, 6]


def test_other_ranks_write_nothing(tmp_path, open_log, record, capsys):
    with open_log(rank=1, console="text") as log:
        log.event("round_start")
        log.step(record)
        log.evaluation(5, {"loss": 1.0})
        with log.span("checkpoint", 5):
            pass
        log.message("hello")
    assert os.listdir(tmp_path) == []
    assert capsys.readouterr().out == ""


def test_a_span_ends_unless_its_body_raises(tmp_path, open_log):
    with open_log() as log:
        with log.span("evaluation", 3):
            pass
        with pytest.raises(RuntimeError), log.span("checkpoint", 4):
            raise RuntimeError
    events = [(event["event"], event.get("step")) for event in read_events(tmp_path)[1:]]
    assert events == [("evaluation_begin", 3), ("evaluation_end", 3), ("checkpoint_begin", 4)]
    assert read_events(tmp_path)[2]["seconds"] >= 0


def test_a_step_before_the_parameters_is_a_mistake_of_the_caller(tmp_path, config, record):
    with (
        RunLog(tmp_path, rank=0, config=config, console="none") as log,
        pytest.raises(AssertionError),
    ):
        log.step(record)


def test_a_run_directory_that_is_not_there_is_refused(tmp_path, config):
    with pytest.raises(UserError, match=r"cannot be written"):
        RunLog(tmp_path / "missing", rank=0, config=config)


def test_a_full_disk_does_not_end_the_run(tmp_path, open_log, record, monkeypatch):
    with open_log() as log:
        log.step(record)
        write = os.write

        def full(descriptor: int, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "write", full)
        for step in (6, 7):
            log.step(replace(record, step=step))
        monkeypatch.setattr(os, "write", write)
        log.step(replace(record, step=8))
    assert [row["step"] for row in read_metrics(tmp_path)] == [5, 6, 7, 8]
    warnings = [event["text"] for event in read_events(tmp_path) if event["event"] == "warning"]
    assert sum("No space left on device" in text for text in warnings) == 3  # one per file
    assert sum("is written again" in text for text in warnings) == 3


def test_no_line_is_written_once_the_run_is_another_starts(tmp_path, open_log, record):
    """`before_write` ends the process before each line of any of the files."""
    lost = []

    def ends() -> None:
        if lost:
            raise SystemExit(1)

    with open_log(before_write=ends) as log:
        log.step(record)
        before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
        lost.append(1)
        for write in (
            lambda: log.step(record),
            lambda: log.event("resume", 5),
            lambda: log.evaluation(5, {"rows": {"loss": 0.5}}),
            lambda: log.warn("a disk is slow"),
        ):
            with pytest.raises(SystemExit):
                write()
        assert {path: path.read_bytes() for path in before} == before
