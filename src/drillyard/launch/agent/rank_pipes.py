"""A pipe for each rank of a node whose ranks torchrun starts (rank_output.py), so that each line knows its rank.

What a rank prints is read as it comes, by a thread per rank, and each of its lines gets `[default3]:` before it, which
is what torchrun's own `--tee` writes for local rank 3: log readers know it. `--tee` itself would let every line take a
way over a file that nobody deletes, looked at ten times a second. The pipes lie in the launch directory, which a
command in a container sees too, or on this host's own disk where that has none (a mounted bucket).
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
from .output import Pump, Sink

_F_SETPIPE_SZ = 1031
_PIPE_BYTES = 1 << 20
_PATTERN = "node-{rank}.ranks"


def marks_ranks(command: Sequence[str]) -> bool:
    """Whether a command starts its ranks through rank_output.py."""
    return any(os.path.basename(word) == rank_output.SCRIPT for word in command)


class RankPipes:
    """The pipes of one round. Raises OSError where none can be made."""

    def __init__(self, launch_directory: Path, node: int, count: int, log: Sink, passed_on: Sink | None) -> None:
        self.directory = _made(launch_directory / _PATTERN.format(rank=node), count)
        self._writers: list[int] = []
        self._pumps: list[Pump] = []
        try:
            for local in range(count):
                self._open(local, log, passed_on)
        except OSError:
            self.finish(0.0)
            raise

    def _open(self, local: int, log: Sink, passed_on: Sink | None) -> None:
        path = self.directory / str(local)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            # Ours as well, so that the pipe does not end before the rank has opened it.
            self._writers.append(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            os.close(reader)
            raise
        os.set_blocking(reader, True)
        with contextlib.suppress(OSError):
            # Above this user's limit for pipes: the default size does.
            fcntl.fcntl(reader, _F_SETPIPE_SZ, _PIPE_BYTES)
        self._pumps.append(Pump(reader, log, passed_on, f"[default{local}]:".encode()))

    def finish(self, seconds: float) -> list[bytes]:
        """The last 64 KiB of each rank, once everything was read or `seconds` have passed."""
        for writer in self._writers:
            os.close(writer)
        shutil.rmtree(self.directory, ignore_errors=True)
        deadline = time.monotonic() + seconds
        return [pump.finish(max(0.0, deadline - time.monotonic())) for pump in self._pumps]


def _made(directory: Path, count: int) -> Path:
    """A directory with so many pipes. What a killed agent of this node has left there makes way."""
    shutil.rmtree(directory, ignore_errors=True)
    try:
        directory.mkdir()
        _make_pipes(directory, count)
    except OSError:
        shutil.rmtree(directory, ignore_errors=True)
        directory = Path(tempfile.mkdtemp(prefix="drillyard-"))
        _make_pipes(directory, count)
    return directory


def _make_pipes(directory: Path, count: int) -> None:
    for local in range(count):
        os.mkfifo(directory / str(local), 0o600)
