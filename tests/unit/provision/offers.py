"""Which plans are made for tests of all machines and ways of buying."""

from __future__ import annotations

from collections.abc import Sequence


def every_plan(offers: Sequence[tuple[str, str]], num_ways: int) -> list[tuple[str, str, int]]:
    """Each offer (machine, way of buying) with the first of the other settings, and each machine's
    first offer with all of them."""
    first = {machine: mode for machine, mode in reversed(offers)}
    return [
        (machine, mode, way)
        for machine, mode in offers
        for way in range(num_ways if first[machine] == mode else 1)
    ]
