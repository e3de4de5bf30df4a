"""Growing logs: files, standard input, cloud objects. Each poll returns what was appended since the
last one.

    FileFollower    a file. One that became shorter, or has other bytes where reading ended, was
                    rewritten and is read again from its beginning; where the path names another
                    file now (log rotation), the old one is finished first. A file that is missing
                    is waited for
    StreamFollower  standard input: what has arrived so far; it ends when its writer ends
    CloudFollower   a Cloud Storage object, which a writer replaces by a longer one that begins the
                    same. It is looked up every few seconds, and only what is new is fetched; a
                    service that does not answer is tried again for ten minutes

Compressed logs are refused: they do not grow by lines.
"""

from __future__ import annotations

import os
import select
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

from drillyard.errors import UserError
from drillyard.guarded_files import open_regular, open_unbuffered
from drillyard.loglines.sources import (
    GCS,
    STDIN,
    LogFile,
    cloud_errors,
    first_line,
    is_packed,
    standard_input,
    storage_client,
)

_PIECE: Final = 1 << 20
_CLOUD_PIECE: Final = 8 << 20
_CLOUD_SECONDS: Final = 5.0
_CLOUD_TIMEOUT_SECONDS: Final = 600.0
_POLL_BYTES: Final = 64 << 20
"""Limit for one poll of a stream: a writer may be faster than the reader, and the bytes read must
be shown."""
_OVERLAP: Final = 64


class GrowingInput(ABC):
    """A log that grows."""

    ended = False
    """Whether no more bytes can come."""
    behind = False
    """Whether the last poll left available bytes unread."""

    @abstractmethod
    def poll(self) -> Iterator[bytes | None]:
        """Yield the new bytes in pieces; None before the bytes of a new beginning. Raises OSError
        or UserError."""

    def absent(self) -> bool:
        """Whether the log does not exist yet."""
        return False

    def close(self) -> None:
        """Close what this follower opened."""
        return


def follower(file: LogFile) -> GrowingInput:
    """Return the follower of a file, stream or object. Raises UserError for compressed ones."""
    if file.name == STDIN:
        return StreamFollower(standard_input())
    if file.name.startswith(GCS):
        return CloudFollower(file.name)
    _refuse_packed(Path(file.name))
    return FileFollower(Path(file.name))


def _refuse_packed(path: Path) -> None:
    try:
        with open_regular(path) as file:
            head = file.read(4)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    if is_packed(head):
        raise UserError(
            f"{path}: is compressed, and such files do not grow line by line; leave out --follow."
        )


class FileFollower(GrowingInput):
    """Follower of a growing file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        self._identity: tuple[int, int] | None = None
        self._last = b""

    def poll(self) -> Iterator[bytes | None]:
        if self._file is None and not self._open():
            return
        assert self._file is not None
        if not self._goes_on():
            self._file.seek(0)
            self._last = b""
            yield None
        yield from self._rest()
        if self._replaced():
            self.close()
            if self._open():
                yield None
                yield from self._rest()

    def absent(self) -> bool:
        return not self.path.exists()

    def _rest(self) -> Iterator[bytes]:
        assert self._file is not None
        while piece := self._file.read(_PIECE):
            self._last = (self._last + piece)[-_OVERLAP:]
            yield piece

    def _goes_on(self) -> bool:
        """Whether the file still has the last bytes that were read, at the place where reading
        ended."""
        assert self._file is not None
        begin = self._file.tell() - len(self._last)
        return os.pread(self._file.fileno(), len(self._last), begin) == self._last

    def _open(self) -> bool:
        try:
            self._file = open_unbuffered(self.path)
        except FileNotFoundError:
            return False
        status = os.fstat(self._file.fileno())
        self._identity, self._last = (status.st_dev, status.st_ino), b""
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


class StreamFollower(GrowingInput):
    """Follower of a stream (a pipe, a terminal, a file: anything with a descriptor)."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._head: bytes | None = b""

    def poll(self) -> Iterator[bytes | None]:
        # Read past the stream's buffer, which is empty: nothing else has read from it.
        descriptor = self._stream.fileno()
        count = 0
        while not self.ended and select.select([descriptor], [], [], 0)[0]:
            self.behind = count >= _POLL_BYTES
            if self.behind:
                return
            piece = os.read(descriptor, _PIECE)
            count += len(piece)
            self.ended = not piece
            if self._head is not None:
                piece = self._checked(piece)
            if piece:
                yield piece
        self.behind = False

    def _checked(self, piece: bytes) -> bytes:
        """Return the first bytes, as soon as there are enough to see that they are not
        compressed."""
        assert self._head is not None
        head = self._head + piece
        if len(head) < 4 and not self.ended:
            self._head = head
            return b""
        if is_packed(head[:4]):
            raise UserError(
                "-: is compressed; decompress it before, as in: zcat run.log.gz | drillyard metrics"
                " -f -"
            )
        self._head = None
        return head


