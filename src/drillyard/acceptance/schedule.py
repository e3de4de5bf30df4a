"""The steps of an acceptance job, which node 0 runs in order."""

from __future__ import annotations

from typing import Any

from drillyard.acceptance.check import Expected, Level

JOIN_SECONDS = {Level.quick: 120.0, Level.standard: 300.0, Level.full: 300.0}
"""Longest wait for a node to join."""


def schedule(level: Level, expected: Expected, nodes: int) -> dict[str, Any]:
    """The schedule as node 0 reads it.

    A step: `probe`, `scope` (node, pairs, mesh, all), `arguments`, `seconds` (the longest time a
    healthy node may take), `ranks` (true: one process per accelerator, with PyTorch), `judge`
    (`figure` and `at_least`: what a pair must reach, for the search), `racks` (of nodes, by rank).
    """
    steps: list[dict[str, Any]] = [{"probe": "host", "scope": "node", "seconds": 30}]
    steps.append(
        {
            "probe": "collective",
            "scope": "node",
            "ranks": True,
            "seconds": 120,
            "arguments": {"collective": "all_reduce", "sizes": [1 << 20]},
        }
    )
    if nodes > 1:
        steps.append(
            {
                "probe": "collective",
                "scope": "pairs",
                "ranks": True,
                "seconds": 120,
                "arguments": {"collective": "all_reduce", "sizes": [1 << 20]},
                "judge": {"figure": "bus_gb_per_s", "at_least": None},
            }
        )
    return {"level": level.value, "join_seconds": JOIN_SECONDS[level], "steps": steps}
