"""Durable files: what is on the disk after a power cut, in which order, and with which checksum.

A file is durable when its content (fsync of the file) and its name (fsync of the directory) are. Checksums are
XXH3-128: far faster than any disk, so taking one costs nothing beside the write. It finds damage, not forgery.
On object-store mounts (GCS FUSE) a file appears when it is closed and a rename is copy and delete;
nothing here relies on a rename being atomic, see `manifest`.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

import xxhash

READ_CHUNK_BYTES = 4 * 1024 * 1024
# Answers of file systems that offer no fsync of a directory; an I/O error (EIO, ENOSPC) is none of these.
_DIRECTORY_SYNC_NOT_OFFERED = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF}


def checksum(data: bytes) -> str:
    """XXH3-128 of `data`, 32 lower-case hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def file_checksum(path: Path, on_read: Callable[[int], None] | None = None) -> str:
    """XXH3-128 of a whole file, read in chunks; `on_read` is told the bytes of each. Raises OSError."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        # No larger than the file: clearing megabytes for each of many small files is what would take the time.
        buffer = memoryview(bytearray(min(READ_CHUNK_BYTES, os.fstat(file.fileno()).st_size + 1)))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            if on_read is not None:
                on_read(count)
    return digest.hexdigest()


def forget_cached(path: Path) -> None:
    """Ask the kernel to drop its copy of a durable file, so that the next read comes from the storage. Raises OSError.

    Advice: a file system may keep its copy (tmpfs has no other).
    """
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable, where the file system offers it. Raises OSError on an I/O error."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _DIRECTORY_SYNC_NOT_OFFERED:
            raise
    finally:
        os.close(descriptor)


def write_durably(path: Path, data: bytes) -> None:
    """Write a file whose final name never shows part of it: temporary name, fsync, rename, fsync of the directory.

    Raises OSError; then the final name is as it was before.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_directory(path.parent)
