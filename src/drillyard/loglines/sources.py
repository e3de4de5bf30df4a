"""Logs named on the command line: files, directories, `-`, gs:// objects; opened and decompressed.

Compression (gzip, zstd; any number of members or frames) is detected by content, never by name.
Cloud objects are streamed, nothing is stored.

A log may be cut off or damaged anywhere; what was packed before that place is intact. So damage
ends the stream like the end of the file, and `trouble` describes it. Where gzip data are damaged,
the last 256 KiB are unpacked again byte by byte; of zstd the text of the damaged block (up to 128
KiB) is lost.
"""

from __future__ import annotations

import io
import sys
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TextIO, cast

from drillyard.errors import MissingExtraError, NotFoundError, UserError
from drillyard.guarded_files import open_input

if TYPE_CHECKING:
    from google.cloud.storage import Client

STDIN: Final = "-"
GCS: Final = "gs://"
_GZIP: Final = b"\x1f\x8b"
_GZIP_WINDOW: Final = 31
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_SKIPPABLE_ZSTD: Final = b"\x2a\x4d\x18"
_PIECE: Final = 1 << 18
_PIECE_OF_TEXT: Final = 1 << 20
_ZSTD_PIECE: Final = 1 << 13


@dataclass(frozen=True, slots=True)
class LogFile:
    """One log to read: its name as given, and the time of its last change, where known."""

    name: str
    size: int | None = None
    changed: datetime | None = None

    @property
    def path(self) -> Path | None:
        """Its path on this machine; None for stdin and cloud objects."""
        return None if self.name == STDIN or self.name.startswith(GCS) else Path(self.name)


def find_files(names: Sequence[str]) -> list[LogFile]:
    """List the files that paths, directories and gs:// prefixes name, each once, in a fixed order.
    Raises UserError."""
    files: dict[str, LogFile] = {}
    for name in names:
        if name == STDIN:
            found = [LogFile(STDIN)]
        elif name.startswith(GCS):
            found = _cloud_files(name)
        else:
            found = _local_files(Path(name))
        files |= {file.name: file for file in found}
    return list(files.values())


def _local_files(path: Path) -> list[LogFile]:
    try:
        if not path.is_dir():
            return [_local_file(path)]
        found = [_local_file(item) for item in sorted(path.rglob("*")) if item.is_file()]
    except OSError as error:
        kind = NotFoundError if isinstance(error, FileNotFoundError) else UserError
        raise kind(f"{error.filename or path}: cannot be read: {error.strerror}") from error
    if not found:
        raise NotFoundError(
            f"{path}: the directory has no files. Give the directory or file that holds the run's"
            " log."
        )
    return found


def _local_file(path: Path) -> LogFile:
    status = path.stat()
    return LogFile(str(path), status.st_size, datetime.fromtimestamp(status.st_mtime, UTC))


@contextmanager
def open_log(file: LogFile) -> Iterator[BinaryIO]:
    """Open a log's bytes, decompressed; see `trouble`. Raises UserError for what cannot be opened
    or read."""
    try:
        with _open_raw(file) as raw:
            yield unpacked(raw, file.name)
    except OSError as error:
        raise UserError(f"{file.name}: cannot be read: {error.strerror or error}") from error


@contextmanager
def _open_raw(file: LogFile) -> Iterator[BinaryIO]:
    if file.name == STDIN:
        yield standard_input()
    elif file.name.startswith(GCS):
        with cloud_errors(file.name):
            bucket, _, name = file.name.removeprefix(GCS).partition("/")
            with (
                storage_client().bucket(bucket).blob(name).open("rb", chunk_size=8 << 20) as stream
            ):
                yield cast("BinaryIO", stream)
    else:
        with open_input(file.name) as stream:
            yield stream


def standard_input() -> BinaryIO:
    """Return standard input's bytes. Raises UserError where the process was started without one."""
    # None where descriptor 0 was closed (the shell's `<&-`), which the types leave out.
    stream = cast("TextIO | None", sys.stdin)
    if stream is None:
        raise UserError(
            "-: there is no standard input: it is closed. Pipe a log into the command, or name a"
            " file."
        )
    return stream.buffer


def storage_client() -> Client:
    """Return a client with the machine's credentials, or an anonymous one where there are none
    (public buckets)."""
    try:
        from google.auth.exceptions import DefaultCredentialsError
        from google.cloud import storage
    except ImportError as error:
        raise MissingExtraError(
            "gs:// paths need Google's client: pip install 'drillyard[gcp]'"
        ) from error
    try:
        return storage.Client()
    except (DefaultCredentialsError, OSError):
        return storage.Client.create_anonymous_client()


@contextmanager
def cloud_errors(name: str) -> Iterator[None]:
    try:
        from google.api_core.exceptions import GoogleAPIError
        from google.auth.exceptions import GoogleAuthError
    except ImportError as error:
        raise MissingExtraError(
            "gs:// paths need Google's client: pip install 'drillyard[gcp]'"
        ) from error
    try:
        yield
    except (GoogleAPIError, GoogleAuthError, OSError) as error:
        check = "Check the name, and `gcloud auth application-default login`."
        raise UserError(f"{name}: {first_line(error)}. {check}") from error


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _cloud_files(name: str) -> list[LogFile]:
    bucket, _, prefix = name.removeprefix(GCS).partition("/")
    with cloud_errors(name):
        blobs = [
            blob
            for blob in storage_client().list_blobs(bucket, prefix=prefix)
            if not blob.name.endswith("/")
        ]
    exact = [blob for blob in blobs if blob.name == prefix]
    inside = [
        blob for blob in blobs if not prefix or blob.name.startswith(prefix.rstrip("/") + "/")
    ]
    chosen = exact or inside
    if not chosen:
        raise NotFoundError(
            f"{name}: there is no such object, and none below it. List them: gcloud storage ls"
            f" {name}"
        )
    return [LogFile(f"{GCS}{bucket}/{blob.name}", blob.size, blob.updated) for blob in chosen]


