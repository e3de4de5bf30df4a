"""The content of a report from a run directory."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from tests.facts import says
from tests.unit.measurement.changed_gpus import ONE_THEN_FOUR, TWO_THEN_ONE, write_changed_run
from tests.unit.reporting import runs

from drillyard.errors import UserError
from drillyard.measurement.read_logs import read_logs
from drillyard.measurement.run_result import measure
from drillyard.reporting.log_content import measured_content
from drillyard.reporting.run_content import read_run_directory
from drillyard.reporting.summary import summarize, write_summary
from drillyard.telemetry import append_event, read_metrics
from drillyard.watch.watcher import FollowedRun


@pytest.fixture(scope="module")
def content(run_directory):
    return read_run_directory(run_directory)


def tile(content, label):
    return next(tile for tile in content.tiles if tile.label == label)


def test_curves_are_the_last_occurrences_of_every_logged_step(run_directory, content):
    records = read_metrics(run_directory)
    curves = content.curves
    assert (
        curves.step.tolist()
        == [record["step"] for record in records]
        == list(range(1, runs.STEPS + 1))
    )
    for name in (
        "loss",
        "step_seconds",
        "mfu",
        "memory_gib",
        "grad_norm",
        "tokens_per_second_per_gpu",
    ):
        assert np.array_equal(
            getattr(curves, name), [record[name] for record in records], equal_nan=True
        )


def test_stalls_are_the_long_steps_and_not_the_first_ones(content):
    curves = content.curves
    assert curves.step[curves.stalls].tolist() == sorted(runs.STALLS)
    assert curves.step[curves.warm_up].tolist() == [1, runs.RESUMED_FROM + 1]
    assert curves.median_seconds == pytest.approx(14.53)


def test_a_step_that_was_not_finite_is_distinguished(content):
    assert content.curves.step[~content.curves.finite].tolist() == [runs.NOT_FINITE]


def test_figures_are_those_of_the_summary(run_directory, content):
    summary = summarize(run_directory)
    assert content.goodput == summary["seconds_by_category"]
    assert math.fsum(content.goodput.values()) == pytest.approx(summary["wall_seconds"])
    assert tile(content, "Goodput").value == f"{summary['goodput']:.1%}"
    assert tile(content, "Step time").value == f"{summary['step_seconds']['median']:.2f} s"
    assert tile(content, "MFU").value == f"{summary['mfu']:.1%}"
    assert "6N" in tile(content, "MFU").note
    assert tile(content, "Restarts") == ("Restarts", "1", "1 failure, 10 steps done again")


def test_a_price_comes_from_the_cluster_and_the_users_own_comes_first(run_directory, content):
    assert "$8.05 per GPU-hour, a4-highgpu-8g flex-start-queued" in tile(content, "Cost").note
    hours = summarize(run_directory)["wall_seconds"] / 3600
    own = tile(read_run_directory(run_directory, 2.0), "Cost")
    assert own.value == f"${16 * 2 * hours:,.2f}"
    assert own.note.endswith("$2.00 per GPU-hour, as given")


@pytest.mark.parametrize(
    ("attempts", "numbers", "dollars"),
    [(TWO_THEN_ONE, [2, 1], "$122"), (ONE_THEN_FOUR, [1, 4], "$124")],
)
def test_a_run_on_other_gpus_after_a_restart_names_both_numbers(
    tmp_path, attempts, numbers, dollars
):
    directory = write_changed_run(tmp_path / "run", *attempts)
    content = read_run_directory(directory, 3600.0)
    devices = f"{numbers[0]}, then {numbers[1]} GPU" + "s" * (numbers[1] > 1)
    assert devices in content.subtitle
    # Four steps of 150 tokens/s/GPU and four of 200; there is no one rate of all GPUs.
    assert tile(content, "Tokens/s per GPU") == ("Tokens/s per GPU", "175.0", f"on {devices}")
    assert tile(content, "Cost").value.startswith(dollars)
    summary = write_summary(directory)
    assert summary["tokens_per_second_per_gpu"] == pytest.approx(175)
    assert (summary["num_gpus"], summary["num_gpus_changes"]) == (numbers[-1], numbers)
    text = (directory / "summary.txt").read_text()
    assert says(text, f"on {numbers[0]}, then {numbers[1]} GPUs")
    assert max(map(len, text.splitlines())) <= 80


def test_an_estimate_is_held_against_the_steps_on_its_own_gpus(tmp_path):
    directory = write_changed_run(tmp_path / "run", *TWO_THEN_ONE)
    append_event(directory, "estimate", step_seconds={"low": 5.5, "high": 6.5})
    (row,) = read_run_directory(directory).estimate.rows
    assert row[2:] == ("6.000 s", "as estimated")


def test_a_log_of_metrics_alone_draws_each_step_with_its_own_gpus(tmp_path):
    directory = write_changed_run(tmp_path / "run", *TWO_THEN_ONE)
    content = measured_content(measure(read_logs([directory / "metrics.jsonl"])))
    rates = content.curves.tokens_per_second_per_gpu.tolist()
    assert rates == pytest.approx([60, *[150] * 4, 120, *[200] * 4])


@pytest.mark.parametrize("price", [-1.0, math.nan, math.inf])
def test_a_price_that_is_none_is_refused(run_directory, price):
    with pytest.raises(UserError, match="--price-per-gpu-hour"):
        read_run_directory(run_directory, price)


def test_evaluations_restarts_and_checkpoints_are_there(content):
    assert [point.step for point in content.evaluations["questions.loss"]] == [40, 80, 120, 160]
    assert content.evaluations["questions.sql_execution"][-1].value == 0.8
    # What was counted is no result: it has no curve.
    names = {name.rpartition(".")[2] for name in content.evaluations}
    assert names == {"loss", "perplexity", "sql_execution"}
    assert content.resumed == [runs.RESUMED_FROM]
    assert ("Size", "840 GiB") in content.checkpoints.rows
    assert list(content.resolved.rows) == [
        ("training.compile", "True", ""),
        ("parallelism.shard", "16", "all ranks"),
    ]
    assert [name for name, _ in content.documents] == ["run.yaml", "cluster.yaml"]


def test_without_a_known_peak_there_is_no_mfu_but_a_reason(tmp_path):
    content = read_run_directory(runs.write_run(tmp_path / "trial", accelerator=None, steps=20))
    assert not np.isfinite(content.curves.mfu).any()
    assert [tile.label for tile in content.tiles if "MFU" in tile.label] == []
    assert "no MFU" in content.mfu_note
    assert content.device == "rank"


def test_a_run_that_is_still_going_is_reported_as_far_as_it_is(tmp_path):
    directory = runs.write_run(tmp_path / "trial", steps=30, end=None)
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"time": "2026-01-31T12:30:00Z", "step": 31, "lo')
    content = read_run_directory(directory)
    assert content.status == "running or killed"
    assert content.curves.step[-1] == 30


def test_a_run_without_a_step_has_a_report_that_says_so(tmp_path):
    directory = runs.write_run(tmp_path / "trial", steps=0)
    content = read_run_directory(directory)
    assert len(content.curves.step) == 0
    assert "No step has been logged yet." in content.missing


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no events\.jsonl"):
        read_run_directory(tmp_path)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (14.0, 15.0, "as estimated"),
        (16.0, 20.0, "9.19% less than estimated"),
        (7.0, 13.0, "11.8% more than estimated"),
    ],
)
def test_an_estimate_is_held_against_what_came(tmp_path, low, high, verdict):
    directory = runs.write_run(tmp_path / "trial")
    event = {
        "time": "2026-01-31T12:00:40.000000Z",
        "event": "estimate",
        "verdict": "fits",
        "memory_gib": {"low": 120.0, "high": 150.0, "available": 180.0},
        "step_seconds": {"low": low, "high": high, "is_bound": False},
    }
    lines = (directory / "events.jsonl").read_text().splitlines()
    (directory / "events.jsonl").write_text(
        "\n".join([*lines[:5], json.dumps(event), *lines[5:], ""])
    )
    memory, seconds = read_run_directory(directory).estimate.rows
    assert memory == (
        "Memory per GPU, most",
        "120.0 GiB to 150.0 GiB of 180.0 GiB",
        "141.5 GiB allocated",
        "as estimated",
    )
    assert seconds[2:] == ("14.53 s", verdict)


def test_memory_of_a_cpu_is_not_compared_with_an_estimate_of_tensors(tmp_path):
    directory = runs.write_run(tmp_path / "trial", steps=10, accelerator=None)
    memory = {"low": 0.002, "high": 0.002, "available": 11.8}
    event = {
        "time": "2026-01-31T12:00:40.000000Z",
        "event": "estimate",
        "verdict": "fits",
        "memory_gib": memory,
    }
    with (directory / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    (row,) = read_run_directory(directory).estimate.rows
    assert row[1:3] == ("0.002000 GiB of 11.80 GiB", "141.5 GiB resident")
    assert row[3].startswith("not comparable")


def test_what_could_not_be_estimated_stands_there_with_its_reason(tmp_path):
    directory = runs.write_run(tmp_path / "trial", steps=10)
    event = {
        "time": "2026-01-31T12:00:40.000000Z",
        "event": "estimate",
        "missing": {"step_seconds": "no speed of a CPU"},
    }
    with (directory / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    (row,) = read_run_directory(directory).estimate.rows
    assert row[:2] == ("Step time, median", "not estimated: no speed of a CPU")


DAMAGE = {
    "events.jsonl": (
        b"""{"event": "failure", "time": "nonsense"}
{"event": "failure", "time": "2026-01-31T12:00:00"}
{"event": 5, "time": "2026-01-31T12:00:00Z"}
{"event": ["end"], "time": 7}
\x00\xff{"event": "end"}
"""
    ),
    "metrics.jsonl": (
        b"""{"step": 3}
{"step": 900, "time": "2026-01-31T12:00:00Z"}
{"step": 901, "time": "2026-01-31T12:00:00Z", "step_seconds": null, "tokens_per_second_per_gpu": "fast", "tokens": 1}
{"step": "7", "time": "then", "step_seconds": 1.0}
[1, 2]
"""  # noqa: E501
    ),
}


def watched_run(directory):
    following = FollowedRun(directory)
    following.poll()
    return following.run


def test_lines_that_are_not_of_the_run_change_nothing(tmp_path):
    directory = runs.write_run(tmp_path / "trial", steps=40)
    whole, watched, measured = (
        summarize(directory),
        watched_run(directory),
        measure(read_logs([directory])).as_json(),
    )
    for name, lines in DAMAGE.items():
        with (directory / name).open("ab") as file:
            file.write(lines)
    assert summarize(directory) == whole
    assert read_run_directory(directory).curves.step.tolist() == list(range(1, 41))
    after = watched_run(directory)
    assert (after.steps, after.account) == (watched.steps, watched.account)
    assert list(after.events) == list(watched.events)
    again = measure(read_logs([directory])).as_json()
    assert {
        name: value for name, value in again.items() if name not in ("sources", "warnings")
    } == {name: value for name, value in measured.items() if name not in ("sources", "warnings")}


def test_the_first_step_after_a_later_start_is_no_stall_whatever_its_round(tmp_path):
    directory = runs.write_run(tmp_path / "trial", steps=40)
    last = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()][-1]
    with (directory / "events.jsonl").open("a") as file:
        file.write('{"time": "2027-01-01T00:00:00Z", "event": "run_start", "round": 0}\n')
    with (directory / "metrics.jsonl").open("a") as file:
        for step, seconds in ((41, 500.0), (42, 14.5)):
            time = f"2027-01-01T01:00:{step}Z"
            file.write(
                json.dumps(last | {"time": time, "step": step, "step_seconds": seconds}) + "\n"
            )
    curves = read_run_directory(directory).curves
    assert curves.step[curves.warm_up].tolist() == [1, 41]
    assert 41 not in curves.step[curves.stalls]
    assert len(read_logs([directory]).attempts) == 2


def test_what_was_not_measured_is_reported(tmp_path):
    runs.write_run(tmp_path / "run")
    failed = {"part": "sql", "metric": "sql-execution", "reason": "rank 1: out of memory"}
    append_event(tmp_path / "run", "evaluation_failed", step=50, stack="...", **failed)
    content = read_run_directory(tmp_path / "run")
    assert any(
        says(note, "sql-execution of sql ... step 50: rank 1: out of memory")
        for note in content.missing
    )
    (message,) = [one for one in content.events if one.name == "evaluation_failed"]
    assert message.level == "warning" and "out of memory" in message.text


@pytest.mark.parametrize("events", ["", '{"event": "failure", "reason": "no disk", "time": 1.0}\n'])
def test_a_run_that_failed_before_its_first_event_has_a_report(tmp_path, events):
    (tmp_path / "events.jsonl").write_text(events)
    content = read_run_directory(tmp_path)
    assert (content.title, len(content.missing) > 0) == (tmp_path.name, True)
