"""Figures of a run whose number of GPUs a restart changed: each step and each second counts with
the GPUs it had."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from tests.facts import says
from tests.unit.measurement.changed_gpus import (
    ONE_THEN_FOUR,
    TWO_THEN_ONE,
    Attempt,
    write_changed_run,
)

from drillyard.measurement.comparison import compare_runs
from drillyard.measurement.comparison_text import render_comparison
from drillyard.measurement.read_logs import read_logs
from drillyard.measurement.result_text import render_result
from drillyard.measurement.run_result import measure
from drillyard.measurement.user_facts import UserFacts, moment_us
from drillyard.reporting.log_content import measured_content

A_DOLLAR_A_SECOND = 3600.0
CHANGES = pytest.mark.parametrize(
    ("attempts", "numbers", "gpu_seconds"),
    [(TWO_THEN_ONE, [2, 1], 122), (ONE_THEN_FOUR, [1, 4], 124)],
)


def measured(paths, **facts):
    return measure(read_logs(paths), UserFacts(price_per_gpu_hour=A_DOLLAR_A_SECOND, **facts))


def text_of(renderable) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(renderable)
    return console.file.getvalue()


@CHANGES
def test_every_step_counts_with_its_own_number(tmp_path: Path, attempts, numbers, gpu_seconds):
    result = measured([write_changed_run(tmp_path / "run", *attempts)])
    got = result.as_json()
    # Without the first step of each attempt: four at 150 and four at 200.
    assert got["tokens_per_second_per_gpu"] == pytest.approx(175)
    assert got["tflops_per_gpu"] == pytest.approx(175 * 6000 / 1e12)
    assert got["cost_per_million_tokens"] == pytest.approx(1e6 / 175)
    assert got["printed"]["tokens_per_second_per_gpu"] == pytest.approx(175)
    # Four steps of 8 GPU-seconds and four of 6.
    assert got["cost_per_step"] == pytest.approx(7)
    assert got["cost_so_far"] == pytest.approx(gpu_seconds)
    assert (got["num_gpus"], got["num_gpus_changes"]) == (numbers[-1], numbers)
    assert got["tokens_per_step"] == 1200
    assert got["warnings"] == []
    assert says(text_of(render_result(result)), f"{numbers[0]}, then {numbers[1]} GPUs")


@CHANGES
def test_step_times_are_those_of_the_last_number_of_gpus(
    tmp_path: Path, attempts, numbers, gpu_seconds
):
    result = measured([write_changed_run(tmp_path / "run", *attempts)])
    got = result.as_json()["step_seconds"]
    seconds = attempts[-1].seconds
    assert (got["p50"], got["mean"], got["p95"]) == pytest.approx((seconds, seconds, seconds))
    assert (got["jitter"], got["slow_fraction"]) == (0, 0)
    assert (got["num_gpus"], got["steps"], got["on_other_gpus"]) == (numbers[-1], 4, 4)
    assert says(text_of(render_result(result)), "4 on other numbers of GPUs not counted")


def test_a_log_of_another_framework_that_changes_its_number_says_so(tmp_path: Path):
    line = "iteration {}/ 100 | elapsed time per iteration (ms): 500.0 | global batch size: 8 |"
    starts = ((8, range(1, 6)), (4, range(4, 9)))
    log = tmp_path / "run.log"
    log.write_text(
        "".join(
            f"using world size: {size}, data-parallel size: {size}\n"
            + "".join(f" {line.format(step)}\n" for step in steps)
            for size, steps in starts
        )
    )
    (warning,) = [one for one in measured([log]).as_json()["warnings"] if "GPUs first" in one]
    assert "8 GPUs" in warning and "4 later" in warning and "--num-gpus" in warning
    given = measured([log], num_gpus=8).as_json()["warnings"]
    assert not [one for one in given if "GPUs first" in one]


@CHANGES
def test_metrics_jsonl_alone_says_it_too(tmp_path: Path, attempts, numbers, gpu_seconds):
    run = write_changed_run(tmp_path / "run", *attempts)
    got = measured([run / "metrics.jsonl"], accelerator="b200").as_json()
    assert got["tokens_per_second_per_gpu"] == pytest.approx(175)
    assert got["cost_per_step"] == pytest.approx(7)
    assert got["num_gpus_changes"] == numbers
    # Its first line is written 20 s after the start.
    assert got["cost_so_far"] == pytest.approx(gpu_seconds - 20 * numbers[0])
    assert got["warnings"] == []


def test_a_range_of_steps_counts_with_the_number_it_had(tmp_path: Path):
    run = write_changed_run(tmp_path / "run", *TWO_THEN_ONE)
    got = measured([run], start_step=2, end_step=5).as_json()
    assert got["tokens_per_second_per_gpu"] == pytest.approx(150)
    assert (got["num_gpus_changes"], got["cost_per_step"]) == ([2], 8)
    assert got["cost_so_far"] == pytest.approx(122)


def test_the_user_may_say_one_number(tmp_path: Path):
    run = write_changed_run(tmp_path / "run", *TWO_THEN_ONE)
    got = measured([run], num_gpus=2).as_json()
    assert (got["num_gpus_changes"], got["cost_so_far"]) == ([2], 2 * 78)
    assert (
        len([one for one in got["warnings"] if "--num-gpus 2" in one and "2, then 1" in one]) == 1
    )


def test_batch_flags_count_per_gpu_and_over_all(tmp_path: Path):
    run = write_changed_run(tmp_path / "run", *TWO_THEN_ONE)
    whole = measured([run], global_batch_size=12, sequence_length=100).as_json()
    assert whole["tokens_per_second_per_gpu"] == pytest.approx(175)
    each = measured([run], batch_size_per_gpu=6, sequence_length=100).as_json()
    # 600 tokens in 4 s, and in 6 s.
    assert each["tokens_per_second_per_gpu"] == pytest.approx((150 + 100) / 2)


def test_the_wall_time_of_the_job_costs_too(tmp_path: Path):
    run = write_changed_run(tmp_path / "run", *TWO_THEN_ONE)
    start = moment_us("--job-start", "2026-01-31T11:59:50Z", None)
    end = moment_us("--job-end", "2026-01-31T12:01:28Z", None)
    got = measured([run], job_start_us=start, job_end_us=end).as_json()
    assert got["wall_seconds"] == 98
    assert got["cost_so_far"] == pytest.approx(10 * 2 + 122 + 10)


def test_runs_are_compared_by_the_dollars_and_tokens_they_took(tmp_path: Path):
    run = write_changed_run(tmp_path / "run", Attempt(2, 4.0), Attempt(1, 6.0, tokens=2400))
    result = measured([run])
    found = compare_runs([result, result])
    furthest = {}
    for point in found.points:
        furthest[point.axis] = max(point.at, furthest.get(point.axis, 0))
    assert furthest["dollars"] == pytest.approx(122)
    assert furthest["tokens"] == 5 * 1200 + 5 * 2400
    assert says(text_of(render_comparison(found)), "2, then 1")


def test_a_run_that_never_changed_has_one_number(tmp_path: Path):
    run = write_changed_run(tmp_path / "run", Attempt(2, 4.0), Attempt(2, 4.0))
    got = measured([run]).as_json()
    # (10 + 10 + 16 + 3 + 5 + 10 + 16) x 2.
    assert (got["num_gpus_changes"], got["cost_so_far"], got["cost_per_step"]) == ([2], 140, 8)
    assert got["tokens_per_second_per_gpu"] == 150


def test_steps_on_fewer_gpus_are_no_stalls(tmp_path: Path):
    run = write_changed_run(tmp_path / "run", Attempt(8, 1.0), Attempt(1, 8.0))
    for paths in ([run], [run / "metrics.jsonl"]):
        got = measured(paths).as_json()
        assert got["stalls"] == []
        assert got["seconds_by_category"]["stalled"] == 0
    # The first step of each attempt counts as a usual one.
    got = measured([run]).as_json()
    assert got["seconds_by_category"]["productive"] == 5 * 1 + 5 * 8
    content = measured_content(measured([run]))
    assert content.curves.stalls.tolist() == []


def test_many_changes_are_not_all_named():
    from drillyard.measurement.gpu_counts import gpus_text

    assert gpus_text([]) == ""
    assert gpus_text([1024]) == "1,024"
    assert gpus_text([8, 4, 2, 1]) == "8, then 4, then 2, then 1"
    assert gpus_text([8, 4, 2, 1, 2]) == "8, then others, then 2"