def is_packed(head: bytes) -> bool:
    """Whether a file with these first 4 bytes is gzip or zstd."""
    return head.startswith(_GZIP) or _is_zstd(head)


def _is_zstd(head: bytes) -> bool:
    # pzstd begins with a skippable frame.
    return head[:4] == _ZSTD or (head[1:4] == _SKIPPABLE_ZSTD and 0x50 <= head[0] <= 0x5F)


def unpacked(raw: BinaryIO, name: str) -> BinaryIO:
    """Return `raw`, or its decompressed content if it is gzip or zstd. Raises UserError where
    zstandard is missing."""
    stream = (
        raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(cast("io.RawIOBase", raw))
    )
    magic = stream.peek(4)[:4]
    if magic.startswith(_GZIP):
        packed = _Packed(
            stream, "gzip", lambda: zlib.decompressobj(_GZIP_WINDOW), _gunzip, zlib.error
        )
        return io.BufferedReader(packed, _PIECE_OF_TEXT)
    if _is_zstd(magic):
        try:
            import zstandard
        except ImportError as error:
            raise UserError(
                f"{name}: is zstd: install zstandard (pip install zstandard), or decompress it"
            ) from error
        new = zstandard.ZstdDecompressor
        packed = _Packed(
            stream, "zstd", lambda: new().decompressobj(), _unzstd, zstandard.ZstdError
        )
        return io.BufferedReader(packed, _PIECE_OF_TEXT)
    return stream


def trouble(stream: BinaryIO) -> str | None:
    """Reason why a stream of `unpacked` ended before its end; None when it did not (or is still to
    be read)."""
    raw = stream.raw if isinstance(stream, io.BufferedReader) else None
    return raw.trouble if isinstance(raw, _Packed) else None


class _Packed(io.RawIOBase):
    """Decompressed text of a packed stream. `trouble` is None, or why it ended early."""

    def __init__(
        self,
        raw: BinaryIO,
        kind: str,
        unpacker: Callable[[], Any],
        unpack: Callable[[Any, bytes], Generator[bytes, None, bytes]],
        damage: type[Exception],
    ) -> None:
        self.trouble: str | None = None
        self._raw, self._kind, self._unpacker, self._unpack, self._damage = (
            raw,
            kind,
            unpacker,
            unpack,
            damage,
        )
        self._ready = b""
        self._text = self._pieces()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._ready:
            try:
                self._ready = next(self._text)
            except StopIteration:
                return 0
        taken = self._ready[: len(buffer)]
        buffer[: len(taken)] = taken
        self._ready = self._ready[len(taken) :]
        return len(taken)

    def _pieces(self) -> Iterator[bytes]:
        """The text of all members."""
        packed = b""
        while packed := self._after_padding(packed):
            unpacker = self._unpacker()
            while not unpacker.eof:
                if not packed:
                    self.trouble = (
                        f"its {self._kind} data end in the middle (cut off, or still being written)"
                    )
                    return
                try:
                    packed = yield from self._unpack(unpacker, packed)
                except self._damage as error:
                    reason = str(error).rpartition(": ")[2]
                    self.trouble = f"its {self._kind} data are damaged ({reason})"
                    if "data check" in reason:
                        # Checksums come at the end: the damage is anywhere before it.
                        self.trouble += ", so some of its figures may be wrong"
                    return
                if not unpacker.eof:
                    packed = self._raw.read(_PIECE)

    def _after_padding(self, packed: bytes) -> bytes:
        """Return the next packed bytes that are no padding (zeros); none at the end."""
        while not (packed := packed.lstrip(b"\0")):
            packed = self._raw.read(_PIECE)
            if not packed:
                return b""
        return packed


def _gunzip(unpacker: Any, packed: bytes) -> Generator[bytes, None, bytes]:
    """Yield the text of the next packed bytes; returns those after the member. Raises zlib.error at
    damage."""
    while packed and not unpacker.eof:
        before = unpacker.copy()
        try:
            yield unpacker.decompress(packed, _PIECE_OF_TEXT)
        except zlib.error:
            # zlib returns nothing of a damaged piece: unpack byte by byte up to the damage, which
            # raises again.
            for place in range(len(packed)):
                yield before.decompress(packed[place : place + 1])
        packed = unpacker.unconsumed_tail
    return bytes(unpacker.unused_data)


def _unzstd(unpacker: Any, packed: bytes) -> Generator[bytes, None, bytes]:
    """Do the same in small pieces: the text of one is in memory as a whole, and lost if the piece
    is damaged."""
    begin = 0
    while begin < len(packed) and not unpacker.eof:
        piece = packed[begin : begin + _ZSTD_PIECE]
        begin += len(piece)
        yield unpacker.decompress(piece)
    return bytes(unpacker.unused_data) + packed[begin:]
