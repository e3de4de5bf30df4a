"""What each device does by itself: matmul rate, memory bandwidth, copies from and to the host and
to the other devices of its node, and a product whose every element is known.

The product has whole numbers of up to seven bits as factors and sums below 2^24, which fp32 holds
exactly in any order: every device of any kind must give the same bits. Copies to the host and
between devices are measured one device at a time, since a node's host memory is shared.
"""

from __future__ import annotations

import hashlib
import re
import sys
import time
from collections.abc import Callable
from typing import Any

if __package__:
    from .ranks import LocalClock, ProbeRank, facts, join_group, rounded, run, say
else:
    from ranks import LocalClock, ProbeRank, facts, join_group, rounded, run, say  # type: ignore

import torch
import torch.distributed as dist

LARGEST_FACTOR = 127
EXACT_BELOW = 1 << 24
"""Whole numbers that fp32 holds exactly."""
_DEVICE_ERROR = re.compile(r"(CUDA|HIP) error: (?!.*_STATUS_NOT_SUPPORTED)")
"""How PyTorch begins the message of a device that fails (c10/cuda/CUDAException.cpp); that of a
product which a library lacks begins alike (ATen/cuda/Exceptions.h)."""
TIMED_SECONDS = 0.05
MOST_CALLS = 1000
"""A repeat has as many calls as take TIMED_SECONDS."""


def measure(rank: ProbeRank, asked: dict[str, Any]) -> dict[str, Any]:
    """Each part in turn; the object is printed after each of them."""
    clock, repeats = LocalClock(rank), int(asked.get("repeats", 5))
    values = {**facts(rank), "waiting_left_out": clock.without_waiting}
    values["product"] = product(rank, asked["product"])
    say(values)
    values["matmul"] = [matmul(rank, clock, each, repeats) for each in asked["matmul"]]
    say(values)
    size = int(asked["memory_bytes"])
    values["memory"] = _copy(rank, clock, rank.device, rank.device, size, repeats, moved=2)
    say(values)
    if rank.on_gpu:
        _in_turns(rank, lambda: _host_copies(rank, clock, values, size, repeats))
        say(values)
        if rank.local_world > 1 and asked.get("peers"):
            values["peers"] = {}
            _in_turns(rank, lambda: _peer_copies(rank, clock, values, size, repeats))
    return values


# The product.


def product(rank: ProbeRank, asked: dict[str, Any]) -> dict[str, Any]:
    """Products of seeded factors: for each round the digest of the result, and how many elements
    were wrong, over all repeats."""
    rows, inner = int(asked["rows"]), int(asked["inner"])
    assert LARGEST_FACTOR**2 * inner < EXACT_BELOW
    kind = torch.bfloat16 if rank.on_gpu else torch.float32
    if rank.on_gpu:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    rounds = []
    for number in range(int(asked["rounds"])):
        left, right = (_factor(asked["seed"] + 2 * number + side, rows, inner) for side in (0, 1))
        # On the host, by whole numbers where it is small: another path than the one under test.
        whole = left.to(torch.int64) @ right.to(torch.int64).T if rows <= 512 else None
        known = (whole if whole is not None else left.float() @ right.float().T).to(kind)
        known, left, right = (each.to(rank.device) for each in (known, left, right))
        left, right, wrong = left.to(kind), right.to(kind).T, 0
        for _ in range(int(asked.get("repeats", 1))):
            result = left @ right
            wrong += int((result != known).sum().item())
        data = result.to(torch.float32).cpu().contiguous().numpy().tobytes()
        rounds.append({"digest": hashlib.sha256(data).hexdigest()[:32], "wrong": wrong})
    return {
        "rows": rows,
        "inner": inner,
        "seed": asked["seed"],
        "type": str(kind)[6:],
        "rounds": rounds,
    }


