"""Whether a run fits: the range of memory that is needed against what there is. One rule for all who judge."""

from __future__ import annotations

from typing import Literal

from drillyard.estimation.quantity import Range

Verdict = Literal["fits", "may not fit", "does not fit"]


def verdict_on(needed_gib: Range, available_gib: float) -> Verdict:
    """`fits` where the whole range is within what there is, `may not fit` where only its lower end is."""
    if needed_gib.high.value <= available_gib:
        return "fits"
    return "may not fit" if needed_gib.low.value <= available_gib else "does not fit"
