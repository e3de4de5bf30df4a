"""A disk that is full while a checkpoint is saved, and has room again when the save has failed."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drillyard.faults.monkeypatch import patch_function, step_of
from drillyard.faults.plan import Fault
from drillyard.training.checkpoint.inventory import verify

if TYPE_CHECKING:
    from drillyard.faults.injection_points import RankFaults


_STORAGE = "drillyard.training.checkpoint.dcp_storage"
_LEFT_BYTES = 4096


def fill_disk(armed: RankFaults, fault: Fault) -> None:
    """Replace what `fault` needs in this process."""
    FullDisk(armed, fault).install()


class FullDisk:
    """A disk that is full from a save on until that save has failed.

    On the small disk of the case a file takes all room but a few KiB. Without one (no right to mount), the kernel
    refuses this process files longer than half of its shard: the error is another one (EFBIG), the path is the same.
    """

    def __init__(self, armed: RankFaults, fault: Fault) -> None:
        self._armed = armed
        self._fault = fault
        self._full = False
        self._soft_limit = 0

    def install(self) -> None:
        """Fill before the shards or the manifest are written, and make room when the save has failed."""
        if self._fault.place == "manifest":
            patch_function(
                _STORAGE, "write_manifest", lambda write: self._filling(write, 0, lambda directory: directory)
            )
        else:
            directory_of = attrgetter("directory")
            patch_function(
                _STORAGE, "CheckpointWriter.write_data", lambda write: self._filling(write, _LEFT_BYTES, directory_of)
            )
        patch_function("drillyard.training.checkpoint.checkpointer", "Checkpointer._failed", self._emptying)

    def _filling(self, write: Any, left: int, directory_of: Callable[[Any], Path]) -> Any:
        def filled(*arguments: Any) -> Any:
            if not self._full and self._armed.due(self._fault) and self._armed.begin(self._fault):
                self._armed.mark(self._fault, "hit", save=step_of(directory_of(arguments[0])))
                self._fill(left)
            return write(*arguments)

        return filled

    def _emptying(self, failed: Any) -> Any:
        def emptied(*arguments: Any, **options: Any) -> Any:
            failed(*arguments, **options)
            if self._full:
                self._empty()
                newest = self._armed.complete()[-1]
                damaged = [found.name for found in verify(newest) if not found.harmless]
                self._armed.marks.put(self._fault, "after", newest=newest.step, damaged=damaged)

        return emptied

    def _fill(self, left: int) -> None:
        self._full = True
        ballast = self._armed.orders.ballast
        if ballast is None:
            self._soft_limit, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self._armed.orders.shard_bytes // 2, hard))
            return
        with ballast.open("wb") as file:
            size = 0
            while (room := _free_bytes(ballast.parent)) > left:
                try:
                    os.posix_fallocate(file.fileno(), size, room - left)
                    size += room - left
                except OSError as error:
                    # Another rank has taken some of it meanwhile.
                    if error.errno != errno.ENOSPC:
                        raise

    def _empty(self) -> None:
        self._full = False
        if self._armed.orders.ballast is None:
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (self._soft_limit, hard))
        else:
            self._armed.orders.ballast.unlink()


def _free_bytes(directory: Path) -> int:
    """Room on a file system, in whole blocks."""
    room = os.statvfs(directory)
    return room.f_bavail * room.f_frsize
