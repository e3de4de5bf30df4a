"""What every probe with PyTorch starts from: its rank and device, the time of local work, groups of
ranks, and the JSON object that it prints.

A probe is a script that calls `run`. Its object is printed again after each part, so that one that
is killed leaves what it had measured: the last line counts.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import re
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.path and sys.path[0] == str(Path(__file__).resolve().parent):
    # Started as a script: the files here must not shadow what PyTorch imports.
    sys.path.pop(0)

import torch
import torch.distributed as dist

LEAST_TORCH = (2, 4)
GROUP_SECONDS = 600
"""Longest wait for another rank; the step's own limit is usually shorter."""
_GET_ADDRESS = 0x8915
"""SIOCGIFADDR of linux/sockios.h: the IPv4 address of an interface."""


@dataclass(frozen=True)
class ProbeRank:
    """This process among those of its group of nodes, and its device."""

    rank: int
    world: int
    local: int
    local_world: int
    device: torch.device

    @property
    def on_gpu(self) -> bool:
        """Whether it has an accelerator."""
        return self.device.type == "cuda"

    def finish(self) -> None:
        """Wait for the work that was given to the device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


class Refused(Exception):
    """Why the probe cannot measure here."""


def run(measure: Callable[[ProbeRank, dict[str, Any]], dict[str, Any]]) -> int:
    """Measure and print the JSON object; returns the exit code.

    `skipped` in the object says why nothing is measured where PyTorch is too old.
    """
    asked = json.loads(sys.stdin.read() or "{}")
    found = re.findall(r"\d+", torch.__version__)[:2]
    if tuple(int(each) for each in found) < LEAST_TORCH:
        least = ".".join(str(each) for each in LEAST_TORCH)
        skipped = f"PyTorch {torch.__version__} is too old: {least} is needed"
        say({"torch": torch.__version__, "skipped": skipped})
        return 0
    # More threads than the ranks' share of the cores would wait for each other.
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS") or 1)))
    try:
        values = measure(rank_here(asked), asked)
    except Refused as refused:
        print(refused, file=sys.stderr)
        return 1
    say(values)
    if dist.is_initialized():
        dist.destroy_process_group()
        # gloo's threads sometimes abort a process that ends in order.
        os._exit(0)
    return 0


def say(values: dict[str, Any]) -> None:
    """Print the object as it is so far."""
    print(json.dumps(values), flush=True)


def rank_here(asked: dict[str, Any]) -> ProbeRank:
    """This process's rank. Raises Refused where it has no accelerator and one is asked for."""
    local = int(os.environ["LOCAL_RANK"])
    on_gpu = asked.get("device") != "cpu" and torch.cuda.is_available()
    if asked.get("device") == "cuda" and not on_gpu:
        raise Refused("PyTorch finds no accelerator")
    if on_gpu and local >= torch.cuda.device_count():
        raise Refused(f"PyTorch finds {torch.cuda.device_count()} accelerators, not {local + 1}")
    if on_gpu:
        torch.cuda.set_device(local)
    return ProbeRank(
        rank=int(os.environ["RANK"]),
        world=int(os.environ["WORLD_SIZE"]),
        local=local,
        local_world=int(os.environ["LOCAL_WORLD_SIZE"]),
        device=torch.device("cuda", local) if on_gpu else torch.device("cpu"),
    )


def facts(rank: ProbeRank) -> dict[str, Any]:
    """The device and the software that a figure depends on."""
    found: dict[str, Any] = {
        "device": rank.device.type,
        "device_name": (
            torch.cuda.get_device_name(rank.device) if rank.on_gpu else _processor_name()
        ),
        "torch": torch.__version__,
    }
    if rank.on_gpu:
        found["cuda"] = torch.version.cuda or torch.version.hip
        with contextlib.suppress(RuntimeError, AttributeError):
            found["nccl"] = ".".join(str(each) for each in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return found


def join_group(rank: ProbeRank, backend: str | None = None) -> str:
    """Form the group of all ranks; returns the backend."""
    name = backend or ("nccl" if rank.on_gpu else "gloo")
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        interface = _interface_to(os.environ["MASTER_ADDR"])
        if interface is not None:
            # gloo takes the address that the host's own name has, which may be loopback.
            os.environ["GLOO_SOCKET_IFNAME"] = interface
    dist.init_process_group(name, timeout=datetime.timedelta(seconds=GROUP_SECONDS))
    return name


def highest(rank: ProbeRank, value: float, group: dist.ProcessGroup | None = None) -> float:
    """The highest of the ranks' values, the same on all of them."""
    agreed = torch.tensor([value], dtype=torch.float64, device=rank.device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
    return float(agreed.item())


class LocalClock:
    """Time of this thread's own work in seconds.

    On a CPU the time in which it was ready to run and waited for a core is taken off: that is other
    processes' work. What stops the process, or makes its core slow, stays in.
    """

    def __init__(self, rank: ProbeRank) -> None:
        self._rank = rank
        self._file: int | None = None
        if not rank.on_gpu:
            with contextlib.suppress(OSError):
                self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    @property
    def without_waiting(self) -> bool:
        """Whether the wait for a core is taken off."""
        return self._file is not None

    def now(self) -> float:
        """Only differences mean something. On an accelerator, after its work is done."""
        self._rank.finish()
        while True:
            waited, now = self._waited(), time.perf_counter()
            # A wait between the two would be taken off what came before it.
            if self._waited() == waited:
                return now - waited

    def _waited(self) -> float:
        if self._file is None:
            return 0.0
        # Nanoseconds on a core, nanoseconds ready but without one, time slices: the kernel's
        # Documentation/scheduler/sched-stats.rst.
        return int(os.pread(self._file, 128, 0).split()[1]) / 1e9


def rounded(values: list[float]) -> list[float]:
    """To seven digits, which is finer than any clock here."""
    return [float(f"{value:.7g}") for value in values]


def _processor_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "cpu"


def _interface_to(address: str) -> str | None:
    """The interface over which an IPv4 address is reached; None where it is not known."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect((address, 9))
        own = asking.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                wanted = struct.pack("256s", name.encode()[:15])
                found = fcntl.ioctl(asking.fileno(), _GET_ADDRESS, wanted)
                if socket.inet_ntoa(found[20:24]) == own:
                    return name
    return None
