"""The steps of an acceptance job, which node 0 runs in order."""

from __future__ import annotations

import math
from typing import Any

from drillyard.acceptance.check import Expected, Level
from drillyard.acceptance.checks import tcp_bandwidth
from drillyard.acceptance.torch_steps import torch_steps

JOIN_SECONDS = {Level.quick: 120.0, Level.standard: 300.0, Level.full: 300.0}
"""Longest wait for a node to join."""
_STORAGE_BYTES = {Level.standard: 1 << 30, Level.full: 8 << 30}
"""Of each node, where no run is named."""
_QUICK_ROUNDS = 7
"""Of TCP bandwidth, about 1.3 s each: all pairs of 8 nodes."""

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
    (`figure` and `at_least`: what a pair must reach, for the search; `of_best`: the share of the
    best pair below which one is measured again), `on` (scope node: the
    only ranks), `rounds` (scope mesh: the most partners), `disjoint` (scope mesh: a node is in one
    pair at a time).
    """
    steps = host_steps(level)
    if nodes > 1:
        steps += _between_nodes(level, expected)
    steps += torch_steps(level, expected, nodes)
    if level is not Level.quick:
        steps += _storage(level, expected, nodes)
    if nodes > 1:
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


def _storage(level: Level, expected: Expected, nodes: int) -> list[dict[str, Any]]:
    """One writer, then all nodes at the same time."""
    size = _STORAGE_BYTES[level]
    if expected.checkpoint_bytes is not None:
        size = max(1, math.ceil(expected.checkpoint_bytes / nodes))
    step = {
        "probe": "storage",
        "scope": "node",
        # At a twentieth of a GB/s, twice: written and read.
        "seconds": 60 + 2 * size / 5e7,
        "arguments": {"bytes": size, "files": 1000, "files_seconds": 20},
    }
    return [{**step, "on": [0]}, step] if nodes > 1 else [step]


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
