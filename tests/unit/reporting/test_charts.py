"""Charts show what the log says, to the bit, and what they leave out is said."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tests.facts import says
from tests.unit.reporting import runs

from drillyard.reporting.charts import charts
from drillyard.reporting.content import Point
from drillyard.reporting.page import render
from drillyard.reporting.run_content import read_run_directory
from drillyard.reporting.tables import MOST_POINTS, evaluation_table


@pytest.fixture(scope="module")
def content(run_directory):
    return read_run_directory(run_directory)


@pytest.fixture(scope="module")
def drawn(content):
    return {chart.name: chart for chart in charts(content)}


def named(chart, label):
    return next(series for series in chart.series if series.label == label)


def values(chart, label):
    series = named(chart, label)
    return {
        step: value for step, value in zip(series.x, series.y, strict=True) if value is not None
    }


def gaps(series):
    return [step for step, value in zip(series.x, series.y, strict=True) if value is None]


def long(content, length):
    """The same run with `length` steps, each like its predecessor but one peak and one dip."""
    step = np.arange(1, length + 1)
    generator = np.random.default_rng(0)
    columns = {
        field.name: generator.normal(10.0, 1.0, length)
        for field in dataclasses.fields(content.curves)
        if field.name not in ("step", "warm_up", "finite", "window_steps", "gpus")
    }
    columns["loss"][777], columns["loss"][length // 2] = 99.0, -99.0
    none = np.zeros(length, dtype=bool)
    curves = dataclasses.replace(content.curves, step=step, warm_up=none, finite=~none, **columns)
    return dataclasses.replace(content, curves=curves)


def test_all_that_a_run_measured_is_drawn(drawn):
    assert list(drawn) == [
        *("loss", "evaluation-1", "step-time", "tokens", "mfu", "memory", "gradient", "rate"),
    ]


def test_the_loss_is_the_log_s_with_its_mean_and_the_held_out_losses(drawn):
    loss = values(drawn["loss"], "Loss")
    assert loss == {step: runs.loss_of(step) for step in range(1, 161) if step != runs.NOT_FINITE}
    assert values(drawn["loss"], "Mean of 3 steps")[50] == pytest.approx(
        sum(map(runs.loss_of, (49, 50, 51))) / 3
    )
    assert values(drawn["loss"], "Held out: questions")[40] == runs.loss_of(40) + 0.1
    assert list(values(drawn["loss"], "Skipped, not finite")) == [runs.NOT_FINITE]
    assert drawn["loss"].marks == [runs.RESUMED_FROM]


def test_stalls_are_marked_and_levels_drawn(drawn):
    chart = drawn["step-time"]
    assert values(chart, "Stall") == runs.STALLS
    assert chart.levels == {
        "median": pytest.approx(14.53),
        "3 x median": pytest.approx(3 * 14.53),
    }
    assert "2 stalls" in chart.note
    stalls = [row for row in chart.table.rows if row[2] == "stall"]
    assert [row[0] for row in stalls] == [f"{step}" for step in sorted(runs.STALLS)]


@pytest.mark.parametrize(
    ("share", "drawn"), [(0.01, False), (0.049, False), (0.051, True), (3.0, True)]
)
def test_waits_for_data_are_drawn_where_they_are_a_notable_part_of_a_step(content, share, drawn):
    waits = np.full(len(content.curves.step), 0.0)
    waits[5] = share * content.curves.median_seconds
    waiting = dataclasses.replace(
        content, curves=dataclasses.replace(content.curves, data_seconds=waits)
    )
    chart = next(chart for chart in charts(waiting) if chart.name == "step-time")
    assert ("Waiting for data" in [series.label for series in chart.series]) == drawn


def test_a_summary_says_in_words_what_a_chart_shows(drawn):
    assert says(
        drawn["step-time"].summary,
        "160 logged steps: first 60.00 s, last 14.56 s, lowest 14.50 s at step 7, highest 80.00 s"
        " at step 130",
    )


def test_a_long_run_is_drawn_by_its_highs_and_lows_and_the_page_says_so(content):
    loss, *_ = charts(long(content, 100_000))
    shown = values(loss, "Loss")
    assert len(shown) <= MOST_POINTS
    assert shown[778] == 99.0 and shown[50_001] == -99.0
    assert says(loss.note, "Drawn: ... 100,000 logged steps")
    assert len(loss.table.rows) <= 21 + 4


def test_a_step_without_a_value_breaks_the_line(content, drawn):
    assert gaps(named(drawn["loss"], "Loss")) == [runs.NOT_FINITE]
    many = long(content, 100_000)
    many.curves.loss[[40_000, 70_000]] = np.nan
    loss, *_ = charts(many)
    assert gaps(named(loss, "Loss")) == [40_001, 70_001]
    assert len(named(loss, "Loss").x) <= MOST_POINTS


def test_points_of_a_figure_that_is_logged_less_often_are_joined(content):
    some = long(content, 1_000)
    some.curves.grad_norm[np.arange(1_000) % 10 > 0] = np.nan
    chart = next(chart for chart in charts(some) if chart.name == "gradient")
    (series,) = chart.series
    assert series.x == list(range(1, 1_001, 10)) and not gaps(series)


def test_an_evaluation_without_a_finite_figure_breaks_its_line(content):
    figures = {"rows.loss": [Point(step, float("nan" if step == 20 else "1")) for step in (10, 20)]}
    loss, *_ = charts(dataclasses.replace(content, evaluations=figures))
    assert gaps(named(loss, "Held out: rows")) == [20]


def test_a_measure_of_evaluations_alone_has_a_chart_too(content):
    only = {"f1": [Point(10, 0.25), Point(20, 0.5)]}
    titles = [chart.title for chart in charts(dataclasses.replace(content, evaluations=only))]
    assert "F1, held out" in titles


def test_figures_that_are_not_finite_stand_in_the_table_and_are_not_drawn(content):
    nan = float("nan")
    figures = {"rows.loss": [Point(10, nan), Point(20, 1.0)], "rows.f1": [Point(10, nan)]}
    changed = dataclasses.replace(content, evaluations=figures)
    loss, *others = charts(changed)
    assert values(loss, "Held out: rows") == {20: 1.0}
    assert "F1, held out" not in [chart.title for chart in others]
    assert [row[1:] for row in evaluation_table(changed).rows] == [
        ("nan (step 10)", "1.0000 (step 20)", "1.0000 (step 20)", "1.0000 (step 20)"),
        ("nan (step 10)",) * 4,
    ]
    assert "Held out: rows" in render(changed)
