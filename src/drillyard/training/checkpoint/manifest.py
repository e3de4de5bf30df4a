"""The manifest of a checkpoint: the last file written, which makes the others a checkpoint.

It names every file with its size and checksum, and ends with a checksum of itself: XXH3-128 over
the manifest's own bytes with the 32 digits of that checksum set to zero. Every byte is covered, so
a flipped bit, a truncation or a half-copied object is noticed before anything in it is believed.
`format_version` counts up when older programs could no longer read what is written; every earlier
version stays readable. Two things are the same in every version, so that a program can distinguish
a later format from damage: the last lines, with the checksum, and the key `format_version`. Keys
that a program does not know are ignored: an added key needs no new version.

A file is durable when its content (fsync of the file) and its name (fsync of the directory) are.
Checksums are XXH3-128: far faster than any disk. They find damage, not forgery. On object-store
mounts (GCS FUSE) a file appears when it is closed and a rename is copy and delete; nothing here
relies on a rename being atomic.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import xxhash

from drillyard.errors import UnsafeFileError
from drillyard.guarded_files import open_unbuffered, read_bytes
from drillyard.safe_files import flush, replace_file

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
# The manifest of a checkpoint that was set aside by a return to an earlier one. Renaming it back
# undoes that.
ABANDONED_NAME = "manifest.abandoned.json"

_ZERO = b"0" * 32
LARGEST_MANIFEST_BYTES = 16 * 1024**2
"""About 160,000 files at 100 bytes: one per rank."""
_LARGEST_COUNT = 2**63 - 1
_KINDS = {"torch_version": str, "created": str, "identity": dict, "metadata": dict}
# What a resume computes with; it compares the other values with its own, whatever they are.
_KINDS_IN_METADATA = {"num_sequences": int, "settings": dict}
READ_CHUNK_BYTES = 4 * 1024 * 1024
# What file systems without fsync of a directory answer; an I/O error (EIO, ENOSPC) is none of
# these.
_DIRECTORY_SYNC_NOT_OFFERED = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF}
_TAIL = re.compile(rb'"checksum": "([0-9a-f]{32})"\n\}\n\Z')


class ManifestError(Exception):
    """The manifest is damaged: a byte of it is not as written. The text says why."""


class LaterFormat(ManifestError):
    """The manifest is intact, and of a format that only a later program can read. The text says
    what to do."""


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and XXH3-128 (hexadecimal) of one file."""

    bytes: int
    xxh3_128: str


@dataclass(frozen=True)
class Manifest:
    """Content of a checkpoint. `identity` and `metadata` are the caller's (JSON values); `created`
    is UTC, ISO 8601."""

    step: int
    world_size: int
    torch_version: str
    created: str
    files: Mapping[str, FileRecord]
    identity: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION


def json_value(value: Any) -> Any:
    """`value` as JSON can hold it: non-finite numbers become null, tuples lists. TypeError for
    anything else."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    raise TypeError(f"{type(value).__name__} is not a JSON value: {value!r}")


def encode(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`: indented JSON (UTF-8) that ends with its own checksum."""
    body = {
        "format_version": manifest.format_version,
        "step": manifest.step,
        "identity": json_value(manifest.identity),
        "metadata": json_value(manifest.metadata),
        "world_size": manifest.world_size,
        "torch_version": manifest.torch_version,
        "created": manifest.created,
        "files": {
            name: {"bytes": f.bytes, "xxh3_128": f.xxh3_128}
            for name, f in sorted(manifest.files.items())
        },
        "checksum": _ZERO.decode(),
    }
    raw = (json.dumps(body, indent=1, allow_nan=False) + "\n").encode()
    return _with_checksum(raw, checksum(raw).encode())


