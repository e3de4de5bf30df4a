"""Terms: the numbers of a prediction, each with its unit, the formula that gave it and what it rests on.

Everything that `estimate` answers is made of terms, so that an answer can explain itself: `--explain` prints them in
the order in which they were computed. A term whose inputs include an unverified value is unverified by itself,
because its value is a `Fact` and facts keep their sources.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from drillyard.errors import UserError
from drillyard.hardware.facts import Fact, FactSource, Number, combine

GIVEN = FactSource("given by the user", None)


@dataclass(frozen=True, slots=True)
class Quantity:
    """One number of a prediction. `unit` is "" for a count or a fraction."""

    name: str
    fact: Fact[float]
    unit: str
    formula: str

    @property
    def value(self) -> float:
        return self.fact.value

    @property
    def source(self) -> str:
        """The sources of the formula and of its inputs, in words."""
        return self.fact.source

    @property
    def unverified(self) -> bool:
        """Whether anything it rests on is an assumption or unconfirmed: say so wherever it is shown."""
        return self.fact.unverified

    def as_json(self) -> dict[str, Any]:
        """Name, value, unit, formula, source, date, unverified."""
        about = self.fact.as_json()
        return {"name": self.name, "value": about.pop("value"), "unit": self.unit, "formula": self.formula, **about}


def quantity(
    name: str, value: float, unit: str, formula: str, *rests_on: Quantity | Fact[Any] | FactSource | Number
) -> Quantity:
    """`value` as a term that rests on terms, facts and sources (of the formula itself); numbers bring no source."""
    parts: list[Fact[Any] | Number] = []
    for part in rests_on:
        if isinstance(part, Quantity):
            parts.append(part.fact)
        elif isinstance(part, FactSource):
            parts.append(Fact(None, (part,)))
        else:
            parts.append(part)
    return Quantity(name, combine(value, *parts), unit, formula)


@dataclass(frozen=True, slots=True)
class Range:
    """A number that is known to lie between two; `low` and `high` are terms of the same name and unit.

    `is_bound`: only the better end is known (nothing measured is like it); the other end is then the same term, and
    whoever shows it calls it a bound.
    """

    low: Quantity
    high: Quantity
    is_bound: bool = False

    @property
    def unverified(self) -> bool:
        return self.low.unverified or self.high.unverified


def given(value: float) -> Fact[float]:
    """A user's own number as a fact."""
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
