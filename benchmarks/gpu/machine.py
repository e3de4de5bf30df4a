"""Versions, and how fast the machine multiplies and copies: the ceilings of every later row."""

from __future__ import annotations

import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from setups import Setting

from drillyard.hardware import find_accelerator

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "accelerate",
    "peft",
    "liger-kernel",
    "torchao",
    "numpy",
    "pydantic",
)


def rates(setting: Setting) -> dict[str, Any]:
    """TFLOP/s of a large bf16 product on random data, GB/s of a large copy (bytes read plus bytes
    written)."""
    size = 512 if setting.tiny else 8192
    elements = 2**20 if setting.tiny else 2**30
    a, b = (torch.randn(size, size, device=setting.device).bfloat16() for _ in range(2))
    source = torch.empty(elements, dtype=torch.int32, device=setting.device).random_()
    target = torch.empty_like(source)
    product_seconds = median_seconds(lambda: a @ b, setting)
    copy_seconds = median_seconds(lambda: target.copy_(source), setting)
    assert torch.equal(source, target)
    return {
        **versions(setting),
        "bf16_product_tflops": 2 * size**3 / product_seconds / 1e12,
        "copy_gb_per_s": 2 * source.nbytes / copy_seconds / 1e9,
    }


def versions(setting: Setting) -> dict[str, Any]:
    """Python, packages, and the accelerator with its driver."""
    found: dict[str, Any] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    if setting.device == "cuda":
        name = torch.cuda.get_device_name()
        accelerator = find_accelerator(name)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found |= {
            "gpu": name,
            "in the catalog as": accelerator.name if accelerator else None,
            "driver": subprocess.run(query, capture_output=True, text=True).stdout.strip() or None,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return found


def median_seconds(action: Callable[[], Any], setting: Setting, repeats: int = 20) -> float:
    """Median seconds of one call after three to warm up, by events on a GPU."""
    for _ in range(3):
        action()
    if setting.device == "cpu":
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            action()
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds)
    pairs = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    for begin, end in pairs:
        begin.record()
        action()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs) / 1e3
