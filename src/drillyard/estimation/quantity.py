"""Quantities: the numbers of an estimate, each with its unit, formula and sources, and how ranges
of them are written.

A quantity is a `Fact`, and facts keep their sources, so one with an unverified input is unverified
too. In texts `?` marks what rests on a value that no primary source confirms, and a range of which
only the better end is known is written as a bound (`at least 12.1 s`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from drillyard.errors import ConfigError, UserError
from drillyard.formatting import TIMES, extent, largest_unit, three_digits
from drillyard.hardware.facts import Fact, FactSource, Number, combine

GIVEN = FactSource("given by the user", None)
DOUBT: Final = "?"
SECONDS_PER_HOUR: Final = 3600
SECONDS_PER_DAY: Final = 86_400


@dataclass(frozen=True, slots=True)
class Quantity(Fact[float]):
    """One number of an estimate, with the sources of its formula and inputs. `unit`: "" for a count
    or a fraction."""

    name: str
    unit: str
    formula: str


def quantity(
    name: str, value: float, unit: str, formula: str, *rests_on: Fact[Any] | FactSource | Number
) -> Quantity:
    """`value`, resting on quantities, facts and sources (of the formula itself); numbers bring no
    source."""
    return Quantity(value, combine(value, *rests_on).sources, name, unit, formula)


@dataclass(frozen=True, slots=True)
class Range:
    """A number that is known to lie between two; `low` and `high` have the same name and unit.

    `is_bound`: only the better end is known, and the other end is the same quantity; texts call it
    a bound.
    """

    low: Quantity
    high: Quantity
    is_bound: bool = False

    @property
    def unverified(self) -> bool:
        return self.low.unverified or self.high.unverified

    @property
    def middle(self) -> float:
        """The geometric mean of both ends."""
        return math.sqrt(self.low.value * self.high.value)

    def map(
        self,
        name: str,
        function: Callable[[float], float],
        unit: str,
        formula: str,
        *rests_on: Fact[Any] | FactSource | Number,
    ) -> Range:
        """Another quantity that follows from this one: `function` of each end."""

        def at(end: Quantity) -> Quantity:
            return quantity(name, function(end.value), unit, formula, end, *rests_on)

        return Range(at(self.low), at(self.high), self.is_bound)


def given(value: float) -> Fact[float]:
    return Fact(value, (GIVEN,))


def above_zero(name: str, value: float) -> float:
    """`value`, which must be a finite number above 0. UserError naming it otherwise."""
    if not (math.isfinite(value) and value > 0):
        raise UserError(f"{name} is {value:g}; a number above 0 is needed")
    return value


def zero_or_above(name: str, value: float) -> float:
    """`value`, which must be a finite number of at least 0. UserError naming it otherwise."""
    if not (math.isfinite(value) and value >= 0):
        raise UserError(f"{name} is {value:g}; a number of 0 or above is needed")
    return value


def check_count(what: str, count: int) -> None:
    """ConfigError unless `count` is at least 1."""
    if count < 1:
        raise ConfigError(f"the number of {what} is {count}; at least 1 is needed")


def range_text(numbers: Range, write: Callable[[float], str], better: str) -> str:
    """`low to high`, one number where both read the same, or `at least x` where it is a bound."""
    if numbers.is_bound:
        return f"{better} {write(numbers.low.value)}"
    return extent((numbers.low.value, numbers.high.value), write)


def number_range(numbers: Range, unit: str, better: str, scale: float = 1.0) -> str:
    """Both ends over `scale`, with `unit`; `better` says which side of a bound is possible (`at
    most`)."""
    return (
        range_text(numbers, lambda value: three_digits(value / scale), better)
        + f"{unit}{doubt_sign(numbers)}"
    )


def time_range(times: Range) -> str:
    """Both ends in the unit that suits the higher one."""
    scale, unit = largest_unit(times.high.value, TIMES)
    return number_range(times, f" {unit}", "at least", scale)


def doubt_sign(value: Quantity | Range) -> str:
    return DOUBT if value.unverified else ""