def decode(raw: bytes) -> Manifest:
    """Read a manifest. Raises ManifestError when a byte is not as written, LaterFormat when the
    format is too new."""
    tail = _TAIL.search(raw[-64:])
    if tail is None:
        raise ManifestError("it is cut short or damaged: it does not end with its checksum")
    if checksum(_with_checksum(raw, _ZERO)).encode() != tail.group(1):
        raise ManifestError("its checksum does not match its content")
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"it is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ManifestError("it is not a JSON object")
    if _count(body, "format_version", least=1) > FORMAT_VERSION:
        raise LaterFormat(
            f"its format version {body['format_version']} is newer than the {FORMAT_VERSION} known"
            " here; use the Drillyard version that wrote it, or a later one"
        )
    _count(body, "step", least=0)
    _count(body, "world_size", least=1)
    _require_kinds(body, _KINDS)
    _require_kinds(body.get("metadata", {}), _KINDS_IN_METADATA)
    known = {item.name: body[item.name] for item in fields(Manifest) if item.name in body}
    try:
        return Manifest(**{**known, "files": _files(body.get("files"))})
    except TypeError as error:
        raise ManifestError(f"it lacks a key: {error}") from None


def _files(records: Any) -> dict[str, FileRecord]:
    if not isinstance(records, dict):
        raise ManifestError("its files are no JSON object")
    for name, record in records.items():
        if not is_file_name(name):
            raise ManifestError(
                f"it lists {name[:80]!r}, which is not the name of a file in the checkpoint's"
                " directory"
            )
        if not isinstance(record, dict) or not isinstance(record.get("xxh3_128"), str):
            raise ManifestError(f"it has no checksum of {name[:80]!r}")
    return {
        name: FileRecord(_count(record, "bytes", least=0), record["xxh3_128"])
        for name, record in records.items()
    }


def is_file_name(name: str) -> bool:
    """Whether a file of this name is directly in a checkpoint's directory: no other path, and not
    the manifest."""
    return (
        bool(name)
        and "/" not in name
        and "\0" not in name
        and name not in (".", "..", MANIFEST_NAME)
    )


def _require_kinds(values: Mapping[str, Any], kinds: Mapping[str, type]) -> None:
    for key, kind in kinds.items():
        if not isinstance(values.get(key, kind()), kind):
            raise ManifestError(f"its {key} is {type(values[key]).__name__}, not {kind.__name__}")


def _count(values: Mapping[str, Any], key: str, *, least: int) -> int:
    value = values.get(key)
    if type(value) is not int or not least <= value <= _LARGEST_COUNT:
        raise ManifestError(f"its {key} is not a whole number from {least} on")
    return value


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint directory. Raises FileNotFoundError, OSError or
    ManifestError."""
    try:
        raw = read_bytes(directory / MANIFEST_NAME, LARGEST_MANIFEST_BYTES)
    except UnsafeFileError as error:
        raise ManifestError(str(error)) from None
    return decode(raw)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Make a checkpoint complete, durably. All its other files must be durable already. Raises
    OSError."""
    write_durably(directory / MANIFEST_NAME, encode(manifest))


def _with_checksum(raw: bytes, digits: bytes) -> bytes:
    """`raw` with the 32 digits before the closing quote, newline, brace and newline replaced."""
    end = len(raw) - len(b'"\n}\n')
    return raw[: end - len(_ZERO)] + digits + raw[end:]


def checksum(data: bytes) -> str:
    """XXH3-128 of `data`, 32 lower-case hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def file_checksum(path: Path, on_read: Callable[[int], None] | None = None) -> str:
    """XXH3-128 of a whole file, read in chunks; calls `on_read` with the size of each. Raises
    OSError."""
    digest = xxhash.xxh3_128()
    with open_unbuffered(path) as file:
        # No larger than the file: clearing megabytes for each of many small files is what would
        # take the time.
        buffer = memoryview(bytearray(min(READ_CHUNK_BYTES, os.fstat(file.fileno()).st_size + 1)))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            if on_read is not None:
                on_read(count)
    return digest.hexdigest()


def forget_cached(path: Path) -> None:
    """Ask the kernel to drop its copy of a durable file, so that the next read comes from the
    storage. Raises OSError.

    Advice: a file system may keep its copy (tmpfs has no other).
    """
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable, where the file system offers it. Raises OSError on an
    I/O error."""
    try:
        flush(path)
    except OSError as error:
        if error.errno not in _DIRECTORY_SYNC_NOT_OFFERED:
            raise


def write_durably(path: Path, data: bytes) -> None:
    """Write a file whose final name never shows part of it: temporary name, fsync, rename, fsync of
    the directory.

    Raises OSError; then the file of the final name is unchanged.
    """
    replace_file(path, data, draft=path.with_name(path.name + ".tmp"), durable=True)
    sync_directory(path.parent)
