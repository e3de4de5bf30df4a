"""Storage of the run directory: writing with fsync, reading what was written, and files by the
thousand.

It works in a directory of its own, which it removes; so does this node's program should the probe
be killed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_BLOCK_BYTES = 8 << 20
_FREE_SHARE = 0.5
"""The most of the free space that is written."""
_SCRATCH = re.compile(r"scratch-\d+-\d+-[0-9a-f]{16}")
_OWN_FILE = re.compile(r"data|f\d+")


def scratch_name(rank: int, task: int, token: str) -> str:
    """The name of a probe's directory. `token`: 16 hexadecimal digits that no other node's program
    has."""
    return f"scratch-{rank}-{task}-{token}"


def remove_leftovers(directory: Path) -> None:
    """Remove what an earlier job left where a node died: directories of probes, and only those with
    nothing else in them."""
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            own = _SCRATCH.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
            if own and all(_OWN_FILE.fullmatch(name) for name in os.listdir(path)):
                shutil.rmtree(path, ignore_errors=True)


def probe(arguments: dict[str, Any]) -> dict[str, Any]:
    """Write and read `bytes`, then make, look at and remove `files`, for `files_seconds` at most.
    Rates in GB/s, and in files per second."""
    scratch = Path(os.environ["ACCEPTANCE_SCRATCH"])
    scratch.mkdir(parents=True)
    try:
        size = int(arguments["bytes"])
        free = shutil.disk_usage(scratch).free
        if 0 < free * _FREE_SHARE < size:
            raise SystemExit(
                f"{scratch.parent} has {free / 1e9:.1f} GB free; {size / 1e9:.1f} GB"
                " are to be written"
            )
        found: dict[str, Any] = {"bytes": size, "filesystem": filesystem_of(scratch)}
        found["write"] = _write(scratch / "data", size)
        found["read"] = _read(scratch / "data", size)
        os.unlink(scratch / "data")
        found["files"] = _files(scratch, int(arguments["files"]), float(arguments["files_seconds"]))
        return found
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _blocks(size: int) -> Any:
    """The content of the file: the first bytes of each block say which it is, so that a block in
    the place of another is noticed, and nothing saves it once for all."""
    content = bytearray(os.urandom(1 << 20) * (_BLOCK_BYTES >> 20))
    for at in range(0, size, _BLOCK_BYTES):
        for part in range(0, _BLOCK_BYTES, 4096):
            content[part : part + 8] = (at + part).to_bytes(8, "big")
        yield memoryview(content)[: min(_BLOCK_BYTES, size - at)]


def _write(path: Path, size: int) -> dict[str, Any]:
    prepared, written = 0.0, 0
    began = time.monotonic()
    with open(path, "wb", buffering=0) as file:
        blocks = _blocks(size)
        while True:
            before = time.monotonic()
            block = next(blocks, None)
            prepared += time.monotonic() - before
            if block is None:
                break
            while block:
                count = file.write(block) or 0
                written, block = written + count, block[count:]
        os.fsync(file.fileno())
    seconds = time.monotonic() - began - prepared
    return {"seconds": seconds, "gb_per_s": written / max(seconds, 1e-9) / 1e9}


def _read(path: Path, size: int) -> dict[str, Any]:
    """`how`: past the page cache (`direct`), or with the file's pages dropped from it first
    (`dropped`): what the kernel keeps anyway, or a server's own cache, may still answer."""
    room = mmap.mmap(-1, _BLOCK_BYTES)
    how, file = _opened(path)
    wrong = None
    try:
        seconds, at = 0.0, 0
        while at < size:
            began = time.monotonic()
            count = os.readv(file, [room])
            seconds += time.monotonic() - began
            if count <= 0:
                break
            head = int.from_bytes(room[:8], "big")
            if at % 4096 == 0 and count >= 8 and head != at:
                wrong = at
                break
            at += count
    finally:
        os.close(file)
    found = {"seconds": seconds, "gb_per_s": at / max(seconds, 1e-9) / 1e9, "how": how}
    if wrong is not None or at != size:
        found["error"] = f"what was read differs from what was written, at byte {wrong or at}"
    return found


def _opened(path: Path) -> tuple[str, int]:
    with contextlib.suppress(OSError, AttributeError):
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            os.preadv(file, [mmap.mmap(-1, 4096)], 0)
            return "direct", file
        except OSError:
            os.close(file)
    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    return "dropped", file


def _files(directory: Path, count: int, most_seconds: float) -> dict[str, Any]:
    """Small files, made one after the other; as many as the time allows."""
    deadline = time.monotonic() + most_seconds

    def make(path: Path) -> None:
        with open(path, "wb") as file:
            file.write(b"1")

    made, create = _rate(make, [directory / f"f{at}" for at in range(count)], deadline)
    paths = [directory / f"f{at}" for at in range(made)]
    _, look = _rate(os.stat, paths, None)
    _, remove = _rate(os.unlink, paths, None)
    return {
        "count": made,
        "create_per_s": create,
        "stat_per_s": look,
        "remove_per_s": remove,
    }


def _rate(
    act: Callable[[Path], object], paths: list[Path], deadline: float | None
) -> tuple[int, float]:
    began, done = time.monotonic(), 0
    for path in paths:
        if deadline is not None and time.monotonic() > deadline:
            break
        act(path)
        done += 1
    return done, done / max(time.monotonic() - began, 1e-9)


def filesystem_of(path: Path) -> str | None:
    """The type of the file system that a path is on, as /proc/self/mountinfo has it."""
    found: tuple[int, str] | None = None
    with contextlib.suppress(OSError, ValueError):
        place = os.path.realpath(path)
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            words = line.split()
            mounted = words[4].replace("\\040", " ")
            inside = place == mounted or place.startswith(mounted.rstrip("/") + "/")
            if inside and (found is None or len(mounted) >= found[0]):
                found = len(mounted), words[words.index("-") + 1]
    return found[1] if found else None
