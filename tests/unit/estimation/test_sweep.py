"""Many estimates: the same work for all, the Pareto front, and combinations that cannot be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.facts import says
from tests.unit.estimation.requests import SMALL, request_of, run_config, two_nodes

from drillyard.config.sweep_grammar import parse_axes
from drillyard.errors import UserError
from drillyard.estimation.cost import PriceOptions
from drillyard.estimation.request import EstimateRequest
from drillyard.estimation.sweep import (
    SweepEstimate,
    SweepResult,
    mark_front,
    run_sweep,
    with_settings,
)
from drillyard.estimation.target import accelerator_target
from drillyard.hardware import catalog

CONFIG = run_config(SMALL, training={"activation_checkpointing": "none"})


def swept(keys: str, request: EstimateRequest | None = None) -> SweepResult:
    return run_sweep(
        request or request_of(CONFIG, two_nodes("a3-megagpu-8g")), parse_axes(keys.split())
    )


def by(found: SweepResult, key: str) -> dict[Any, SweepEstimate]:
    return {point.values[key]: point for point in found.points}


def test_every_point_does_the_same_work() -> None:
    found = swept("micro_batch_size=1,2,8")
    for point in found.points:
        assert point.estimate is not None and point.estimate.run_time is not None
        assert point.estimate.run_time.tokens == pytest.approx(found.tokens)
    assert found.tokens == 1000 * 16 * 8 * 4096


def test_a_run_of_unknown_length_is_compared_on_a_billion_tokens() -> None:
    epochs = run_config(SMALL, training={"steps": None, "epochs": 1.0})
    assert swept("nodes=1", request_of(epochs, two_nodes("a3-megagpu-8g"))).tokens == 1e9


def test_more_nodes_are_faster_and_cost_more_so_both_are_on_the_front() -> None:
    points = by(swept("nodes=1,16"), "nodes")
    few, many = points[1], points[16]
    assert (
        few.hours is not None
        and many.hours is not None
        and few.cost is not None
        and many.cost is not None
    )
    assert many.hours < few.hours and many.cost > few.cost
    assert few.on_front and many.on_front


def test_no_point_of_the_front_is_beaten_in_both_and_every_other_is() -> None:
    found = swept("nodes=1..8..x2 micro_batch_size=1..8..x2 activation_checkpointing=none,full")
    fitting = [
        point
        for point in found.points
        if point.estimate is not None and point.estimate.verdict == "fits"
    ]
    assert 0 < len(found.front) < len(fitting)

    def beaten(point: SweepEstimate) -> bool:
        def place(one: SweepEstimate) -> tuple[float, float]:
            assert one.hours is not None and one.cost is not None
            return one.hours, one.cost

        hours, cost = place(point)
        return any(
            place(other) <= (hours, cost) and place(other)[1] <= cost and other is not point
            for other in fitting
        )

    for point in fitting:
        assert point.on_front != beaten(point), point.values


def test_what_does_not_fit_is_never_on_the_front() -> None:
    points = by(swept("micro_batch_size=1,8192"), "micro_batch_size")
    assert points[8192].estimate is not None and points[8192].estimate.verdict == "does not fit"
    assert points[1].on_front and not points[8192].on_front


def test_open_settings_are_decided_again_at_every_point() -> None:
    auto = run_config(training={"micro_batch_size": 1})
    points = by(swept("nodes=2,16", request_of(auto)), "nodes")
    modes = [points[nodes].estimate.setup.activation_checkpointing for nodes in (2, 16)]  # type: ignore[union-attr]
    assert modes[0] != modes[1] == "none"


def test_a_combination_that_cannot_be_is_reported_and_does_not_end_the_sweep() -> None:
    request = request_of(
        run_config(SMALL, training={"global_batch_size": 128}), two_nodes("a3-megagpu-8g")
    )
    points = by(swept("micro_batch_size=2,3", request), "micro_batch_size")
    assert points[2].estimate is not None
    assert points[3].estimate is None and says(points[3].refusal, "global_batch_size: 128")
    bought = request_of(CONFIG, two_nodes("a3-megagpu-8g", consumption="on-demand"))
    machines = by(swept("machine=a3-megagpu-8g,a4-highgpu-8g,a5", bought), "machine")
    assert says(machines["a4-highgpu-8g"].refusal, "'on-demand'")
    assert says(machines["a5"].refusal, "machine 'a5'")
    assert machines["a3-megagpu-8g"].on_front


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("micro_batch_size=0..2", "--sweep: training.micro_batch_size: found 0"),
        (
            "activation_checkpointing=some",
            "--sweep: training.activation_checkpointing: found 'some'",
        ),
        ("training.stpes=1", r"--sweep: training.stpes:.*'steps'"),
        ("sequence_length=1.5", "--sweep: data.sequence_length"),
    ],
)
def test_a_value_that_no_run_may_have_ends_it(keys: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        swept(keys)


def test_settings_are_changed_in_sections_that_were_not_there() -> None:
    assert with_settings(CONFIG, {"model.lora.rank": 8}).model.lora.rank == 8  # type: ignore[union-attr]
    assert with_settings(CONFIG, {"training.micro_batch_size": 4}).training.micro_batch_size == 4
    assert with_settings(CONFIG, {}) is CONFIG


def test_without_a_price_for_all_gpu_hours_are_compared() -> None:
    found = swept("machine=a3-megagpu-8g,p5e.48xlarge")
    assert found.cost_unit == "GPU-hours"
    for point in found.points:
        assert point.hours is not None and point.cost == pytest.approx(point.hours * 16)
    priced = request_of(CONFIG, two_nodes("a3-megagpu-8g"), price=PriceOptions(2.0))
    dollars = swept("machine=a3-megagpu-8g,p5e.48xlarge", priced)
    assert dollars.cost_unit == "$"
    for point in dollars.points:
        assert point.hours is not None and point.cost == pytest.approx(point.hours * 32)


def test_times_hold_failures_where_that_is_known_of_every_point() -> None:
    assert swept("nodes=1,2").with_failures
    assert not swept(
        "micro_batch_size=1", request_of(CONFIG, accelerator_target("h100", 8, catalog()))
    ).with_failures


def bounded(point: SweepEstimate) -> SweepEstimate:
    """The same point, with only a bound of its step time."""
    assert point.estimate is not None and point.estimate.step_time is not None
    speed = point.estimate.step_time
    only = replace(speed, seconds=replace(speed.seconds, is_bound=True))
    return replace(point, estimate=replace(point.estimate, step_time=only), on_front=False)


def test_a_bound_does_not_win_against_what_was_measured() -> None:
    few, many = swept("nodes=1,16").points
    assert [point.on_front for point in mark_front([few, many])] == [True, True]
    few = replace(few, on_front=False)
    assert [point.on_front for point in mark_front([few, bounded(many)])] == [True, False]
    assert [point.on_front for point in mark_front([bounded(few), bounded(many)])] == [True, True]
