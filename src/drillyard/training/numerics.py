"""Conditions on which a step's rounding depends besides config, data and the state before it:
recorded at each start.

A run may continue with another kernel, compiled or not, on other ranks or another version of torch:
all of that is rounding, so it is allowed and changes bits. A comparison of bits (replay.py) must
know these conditions, or it would take a change of software for a failure of hardware. So the event
`order` of each start carries this record.

`settings` are those of the run config that a resume may change and that a replay can restore;
`conditions` are those that the config does not contain: software, hardware, and what was decided by
inspecting them.
"""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from typing import Any, Final

import torch

from drillyard.config.run import RunConfig
from drillyard.parallel.ranks import Ranks
from drillyard.training.model_setup import ShardedModel

NUMERICS_REVISION: Final = 6
"""Of Drillyard's own arithmetic. Raise it by one with every change after which some config, on the
same layout, data, software and hardware, gives other bits of loss, gradient norm or weights than
before: another order of a sum, another kernel or precision of an intermediate, another use of
random draws, another way to cut the batch. Not for changes of what is printed, saved or checked."""

ROUNDING_VARIABLES: Final = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NCCL_ALGO",
    "NCCL_NVLS_ENABLE",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
"""Environment variables by which libraries choose kernels or orders of reduction."""


def numerics(config: RunConfig, ranks: Ranks, model: ShardedModel) -> dict[str, Any]:
    """The record of this start; plain values, the same on all ranks of hosts of one kind."""
    return {
        "settings": {
            **model.resolved.settings(),
            "parallelism.replicate": ranks.num_replicas,
            "training.deterministic": config.training.deterministic,
            "training.threads_per_rank": ranks.threads,
        },
        "conditions": {
            "numerics revision": NUMERICS_REVISION,
            **versions(),
            # It makes the casts of fp8.
            **(
                {"torchao": metadata.version("torchao")}
                if config.training.precision == "fp8"
                else {}
            ),
            "hardware": hardware_name(ranks.device),
            "ranks per node": ranks.local_world_size,
            "kept unsharded": model.small,
            **(
                _cuda()
                if ranks.device.type == "cuda"
                else {"cpu capability": torch.backends.cpu.get_cpu_capability()}
            ),
            **{name: os.environ[name] for name in ROUNDING_VARIABLES if name in os.environ},
        },
    }


def versions() -> dict[str, Any]:
    """Versions that a run's numbers depend on."""
    import transformers

    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
    }


def hardware_name(device: torch.device) -> str:
    """Name of the hardware that kernels run on: the GPU's, or the CPU's. Other hardware may round
    otherwise."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    with open("/proc/cpuinfo", encoding="utf-8") as cpuinfo:
        names = (
            line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")
        )
        return next(names, platform.machine())


def _cuda() -> dict[str, Any]:
    cudnn, nccl = torch.backends.cudnn.version(), torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return {"cuda": torch.version.cuda, "cudnn": cudnn, "nccl": ".".join(map(str, nccl))}
