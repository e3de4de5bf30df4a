"""How fast a device multiplies and copies: the ceilings that a step's time is compared with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class DeviceRates(NamedTuple):
    """FLOP/s of a large product of matrices, bytes/s of a large copy (read plus written), and
    FLOP/s of a large product in fp8, where it was asked for and the device is a GPU."""

    flops_per_second: float
    bytes_per_second: float
    fp8_flops_per_second: float | None = None


def device_rates(
    device: torch.device, dtype: torch.dtype, *, size: int, copied_mib: int, fp8: bool = False
) -> DeviceRates:
    """Measure the product of two random matrices [size, size] of `dtype` and, on a GPU, in `fp8`
    with one scale each, and a copy of `copied_mib` MiB."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    source = torch.empty(copied_mib * 2**18, dtype=torch.int32, device=device).random_()
    target = torch.empty_like(source)
    product = median_seconds(lambda: a @ b, device)
    copy = median_seconds(lambda: target.copy_(source), device)
    in_fp8 = _fp8_seconds(a, b) if fp8 and device.type == "cuda" else None
    flops = 2 * size**3
    return DeviceRates(
        flops / product, 2 * source.nbytes / copy, None if in_fp8 is None else flops / in_fp8
    )


def _fp8_seconds(a: torch.Tensor, b: torch.Tensor) -> float:
    left, right = (each.to(torch.float8_e4m3fn) for each in (a, b))
    one = torch.ones((), device=a.device)
    return median_seconds(
        lambda: torch._scaled_mm(
            left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16
        ),
        a.device,
    )


def median_seconds(action: Callable[[], Any], device: torch.device, repeats: int = 20) -> float:
    """Median seconds of one call after three to warm up, by events on a GPU; of three calls on a
    CPU."""
    for _ in range(3):
        action()
    if device.type == "cpu":
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            action()
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds)
    pairs: list[tuple[Any, Any]] = [(_timed_event(), _timed_event()) for _ in range(repeats)]
    for begin, end in pairs:
        begin.record()
        action()
        end.record()
    torch.cuda.synchronize(device)
    return float(statistics.median(begin.elapsed_time(end) for begin, end in pairs)) / 1e3


def _timed_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
