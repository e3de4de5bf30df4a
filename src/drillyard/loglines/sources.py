"""What a path on the command line names: files, directories, `-`, gs:// objects; opened and decompressed.

Compression is told by the content (gzip, zstd), never by the name. Cloud objects are streamed, nothing is stored.
"""

from __future__ import annotations

import io
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, cast

from drillyard.errors import UserError

if TYPE_CHECKING:
    from google.cloud.storage import Client

STDIN: Final = "-"
GCS: Final = "gs://"
_GZIP: Final = b"\x1f\x8b"
_GZIP_WINDOW: Final = 31
_ZSTD: Final = b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True, slots=True)
class LogFile:
    """One thing to read. `name` is what people call it; `changed` is the time of its last change, where known."""

    name: str
    size: int | None = None
    changed: datetime | None = None

    @property
    def path(self) -> Path | None:
        """Its path on this machine; None for stdin and cloud objects."""
        return None if self.name == STDIN or self.name.startswith(GCS) else Path(self.name)


def find_files(names: Sequence[str]) -> list[LogFile]:
    """The files that paths name, directories and gs:// prefixes in full, each once, in a stable order.

    Raises UserError for what is not there or cannot be listed, and for a directory without files.
    """
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
        raise UserError(f"{error.filename or path}: cannot be read: {error.strerror}") from error
    if not found:
        raise UserError(f"{path}: the directory has no files. Give the directory or file that holds the run's log.")
    return found


def _local_file(path: Path) -> LogFile:
    status = path.stat()
    return LogFile(str(path), status.st_size, datetime.fromtimestamp(status.st_mtime, UTC))


@contextmanager
def open_log(file: LogFile) -> Iterator[BinaryIO]:
    """A log's bytes, decompressed. Raises UserError for what cannot be opened, read or decompressed."""
    try:
        with _open_raw(file) as raw:
            yield decompressed(raw, file.name)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{file.name}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


@contextmanager
def _open_raw(file: LogFile) -> Iterator[BinaryIO]:
    if file.name == STDIN:
        yield sys.stdin.buffer
    elif file.name.startswith(GCS):
        with _cloud_errors(file.name):
            bucket, _, name = file.name.removeprefix(GCS).partition("/")
            with _client().bucket(bucket).blob(name).open("rb", chunk_size=8 << 20) as stream:
                yield cast("BinaryIO", stream)
    else:
        with open(file.name, "rb") as stream:
            yield stream


class _Zstandard(io.RawIOBase):
    """All frames of a zstd stream, one after the other; what is cut off ends like a file that is still written."""

    def __init__(self, raw: BinaryIO) -> None:
        import zstandard

        self._reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
        self._error = zstandard.ZstdError

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        try:
            return int(self._reader.readinto(buffer))
        except self._error as error:
            raise OSError(f"its zstd data is damaged: {error}") from error


class _Gzip(io.RawIOBase):
    """All members of a gzip stream; what is cut off gives what came before: a log may be cut anywhere."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._inflate = zlib.decompressobj(_GZIP_WINDOW)
        self._packed = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while True:
            if self._inflate.eof:
                self._packed = self._inflate.unused_data.lstrip(b"\0")
                self._inflate = zlib.decompressobj(_GZIP_WINDOW)
            self._packed = self._packed or self._raw.read(1 << 18)
            if not self._packed:
                return 0
            plain = self._inflate.decompress(self._packed, len(buffer))
            self._packed = self._inflate.unconsumed_tail
            if plain:
                buffer[: len(plain)] = plain
                return len(plain)


def is_compressed(head: bytes) -> bool:
    """Whether a file that begins so (4 bytes) is gzip or zstd."""
    return head.startswith((_GZIP, _ZSTD))


def decompressed(raw: BinaryIO, name: str) -> BinaryIO:
    """`raw` itself, or what it holds when it is gzip or zstd."""
    stream = raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(cast("io.RawIOBase", raw))
    magic = stream.peek(4)[:4]
    if magic.startswith(_GZIP):
        return io.BufferedReader(_Gzip(stream), 1 << 20)
    if magic == _ZSTD:
        try:
            return io.BufferedReader(_Zstandard(stream), 1 << 20)
        except ImportError as error:
            raise UserError(f"{name}: is zstd: install zstandard (pip install zstandard), or decompress it") from error
    return stream


def _client() -> Client:
    """A storage client with the machine's credentials, or none where there are none (public buckets)."""
    try:
        from google.auth.exceptions import DefaultCredentialsError
        from google.cloud import storage
    except ImportError as error:
        raise UserError("gs:// paths need Google's client: pip install 'drillyard[gcp]'") from error
    try:
        return storage.Client()
    except (DefaultCredentialsError, OSError):
        return storage.Client.create_anonymous_client()


@contextmanager
def _cloud_errors(name: str) -> Iterator[None]:
    try:
        from google.api_core.exceptions import GoogleAPIError
        from google.auth.exceptions import GoogleAuthError
    except ImportError as error:
        raise UserError("gs:// paths need Google's client: pip install 'drillyard[gcp]'") from error
    try:
        yield
    except (GoogleAPIError, GoogleAuthError, OSError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{name}: {first}. Check the name, and `gcloud auth application-default login`.") from error


def _cloud_files(name: str) -> list[LogFile]:
    bucket, _, prefix = name.removeprefix(GCS).partition("/")
    with _cloud_errors(name):
        blobs = [blob for blob in _client().list_blobs(bucket, prefix=prefix) if not blob.name.endswith("/")]
    exact = [blob for blob in blobs if blob.name == prefix]
    inside = [blob for blob in blobs if not prefix or blob.name.startswith(prefix.rstrip("/") + "/")]
    chosen = exact or inside
    if not chosen:
        raise UserError(f"{name}: there is no such object, and none below it. List them: gcloud storage ls {name}")
    return [LogFile(f"{GCS}{bucket}/{blob.name}", blob.size, blob.updated) for blob in chosen]
