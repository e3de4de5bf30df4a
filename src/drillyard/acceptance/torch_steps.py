"""Steps of the probes that need PyTorch, in sizes that suit the machine: of accelerators where the
cluster config names a machine that has some, else of CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from drillyard.acceptance.check import Expected, Level
from drillyard.acceptance.checks.collectives import pair_limit
from drillyard.acceptance.node_results import has_gpus
from drillyard.acceptance.thresholds import required_sizes
from drillyard.acceptance.training_phases import shape_for

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "sendrecv")
ROW_NAMES = {"all_to_all": "alltoall"}
"""Names in bandwidths.yaml that differ."""
REPEATS = 5
SEED = 20260
START_SECONDS = 120
"""For PyTorch and the group of ranks to start, within a step's limit: on a busy host it is slow."""

GPU_SIZES = {
    Level.quick: [64 * MIB, GIB, 8 * GIB],
    Level.standard: [MIB << shift for shift in range(0, 14, 2)] + [8 * GIB],
    Level.full: [32 * KIB << shift for shift in range(20)],
}
CPU_SIZES = {
    Level.quick: [64 * KIB, 4 * MIB],
    Level.standard: [64 * KIB, MIB, 4 * MIB],
    Level.full: [32 * KIB << shift for shift in range(0, 10, 2)],
}
BUDGET_SECONDS = {Level.quick: 10.0, Level.standard: 25.0, Level.full: 120.0}
"""Of one collective, its start not counted."""


def torch_steps(level: Level, expected: Expected, nodes: int) -> Iterator[dict[str, Any]]:
    """What each device does, then collectives on single nodes, on pairs and on all, then
    training."""
    gpu = has_gpus(expected)
    yield _step("devices", "node", 60, devices_arguments(level, expected))
    seconds = int(2 * BUDGET_SECONDS[level])
    single, several = (collectives_of(level, expected, count) for count in (1, 2))
    for collective in COLLECTIVES:
        one, two = (_arguments(level, expected, collective, count) for count in (1, 2))
        if collective in single and gpu:
            step = _step("nccl_tests", "node", seconds, one)
            del step["ranks"]
            yield step
        if collective in single:
            yield _step("collective", "node", seconds, one)
        if collective in several and nodes > 1:
            # The figure is that of the largest size.
            least = pair_limit(expected, collective, max(two["sizes"]))
            judged = {"judge": {"figure": "bus_gb_per_s", "at_least": least}}
            yield _step("collective", "pairs", seconds, two) | judged
        if collective in several and nodes > 2:
            yield _step("collective", "all", seconds, two)
    yield _step("training", "all", 120, training_arguments(level, expected))


def _arguments(level: Level, expected: Expected, collective: str, nodes: int) -> dict[str, Any]:
    gpu = has_gpus(expected)
    return {
        "collective": collective,
        "sizes": sizes_of(level, expected, collective, nodes) if gpu else CPU_SIZES[level],
        "repeats": REPEATS,
        "budget_seconds": BUDGET_SECONDS[level],
        "device": "cuda" if gpu else None,
    }


def sizes_of(level: Level, expected: Expected, collective: str, nodes: int) -> list[int]:
    """The level's, and those by which a row of so many nodes judges; the largest is one of
    these. None is larger than a quarter of the device's memory."""
    deciding = required_sizes(expected, nodes).get(ROW_NAMES.get(collective, collective), ())
    most = max(deciding, default=max(GPU_SIZES[level]))
    memory = None if expected.accelerator is None else expected.accelerator.memory_gb
    if memory is not None:
        # A message is there twice, and its check takes some more.
        most = min(most, int(memory * 1e9 / 4))
    return sorted(size for size in {*deciding, *GPU_SIZES[level]} if size <= most)


def collectives_of(level: Level, expected: Expected, nodes: int) -> list[str]:
    """All of them; at the quick level those that a row of the machine judges on so many nodes, or
    all_reduce."""
    if level is not Level.quick:
        return list(COLLECTIVES)
    judged = required_sizes(expected, nodes)
    return [each for each in COLLECTIVES if ROW_NAMES.get(each, each) in judged] or ["all_reduce"]


def devices_arguments(level: Level, expected: Expected) -> dict[str, Any]:
    """Of the devices probe."""
    if not has_gpus(expected):
        product = {"rows": 256, "inner": 256, "rounds": 4, "repeats": 4, "seed": SEED}
        shapes = [{"type": "fp32", "m": 384, "n": 384, "k": 384}]
        return {"product": product, "matmul": shapes, "memory_bytes": 16 * MIB, "device": None}
    rounds = {Level.quick: 2, Level.standard: 8, Level.full: 64}[level]
    product = {"rows": 4096, "inner": 1024, "rounds": rounds, "repeats": 50, "seed": SEED}
    sides = [(8192, 8192, 8192), (8192, 14336, 4096)]
    if level is not Level.quick:
        sides += [(16384, 16384, 8192), (4096, 4096, 4096), (16384, 8192, 1280)]
    shapes = [
        {"type": kind, "m": m, "n": n, "k": k}
        for kind in _precisions(expected)
        for m, n, k in sides
    ]
    return {
        "product": product,
        "matmul": shapes,
        "memory_bytes": GIB if level is not Level.quick else 256 * MIB,
        "peers": level is not Level.quick,
        "device": "cuda",
    }


def training_arguments(level: Level, expected: Expected) -> dict[str, Any]:
    """Of the training probe."""
    gpu = has_gpus(expected)
    memory = expected.accelerator.memory_gb if expected.accelerator is not None else None
    blocks, seconds = {Level.quick: (5, 0.4), Level.standard: (5, 3.0), Level.full: (10, 12.0)}[
        level
    ]
    return {
        "shape": shape_for(memory if gpu else None),
        "blocks": blocks,
        "block_seconds": seconds,
        "steps": 10 if gpu or level is not Level.quick else 8,
        "most_nodes": 8,
        "device": "cuda" if gpu else None,
    }


def _precisions(expected: Expected) -> list[str]:
    """bf16 and fp8 where the accelerator has them, else fp16."""
    peaks = {} if expected.accelerator is None else expected.accelerator.peak_tflops
    return [each for each in ("bf16", "fp8") if each in peaks] or ["fp16"]


def _step(probe: str, scope: str, seconds: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "probe": probe,
        "scope": scope,
        "ranks": True,
        "seconds": START_SECONDS + seconds,
        "arguments": {key: value for key, value in arguments.items() if value is not None},
    }
