"""Which process on which machine: what tells that a process is dead without asking it.

A process is its id and its start time; a machine its boot and its process namespace, so that two containers of one host
name are two machines, and four Slurm nodes played by one host are one.

Supervisors write themselves down so in the run directories that they hold; the agents of launched runs (launch/agent)
use it too, and take this file along: standard library only, and nothing newer than Python 3.9.
"""

from __future__ import annotations

import functools
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Process:
    """One process of one machine."""

    host: str
    machine: str
    pid: int
    started: int
    """Clock ticks after the boot, as the kernel counts them."""

    def as_json(self) -> dict[str, Any]:
        """Its fields."""
        return asdict(self)

    @property
    def here(self) -> bool:
        """Whether its life can be seen from here."""
        return self.machine == this_machine()

    @property
    def alive(self) -> bool:
        """Whether it still runs; only for one that is `here`."""
        return start_time(self.pid) == self.started


def process_of(told: object) -> Process | None:
    """The process that a JSON object names, or None where it names none."""
    if not isinstance(told, dict):
        return None
    try:
        return Process(str(told["host"]), str(told["machine"]), int(told["pid"]), int(told["started"]))
    except (KeyError, TypeError, ValueError):
        return None


def this_process() -> Process:
    """The caller."""
    return running_process(os.getpid())


def running_process(pid: int) -> Process:
    """A live process of this machine."""
    return Process(node_name(), this_machine(), pid, start_time(pid) or 0)


def node_name() -> str:
    """What the scheduler calls this node, or the host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


@functools.cache
def this_machine() -> str:
    """The same for all processes that see each other's ids, until the next boot."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def start_time(pid: int) -> int | None:
    """When a process started; None where there is none, or only a zombie that nobody has reaped."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # proc(5): the command's name stands in brackets and may hold anything; state is field 3, starttime field 22.
    fields = told[told.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])
