"""A file that grows: each poll gives what was appended since the last one.

A file that became shorter was truncated and is read from its beginning; a path that names another file now (log
rotation) is finished first, then the new one is read from its beginning. A file that is not there yet is waited for.
Decompression is not done here: compressed logs do not grow by lines.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

_PIECE: Final = 1 << 20


class Follower:
    """Reads a growing file. `restarts` counts how often it began anew (truncated or rotated)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.restarts = 0
        self._file: BinaryIO | None = None
        self._identity: tuple[int, int] | None = None

    def poll(self) -> Iterator[bytes | None]:
        """The new bytes in pieces; None where what follows belongs to a new beginning. Raises OSError."""
        if self._file is None and not self._open():
            return
        assert self._file is not None
        if os.fstat(self._file.fileno()).st_size < self._file.tell():
            self._file.seek(0)
            self.restarts += 1
            yield None
        yield from self._rest()
        if self._replaced():
            self.close()
            if self._open():
                self.restarts += 1
                yield None
                yield from self._rest()

    def _rest(self) -> Iterator[bytes]:
        assert self._file is not None
        while piece := self._file.read(_PIECE):
            yield piece

    def _open(self) -> bool:
        try:
            self._file = self.path.open("rb", buffering=0)
        except FileNotFoundError:
            return False
        status = os.fstat(self._file.fileno())
        self._identity = (status.st_dev, status.st_ino)
        return True

    def _replaced(self) -> bool:
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return False
        return (status.st_dev, status.st_ino) != self._identity

    def close(self) -> None:
        """Close the file; a later poll opens whatever the path names then."""
        if self._file is not None:
            self._file.close()
        self._file = None
