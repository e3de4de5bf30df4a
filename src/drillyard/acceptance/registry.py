"""All checks, in the order in which they run and are reported."""

from __future__ import annotations

from drillyard.acceptance.check import Check, Level
from drillyard.acceptance.checks import accelerator_count, collectives, slow_pairs

CHECKS: tuple[Check, ...] = (
    accelerator_count.CHECK,
    collectives.NODE,
    collectives.PAIRS,
    slow_pairs.CHECK,
    collectives.ALL,
)


def checks_of(level: Level) -> list[Check]:
    """The checks that run at a level."""
    return [check for check in CHECKS if check.level in level.includes]
