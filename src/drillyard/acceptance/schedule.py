"""The steps of an acceptance job, which node 0 runs in order."""

from __future__ import annotations

from typing import Any

from drillyard.acceptance.check import Expected, Level

JOIN_SECONDS = {Level.quick: 120.0, Level.standard: 300.0, Level.full: 300.0}
"""Longest wait for a node to join."""

DCGM_RUNS = {Level.quick: (1, 60.0), Level.standard: (2, 720.0), Level.full: (3, 3600.0)}
"""DCGM's level, and its longest time in seconds: 2.5 to 10.5 min for level 2, 10 min and more for
3, where published runs say so."""


def host_steps(level: Level) -> list[dict[str, Any]]:
    """Steps that look at each node by itself, without PyTorch. Tools have their own limits, below
    those of the steps."""
    steps: list[dict[str, Any]] = [
        {"probe": probe, "scope": "node", "seconds": 30}
        for probe in ("host", "accelerators", "kernel_log", "network_interfaces", "software")
    ]
    run, seconds = DCGM_RUNS[level]
    arguments = {"run": run, "seconds": seconds}
    steps.append(
        {"probe": "dcgm", "scope": "node", "seconds": seconds + 10, "arguments": arguments}
    )
    return steps


def schedule(level: Level, expected: Expected, nodes: int) -> dict[str, Any]:
    """The schedule as node 0 reads it.

    A step: `probe`, `scope` (node, pairs, mesh, all), `arguments`, `seconds` (the longest time a
    healthy node may take), `ranks` (true: one process per accelerator, with PyTorch), `judge`
    (`figure` and `at_least`: what a pair must reach, for the search), `racks` (of nodes, by rank).
    """
    steps = host_steps(level)
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
