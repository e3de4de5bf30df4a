"""Lists and reads files of the machine that it runs on, as asked on standard input. Sent to hosts by `remote_files.py`.

Standard library only, and nothing newer than Python 3.7: it runs with whatever Python a login node has. It keeps
nothing between two requests, so a connection that was lost is replaced by another one; it ends with its input, so
nothing of it is left when the other side goes away.

A request is a line of JSON, `{"list": [PATTERN, ...]}`, `{"tree": DIRECTORY}` or `{"read": [[PATH, OFFSET, LENGTH,
HEAD, TOP], ...]}`. The answer is a line of JSON, for each read one, followed by its bytes.

Only regular files are listed and read. A run directory of somebody else may hold a link to a file that only the reader
may read, or a pipe that blocks the reader: links are not followed, those of directories neither.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import stat
import sys
from collections.abc import Iterable
from typing import Any, BinaryIO

HEAD_BYTES = 64
"""A file that begins otherwise than it did is another file. Inode numbers would not do: object stores that are mounted
as directories give a file that was appended to another one."""


def matching_files(patterns: Iterable[str]) -> list[list[Any]]:
    """Path and size of the files that the patterns match."""
    paths = sorted({path for pattern in patterns for path in glob.glob(pattern)})
    return [[path, size] for path, size in ((path, regular_size(path)) for path in paths) if size is not None]


def tree(directory: str) -> list[list[Any]] | None:
    """Path, relative to the directory, and size of all files below it; None where it is not there."""
    if not os.path.isdir(directory):
        return None
    files = []
    for root, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(root, name)
            size = regular_size(path)
            if size is not None:
                files.append([os.path.relpath(path, directory), size])
    return sorted(files)


def regular_size(path: str) -> int | None:
    """The size of a regular file; None for anything else."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def open_regular(path: str, top: str) -> int | None:
    """A descriptor of a regular file; None for anything else, and where the way to it from the directory `top` has a
    link. Raises OSError."""
    directory = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        *parents, name = os.path.relpath(path, top).split(os.sep)
        for parent in parents:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            below = os.open(parent, flags, dir_fd=directory)
            os.close(directory)
            directory = below
        # Not to block on a pipe, which is then no regular file.
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    finally:
        os.close(directory)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    return None


def read(path: str, offset: int, length: int, head: bytes, top: str = "") -> tuple[bytes, bool, bytes] | None:
    """What a file has from `offset` on: its first bytes, whether it was begun anew (then it is read from its own
    beginning), and the bytes. None where there is no regular file, or a link on the way to it from `top` (default: its
    directory). `head`: its first bytes as they were seen last."""
    try:
        descriptor = open_regular(path, top or os.path.dirname(path) or ".")
    except OSError as error:
        # ELOOP: the last name is a link. ENXIO: a socket.
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
            return None
        raise
    if descriptor is None:
        return None
    with open(descriptor, "rb") as file:
        now = file.read(HEAD_BYTES)
        anew = not now.startswith(head) or os.fstat(file.fileno()).st_size < offset
        file.seek(0 if anew else offset)
        return now, anew, file.read(length)


def main() -> None:
    """Answer until the input ends."""
    out = sys.stdout.buffer
    for line in sys.stdin.buffer:
        request = json.loads(line.decode())
        if "list" in request:
            tell(out, matching_files(request["list"]))
        elif "tree" in request:
            tell(out, tree(request["tree"]))
        for path, offset, length, head, top in request.get("read", ()):
            try:
                told = read(path, offset, length, bytes.fromhex(head), top)
            except OSError as error:
                tell(out, {"error": f"{path}: {error.strerror}"})
                continue
            if told is None:
                tell(out, None)
            else:
                tell(out, {"head": told[0].hex(), "anew": told[1], "bytes": len(told[2])})
                out.write(told[2])
        out.flush()


def tell(out: BinaryIO, value: Any) -> None:
    """One line of JSON."""
    out.write(json.dumps(value).encode() + b"\n")


if __name__ == "__main__":
    main()
