"""Named failure rates, and the defaults of what a failure costs: failure_rates.yaml, each value
with source and date.

A rate counts unplanned interruptions per 1,000 days of a node with 8 GPUs, for any number of GPUs
per node: machines with more or fewer count in proportion. Planned maintenance and preemptions are
not in it.

Limits: rates of large clusters in their first years, all of Meta's; a cluster's own rate, once
known, is better. They are means: early life, bad batches and repeated failures of the same node are
not in them.
"""

from __future__ import annotations

from functools import cache
from typing import TypeVar

from pydantic import NonNegativeFloat

from drillyard.config.problems import closest_name
from drillyard.errors import UserError
from drillyard.estimation.quantity import GIVEN, zero_or_above
from drillyard.hardware.facts import CatalogRow, Fact, FactSource, Provenance, read_row
from drillyard.packaged_yaml import read_packaged_yaml

R = TypeVar("R", bound=CatalogRow)
GPUS_PER_RATED_NODE = 8


class FailureRate(CatalogRow):
    """Unplanned interruptions per 1,000 days of a node with 8 GPUs."""

    name: str
    title: str
    failures_per_1000_node_days: NonNegativeFloat

    @property
    def rate(self) -> Fact[float]:
        """Failures per 1,000 node-days, with its source."""
        return self.fact("failures_per_1000_node_days")


class Assumption(CatalogRow):
    """A default, used where the user gives no figure of their own."""

    name: str
    value: NonNegativeFloat
    unit: str
    meaning: str


@cache
def failure_rates() -> dict[str, FailureRate]:
    """The named rates, in the order of the data file."""
    return {row.name: row for row in _rows("rates", FailureRate)}


@cache
def assumptions() -> dict[str, Assumption]:
    return {row.name: row for row in _rows("assumptions", Assumption)}


def failure_rate(name: str) -> FailureRate:
    """The rate called `name`. UserError with the known names when there is none."""
    known = failure_rates()
    if name in known:
        return known[name]
    meant = closest_name(name, known)
    raise UserError(
        f"failure rate '{name}' is not known{f'; did you mean {meant}?' if meant else ''}\n"
        f"known: {', '.join(known)}; or give your own number of failures per 1,000 node-days"
    )


def custom_failure_rate(failures_per_1000_node_days: float) -> FailureRate:
    """A user's own rate; 0 means that nothing fails."""
    value = zero_or_above("the number of failures per 1,000 node-days", failures_per_1000_node_days)
    return FailureRate.create(
        Provenance(GIVEN), name="own", title="your own rate", failures_per_1000_node_days=value
    )


def assumption_or_given(name: str, own: float | None = None) -> Fact[float]:
    """The default called `name`, or the user's `own` figure where one is given (0 or above)."""
    return (
        assumptions()[name].fact("value")
        if own is None
        else Fact(zero_or_above(name, own), (GIVEN,))
    )


def _rows(section: str, cls: type[R]) -> list[R]:
    data = read_packaged_yaml("drillyard.estimation", "failure_rates.yaml")
    known = {key: FactSource(row["text"], str(row["date"])) for key, row in data["sources"].items()}
    return [read_row(cls, raw, known) for raw in data[section]]
