"""Lists and reads files of the machine that it runs on, as asked on standard input. Sent to hosts by `remote.py`.

Standard library only, and nothing newer than Python 3.7: it runs with whatever Python a login node has. It keeps
nothing between two requests, so a connection that was lost is replaced by another one; it ends with its input, so
nothing of it is left when the other side goes away.

A request is a line of JSON, `{"list": [PATTERN, ...]}`, `{"tree": DIRECTORY}` or `{"read": [[PATH, OFFSET, LENGTH,
HEAD], ...]}`. The answer is a line of JSON, for each read one, followed by its bytes.
"""

from __future__ import annotations

import glob
import json
import os
import sys
from collections.abc import Iterable
from typing import Any, BinaryIO

HEAD_BYTES = 64
"""A file that begins otherwise than it did is another file. Inode numbers would not do: object stores that are mounted
as directories give a file that was appended to another one."""


def found(patterns: Iterable[str]) -> list[list[Any]]:
    """Path and size of the files that the patterns match."""
    files = []
    for path in sorted({path for pattern in patterns for path in glob.glob(pattern)}):
        if os.path.isfile(path):
            files.append([path, os.path.getsize(path)])
    return files


def tree(directory: str) -> list[list[Any]] | None:
    """Path, relative to the directory, and size of all files below it; None where it is not there."""
    if not os.path.isdir(directory):
        return None
    files = []
    for root, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(root, name)
            if os.path.isfile(path):
                files.append([os.path.relpath(path, directory), os.path.getsize(path)])
    return sorted(files)


def read(path: str, offset: int, length: int, head: bytes) -> tuple[bytes, bool, bytes] | None:
    """What a file has from `offset` on: its first bytes, whether it was begun anew (then it is read from its own
    beginning), and the bytes. None where it is not there. `head`: its first bytes as they were seen last."""
    try:
        file = open(path, "rb")  # noqa: SIM115
    except (FileNotFoundError, NotADirectoryError):
        return None
    with file:
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
            tell(out, found(request["list"]))
        elif "tree" in request:
            tell(out, tree(request["tree"]))
        for path, offset, length, head in request.get("read", ()):
            try:
                told = read(path, offset, length, bytes.fromhex(head))
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
