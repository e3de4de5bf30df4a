"""Reading files that somebody else may have made: those of run directories, checkpoints, models,
tokenizers, caches and logs.

Whatever is there in the place of a file, looking at it ends soon and costs little memory: a pipe
or a device is refused instead of being waited for, a document has a largest size, and a line of
JSON lines a longest length. What counts is the open descriptor, so exchanging the file between the
look and the read changes nothing; only libraries that open files themselves read by name what
`require_document` and `require_regular` have looked at. Links to regular files are followed.
"""

from __future__ import annotations

import io
import json
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from drillyard.errors import UnsafeFileError

LARGEST_DOCUMENT_BYTES: Final = 16 << 20
"""A JSON or YAML document of a run. The largest of ours lists a file per rank, or a dtype per
weight: 100 bytes each."""
LARGEST_MODEL_DOCUMENT_BYTES: Final = 128 << 20
"""A document of a model: a tokenizer.json with 260,000 entries has 34 MB."""
LONGEST_LINE_BYTES: Final = 4 << 20
"""A line of events.jsonl or metrics.jsonl. Its objects take up to 25 times as much memory."""

_KINDS: Final = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFDIR: "a directory",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_DOCUMENT_PATTERNS: Final = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*/*.jinja")
_WEIGHT_PATTERNS: Final = ("*.safetensors", "*.distcp", ".metadata")
_STREAMS: Final = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
_AGAIN: Final = "copy it again from where it was written, or remove it"


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a regular file, or a link to one, for reading. Raises UnsafeFileError for anything else
    of that name, OSError as `open` does."""
    return open(open_descriptor(path), "rb")


def open_unbuffered(path: str | os.PathLike[str]) -> io.FileIO:
    """As `open_regular`, without a buffer."""
    return io.FileIO(open_descriptor(path))


def open_descriptor(path: str | os.PathLike[str]) -> int:
    """As `open_regular`, as a descriptor that the caller closes."""
    # A look before opening: to open a device may do something, such as rewinding a tape.
    _require_kind(path, os.stat(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _require_kind(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_input(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a file that a user named: as `open_regular`, or a stream of the shell (`<(command)`,
    /dev/stdin)."""
    if os.fspath(path).startswith(_STREAMS):
        return open(path, "rb")
    return open_regular(path)


def is_there(path: Path) -> bool:
    """Whether there is a regular file, or a link to one. Raises UnsafeFileError for anything else
    of that name."""
    if path.is_file():
        return True
    if path.exists():
        _require_kind(path, path.stat())
    return False


def read_bytes(path: Path, largest: int = LARGEST_DOCUMENT_BYTES) -> bytes:
    """The content of a file. Raises UnsafeFileError for more than `largest` bytes and for a
    device or a pipe, OSError as `open` does."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        # Before it is read: what may be large would cost as much memory.
        _require_size(path, size, largest)
        content = file.read(size + 1)
    _require_size(path, max(size, len(content)), largest)
    return content


def read_text(path: Path, largest: int = LARGEST_DOCUMENT_BYTES, errors: str = "strict") -> str:
    """As `read_bytes`, decoded from UTF-8. Raises UnicodeDecodeError, a ValueError, as well."""
    return read_bytes(path, largest).decode("utf-8", errors)


def read_json(path: Path, largest: int = LARGEST_DOCUMENT_BYTES) -> Any:
    """The value of a JSON file. Raises as `read_text`, ValueError where it is not JSON, and
    RecursionError where it is nested too deeply."""
    return json.loads(read_text(path, largest))


def read_lines(path: Path, longest: int = LONGEST_LINE_BYTES) -> Iterator[bytes]:
    """The lines of a file, each with its end. Raises UnsafeFileError at a longer one."""
    with open_regular(path) as file:
        number = 1
        while line := file.readline(longest + 1):
            if len(line) > longest:
                raise too_long_line(path, longest, number)
            yield line
            number += 1


def too_long_line(
    path: str | os.PathLike[str], longest: int, number: int | None = None
) -> UnsafeFileError:
    """The refusal of a file with a line of more than `longest` bytes; `number`: the line's, where
    it is known."""
    where = os.fspath(path) if number is None else f"{os.fspath(path)}:{number}"
    return UnsafeFileError(
        f"{where}: a line has more than {longest >> 20} MiB, which no run writes; {_AGAIN}"
    )


def require_regular(*paths: Path) -> None:
    """Raise UnsafeFileError for what is there and not a regular file, before a library opens it by
    name."""
    for path in paths:
        is_there(path)


def require_documents(paths: Iterable[Path], largest: int = LARGEST_MODEL_DOCUMENT_BYTES) -> None:
    """As `require_regular`, and for files of more than `largest` bytes."""
    for path in paths:
        if is_there(path):
            _require_size(path, path.stat().st_size, largest)


def require_lines(*paths: Path) -> None:
    """As `require_regular`, and for a first line that no run writes: a sparse file has no other."""
    for path in paths:
        if is_there(path):
            next(read_lines(path), b"")


def require_inside(directory: Path, *paths: Path) -> None:
    """Raise UnsafeFileError for a link that leads out of `directory`, which somebody else may have
    made: what it leads to may be a secret of the reader, and would be in a report or an export."""
    here = os.path.realpath(directory)
    for path in paths:
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(here):
            raise UnsafeFileError(
                f"{path}: is a link to {os.path.realpath(path)}, outside of {directory}; put a copy"
                " in its place if it belongs there"
            )


def require_usual_files(directory: Path) -> None:
    """As `require_documents` for what a library reads by name in the directory of a model, a
    tokenizer or a checkpoint. Takes no time, so it comes before the library is imported."""
    for pattern in _DOCUMENT_PATTERNS:
        require_documents(directory.glob(pattern))
    for pattern in _WEIGHT_PATTERNS:
        require_regular(*directory.glob(pattern))
    for path in directory.glob("*.safetensors"):
        _require_header(path)


def _require_header(path: Path) -> None:
    # https://github.com/huggingface/safetensors#format: 8 bytes of length, then a JSON object.
    with open_regular(path) as file:
        start = file.read(9)
    if len(start) == 9 and start[8:] != b"{":
        raise UnsafeFileError(f"{path}: holds no weights in the safetensors format; {_AGAIN}")


def _require_kind(path: str | os.PathLike[str], status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise UnsafeFileError(
            f"{os.fspath(path)}: is {kind}, and only a regular file is read here; {_AGAIN}"
        )


def _require_size(path: Path, size: int, largest: int) -> None:
    if size > largest:
        raise UnsafeFileError(
            f"{path}: has {size:,} bytes, and such a file has at most {largest >> 20} MiB; {_AGAIN}"
        )
