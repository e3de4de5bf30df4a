"""Lists and reads files of the machine that it runs on, as asked on standard input. Sent to hosts
by `remote_files.py`.

Standard library only, nothing newer than Python 3.7. It keeps no state and exits at the end of its
input. A request is a line of JSON, `{"list": [PATTERN, ...]}`, `{"tree": DIRECTORY}` or `{"read":
[[PATH, OFFSET, LENGTH, HEAD, TOP], ...]}`. The answer is a line of JSON, for each read one,
followed by its bytes. Only regular files are listed and read, no link is followed: another user's
run directory may have a link to a file that only the reader may read, or a pipe.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import stat
import sys
from collections.abc import Iterable
from typing import Any, BinaryIO

HEAD_BYTES = 64
"""A file whose first bytes have changed is another file. Inode numbers would not do: an object
store that is mounted as a directory gives a file another one with each append."""


def matching_files(patterns: Iterable[str]) -> list[tuple[str, int]]:
    """Path and size of the files that the patterns match."""
    return regular_files({path for pattern in patterns for path in glob.glob(pattern)})


def tree(directory: str) -> list[tuple[str, int]]:
    """Path, relative to the directory, and size of all files below it; none where it is not
    there."""
    paths = (os.path.join(root, name) for root, _, names in os.walk(directory) for name in names)
    return [(os.path.relpath(path, directory), size) for path, size in regular_files(paths)]


def regular_files(paths: Iterable[str]) -> list[tuple[str, int]]:
    """Path and size of those that are regular files, in order of their paths."""
    files = []
    for path in sorted(paths):
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode):
                files.append((path, status.st_size))
    return files


def open_regular(path: str, top: str) -> int | None:
    """A descriptor of a regular file; None for anything else, and where a directory below `top` on
    its path is a link. Raises OSError."""
    directory = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        *parents, name = os.path.relpath(path, top).split(os.sep)
        for parent in parents:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            below = os.open(parent, flags, dir_fd=directory)
            os.close(directory)
            directory = below
        # Not to block on a pipe, which is not a regular file.
        descriptor = os.open(
            name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory
        )
    finally:
        os.close(directory)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    return None


def read(
    path: str, offset: int, length: int, head: bytes, top: str = ""
) -> tuple[bytes, bool, bytes] | None:
    """A file's first bytes, whether it was replaced or truncated (then it is read from its
    beginning), and its bytes from `offset` on; below 0: its last bytes. None where there is no
    regular file, or a link on the way to it from `top` (default: its directory). `head`: its first
    bytes when it was last read."""
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
        now, size = file.read(HEAD_BYTES), os.fstat(file.fileno()).st_size
        replaced = not now.startswith(head) or size < offset
        file.seek(0 if replaced else offset if offset >= 0 else max(0, size + offset))
        return now, replaced, file.read(length)


def main() -> None:
    """Answer until the input ends."""
    out = sys.stdout.buffer
    for line in sys.stdin.buffer:
        request = json.loads(line.decode())
        if "list" in request:
            write_line(out, matching_files(request["list"]))
        elif "tree" in request:
            write_line(out, tree(request["tree"]))
        for path, offset, length, head, top in request.get("read", ()):
            try:
                found = read(path, offset, length, bytes.fromhex(head), top)
            except OSError as error:
                write_line(out, {"error": f"{path}: {error.strerror}"})
                continue
            if found is None:
                write_line(out, None)
            else:
                write_line(
                    out, {"head": found[0].hex(), "replaced": found[1], "bytes": len(found[2])}
                )
                out.write(found[2])
        out.flush()


def write_line(out: BinaryIO, value: Any) -> None:
    out.write(json.dumps(value).encode() + b"\n")


if __name__ == "__main__":
    main()
