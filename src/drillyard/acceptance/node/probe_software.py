"""Software of a host that a training run uses: drivers, libraries, services, and the environment in
which it would start. Texts as files and tools give them."""

from __future__ import annotations

import glob
import os
import platform
import re
from typing import Any

from drillyard.host_tools import read_small, run_tools

PREFIXES = (
    "NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "FI_", "CUDA_", "NVIDIA_", "RDMAV_", "OFI_",
    "TORCH_", "PYTORCH_", "OMP_", "LD_", "NV_LIBNCCL",
)  # fmt: skip
"""Of environment variables that are looked at. None of them holds a secret."""
_PACKAGES = (
    "libnccl*", "nvidia-fabricmanager*", "libfabric*", "aws-ofi-nccl*", "libnccl-ofi*",
    "nvidia-driver*", "cuda-drivers*", "datacenter-gpu-manager*", "mlnx-ofed*", "doca-ofed*",
    "rdma-core",
)  # fmt: skip
_LIBRARIES = (
    "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/local/lib",
    "/usr/local/nvidia/lib64", "/usr/local/cuda/lib64", "/usr/local/gib/lib64",
    "/var/lib/tcpx/lib64", "/var/lib/tcpxo/lib64", "/opt/amazon/ofi-nccl/lib",
    "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu", "/opt/aws-ofi-nccl/lib", "/opt/amazon/efa/lib64",
    "/opt/amazon/efa/lib",
)  # fmt: skip
_LIBRARY_NAMES = ("libnccl.so*", "libnccl-net*.so*", "libnccl-tuner*.so*", "libfabric.so*")
_SERVICES = ("nvidia-fabricmanager", "nvidia-persistenced", "nvidia-dcgm", "nvidia-imex")
_MODULES = re.compile(r"^(nvidia\w*|gdrdrv|mlx5_\w+|ib_\w+|efa|gve)\s", re.MULTILINE)


def probe(arguments: dict[str, Any]) -> dict[str, Any]:
    """`{"files", "libraries", "modules", "environment", "python", "libc", "tools"}`."""
    commands = {
        "packages": [
            "dpkg-query",
            "-W",
            "-f",
            "${Package} ${Version} ${db:Status-Abbrev}\n",
            *_PACKAGES,
        ],
        "rpm_packages": [
            "rpm",
            "-qa",
            "--qf",
            "%{NAME} %{VERSION}-%{RELEASE} ii\n",
            *_PACKAGES,
        ],
        "services": ["systemctl", "is-active", *_SERVICES],
        "libfabric": ["fi_info", "--version"],
        "ofed": ["ofed_info", "-s"],
        "fabric_manager": ["nv-fabricmanager", "--version"],
        "containers": ["docker", "ps", "-a", "--format", "{{.Image}}"],
    }
    modules = read_small("/proc/modules", 1 << 20) or ""
    return {
        "files": {
            "os": read_small("/etc/os-release"),
            "driver": read_small("/proc/driver/nvidia/version"),
            "gib": read_small("/usr/local/gib/version"),
        },
        "libraries": sorted(set(_libraries())),
        "modules": sorted({found.group(1) for found in _MODULES.finditer(modules)}),
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)
        },
        "kernel": os.uname().release,
        "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()),
        "tools": run_tools(commands, float(arguments.get("seconds", 10.0))),
        "service_names": list(_SERVICES),
    }


def _libraries() -> list[str]:
    """Names of library files, versions included: links are followed."""
    directories = [*_LIBRARIES, *os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)]
    return [
        os.path.realpath(path)
        for directory in directories
        for name in _LIBRARY_NAMES
        if directory
        for path in glob.glob(os.path.join(glob.escape(directory), name))
    ]
