"""The price of one GPU for one hour."""

from __future__ import annotations

import math

import pytest

from drillyard.errors import UserError
from drillyard.reporting.gpu_price import gpu_price


@pytest.mark.parametrize("dollars", [-0.01, math.nan, math.inf])
def test_a_price_is_a_number_of_dollars(dollars: float) -> None:
    with pytest.raises(UserError, match="--price-per-gpu-hour"):
        gpu_price(None, dollars)


def test_a_given_price_may_be_nothing_and_costs_by_the_hour() -> None:
    free, paid = gpu_price(None, 0.0), gpu_price(None, 2.5)
    assert free is not None and free.cost(8, 3600.0) == 0
    assert paid is not None and paid.cost(8, 1800.0) == 10
    assert gpu_price(None, None) is None
