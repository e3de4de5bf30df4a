"""Identity of a process and its machine, and its facts in /proc: so a dead process is recognised as
such later.

A process is its id and its start time; a machine its boot and its process namespace, so that two
containers with one host name are two machines, and four Slurm nodes on one host are one.

Shipped with the agents of launched runs (launch/agent): standard library only, nothing newer than
Python 3.9.
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
    host: str
    machine: str
    pid: int
    started: int
    """Clock ticks after the boot, as the kernel counts them."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def here(self) -> bool:
        """Whether it is on this machine, so that `alive` has a meaning."""
        return self.machine == this_machine()

    @property
    def alive(self) -> bool:
        """Whether it still runs; only for one that is `here`."""
        return start_time(self.pid) == self.started


def process_of(content: object) -> Process | None:
    """The process that a JSON object names, or None where it names none."""
    if not isinstance(content, dict):
        return None
    try:
        return Process(
            str(content["host"]),
            str(content["machine"]),
            int(content["pid"]),
            int(content["started"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def this_process() -> Process:
    return running_process(os.getpid())


def running_process(pid: int) -> Process:
    return Process(node_name(), this_machine(), pid, start_time(pid) or 0)


def node_name() -> str:
    """Scheduler's name of this node, or the host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


@functools.cache
def this_machine() -> str:
    """Name of this machine: the same for all processes that see each other's ids, until the next
    boot."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def read_kernel_file(path: str) -> str:
    """Read a file of /proc or /sys; empty if it is missing, as for a process that has ended."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def stat_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on (proc(5)): state, ppid, ...; empty for a process
    that has ended."""
    return fields_of_stat(read_kernel_file(f"/proc/{pid}/stat"))


def fields_of_stat(stat: str) -> list[str]:
    """Same fields from the file's text, in which the command's name is in brackets and may contain
    anything."""
    return stat.rpartition(")")[2].split()


def process_state(pid: int) -> str:
    """State letter of a process (R, S, D, T, ...); empty when it has ended."""
    return "".join(stat_fields(pid)[:1])


def start_time(pid: int) -> int | None:
    """Start time of a process; None where there is none, or only a zombie that was not reaped."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else None
