"""The steps of an acceptance job, which node 0 runs in order."""

from __future__ import annotations

from typing import Any

from drillyard.acceptance.check import Expected, Level
from drillyard.acceptance.checks import tcp_bandwidth
from drillyard.acceptance.torch_steps import torch_steps

JOIN_SECONDS = {Level.quick: 120.0, Level.standard: 300.0, Level.full: 300.0}
"""Longest wait for a node to join."""
_QUICK_ROUNDS = 7
"""Of TCP bandwidth, about 1.3 s each: all pairs of 8 nodes."""


def schedule(level: Level, expected: Expected, nodes: int) -> dict[str, Any]:
    """The schedule as node 0 reads it.

    A step: `probe`, `scope` (node, pairs, mesh, all), `arguments`, `seconds` (the longest time a
    healthy node may take), `ranks` (true: one process per accelerator, with PyTorch), `judge`
    (`figure` and `at_least`: what a pair must reach, for the search; `of_best`: the share of the
    best pair below which one is measured again), `racks` (of nodes, by rank), `on` (scope node: the
    only ranks), `rounds` (scope mesh: the most partners), `disjoint` (scope mesh: a node is in one
    pair at a time).
    """
    steps: list[dict[str, Any]] = [{"probe": "host", "scope": "node", "seconds": 30}]
    steps += torch_steps(level, expected, nodes)
    if nodes > 1:
        steps[1:1] = _between_nodes(level, expected)
        # What clocks did in the meantime: the last look of each node's own watch, and of others.
        steps.append(
            {
                "probe": "network",
                "scope": "mesh",
                "rounds": 3,
                "seconds": 60,
                "arguments": {"measures": ["clock"]},
            }
        )
    return {"level": level.value, "join_seconds": JOIN_SECONDS[level], "steps": steps}


def _between_nodes(level: Level, expected: Expected) -> list[dict[str, Any]]:
    """What needs no PyTorch: clocks, ports, MTU and names; TCP bandwidth."""
    quick = level is Level.quick
    bandwidth: dict[str, Any] = {
        "probe": "tcp_bandwidth",
        "scope": "mesh",
        "disjoint": True,
        "seconds": 30,
        "arguments": {"seconds": 0.5 if quick else 1.0, "streams": 4},
        "judge": {
            "figure": tcp_bandwidth.FIGURE,
            "at_least": tcp_bandwidth.least_of_baseline(expected.baseline),
            "of_best": tcp_bandwidth.SHARE,
        },
    }
    if quick:
        bandwidth["rounds"] = _QUICK_ROUNDS
    return [{"probe": "network", "scope": "mesh", "seconds": 120}, bandwidth]
