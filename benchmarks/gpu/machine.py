"""Versions, and how fast the machine multiplies and copies: the ceilings of every later row."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from typing import Any

import torch
from setups import Setting

from drillyard.hardware import find_accelerator
from drillyard.training.device_rates import DeviceRates, device_rates

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
    found = measured_rates(setting)
    return {
        **versions(setting),
        "bf16_product_tflops": found.flops_per_second / 1e12,
        "copy_gb_per_s": found.bytes_per_second / 1e9,
    }


def measured_rates(setting: Setting) -> DeviceRates:
    """The rates of a bf16 product and of a copy."""
    return device_rates(
        torch.device(setting.device),
        torch.bfloat16,
        size=256 if setting.tiny else 8192,
        copied_mib=4 if setting.tiny else 1024,
    )


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
