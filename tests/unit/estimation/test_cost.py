"""Dollars: from prices that say what they are, for a step, a million tokens and a run; missing
where nobody knows."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st
from tests.facts import says
from tests.unit.estimation.requests import two_nodes

from drillyard.errors import UserError
from drillyard.estimation.cost import (
    HourlyPrice,
    PriceOptions,
    RunCost,
    hourly_price,
    missing_price_reason,
    run_cost,
)
from drillyard.estimation.quantity import Range, quantity
from drillyard.estimation.target import Target, accelerator_target
from drillyard.hardware import catalog, load_catalog

TOKENS_PER_STEP = 16 * 8 * 4096


def seconds(low: float, high: float | None = None, *, is_bound: bool = False) -> Range:
    return Range(
        *(
            quantity("step", value, "s", "measured")
            for value in (low, low if high is None else high)
        ),
        is_bound,
    )


def priced(target: Target, **own: float) -> HourlyPrice:
    price = hourly_price(target, catalog(), PriceOptions(**own))
    assert price is not None
    return price


def cost(step: Range, run: Range | None = None, **own: float) -> RunCost:
    return run_cost(priced(two_nodes(), **own), step, TOKENS_PER_STEP, run)


def test_the_published_step_of_16_b200s_costs_what_was_published() -> None:
    published = cost(seconds(14.53), usd_per_gpu_hour=8.05)
    assert published.of_step.low.value == pytest.approx(0.5198, abs=1e-4)
    assert published.of_million_tokens.low.value == pytest.approx(0.991, abs=1e-3)
    assert published.price.of_all.value == pytest.approx(128.8)


def test_a_node_costs_as_much_as_its_gpus() -> None:
    by_gpu, by_node = cost(seconds(10), usd_per_gpu_hour=2), cost(seconds(10), usd_per_node_hour=16)
    assert by_gpu.of_step.low.value == by_node.of_step.low.value
    assert by_gpu.price.of_node.value == by_node.price.of_node.value == 16
    assert by_gpu.price.of_gpu.value == by_node.price.of_gpu.value == 2


def test_the_run_is_paid_for_by_its_wall_time() -> None:
    found = cost(seconds(10), seconds(3600, 7200), usd_per_node_hour=10).of_run
    assert found is not None
    assert (found.low.value, found.high.value) == (20, 40)
    assert cost(seconds(10), None, usd_per_node_hour=10).of_run is None


def test_a_bound_of_time_gives_a_bound_of_cost() -> None:
    assert cost(seconds(10, is_bound=True), usd_per_gpu_hour=1).of_step.is_bound
    assert not cost(seconds(10, 12), usd_per_gpu_hour=1).of_step.is_bound


@pytest.mark.parametrize("name", ["usd_per_gpu_hour", "usd_per_node_hour"])
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_a_price_that_is_none_is_refused(name: str, value: float) -> None:
    with pytest.raises(UserError, match=r"(GPU|node)-hour is .*above 0"):
        PriceOptions(**{name: value})


def test_two_prices_are_refused() -> None:
    with pytest.raises(UserError, match="one of them"):
        PriceOptions(1, 1)


def test_a_listed_price_says_how_it_is_bought_its_source_its_date_and_that_it_is_unverified() -> (
    None
):
    price = priced(two_nodes(consumption="flex-start-queued", region="us-central1"))
    assert price.of_gpu.value == pytest.approx(8.05)
    assert price.bought == "flex-start, us-central1"
    assert price.of_gpu.date is not None and price.of_gpu.date in price.about
    assert price.of_gpu.source in price.about
    listed = next(
        row
        for row in catalog().prices
        if row.machine == "a4-highgpu-8g" and row.consumption == "flex-start"
    )
    assert price.of_gpu.unverified == listed.fact("usd_per_gpu_hour").unverified


def test_a_cost_is_as_unverified_as_its_price() -> None:
    doubted = [
        row for row in catalog().prices if row.node_hour(catalog().machine(row.machine)).unverified
    ]
    for row in doubted:
        target = two_nodes(row.machine, consumption=row.consumption, region=row.region)
        assert run_cost(priced(target), seconds(1), 1, None).of_step.unverified
    assert doubted and not cost(seconds(1), usd_per_gpu_hour=1).of_step.unverified


def test_no_price_is_taken_from_elsewhere() -> None:
    target = two_nodes("a3-megagpu-8g", consumption="spot", region="mars-north1")
    assert hourly_price(target, catalog(), PriceOptions()) is None
    assert says(missing_price_reason(target), "no price ... a3-megagpu-8g ... spot ... mars-north1")
    assert (
        hourly_price(two_nodes("a3-megagpu-8g", consumption="calendar"), catalog(), PriceOptions())
        is None
    )


def test_where_nobody_said_how_it_is_bought_it_is_what_anybody_can_have() -> None:
    assert priced(two_nodes("a3-megagpu-8g")).bought.startswith("on-demand")
    assert priced(two_nodes("a4-highgpu-8g")).bought.startswith("flex-start")


def test_an_own_price_file_comes_first_and_names_itself(tmp_path: Path) -> None:
    own = tmp_path / "prices.yaml"
    own.write_text(
        "prices: [{machine: a3-megagpu-8g, consumption: on-demand, usd_per_node_hour: 24}]\n"
    )
    price = hourly_price(two_nodes("a3-megagpu-8g"), load_catalog(own), PriceOptions())
    assert price is not None
    assert price.of_gpu.value == 3
    assert str(own) in price.about


def test_gpus_without_a_machine_have_only_the_users_price_and_no_idle_neighbours() -> None:
    target = accelerator_target("h100", 12, catalog())
    assert hourly_price(target, catalog(), PriceOptions()) is None
    assert says(missing_price_reason(target), "accelerator h100")
    assert priced(target, usd_per_gpu_hour=2).of_all.value == 24
    assert priced(target, usd_per_node_hour=16).of_all.value == 32


@drawn(
    step=st.floats(1e-3, 1e4),
    price=st.floats(1e-2, 1e3),
    tokens=st.floats(1, 1e9),
    times=st.floats(1.1, 10),
)
def test_cost_is_proportional_to_time_and_price(
    step: float, price: float, tokens: float, times: float
) -> None:
    hourly = priced(two_nodes(), usd_per_gpu_hour=price)
    once = run_cost(hourly, seconds(step), tokens, seconds(step))
    more = run_cost(
        priced(two_nodes(), usd_per_gpu_hour=price * times), seconds(step), tokens, None
    )
    assert more.of_step.low.value == pytest.approx(once.of_step.low.value * times)
    assert once.of_million_tokens.low.value * tokens == pytest.approx(once.of_step.low.value * 1e6)
    assert once.of_run is not None and once.of_run.low.value == pytest.approx(
        once.of_step.low.value
    )
