"""The summary: computed from the logs alone, every figure with its conditions, readable in 80
columns."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from tests.facts import says
from tests.unit.telemetry.conftest import config, make_config, record

from drillyard.errors import UserError
from drillyard.hardware import find_accelerator
from drillyard.reporting.summary import closing_lines, required_failure, write_summary
from drillyard.telemetry import RunLog, append_event, read_events
from drillyard.telemetry.events import goodput

__all__ = ["config", "make_config", "record"]


@pytest.fixture
def finished_run(tmp_path, config, record):
    """Two attempts: steps 1-4, a failure, resume from 2, steps 3-6; the first step of each attempt
    is slow."""
    run_directory = tmp_path / "trial"
    run_directory.mkdir()

    def run(accelerator="b200", **changes) -> dict:
        append_event(run_directory, "run_start")
        for attempt, steps in ((0, (1, 2, 3, 4)), (1, (3, 4, 5, 6))):
            with RunLog(
                run_directory, rank=0, config=config, console="none", attempt=attempt
            ) as log:
                log.event("round_start")
                log.parameters(70_000, 70_000, "6N", 420_000.0, find_accelerator(accelerator))
                if attempt:
                    log.event("resume", 2)
                for step in steps:
                    seconds = 60.0 if step == steps[0] else 10.0 + step
                    log.step(
                        replace(
                            record, step=step, loss=10.0 / step, step_seconds=seconds, **changes
                        )
                    )
                    log.evaluation(step, {"sql": {"loss": abs(step - 4.5), "accuracy": step / 10}})
            append_event(run_directory, "end" if attempt else "failure", status="completed")
        return write_summary(run_directory)

    run.directory = run_directory
    return run


def test_what_the_summary_says(finished_run, record):
    summary = finished_run()
    assert summary == json.loads((finished_run.directory / "summary.json").read_text())
    assert (summary["version"], summary["name"], summary["status"], summary["steps"]) == (
        1,
        "trial",
        "completed",
        6,
    )
    assert summary["final_loss"] == 10.0 / 6
    assert summary["held_out"]["sql.loss"] == {
        "last": 1.5,
        "last_step": 6,
        "best": 0.5,
        "best_step": 5,
    }
    assert summary["held_out"]["sql.accuracy"] == {"last": 0.6, "last_step": 6}
    assert summary["tokens"] == 6 * record.tokens  # each step once, though two were done twice
    assert (summary["restarts"], summary["failures"], summary["steps_redone"]) == (1, 1, 2)
    # Left out: step 1 of the first attempt and step 3 of the second; kept 12, 13, 14 and 14, 15, 16
    # seconds.
    assert summary["step_seconds"] == {
        "median": 14.0,
        "p95": pytest.approx(15.75),
        "logged_steps": 8,
        "left_out": 2,
        "window_steps": 1,
    }
    assert summary["tokens_per_second_per_gpu"] == pytest.approx(record.tokens / 16 / 14.0)
    assert summary["mfu"] == pytest.approx(record.tokens / 16 / 14.0 * 420_000 / 2250e12)


def test_what_was_said_of_the_data_is_in_the_summary(finished_run):
    note = (
        "train: 10 of 60 rows have no assistant turn, so nothing is learnt from them; the first is"
        " train.jsonl, line 7"
    )
    finished_run()
    append_event(finished_run.directory, "data", parts={}, notes=[note])
    assert write_summary(finished_run.directory)["data_notes"] == [note]
    text = (finished_run.directory / "summary.txt").read_text()
    assert f"Data: {note}" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80


def test_goodput_is_the_one_sum_over_the_events(finished_run):
    summary = finished_run()
    account = goodput(read_events(finished_run.directory))
    assert summary["seconds_by_category"] == account.seconds()
    assert summary["goodput"] == account.goodput
    assert sum(summary["seconds_by_category"].values()) == pytest.approx(
        summary["wall_seconds"], abs=1e-9
    )


def test_the_text_fits_80_columns_and_names_the_ruler(finished_run):
    finished_run()
    text = (finished_run.directory / "summary.txt").read_text()
    assert max(len(line) for line in text.splitlines()) <= 80
    assert says(text, "2 first")
    assert "formula 6N, peak 2250 TFLOP/s bf16, b200" in text
    assert "1 failures, 2 steps done again" in text


def test_an_unknown_device_has_no_mfu_and_the_text_says_why(finished_run):
    summary = finished_run(accelerator="cpu")
    assert summary["mfu"] is None
    assert "MFU" in (text := (finished_run.directory / "summary.txt").read_text())
    assert says(text, "none: ... peak")
    assert "on 16 ranks" in text


def test_steps_that_compiled_are_left_out_of_the_speed(finished_run):
    summary = finished_run(compile_seconds=3.0)
    assert summary["step_seconds"]["median"] is None
    assert "not known" in (finished_run.directory / "summary.txt").read_text()


def test_windows_count_all_their_steps(tmp_path, config, record):
    with RunLog(tmp_path, rank=0, config=config, console="none") as log:
        log.parameters(1000, 10, "6N", 6000.0, None)
        for step in (10, 20, 30):
            log.step(replace(record, step=step, window_steps=10))
        log.event("end", 30, status="completed")
    summary = write_summary(tmp_path)
    assert summary["tokens"] == 30 * record.tokens
    text = (tmp_path / "summary.txt").read_text()
    assert says(text, "10 steps")
    assert "1.00K, 10 of them trained" in text


def test_steps_that_a_return_to_an_earlier_checkpoint_undid_do_not_count(tmp_path, config, record):
    """38 steps, then back to step 36 with fewer steps to do: the run ends with step 37."""
    with RunLog(tmp_path, rank=0, config=config, console="none") as log:
        log.parameters(1000, 1000, "6N", 6000.0, None)
        for step, loss in ((19, 4.0), (38, 3.0)):
            log.step(replace(record, step=step, loss=loss))
        log.event("resume", 36)
        log.step(replace(record, step=37, loss=3.5))
        log.event("end", 37, status="completed")
    summary = write_summary(tmp_path)
    # A run whose summary has other steps than its last checkpoint would never count as finished.
    assert (summary["steps"], summary["first_loss"], summary["final_loss"]) == (37, 4.0, 3.5)


def test_a_return_that_trains_nothing_ends_at_its_step(tmp_path, config, record):
    """40 steps, then back to step 20 as the last one: no line of metrics follows."""
    with RunLog(tmp_path, rank=0, config=config, console="none") as log:
        log.parameters(1000, 1000, "6N", 6000.0, None)
        for step, loss in ((19, 4.0), (20, 3.8), (38, 3.0)):
            log.step(replace(record, step=step, loss=loss))
        log.event("resume", 20)
        log.event("end", 20, status="completed")
    summary = write_summary(tmp_path)
    assert (summary["steps"], summary["first_loss"], summary["final_loss"]) == (20, 4.0, 3.8)


def test_a_run_that_begins_at_its_last_step_has_its_steps(tmp_path, config):
    with RunLog(tmp_path, rank=0, config=config, console="none") as log:
        log.parameters(1000, 1000, "6N", 6000.0, None)
        log.event("resume", 52)
        log.event("end", 52, status="completed")
    summary = write_summary(tmp_path)
    assert (summary["steps"], summary["final_loss"]) == (52, None)


def test_a_final_loss_of_nan_is_strict_json(tmp_path, config, record):
    with RunLog(tmp_path, rank=0, config=config, console="none") as log:
        log.parameters(1000, 1000, "6N", 6000.0, None)
        log.step(replace(record, loss=math.nan, skipped_steps=2))
    write_summary(tmp_path)
    stored = json.loads((tmp_path / "summary.json").read_text())
    assert (stored["final_loss"], stored["nonfinite"]) == (
        None,
        {"first_loss": "nan", "final_loss": "nan"},
    )
    assert (stored["status"], stored["skipped_steps"]) == ("running or killed", 2)
    assert says((tmp_path / "summary.txt").read_text(), "2 steps ... not finite")


def test_a_run_that_never_took_a_step_has_a_summary(tmp_path):
    append_event(tmp_path, "run_start")
    append_event(tmp_path, "failure", reason="killed")
    append_event(tmp_path, "end", status="failed")
    summary = write_summary(tmp_path)
    assert (summary["steps"], summary["final_loss"], summary["goodput"]) == (0, None, 0.0)


def test_a_summary_that_a_killed_writer_left_half_made_goes_with_the_next(tmp_path):
    append_event(tmp_path, "run_start")
    for name in ("summary.txt", "summary.json"):
        (tmp_path / f"{name}.tmp").write_text("half")
    write_summary(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "events.jsonl",
        "summary.txt",
        "summary.json",
    }


def test_a_directory_of_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no events\.jsonl"):
        write_summary(tmp_path)


def test_a_failed_evaluation_is_in_the_summary_until_it_is_done_again(tmp_path, finished_run):
    failed = {"part": "sql", "metric": "loss", "reason": "rank 1: out of memory"}
    for step, fails in ((4, True), (4, False), (6, True)):
        append_event(finished_run.directory, "evaluation_begin", step=step)
        if fails:
            append_event(
                finished_run.directory, "evaluation_failed", step=step, stack="...", **failed
            )
    summary = finished_run()
    assert summary["failed_evaluations"] == [{"step": 6, **failed}]
    assert says(
        (finished_run.directory / "summary.txt").read_text(),
        "loss of sql ... step 6: rank 1: out of memory",
    )
    failure = required_failure(finished_run.directory)
    assert failure is not None and says(failure, "loss of sql ... step 6")


def test_a_required_metric_is_one_of_the_finished_model(finished_run):
    failed = {"part": "sql", "metric": "loss", "reason": "rank 1: out of memory"}
    append_event(finished_run.directory, "evaluation_begin", step=4)
    append_event(finished_run.directory, "evaluation_failed", step=4, **failed)
    append_event(finished_run.directory, "evaluation_begin", step=6)
    assert [each["step"] for each in finished_run()["failed_evaluations"]] == [4]
    assert required_failure(finished_run.directory) is None


@pytest.mark.parametrize(
    ("parts", "more"), [(["sql"], ""), (["sql", "rows"], "(and 1 more: see summary.json)")]
)
def test_several_missing_metrics_are_counted(finished_run, parts, more):
    append_event(finished_run.directory, "evaluation_begin", step=6)
    for part in parts:
        append_event(
            finished_run.directory,
            "evaluation_failed",
            step=6,
            part=part,
            metric="loss",
            reason="no memory",
        )
    finished_run()
    first, _ = str(required_failure(finished_run.directory)).splitlines()
    assert first.endswith("no memory" + (f" {more}" if more else ""))


@pytest.mark.parametrize("name", ["summary.txt", "summary.json"])
def test_a_summary_that_cannot_be_written_is_the_users_to_change(finished_run, name):
    finished_run()
    (finished_run.directory / f"{name}.tmp").mkdir()
    with pytest.raises(UserError, match=name):
        write_summary(finished_run.directory)


def test_the_last_lines_of_a_run_say_losses_model_and_what_to_type(finished_run):
    text = "\n".join(closing_lines(finished_run(), finished_run.directory))
    assert "6 steps, loss 10.00 -> 1.667" in text
    assert (
        f"drillyard report {finished_run.directory}" in text
        and f"{finished_run.directory}/final" in text
    )
    assert required_failure(finished_run.directory) is None
