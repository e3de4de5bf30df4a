"""One collective over a list of message sizes, on all ranks of a group: its time, and whether its
result is right.

Sizes, and the bandwidths that follow, are those of nccl-tests (doc/PERFORMANCE.md): the bytes of
all ranks' parts together for all_gather, reduce_scatter and all_to_all, of one message for the
others. Elements are fp32 and hold whole numbers, whose sums are exact in any order.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

if __package__:
    from .ranks import ProbeRank, Refused, facts, highest, join_group, rounded, run, say
else:
    from ranks import ProbeRank, Refused, facts, highest, join_group, rounded, run, say  # type: ignore

import torch
import torch.distributed as dist

ITEM_BYTES = 4
PERIOD = 251
"""Elements repeat after so many: a prime, so that parts that are swapped differ."""
CHUNK = 1 << 24
"""Elements that are written or compared at once, to save memory."""
TIMED_SECONDS = 0.05
MOST_ITERATIONS = 20
"""A repeat has as many calls as take TIMED_SECONDS, at most MOST_ITERATIONS."""
CHECK_COST = 3
"""Calls whose time the check of one result takes, about."""
LEAST_REPEATS = 2
LEAST_CALLS = 2 + LEAST_REPEATS * (1 + CHECK_COST)
LATENCY_BYTES = 1 << 20


@dataclass(frozen=True)
class Case:
    """One collective at one size: `call` it, `fill` its input again, count the `wrong` elements of
    its result."""

    bytes: int
    call: Callable[[], None]
    fill: Callable[[], None]
    wrong: Callable[[], int]


def measure(rank: ProbeRank, asked: dict[str, Any]) -> dict[str, Any]:
    """Sizes in rising order, until the time given is used up."""
    collective = str(asked["collective"])
    if collective not in CASES:
        raise Refused(f"{collective} is not one of {', '.join(CASES)}")
    values = {"collective": collective, "ranks": rank.world, **facts(rank)}
    if rank.world == 1:
        return {**values, "skipped": "one rank has nobody to send to"}
    values["backend"] = join_group(rank)
    sizes = sorted(int(size) for size in asked["sizes"])
    repeats, budget = int(asked.get("repeats", 5)), float(asked.get("budget_seconds", 60.0))
    rows: list[dict[str, Any]] = []
    values.update(rows=rows, budget_seconds=budget, not_measured=[])
    began, before = time.monotonic(), 0.0
    for at, size in enumerate(sizes):
        # Up to LATENCY_BYTES a call takes as long as a tiny one.
        growth = max(1.0, size / max(sizes[at - 1], LATENCY_BYTES)) if at else 0.0
        spent = highest(rank, time.monotonic() - began)
        if rows and spent + before * growth * LEAST_CALLS > budget:
            values["not_measured"] = sizes[at:]
            break
        row, before = _row(rank, CASES[collective](rank, size), repeats, budget - spent)
        rows.append(row)
        per_second = row["bytes"] / min(row["seconds"]) / 1e9
        values["bus_gb_per_s"] = per_second * bus_factor(collective, rank.world)
        say(values)
    return values


def bus_factor(collective: str, ranks: int) -> float:
    """Bus bandwidth over bytes per second, as nccl-tests define it."""
    if collective == "sendrecv":
        return 1.0
    return (2.0 if collective == "all_reduce" else 1.0) * (ranks - 1) / ranks


def _row(rank: ProbeRank, case: Case, repeats: int, left: float) -> tuple[dict[str, Any], float]:
    """The row of one size, with as many repeats as fit into the seconds that are `left`, and the
    seconds of a call on the slowest rank."""
    for _ in range(2):
        case.fill()
        dist.barrier()
        rank.finish()
        began = time.perf_counter()
        case.call()
        rank.finish()
        taken = time.perf_counter() - began
    slowest = highest(rank, taken)
    repeats = max(LEAST_REPEATS, min(repeats, int(left / max(slowest, 1e-6) / (1 + CHECK_COST))))
    iterations = max(1, min(MOST_ITERATIONS, int(TIMED_SECONDS / max(slowest, 1e-6))))
    seconds, wrong = [], 0
    for _ in range(repeats):
        dist.barrier()
        rank.finish()
        began = time.perf_counter()
        for _ in range(iterations):
            case.call()
        rank.finish()
        seconds.append((time.perf_counter() - began) / iterations)
        # Of a sum the input is gone; the checked call has its own.
        case.fill()
        case.call()
        wrong += case.wrong()
    row = {"bytes": case.bytes, "seconds": rounded(seconds), "wrong": wrong, "calls": iterations}
    return row, slowest


def _fill(tensor: torch.Tensor, add: int) -> None:
    """Element i becomes i modulo PERIOD, plus `add`."""
    for at in range(0, tensor.numel(), CHUNK):
        part = tensor[at : at + CHUNK]
        part.copy_(torch.arange(at, at + part.numel(), device=tensor.device) % PERIOD + add)


def _wrong(tensor: torch.Tensor, first: int, times: int, add: int) -> int:
    """Elements that are not (first + i) modulo PERIOD, times `times`, plus `add`."""
    count = 0
    for at in range(0, tensor.numel(), CHUNK):
        part = tensor[at : at + CHUNK]
        place = torch.arange(first + at, first + at + part.numel(), device=tensor.device)
        count += int((part != (place % PERIOD * times + add).to(part.dtype)).sum().item())
    return count


def _buffer(rank: ProbeRank, elements: int) -> torch.Tensor:
    return torch.empty(elements, dtype=torch.float32, device=rank.device)


def _elements(size: int, parts: int = 1) -> int:
    """Elements of each of `parts` equal parts of a message."""
    return max(1, size // ITEM_BYTES // parts)


def _all_reduce(rank: ProbeRank, size: int) -> Case:
    world, data = rank.world, _buffer(rank, _elements(size))
    return Case(
        bytes=data.numel() * ITEM_BYTES,
        call=lambda: _ignore(dist.all_reduce(data)),
        fill=lambda: _fill(data, rank.rank),
        wrong=lambda: _wrong(data, 0, world, world * (world - 1) // 2),
    )


def _all_gather(rank: ProbeRank, size: int) -> Case:
    each = _elements(size, rank.world)
    own, result = _buffer(rank, each), _buffer(rank, each * rank.world)

    def fill() -> None:
        _fill(own, rank.rank)
        result.zero_()

    return Case(
        bytes=result.numel() * ITEM_BYTES,
        call=lambda: _ignore(dist.all_gather_into_tensor(result, own)),
        fill=fill,
        wrong=lambda: sum(
            _wrong(result[peer * each : (peer + 1) * each], 0, 1, peer)
            for peer in range(rank.world)
        ),
    )


def _reduce_scatter(rank: ProbeRank, size: int) -> Case:
    world, each = rank.world, _elements(size, rank.world)
    data, result = _buffer(rank, each * world), _buffer(rank, each)
    return Case(
        bytes=data.numel() * ITEM_BYTES,
        call=lambda: _ignore(dist.reduce_scatter_tensor(result, data)),
        fill=lambda: _fill(data, rank.rank),
        wrong=lambda: _wrong(result, rank.rank * each, world, world * (world - 1) // 2),
    )


def _all_to_all(rank: ProbeRank, size: int) -> Case:
    world, each = rank.world, _elements(size, rank.world)
    data, result = _buffer(rank, each * world), _buffer(rank, each * world)

    def fill() -> None:
        _fill(data, rank.rank)
        result.zero_()

    return Case(
        bytes=data.numel() * ITEM_BYTES,
        call=lambda: _ignore(dist.all_to_all_single(result, data)),
        fill=fill,
        wrong=lambda: sum(
            _wrong(result[peer * each : (peer + 1) * each], rank.rank * each, 1, peer)
            for peer in range(world)
        ),
    )


def _sendrecv(rank: ProbeRank, size: int) -> Case:
    each = _elements(size)
    own, result = _buffer(rank, each), _buffer(rank, each)
    after, before = (rank.rank + 1) % rank.world, (rank.rank - 1) % rank.world

    def call() -> None:
        sends = dist.P2POp(dist.isend, own, after)
        receives = dist.P2POp(dist.irecv, result, before)
        for work in dist.batch_isend_irecv([sends, receives]):
            work.wait()

    def fill() -> None:
        _fill(own, rank.rank)
        result.zero_()

    return Case(each * ITEM_BYTES, call, fill, lambda: _wrong(result, 0, 1, before))


def _ignore(_: object) -> None:
    pass


CASES: dict[str, Callable[[ProbeRank, int], Case]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "sendrecv": _sendrecv,
}


if __name__ == "__main__":
    sys.exit(run(measure))