class CloudFollower(GrowingInput):
    """Follower of a Cloud Storage object."""

    def __init__(self, name: str, seconds: float = _CLOUD_SECONDS) -> None:
        self.name = name
        self._seconds = seconds
        self._silent_since: float | None = None
        self._looked: float | None = None
        self._bucket: Any = None
        self._generation: int | None = None
        self._offset = 0
        self._last = b""

    def poll(self) -> Iterator[bytes | None]:
        now = time.monotonic()
        if self._looked is not None and now - self._looked < self._seconds:
            return
        self._looked = now
        with cloud_errors(self.name), self._tolerated():
            found = self._look()
            if found is not None and (generation := found.generation) != self._generation:
                yield from self._news(found, generation)
                # Only now, so that an incomplete fetch is repeated.
                self._generation = generation
            self._silent_since = None

    def _news(self, found: Any, generation: int) -> Iterator[bytes | None]:
        """Yield what was added to an object since the last read. `generation`: the client changes
        that of `found`."""
        size = int(found.size)
        if self._offset and not self._goes_on(found, generation, size):
            self._offset, self._last = 0, b""
            yield None
        while self._offset < size:
            piece = _fetch(found, generation, self._offset, min(self._offset + _CLOUD_PIECE, size))
            if not self._offset and is_packed(piece[:4]):
                raise UserError(
                    f"{self.name}: is compressed, and does not grow line by line; leave out"
                    " --follow."
                )
            self._offset += len(piece)
            self._last = (self._last + piece)[-_OVERLAP:]
            yield piece

    @contextmanager
    def _tolerated(self) -> Iterator[None]:
        """Leave to the next poll what may be temporary."""
        from google.api_core.exceptions import (
            NotFound,
            PreconditionFailed,
            RetryError,
            ServerError,
            TooManyRequests,
        )
        from google.auth.exceptions import TransportError
        from requests.exceptions import RequestException

        try:
            yield
        except (NotFound, PreconditionFailed):
            # Replaced since it was looked up: that is how objects grow.
            self._silent_since = None
        except (
            ServerError,
            TooManyRequests,
            RetryError,
            TransportError,
            RequestException,
            ConnectionError,
        ) as error:
            now = time.monotonic()
            if self._silent_since is None:
                self._silent_since = now
                minutes = round(_CLOUD_TIMEOUT_SECONDS / 60)
                text = (
                    f"{self.name}: {first_line(error)}; asks again, for {minutes} minutes at most"
                )
                print(text, file=sys.stderr, flush=True)
            elif now - self._silent_since > _CLOUD_TIMEOUT_SECONDS:
                seconds = round(now - self._silent_since)
                raise UserError(
                    f"{self.name}: no answer for {seconds} s: {first_line(error)}. Follow it again"
                    " when there is one."
                ) from error

    def _goes_on(self, blob: Any, generation: int, size: int) -> bool:
        begin, end = self._offset - len(self._last), self._offset
        return size >= end and _fetch(blob, generation, begin, end) == self._last

    def _look(self) -> Any:
        """Look up the object; None when it is missing (it may be about to be replaced)."""
        bucket, _, name = self.name.removeprefix(GCS).partition("/")
        if self._bucket is None:
            self._bucket = storage_client().bucket(bucket)
        return self._bucket.get_blob(name, retry=None)


def _fetch(blob: Any, generation: int, begin: int, end: int) -> bytes:
    """Fetch bytes of one generation of an object: it may be replaced between two calls. Tries once,
    so that other files do not wait for this one: the next poll tries again."""
    return bytes(
        blob.download_as_bytes(start=begin, end=end - 1, if_generation_match=generation, retry=None)
    )
