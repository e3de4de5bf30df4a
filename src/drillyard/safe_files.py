"""What file systems do to a run, in one place: words for their errors, and how to publish a directory on any of them.

A long run meets full disks, quotas, a disk that the kernel has turned read-only and mounts that are gone for a while.
Whoever writes says so with `describe`, which adds to the system's words what to do about it. Object-store mounts (GCS
FUSE) have no rename of directories, so what must appear as a whole is published with `publish`: its reader goes by one
file, which comes last.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from drillyard.control_characters import CleanStream
from drillyard.errors import UserError

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
# GCS FUSE answers EMFILE: a rename would be a copy of each object ("too many objects to be renamed").
_NO_RENAME_OF_DIRECTORIES = frozenset({errno.EMFILE, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV})
_DIGEST_LINE = b"<!-- drillyard, sha256 of the above: %s -->\n"
_ADVICE = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there, or have the quota raised",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EROFS: "make the file system writable again; the kernel makes it read-only after errors (see dmesg)",
    errno.EIO: "the disk or its server fails; see dmesg, or the log of the mount",
    errno.ENOTCONN: "the mount is gone; mount it again",
    errno.ENOENT: "it is gone; mount its disk again, or restore it",
    errno.ESTALE: "the file was replaced on its server, by another host or process",
    errno.EACCES: "give write permission",
    errno.EPERM: "give write permission",
}


def describe_os_error(error: OSError) -> str:
    """The system's words for an error and, where known, what to do: `No space left on device: free space there`."""
    words = error.strerror or str(error)
    advice = _ADVICE.get(error.errno or 0)
    return f"{words}: {advice}" if advice else words


def publish_directory(made: Path, target: Path, last: str) -> None:
    """Move the complete directory `made` to `target`, where nothing may be, by one rename where there is such a thing.

    Elsewhere its files are moved one by one and the one named `last` comes at the end: until it is there, a
    reader sees no complete directory. Raises OSError, with EEXIST or ENOTEMPTY when something is at `target`.
    """
    try:
        made.rename(target)
        return
    except OSError as error:
        if error.errno not in _NO_RENAME_OF_DIRECTORIES:
            raise
    target.mkdir()
    files = sorted(path.relative_to(made) for path in made.rglob("*") if path.is_file())
    for file in sorted(files, key=lambda file: file == Path(last)):
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        (made / file).rename(target / file)
    for directory in sorted(made.rglob("*"), reverse=True):
        directory.rmdir()
    made.rmdir()


def write_output(path: Path, data: bytes, *, overwrite: bool) -> None:
    """Write an HTML or SVG file whose name the user chose, as a whole; links are followed.

    Its last line is a comment with the digest of what is above. So a file that is there is replaced if this function
    wrote it and it is unedited, if it is empty, or with `overwrite`: else UserError. A device or a pipe is
    written to. Raises OSError.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        target.write_bytes(data)
        return
    if target.is_file() and not overwrite and not _is_own_output(target):
        raise UserError(
            f"{path}: is there already, and not as this command wrote it: another file, or edited since; "
            "name another file, or --overwrite"
        )
    data = _with_digest(data if data.endswith(b"\n") else data + b"\n")
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    with draft.open("xb") as file:
        try:
            file.write(data)
            file.close()
            draft.replace(target)
        except BaseException:
            # Ctrl-C too must leave nothing beside the user's file.
            draft.unlink(missing_ok=True)
            raise


def _is_own_output(path: Path) -> bool:
    """Whether a file is empty, or as `write_output` wrote it."""
    # No report is nearly so large, and a file named by mistake may be larger than the memory.
    if path.stat().st_size > 64 << 20:
        return False
    content = path.read_bytes()
    return not content or content == _with_digest(content.rpartition(_DIGEST_LINE.partition(b"%s")[0])[0])


def _with_digest(data: bytes) -> bytes:
    return data + _DIGEST_LINE % hashlib.sha256(data).hexdigest().encode()


_MAX_DEPTH = 100
"""Directories: below this a path has a length that every tool opens and removes (PATH_MAX is 4,096 bytes)."""


def require_plain_name(path: str, source: str) -> None:
    """Raise UserError for a file name from elsewhere that could leave the directory that it is to be written to.

    `source`: who gave it, for the error.
    """
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        what = "is no path below a directory (absolute, or with '..', '.' or an empty part)"
    elif len(parts) > _MAX_DEPTH:
        what = f"is more than {_MAX_DEPTH} directories deep"
    elif re.search(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", path):
        # C0, DEL, C1, and what changes the direction of writing: a listing would show another name.
        what = "has a control character"
    elif any("\ud800" <= character < "\udc80" for character in path):
        what = "is no text"
    else:
        return
    raise UserError(f"{source}: the file name {path!r} {what}, so nothing was copied; rename it or leave it out")


@contextlib.contextmanager
def new_file_below(top: str, path: str) -> Iterator[BinaryIO]:
    """Write the file `path`, a plain name, below the directory `top`; it has its name once it is complete.

    Directories are made where they are missing. Links below `top` are not followed: one in the place of a directory is
    an error, one in the place of the file is replaced. Raises OSError.
    """
    Path(top).mkdir(parents=True, exist_ok=True)
    *parents, name = path.split("/")
    draft = f".{name}.{os.getpid()}.partial"
    directory = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for parent in parents:
            with contextlib.suppress(FileExistsError):
                os.mkdir(parent, dir_fd=directory)
            below = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            os.close(directory)
            directory = below
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=directory)
        try:
            with open(descriptor, "wb") as file:
                yield file
            os.replace(draft, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            os.unlink(draft, dir_fd=directory)
            raise
    finally:
        os.close(directory)


def flush(path: Path) -> None:
    """Make a file's content, or a directory's names, durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def close_quietly(descriptor: int) -> None:
    """Close a descriptor whose file may have gone with its mount, or cannot take what was written last."""
    with contextlib.suppress(OSError):
        os.close(descriptor)


class _ForgivingStream(io.FileIO):
    """A descriptor for what people read: what cannot be written is dropped."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.dropped = False

    def write(self, data: Any) -> int:
        """Write all of it, or what the file takes; says that all was written."""
        view = memoryview(data).cast("B")
        size = len(view)
        try:
            while view:
                view = view[os.write(self.fileno(), view) :]
        except OSError:
            self.dropped = True
        return size


def tolerate_lost_stderr() -> Callable[[], bool]:
    """From here on nothing that is written to standard error raises; returns whether something was dropped so far."""
    stream: Any = _ForgivingStream(2)
    text: Any = CleanStream(io.TextIOWrapper(stream, encoding="utf-8", errors="backslashreplace", write_through=True))
    sys.stderr = text
    return lambda: bool(stream.dropped)
