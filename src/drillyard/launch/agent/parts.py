"""A node's log where the launch directory is a mounted bucket: in parts, each of which is closed soon.

On Cloud Storage FUSE others see what was written to a file once it is closed, and appending rewrites an object. So
lines are gathered for some seconds and written into `node-K.log` until that is large, then into `node-K.log.0001`, ...;
a file is open only while it is written. An agent that was started again begins a new part.

Cost: an object of at most some MiB is rewritten every few seconds while something is printed. What an agent that is
killed had gathered is lost: `GATHER_SECONDS` of lines.
"""

from __future__ import annotations

import time
from pathlib import Path

from .output_pump import Sink

GATHER_SECONDS = 5.0
PART_BYTES = 4 << 20
_ENOUGH_BYTES = 16 << 20


class SegmentedLog(Sink):
    """The sink of such a log."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._number = 0
        while self._path.exists():
            self._number += 1
        self._size = 0
        self._written_at = time.monotonic()
        super().__init__(-1, "could not be written here")

    @property
    def _path(self) -> Path:
        return self._log if self._number == 0 else self._log.with_name(f"{self._log.name}.{self._number:04d}")

    def _gather(self) -> None:
        patience = self._written_at + GATHER_SECONDS - time.monotonic()
        self._changed.wait_for(
            lambda: self._hurried or self._closed or self._bytes >= _ENOUGH_BYTES, max(0.0, patience)
        )

    def _write(self, data: bytes) -> int:
        try:
            with self._path.open("ab") as part:
                part.write(data)
        except OSError:
            # Told with the next piece, in a part of its own: how much of this one is there is not known.
            self._number, self._size = self._number + 1, 0
            time.sleep(0.05)
            return len(data)
        finally:
            self._written_at = time.monotonic()
        self._size += len(data)
        if self._size >= PART_BYTES:
            self._number, self._size = self._number + 1, 0
        return 0
