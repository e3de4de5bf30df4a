"""A pipe for each rank of a node whose ranks torchrun starts (rank_output.py), so that each line knows its rank.

What a rank prints is read as it comes, by a thread per rank, and each of its lines gets `[default3]:` before it, which
is what torchrun's own `--tee` writes for local rank 3: log readers know it. `--tee` itself would let every line take a
way over a file that nobody deletes, looked at ten times a second. The pipes lie in the launch directory, which a
command in a container sees too, or on this host's own disk where that has none (a mounted bucket). A container does not
see those: there lines have no marks, and each rank says so once.

Their directory has a name of its own and is removed by who made it, once the ranks were read. What an agent that was
killed has left goes when the next round of its node begins: pipes that nobody on this host reads. The fence (fence.py)
lets no round begin while an earlier start's may still run, here or elsewhere.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from . import rank_output
from .output_pump import Pump, Sink
from .shared_modules import redaction

_F_SETPIPE_SZ = 1031
_PIPE_BYTES = 1 << 20
_PREFIX = "node-{rank}.ranks-"


def marks_ranks(command: Sequence[str]) -> bool:
    """Whether a command starts its ranks through rank_output.py."""
    return any(os.path.basename(word) == rank_output.SCRIPT for word in command)


class RankPipes:
    """The pipes of one round. Raises OSError where none can be made."""

    def __init__(
        self,
        launch_directory: Path,
        node: int,
        count: int,
        log: Sink,
        passed_on: Sink | None,
        redactor: redaction.Redactor | None = None,
    ) -> None:
        prefix = _PREFIX.format(rank=node)
        _clear(launch_directory, prefix)
        try:
            self.directory, ends = _made(prefix, count, launch_directory)
        except OSError:
            self.directory, ends = _made("drillyard-", count, None)
        self._writers = [writer for _, writer in ends]
        marks = [f"[default{local}]:".encode() for local in range(count)]
        self._pumps = [
            Pump(reader, log, passed_on, mark, redactor) for (reader, _), mark in zip(ends, marks, strict=True)
        ]

    def finish(self, seconds: float) -> list[bytes]:
        """The last 64 KiB of each rank, once everything was read or `seconds` have passed."""
        for writer in self._writers:
            os.close(writer)
        deadline = time.monotonic() + seconds
        tails = [pump.finish(max(0.0, deadline - time.monotonic())) for pump in self._pumps]
        shutil.rmtree(self.directory, ignore_errors=True)
        return tails


def _made(prefix: str, count: int, parent: Path | None) -> tuple[Path, list[tuple[int, int]]]:
    """A new directory with so many pipes, and their ends (reader, writer). Raises OSError, and leaves nothing then."""
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    ends: list[tuple[int, int]] = []
    try:
        for local in range(count):
            os.mkfifo(directory / str(local), 0o600)
            ends.append(_opened(directory / str(local)))
    except OSError:
        for end in ends:
            os.close(end[0])
            os.close(end[1])
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return directory, ends


def _opened(path: Path) -> tuple[int, int]:
    """Both ends of a pipe: the writer is ours as well, so that it does not end before the rank has opened it."""
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        os.close(reader)
        raise
    os.set_blocking(reader, True)
    with contextlib.suppress(OSError):
        # Above this user's limit for pipes: the default size does.
        fcntl.fcntl(reader, _F_SETPIPE_SZ, _PIPE_BYTES)
    return reader, writer


def _clear(launch_directory: Path, prefix: str) -> None:
    """Remove directories of this node whose pipes nobody reads any more."""
    for directory in launch_directory.glob(f"{prefix}*"):
        if not any(_is_read(path) for path in directory.glob("*")):
            shutil.rmtree(directory, ignore_errors=True)


def _is_read(path: Path) -> bool:
    """Whether a process of this host has the reading end of a pipe. Its reader does not notice being asked."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        # ENXIO, where there is no reader.
        return False
    return True
