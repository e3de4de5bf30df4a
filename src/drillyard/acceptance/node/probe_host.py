"""Facts of a host: processors, memory, shared memory, disks, limits, the kernel's command line."""

from __future__ import annotations

import contextlib
import os
import resource
from typing import Any

from drillyard.host_tools import num_gpus, read_small

_LIMITS = {
    "locked_memory": resource.RLIMIT_MEMLOCK,
    "open_files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
    "stack": resource.RLIMIT_STACK,
}


def probe(arguments: dict[str, Any]) -> dict[str, Any]:
    """What is there; what cannot be read is null. Sizes in bytes, limits null where unlimited.

    `disks`: paths to look at beside /, /tmp, TMPDIR and the working directory.
    """
    # Not tempfile.gettempdir(): where /tmp is full it is another directory.
    disks = dict.fromkeys(["/", "/tmp", *arguments.get("disks", [])])  # noqa: S108 - looked at
    if temporary := os.environ.get("TMPDIR"):
        disks[temporary] = None
    with contextlib.suppress(OSError):
        disks[os.getcwd()] = None
    return {
        "accelerators": num_gpus(),
        "cores": len(os.sched_getaffinity(0)),
        "cores_online": os.cpu_count(),
        "memory": read_small("/proc/meminfo"),
        "swap": read_small("/proc/swaps"),
        "shared_memory": _space("/dev/shm"),  # noqa: S108 - a mount point, only looked at
        "disks": {path: _space(path) for path in disks},
        "limits": {name: _limit(number) for name, number in _LIMITS.items()},
        "process": read_small("/proc/self/status"),
        "kernel": " ".join(os.uname()[::2]),
        "command_line": read_small("/proc/cmdline"),
    }


def _space(path: str) -> dict[str, int] | None:
    """Size of the file system at a path, and what is free for a user without rights."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return {
        "size": found.f_blocks * found.f_frsize,
        "free": found.f_bavail * found.f_frsize,
        "device": os.stat(path).st_dev,
    }


def _limit(number: int) -> int | None:
    soft = resource.getrlimit(number)[0]
    return None if soft == resource.RLIM_INFINITY else soft
