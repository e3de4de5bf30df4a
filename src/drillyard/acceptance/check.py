"""What a check is: a description for people, and a pure function from evidence to results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.results import CheckResult, Status
from drillyard.errors import UserError
from drillyard.hardware.accelerators import Accelerator
from drillyard.hardware.catalog import Catalog
from drillyard.hardware.machines import Machine
from drillyard.hardware.network_stacks import NetworkStack


class Level(StrEnum):
    """How much is checked: in under 60 s, in under 15 min, or everything."""

    quick = "quick"
    standard = "standard"
    full = "full"

    @property
    def includes(self) -> tuple[Level, ...]:
        """The levels whose checks run at this one."""
        every = tuple(Level)
        return every[: every.index(self) + 1]


def level_named(text: str, option: str = "--level") -> Level:
    """The level that an option names. Raises UserError."""
    try:
        return Level(text)
    except ValueError:
        raise UserError(f"{option} {text}: is not a level; these are: {', '.join(Level)}") from None


@dataclass(frozen=True)
class Expected:
    """What the nodes should be: facts that checks compare with. None where a config names no
    machine, or nothing is known."""

    catalog: Catalog
    machine: Machine | None
    accelerator: Accelerator | None
    stack: NetworkStack | None
    environment: Mapping[str, str] = field(default_factory=dict)
    """The NCCL_* variables that the launch plan sets."""
    baseline: AcceptanceEvidence | None = None
    """This cluster's earlier evidence."""
    checkpoint_bytes: float | None = None
    """Of one checkpoint of the run to come, in all."""


@dataclass(frozen=True)
class Check:
    """One check. `probes`: those whose observations it reads. `seconds`: of a healthy node.

    `judge` is pure and returns at least one result: what cannot be judged is `incomplete`, what
    does not apply `skipped`, each with its reason. It may return none of recorded evidence that has
    nothing for it.
    """

    name: str
    title: str
    level: Level
    probes: tuple[str, ...]
    seconds: float
    measures: str
    how: str
    evidence: str
    """What must have been seen for a pass."""
    references: str
    """Where its limits come from."""
    meaning: str
    """What a failure means."""
    action: str
    """What to do then."""
    judge: Callable[[AcceptanceEvidence, Expected], Iterable[CheckResult]]
    metric: str = ""
    """What its results measure, where they do not say it themselves; default: the name."""

    def result(
        self, nodes: tuple[int, ...], status: Status, reason: str, **more: Any
    ) -> CheckResult:
        """A result of this check about `nodes`; `more` as in `CheckResult`. One that fails or warns
        says what the check says to do."""
        values: dict[str, Any] = {
            "metric": self.metric or self.name,
            "action": self.action if status in (Status.fail, Status.warn) else "",
            "required": status not in (Status.skipped, Status.recorded),
            **more,
        }
        return CheckResult(check=self.name, nodes=nodes, status=status, reason=reason, **values)
