"""The length of a run: its steps, its saves, and what failures take of its time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.facts import says
from tests.unit.estimation.requests import SMALL, run_config, two_nodes

from drillyard.config.run import RunConfig
from drillyard.errors import UserError
from drillyard.estimation.failure_rates import failure_rates
from drillyard.estimation.model_source import ModelOptions, find_model
from drillyard.estimation.quantity import Range, quantity
from drillyard.estimation.resolved_setup import resolve_setup
from drillyard.estimation.run_time import (
    FailureOptions,
    RunTime,
    middle_failure_inputs,
    planned_steps,
    run_time,
    saved_state,
)
from drillyard.estimation.setup import LoraSetup, Setup
from drillyard.estimation.target import Target, accelerator_target
from drillyard.hardware import catalog


def setup(config: RunConfig, target: Target) -> Setup:
    resolved = resolve_setup(
        config,
        find_model(config, ModelOptions()).spec,
        num_gpus=target.num_gpus,
        gpus_per_node=target.gpus_per_node,
        memory_gib=None,
        device_type="cuda",
    )
    return resolved.setup


def seconds(low: float, high: float, *, is_bound: bool = False) -> Range:
    return Range(quantity("step", low, "s", ""), quantity("step", high, "s", ""), is_bound)


STEP = seconds(10, 12)


def timed(
    step: Range = STEP,
    steps: int = 100_000,
    nodes: int = 256,
    *,
    target: Target | None = None,
    every_steps: int | None = None,
    **options: Any,
) -> RunTime:
    target = target or two_nodes("a3-megagpu-8g", nodes)
    config = run_config(checkpoint={"every_steps": every_steps})
    return run_time(config, setup(config, target), target, step, steps, FailureOptions(**options))


def test_steps_are_those_of_the_config_or_follow_from_epochs_and_the_size_of_the_data() -> None:
    target = two_nodes()
    config = run_config()
    one = setup(config, target)
    assert planned_steps(config, one, None) == 1000
    epochs = run_config(training={"steps": None, "epochs": 2.5})
    assert planned_steps(epochs, one, None) is None
    assert planned_steps(epochs, one, 10 * one.tokens_per_step) == 25
    # The last step of each epoch has what is left of it.
    assert planned_steps(epochs, one, 10 * one.tokens_per_step + 1) == 11 + 11 + 6
    with pytest.raises(UserError, match=r"--data-tokens|tokens in"):
        planned_steps(epochs, one, 0)


def test_what_is_saved_is_masters_and_moments_of_what_is_trained_once_over_all_gpus() -> None:
    target = two_nodes()
    one = setup(run_config(), target)
    assert saved_state(one).value == pytest.approx(70_553_706_496 * 12 / 16)
    assert saved_state(replace(one, precision="fp64")).value == pytest.approx(
        70_553_706_496 * 24 / 16
    )
    assert saved_state(replace(one, shard=8, replicate=2)).value == saved_state(one).value
    adapted = saved_state(replace(one, adapters=LoraSetup(16, ("q_proj",))))
    assert adapted.value == pytest.approx(80 * 16 * (8192 + 8192) * 12 / 16)


def test_every_named_rate_is_reported_where_none_is_chosen_and_the_run_spans_them_all() -> None:
    run = timed()
    assert [outlook.rate.name for outlook in run.failures] == list(failure_rates())
    assert run.wall is not None
    assert run.failure_free.low.value == 1e6 and run.failure_free.high.value == 1.2e6
    walls = [one.wall_seconds for outlook in run.failures for one in (outlook.fast, outlook.slow)]
    assert (run.wall.low.value, run.wall.high.value) == (min(walls), max(walls))
    assert run.wall.low.value > run.failure_free.low.value
    assert run.longest is run.wall


def test_a_rate_is_chosen_by_name_or_number() -> None:
    (outlook,) = timed(rate="rsc1").failures
    assert outlook.rate.rate.value == 6.5
    (own,) = timed(rate="6.5").failures
    assert own.fast.wall_seconds == outlook.fast.wall_seconds
    (none,) = timed(rate="0").failures
    assert none.fast.named("expected interruptions").value == 0
    for wrong in ("rsc", "-1", "nan"):
        with pytest.raises(UserError):
            timed(rate=wrong)


def test_preemptions_are_counted_where_they_are_given_and_else_said_to_be_left_out() -> None:
    target = two_nodes("a3-megagpu-8g", 256, consumption="spot")
    without, with_them = timed(target=target), timed(target=target, preemptions_per_node_day=0.01)
    assert "preemptions" in without.failures[0].fast.left_out[0]
    assert not any("preemptions" in text for text in with_them.failures[0].fast.left_out)
    assert with_them.failures[0].goodput.high.value < without.failures[0].goodput.high.value
    assert not any("preemptions" in text for text in timed().failures[0].fast.left_out)


def test_a_restart_can_be_given_as_a_whole() -> None:
    run = timed(restart_seconds=3600)
    assert run.restart is not None and run.restart.total.value == 3600
    assert (
        run.failures[0].goodput.high.value < timed(restart_seconds=60).failures[0].goodput.low.value
    )


def test_the_interval_of_the_config_is_what_is_estimated_and_the_best_one_is_reported_beside_it() -> (  # noqa: E501
    None
):
    run = timed(every_steps=2000)
    assert run.saves == "every 2000 steps, as configured"
    assert all(outlook.fast.schedule.interval_steps == 2000 for outlook in run.failures)
    assert all(
        outlook.best is not None and outlook.best.goodput > outlook.fast.goodput
        for outlook in run.failures
    )
    assert "more goodput" in run.warnings[0]
    assert timed().wall.low.value < run.wall.low.value  # type: ignore[union-attr]


def test_an_interval_as_good_as_the_best_needs_no_word() -> None:
    best = timed(rate="llama3").failures[0].fast.schedule.interval_steps
    assert timed(rate="llama3", every_steps=best + 1).warnings == ()


def test_a_run_that_saves_only_at_its_end_is_warned_of_where_that_costs_something() -> None:
    (warning,) = timed().warnings
    assert says(warning, "checkpoint.every_steps") and "practically never ends" in warning
    (milder,) = timed(steps=4000, nodes=64).warnings
    assert says(milder, "goodput")
    assert timed(steps=10, nodes=1).warnings == ()


def test_an_interval_that_is_shorter_than_a_save_takes_is_reported_and_not_used() -> None:
    run = timed(every_steps=1, steps=1000, nodes=2, storage_gb_per_s=1.0)
    assert says(run.warnings[0], "on storage")
    assert run.saves.endswith("the best interval")


def test_an_interval_with_which_the_run_never_ends_is_reported_and_not_used() -> None:
    run = timed(every_steps=100_000)
    assert "practically never ends" in run.warnings[0]
    assert run.saves.endswith("the best interval")


def test_a_bound_of_the_step_gives_a_bound_of_the_run() -> None:
    run = timed(seconds(10, 10, is_bound=True))
    assert run.wall is not None and run.wall.is_bound and run.failure_free.is_bound
    assert run.wall.low == run.wall.high


def test_without_a_bandwidth_there_is_no_wall_time_and_the_flag_that_gives_it_is_reported() -> None:
    target = accelerator_target("h100", 16, catalog())
    run = timed(target=target)
    assert run.wall is None and run.failures == () and run.longest is run.failure_free
    assert [missing.give for missing in run.missing] == ["--storage-gb-per-s"]
    assert timed(target=target, storage_gb_per_s=5).wall is not None


def test_the_middle_of_the_run_is_simulated() -> None:
    target = two_nodes("a3-megagpu-8g", 256)
    config = run_config(SMALL)
    options = FailureOptions()
    step = seconds(4, 9)
    run = run_time(config, setup(config, target), target, step, 1000, options)
    assert middle_failure_inputs(run, target, step, options).step_seconds.value == pytest.approx(6)
