"""What a path on the command line names: files, directories, `-`, gs:// objects; opened and decompressed.

Compression is told by the content (gzip, zstd), never by the name. Cloud objects are streamed, nothing is stored.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, TextIO, cast

from drillyard.errors import UserError
from drillyard.loglines.packed import unpacked

if TYPE_CHECKING:
    from google.cloud.storage import Client

STDIN: Final = "-"
GCS: Final = "gs://"


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
    """A log's bytes, decompressed; see packed.py for what is cut off or damaged. Raises UserError for what cannot be
    opened or read."""
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
            with storage_client().bucket(bucket).blob(name).open("rb", chunk_size=8 << 20) as stream:
                yield cast("BinaryIO", stream)
    else:
        with open(file.name, "rb") as stream:
            yield stream


def standard_input() -> BinaryIO:
    """Standard input's bytes. Raises UserError where the process was started without one."""
    # The interpreter's word for a descriptor 0 that was closed (the shell's `<&-`); the types do not know of it.
    stream = cast("TextIO | None", sys.stdin)
    if stream is None:
        raise UserError("-: there is no standard input: it is closed. Pipe a log into the command, or name a file.")
    return stream.buffer


def storage_client() -> Client:
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
def cloud_errors(name: str) -> Iterator[None]:
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
    with cloud_errors(name):
        blobs = [blob for blob in storage_client().list_blobs(bucket, prefix=prefix) if not blob.name.endswith("/")]
    exact = [blob for blob in blobs if blob.name == prefix]
    inside = [blob for blob in blobs if not prefix or blob.name.startswith(prefix.rstrip("/") + "/")]
    chosen = exact or inside
    if not chosen:
        raise UserError(f"{name}: there is no such object, and none below it. List them: gcloud storage ls {name}")
    return [LogFile(f"{GCS}{bucket}/{blob.name}", blob.size, blob.updated) for blob in chosen]
