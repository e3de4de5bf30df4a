"""What grows: files, standard input, cloud objects. Each poll gives what was appended since the last one.

    Follower        a file. One that became shorter was truncated and is read from its beginning; a path that names
                    another file now (log rotation) is finished first, then the new one is read from its beginning. A
                    file that is not there yet is waited for
    StreamFollower  standard input: what has come so far, without waiting for more; it ends when its writer does
    CloudFollower   a Cloud Storage object, which never grows in place: whoever appends replaces it by a longer one that
                    begins the same. It is looked at every few seconds, and only what is new is fetched

Decompression is not done here: compressed logs do not grow by lines.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

from drillyard.errors import UserError
from drillyard.loglines.packed import is_packed
from drillyard.loglines.sources import GCS, STDIN, LogFile, cloud_errors, storage_client

_PIECE: Final = 1 << 20
_CLOUD_PIECE: Final = 8 << 20
_CLOUD_SECONDS: Final = 5.0
_OVERLAP: Final = 64


class Follows(Protocol):
    """Something that grows."""

    ended: bool
    """Whether nothing can come any more."""

    def poll(self) -> Iterator[bytes | None]:
        """The new bytes in pieces; None where what follows belongs to a new beginning. Raises OSError or UserError."""

    def absent(self) -> bool:
        """Whether it is not there yet."""

    def close(self) -> None:
        """Let go of it."""


def follower(file: LogFile) -> Follows:
    """Follows what a name names. Raises UserError for what is compressed."""
    if file.name == STDIN:
        return StreamFollower(sys.stdin.buffer)
    if file.name.startswith(GCS):
        return CloudFollower(file.name)
    _refuse_packed(Path(file.name))
    return Follower(Path(file.name))


def _refuse_packed(path: Path) -> None:
    try:
        with path.open("rb") as file:
            head = file.read(4)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    if is_packed(head):
        raise UserError(f"{path}: is compressed, and such files do not grow line by line; leave out --follow.")


class Follower:
    """Reads a growing file. `restarts` counts how often it began anew (truncated or rotated)."""

    ended = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self.restarts = 0
        self._file: BinaryIO | None = None
        self._identity: tuple[int, int] | None = None

    def poll(self) -> Iterator[bytes | None]:
        """See Follows."""
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

    def absent(self) -> bool:
        """See Follows."""
        return not self.path.exists()

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


class StreamFollower:
    """Reads what has come on a stream (a pipe, a terminal, a file: anything with a descriptor)."""

    def __init__(self, stream: BinaryIO) -> None:
        self.ended = False
        self._stream = stream
        self._head: bytes | None = b""

    def poll(self) -> Iterator[bytes | None]:
        """See Follows. Past the stream's buffer: nobody has read from it yet."""
        descriptor = self._stream.fileno()
        while not self.ended and select.select([descriptor], [], [], 0)[0]:
            piece = os.read(descriptor, _PIECE)
            self.ended = not piece
            if self._head is not None:
                piece = self._checked(piece)
            if piece:
                yield piece

    def _checked(self, piece: bytes) -> bytes:
        """The first bytes, as soon as they tell that they are not packed."""
        assert self._head is not None
        head = self._head + piece
        if len(head) < 4 and not self.ended:
            self._head = head
            return b""
        if is_packed(head[:4]):
            raise UserError("-: is compressed; decompress it before, as in: zcat run.log.gz | drillyard metrics -f -")
        self._head = None
        return head

    def absent(self) -> bool:
        """See Follows."""
        return False

    def close(self) -> None:
        """Standard input is not ours to close."""


class CloudFollower:
    """Reads what was added to a Cloud Storage object. `restarts` counts how often it became another one."""

    ended = False

    def __init__(self, name: str, seconds: float = _CLOUD_SECONDS) -> None:
        self.name = name
        self.restarts = 0
        self._seconds = seconds
        self._looked: float | None = None
        self._bucket: Any = None
        self._generation: int | None = None
        self._offset = 0
        self._last = b""

    def poll(self) -> Iterator[bytes | None]:
        """See Follows."""
        now = time.monotonic()
        if self._looked is not None and now - self._looked < self._seconds:
            return
        self._looked = now
        with cloud_errors(self.name):
            found = self._look()
            if found is None or found.generation == self._generation:
                return
            size, self._generation = int(found.size), found.generation
            if self._offset and not self._goes_on(found, size):
                self._offset, self._last = 0, b""
                self.restarts += 1
                yield None
            while self._offset < size:
                piece = _fetch(found, self._offset, min(self._offset + _CLOUD_PIECE, size))
                if not self._offset and is_packed(piece[:4]):
                    raise UserError(f"{self.name}: is compressed, and does not grow line by line; leave out --follow.")
                self._offset += len(piece)
                self._last = (self._last + piece)[-_OVERLAP:]
                yield piece

    def _goes_on(self, blob: Any, size: int) -> bool:
        """Whether the object has, where reading ended, what was read there."""
        return size >= self._offset and _fetch(blob, self._offset - len(self._last), self._offset) == self._last

    def _look(self) -> Any:
        """The object as it is now; None when it is not there (it may be on its way to be replaced)."""
        bucket, _, name = self.name.removeprefix(GCS).partition("/")
        if self._bucket is None:
            self._bucket = storage_client().bucket(bucket)
        return self._bucket.get_blob(name)

    def absent(self) -> bool:
        """See Follows. Listed before it is followed."""
        return False

    def close(self) -> None:
        """Nothing is held open."""


def _fetch(blob: Any, begin: int, end: int) -> bytes:
    """Bytes of an object of one generation: it may be replaced between two calls."""
    piece = blob.download_as_bytes(start=begin, end=end - 1, if_generation_match=blob.generation)
    return bytes(piece)
