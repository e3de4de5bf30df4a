"""The named rates are the published ones, and say where they come from."""

from __future__ import annotations

import pytest
from tests.facts import says

from drillyard.errors import UserError
from drillyard.estimation.failure_rates import (
    assumption_or_given,
    assumptions,
    custom_failure_rate,
    failure_rate,
    failure_rates,
)


def test_the_three_named_rates():
    rates = {name: row.failures_per_1000_node_days for name, row in failure_rates().items()}
    assert rates == {"llama3": 3.8, "rsc1": 6.5, "rsc2": 2.34}
    assert rates["llama3"] == pytest.approx(419 / (54 * 16_384 / 8) * 1000, abs=0.05)


def test_every_value_has_a_source_and_a_date():
    facts = [row.rate for row in failure_rates().values()] + [
        row.fact("value") for row in assumptions().values()
    ]
    assert all(fact.source and fact.date for fact in facts)
    assert not any(row.rate.unverified for row in failure_rates().values())
    assert all(row.fact("value").unverified for row in assumptions().values())


def test_a_misspelled_rate_is_named_with_the_nearest():
    with pytest.raises(UserError, match="did you mean llama3") as refused:
        failure_rate("lama3")
    assert len(str(refused.value).splitlines()) == 2


def test_an_own_rate_is_the_user_s():
    assert custom_failure_rate(1.5).rate.value == 1.5
    assert says(custom_failure_rate(1.5).rate.source, "by the user")


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf")])
def test_a_rate_below_zero_or_no_number_is_refused(rate):
    with pytest.raises(UserError, match="failures per 1,000 node-days"):
        custom_failure_rate(rate)


def test_a_default_gives_way_to_an_own_figure():
    assert (
        assumption_or_given("detect_seconds").value,
        assumption_or_given("detect_seconds").unverified,
    ) == (
        150,
        True,
    )
    assert (
        assumption_or_given("detect_seconds", 20).value,
        assumption_or_given("detect_seconds", 20).unverified,
    ) == (
        20,
        False,
    )
    with pytest.raises(UserError, match="detect_seconds is -1"):
        assumption_or_given("detect_seconds", -1)
