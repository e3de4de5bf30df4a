"""Writing files and directories on any file system: complete or not at all, never over files of
others.

A long run meets full disks, quotas, disks that the kernel has made read-only, and mounts that
disappear for a while; `describe_os_error` adds to the system's message what to do. Object-store
mounts (GCS FUSE) cannot rename directories, so `publish_directory` moves one file last, which
readers wait for.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from drillyard.control_characters import CleanStream
from drillyard.errors import UserError

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
# GCS FUSE answers EMFILE: a rename would be a copy of each object ("too many objects to be
# renamed").
_NO_RENAME_OF_DIRECTORIES = frozenset({errno.EMFILE, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV})
VISIBLE_WITHIN_SECONDS = 15.0
"""Attribute caches of network file systems show what another host made late, but within seconds."""
MARKUP = b"<!-- drillyard, sha256 of the above: %s -->\n"
YAML = b"# drillyard, sha256 of the above: %s\n"
"""Last lines of outputs: of HTML, SVG and XML, and of YAML."""
_MOST_OUTPUT_BYTES = 1 << 30
_ADVICE = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there, or have the quota raised",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EROFS: (
        "make the file system writable again; the kernel makes it read-only after errors (see"
        " dmesg)"
    ),
    errno.EIO: "the disk or its server fails; see dmesg, or the log of the mount",
    errno.ENOTCONN: "it is not mounted any more; mount it again",
    errno.ENOENT: "the directory does not exist; create it, or mount its disk again",
    errno.ENOTDIR: "a part of the path is a file; choose another path",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ESTALE: "the file was replaced on its server, by another host or process",
    errno.EACCES: "give write permission",
    errno.EPERM: "give write permission",
}


def describe_os_error(error: OSError) -> str:
    """The system's message for an error and, if known, what to do: `No space left on device: free
    space there`."""
    words = error.strerror or str(error)
    advice = _ADVICE.get(error.errno or 0)
    return f"{words}: {advice}" if advice else words


def make_directory(path: Path, *, parents: bool = False) -> None:
    """Create a directory that may be there, or that another host creates at this moment.

    NFS and virtiofs may say that a directory exists and, asked what it is, that there is none: then
    this host looks again for some seconds. Raises OSError.
    """
    end = time.monotonic() + VISIBLE_WITHIN_SECONDS
    while True:
        try:
            path.mkdir(parents=parents, exist_ok=True)
            return
        except FileExistsError as error:
            # What is there and no directory stays so.
            if os.path.lexists(error.filename or path) or time.monotonic() > end:
                raise
            time.sleep(0.1)


def publish_directory(made: Path, target: Path, last: str) -> None:
    """Move the complete directory `made` to `target`, which must not exist, by one rename if the
    file system can.

    Otherwise file by file, `last` at the end: without it, readers take the directory for
    incomplete. Raises OSError.
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
        make_directory((target / file).parent, parents=True)
        (made / file).rename(target / file)
    for directory in sorted(made.rglob("*"), reverse=True):
        directory.rmdir()
    made.rmdir()


def replace_file(
    path: Path,
    data: bytes,
    *,
    draft: Path | None = None,
    durable: bool = False,
    mode: int | None = None,
) -> None:
    """Write a file that readers see whole or not at all: under the name `draft`, then renamed to
    `path`.

    Without `draft` it is a new file beside `path`, so writers may run at once; a given one replaces
    what a killed writer left. `durable`: the content is on the disk before it gets its name.
    `mode`: the permissions of the file, before it has content; default: as the umask has it. Raises
    OSError, with `path` unchanged.
    """
    how = "xb" if draft is None else "wb"
    draft = draft or path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with draft.open(how) as file:
        try:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
            # Object-store mounts, and quotas on NFS, may refuse the content only here.
            file.close()
            draft.replace(path)
        except BaseException:
            # Ctrl-C must also leave no draft beside the user's file.
            with contextlib.suppress(OSError):
                draft.unlink()
            raise


def rewrite_file(path: Path, data: bytes) -> None:
    """Give a file of the user, which exists, other content; readers never see part of it. It keeps
    its permissions; links are followed. Raises OSError, with the file unchanged."""
    target = Path(os.path.realpath(path))
    replace_file(target, data, durable=True, mode=stat.S_IMODE(target.stat().st_mode))


def write_output(path: Path, data: bytes, *, overwrite: bool, mark: bytes = MARKUP) -> None:
    """Write a file whose name the user chose; readers never see part of it. Links are followed.

    Its last line is a comment, `mark`, with the digest of the lines above. An existing file is
    replaced if it is empty or an unedited output, or with `overwrite`: else UserError. Devices and
    pipes are written to directly. Raises OSError.
    """
    if not overwrite:
        require_replaceable(path, is_marked(mark), "name another file, or --overwrite")
    replace_output(path, _with_digest(data if data.endswith(b"\n") else data + b"\n", mark))


def replace_output(path: Path, data: bytes) -> None:
    """Write a file whose name the user chose, and that may be replaced; readers never see part of
    it. Links are followed; devices and pipes are written to directly. Raises OSError."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        target.write_bytes(data)
    else:
        replace_file(target, data)


def require_replaceable(path: Path, is_own: Callable[[bytes], bool], remedy: str) -> None:
    """Raise UserError, with the `remedy`, for a file whose content is not empty and not our own.
    Raises OSError."""
    target = Path(os.path.realpath(path))
    if not target.is_file():
        return
    # No output is nearly this large, and a file named by mistake may not fit in memory.
    content = target.read_bytes() if target.stat().st_size <= _MOST_OUTPUT_BYTES else None
    if content is None or (content and not is_own(content)):
        raise UserError(
            f"{path}: exists, and this command did not write it, or it was edited since; {remedy}"
        )


def is_marked(mark: bytes) -> Callable[[bytes], bool]:
    """A function that says whether content is unedited since `write_output` wrote it."""
    start = mark.partition(b"%s")[0]
    return lambda content: content == _with_digest(content.rpartition(start)[0], mark)


def _with_digest(data: bytes, mark: bytes) -> bytes:
    return data + mark % hashlib.sha256(data).hexdigest().encode()


_MAX_DEPTH = 100
"""Directories: every tool can open and remove paths up to this depth (PATH_MAX is 4,096 bytes)."""


def write_tokenizer(tokenizer: Any, directory: Path) -> None:
    """Write the files of a tokenizer of transformers into a directory.

    Raises OSError, also where the tokenizers library raises a plain Exception of one: `... (os
    error 28)`.
    """
    try:
        tokenizer.save_pretrained(str(directory))
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None or isinstance(error, OSError):
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(directory)) from error


def require_plain_name(path: str, source: str) -> None:
    """Raise UserError for a file name from `source`, another host, that would be written outside of
    its directory."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        what = "is not a path below a directory (absolute, or with '..', '.' or an empty part)"
    elif len(parts) > _MAX_DEPTH:
        what = f"is more than {_MAX_DEPTH} directories deep"
    elif re.search(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", path):
        # C0, DEL, C1, and characters that change the direction of writing: a listing would show
        # another name.
        what = "has a control character"
    elif any("\ud800" <= character < "\udc80" for character in path):
        what = "is not text"
    else:
        return
    raise UserError(
        f"{source}: the file name {path!r} {what}, so nothing was copied; rename it or leave it out"
    )


@contextlib.contextmanager
def new_file_below(top: str, path: str) -> Iterator[BinaryIO]:
    """Write the file `path`, a plain name, below the directory `top`; it gets its name once it is
    complete.

    Links below `top` are not followed: one for a directory is an error, one for the file is
    replaced. Raises OSError.
    """
    Path(top).mkdir(parents=True, exist_ok=True)
    *parents, name = path.split("/")
    draft = f".{name}.{os.getpid()}.partial"
    directory = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for parent in parents:
            with contextlib.suppress(FileExistsError):
                os.mkdir(parent, dir_fd=directory)
            below = os.open(
                parent,
                os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC,
                dir_fd=directory,
            )
            os.close(directory)
            directory = below
        descriptor = os.open(
            draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=directory
        )
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
    """fsync a file or a directory. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class FileChecksum:
    """Size and XXH3-128 (32 hexadecimal digits) of a file."""

    bytes: int
    xxh3_128: str


class ChecksummedFile:
    """A file that is being written, and the checksum of what has been written so far."""

    def __init__(self, path: Path) -> None:
        self.stream = path.open("wb")
        self._digest = xxhash.xxh3_128()
        self._num_bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        self.stream.write(data)
        self._digest.update(data)
        self._num_bytes += len(data)

    def close(self) -> FileChecksum:
        """Flush the file to the disk and close it; returns what it holds. Raises OSError."""
        with self.stream:
            self.stream.flush()
            os.fsync(self.stream.fileno())
        return FileChecksum(self._num_bytes, self._digest.hexdigest())


def close_quietly(descriptor: int) -> None:
    """Close a descriptor whose file may have disappeared with its mount, or may refuse the last
    write."""
    with contextlib.suppress(OSError):
        os.close(descriptor)


class _LossyStream(io.FileIO):
    """A stream that drops what cannot be written."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.dropped = False

    def write(self, data: Any) -> int:
        """Write all of it, or as much as the file takes; returns the full size."""
        view = memoryview(data).cast("B")
        size = len(view)
        try:
            while view:
                view = view[os.write(self.fileno(), view) :]
        except OSError:
            self.dropped = True
        return size


def tolerate_lost_stderr() -> Callable[[], bool]:
    """From now on no write to standard error raises. Returns a function: whether anything was
    dropped so far."""
    stream: Any = _LossyStream(2)
    text: Any = CleanStream(
        io.TextIOWrapper(stream, encoding="utf-8", errors="backslashreplace", write_through=True)
    )
    sys.stderr = text
    return lambda: bool(stream.dropped)
