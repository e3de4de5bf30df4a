"""Heartbeats: what each rank is doing and when it last made progress, on a board that its
supervisor reads.

Progress is a step, a forward, the start of a phase, work in a phase that one rank does alone
(rank_supervision.py), but not output. The board is a memfd, one slot per local rank, which vanishes
with its last user. Ranks open it as /proc/<supervisor>/fd/<n> (in DRILLYARD_LIFE_BOARD), so it need
not be inherited through a wrapper. A heartbeat is one store to shared memory; times are
CLOCK_MONOTONIC, which all processes of a host share.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from drillyard.errors import UserError

BOARD: Final = "DRILLYARD_LIFE_BOARD"
_NUMBERS: Final = struct.Struct("<qqq?")
"""Nanoseconds of the last heartbeat, steps completed, steps in all, and `Heartbeat.trained`; the
steps are -1 while unknown."""
_PHASE: Final = struct.Struct("<32s")
_SLOT_BYTES: Final = 64


@dataclass(frozen=True)
class Heartbeat:
    """Last report of a rank. `at`: seconds of time.monotonic, 0.0 before the first; `step`: steps
    completed; `trained`: whether the last of them was done in this attempt."""

    at: float
    step: int | None
    total_steps: int | None
    phase: str
    trained: bool = False


class HeartbeatBoard(contextlib.AbstractContextManager["HeartbeatBoard"]):
    """Board with the heartbeats of all ranks on this host, which the supervisor reads. Use it with
    `with`."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._descriptor = os.memfd_create("drillyard-heartbeats", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, num_ranks * _SLOT_BYTES)
        self._memory = mmap.mmap(self._descriptor, num_ranks * _SLOT_BYTES)
        for rank in range(num_ranks):
            _NUMBERS.pack_into(self._memory, rank * _SLOT_BYTES, 0, -1, -1, False)

    def __exit__(self, *exception: object) -> None:
        self._memory.close()
        os.close(self._descriptor)

    @property
    def environment(self) -> dict[str, str]:
        return {BOARD: f"/proc/{os.getpid()}/fd/{self._descriptor}"}

    def read(self) -> list[Heartbeat]:
        """The last heartbeat of every rank, by local rank."""
        return [_unpack(self._memory, rank * _SLOT_BYTES) for rank in range(self._num_ranks)]


class HeartbeatWriter:
    """Writer of one rank's slot, which the rank itself reads too, and its supervisor where there is
    one."""

    def __init__(self, memory: mmap.mmap | bytearray | None = None, offset: int = 0) -> None:
        self._memory = bytearray(_SLOT_BYTES) if memory is None else memory
        self._offset = offset
        self._steps = (-1, -1, False)
        self.begin("start")

    def show(self) -> None:
        """Record that this rank has made progress."""
        _NUMBERS.pack_into(self._memory, self._offset, time.monotonic_ns(), *self._steps)

    def begin(self, phase: str) -> None:
        """Begin a phase, named in at most 32 ASCII characters; that is progress too."""
        _PHASE.pack_into(self._memory, self._offset + _NUMBERS.size, phase.encode())
        self.show()

    def step(self, steps_done: int, total_steps: int, *, trained: bool = True) -> None:
        """Record that an optimizer step is completed, or (not `trained`) was by an earlier
        attempt."""
        self._steps = (steps_done, total_steps, trained)
        self.show()

    def last(self) -> Heartbeat:
        return _unpack(self._memory, self._offset)


def heartbeat_writer(environment: Mapping[str, str]) -> HeartbeatWriter:
    """Return the slot of this rank, on its supervisor's board if `environment` names one. Raises
    UserError where that cannot be opened: the supervisor would take the rank for hung."""
    path = environment.get(BOARD)
    if path is None:
        return HeartbeatWriter()
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}: a rank cannot report its progress to its supervisor; allow"
            " processes of this user to open each other's files in /proc (hidepid, AppArmor,"
            " capabilities of the python executable)"
        ) from None
    try:
        return HeartbeatWriter(
            mmap.mmap(descriptor, 0), int(environment["LOCAL_RANK"]) * _SLOT_BYTES
        )
    finally:
        os.close(descriptor)


def _unpack(memory: mmap.mmap | bytearray, offset: int) -> Heartbeat:
    nanoseconds, step, total, trained = _NUMBERS.unpack_from(memory, offset)
    (phase,) = _PHASE.unpack_from(memory, offset + _NUMBERS.size)
    name = phase.rstrip(b"\0").decode(errors="replace")
    return Heartbeat(
        nanoseconds / 1e9, None if step < 0 else step, None if total < 0 else total, name, trained
    )
