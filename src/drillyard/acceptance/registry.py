"""All checks, in the order in which they run and are reported."""

from __future__ import annotations

from drillyard.acceptance.check import Check, Level
from drillyard.acceptance.checks import accelerator_count

CHECKS: tuple[Check, ...] = (accelerator_count.CHECK,)


def checks_of(level: Level) -> list[Check]:
    """The checks that run at a level."""
    return [check for check in CHECKS if check.level in level.includes]