def _factor(seed: int, rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(
        -LARGEST_FACTOR, LARGEST_FACTOR + 1, (rows, columns), generator=generator, dtype=torch.int32
    )


# Rates.


def matmul(
    rank: ProbeRank, clock: LocalClock, asked: dict[str, Any], repeats: int
) -> dict[str, Any]:
    """The rate of an (m, k) by (k, n) product, in TFLOP/s per repeat; `unsupported` where PyTorch
    has no such product for the device. Raises what a device raises that has no memory or fails."""
    m, n, k = (int(asked[each]) for each in "mnk")
    row: dict[str, Any] = {"type": asked["type"], "m": m, "n": n, "k": k}
    call = _fp8(rank, m, n, k) if asked["type"] == "fp8" else _plain(rank, asked["type"], m, n, k)
    try:
        call()
        rank.finish()
    except (RuntimeError, TypeError, AttributeError) as error:
        if isinstance(error, torch.cuda.OutOfMemoryError) or _DEVICE_ERROR.match(str(error)):
            raise
        return {**row, "unsupported": str(error).splitlines()[0][:200]}
    row["tflops"] = rounded([2.0 * m * n * k / each / 1e12 for each in _time(clock, call, repeats)])
    return row


def _plain(rank: ProbeRank, kind: str, m: int, n: int, k: int) -> Callable[[], object]:
    generator = torch.Generator(rank.device).manual_seed(0)
    numbers = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[kind]
    left = torch.randn(m, k, generator=generator, device=rank.device).to(numbers)
    right = torch.randn(k, n, generator=generator, device=rank.device).to(numbers)
    result = torch.empty(m, n, dtype=numbers, device=rank.device)
    return lambda: torch.mm(left, right, out=result)


def _fp8(rank: ProbeRank, m: int, n: int, k: int) -> Callable[[], object]:
    """One scale per factor, the second one column by column, as torch._scaled_mm wants it."""

    def call() -> object:
        if not factors:
            numbers = torch.float8_e4m3fn
            one = torch.ones((), device=rank.device)
            left = torch.randn(m, k, device=rank.device).to(numbers)
            right = torch.randn(n, k, device=rank.device).to(numbers).t()
            factors.extend((left, right, one))
        left, right, one = factors
        return torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    factors: list[torch.Tensor] = []
    return call


def _copy(
    rank: ProbeRank,
    clock: LocalClock,
    source: torch.device,
    target: torch.device,
    size: int,
    repeats: int,
    moved: int = 1,
) -> dict[str, Any]:
    """GB/s of a copy of `size` bytes, `moved` times counted; the host's side is pinned."""

    def buffer(device: torch.device) -> torch.Tensor:
        pinned = device.type == "cpu" and rank.on_gpu
        return torch.ones(size, dtype=torch.uint8, device=device, pin_memory=pinned)

    wanted, found = buffer(target), buffer(source)
    seconds = _time(clock, lambda: wanted.copy_(found, non_blocking=True), repeats)
    return {"bytes": size, "gb_per_s": rounded([moved * size / each / 1e9 for each in seconds])}


def _host_copies(
    rank: ProbeRank, clock: LocalClock, values: dict[str, Any], size: int, repeats: int
) -> None:
    host = torch.device("cpu")
    values["host_to_device"] = _copy(rank, clock, host, rank.device, size, repeats)
    values["device_to_host"] = _copy(rank, clock, rank.device, host, size, repeats)


def _peer_copies(
    rank: ProbeRank, clock: LocalClock, values: dict[str, Any], size: int, repeats: int
) -> None:
    for peer in range(rank.local_world):
        if peer != rank.local:
            target = torch.device("cuda", peer)
            values["peers"][str(peer)] = _copy(rank, clock, rank.device, target, size, repeats)


def _time(clock: LocalClock, call: Callable[[], object], repeats: int) -> list[float]:
    """Seconds per call, for each repeat, after one that warms up and one that is timed."""
    call()
    began = clock.now()
    call()
    once = max(clock.now() - began, 1e-7)
    calls = max(1, min(MOST_CALLS, int(TIMED_SECONDS / once)))
    seconds = []
    for _ in range(repeats):
        began = clock.now()
        for _ in range(calls):
            call()
        seconds.append(max(clock.now() - began, 1e-9) / calls)
        # What all devices do at once must not always meet the same moment.
        time.sleep(0.005)
    return seconds


def _in_turns(rank: ProbeRank, part: Callable[[], None]) -> None:
    """Run `part` on one rank of the node after the other."""
    if rank.world > 1 and not dist.is_initialized():
        join_group(rank, "gloo")
    for turn in range(rank.world):
        if turn == rank.rank:
            part()
        if rank.world > 1:
            dist.barrier()


if __name__ == "__main__":
    sys.exit(run(measure))
