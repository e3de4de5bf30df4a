"""Output of a node's command: stamped line by line into node-K.log, and passed on to the agent's
output.

The ranks must never wait for a disk or a terminal. A thread reads each pipe in large pieces and
hands them to sinks, each with a thread of its own. All lines of a piece arrived together and get
one stamp, so stamping is one `bytes.replace` (hundreds of MB/s in CPython). Of the drawings of a
progress bar, one per second is kept as a line.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from drillyard.redaction import RedactedStream, Redactor

_PIECE_BYTES = 1 << 20
_TAIL_BYTES = 64 << 10
_LINE_BYTES = 1 << 20
_SECONDS_OF_REDRAW = 1.0
_F_SETPIPE_SZ = 1031
_PIPE_BYTES = 1 << 20
_SINK_BYTES = 64 << 20
GATHER_SECONDS = 5.0
SEGMENT_BYTES = 4 << 20
_ENOUGH_BYTES = 16 << 20


def stamp(seconds: float) -> bytes:
    """Time stamp `2026-11-21T22:55:10.123456Z `: UTC, always 28 bytes with the blank."""
    whole, rest = divmod(round(seconds * 1e6), 1_000_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)).encode() + b".%06dZ " % rest


def stamped_line(text: str) -> bytes:
    """Line of a node's log with the current time."""
    return stamp(time.time()) + text.encode(errors="replace") + b"\n"


class Sink:
    """File descriptor with a writing thread of its own; `put` never waits. Data that cannot be
    written in time, or on a full disk, are left out; their size is written, with the words `gap`,
    once lines can be written again."""

    def __init__(self, descriptor: int, gap: str, limit: int = _SINK_BYTES) -> None:
        self._descriptor = descriptor
        self._gap = gap
        self._limit = limit
        self._waiting: list[bytes] = []
        self._bytes = 0
        self._left_out = 0
        self._hurried = False
        self._writing = False
        self._changed = threading.Condition()
        threading.Thread(target=self._write_on, daemon=True).start()

    def put(self, data: bytes) -> None:
        """Queue `data` to be written in one piece, or leave it out if too much is queued
        already."""
        if not data:
            return
        with self._changed:
            if self._bytes + len(data) > self._limit:
                self._left_out += len(data)
                return
            self._waiting.append(data)
            self._bytes += len(data)
            self._changed.notify_all()

    def drain(self, seconds: float) -> None:
        """Wait until all is written, at most `seconds`."""
        with self._changed:
            self._hurried = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not (self._waiting or self._writing), seconds)
            self._hurried = False

    def close(self) -> None:
        """Write the queued data, for at most five seconds. The descriptor stays open."""
        self.drain(5.0)

    def _write_on(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                self._gather()
                data, self._waiting, self._bytes = b"".join(self._waiting), [], 0
                self._writing = True
                left_out, self._left_out = self._left_out, 0
            if left_out:
                data = stamped_line(f"=== {left_out} bytes of output {self._gap}") + data
            lost = self._write(data)
            with self._changed:
                self._left_out += lost
                self._writing = False
                self._changed.notify_all()

    def _gather(self) -> None:
        """Wait for more data where each write is expensive; `_changed` is held."""

    def _write(self, data: bytes) -> int:
        """Write `data`; returns how many bytes could not be written: a full disk, a closed
        reader."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._descriptor, view[:_PIECE_BYTES]) :]
            except OSError:
                # Try again with the next piece: the disk may have room then.
                time.sleep(0.05)
                return len(view)
        return 0


def open_log(path: Path) -> Sink:
    """Open the sink of a node's log, which is appended to. Raises OSError."""
    descriptor = os.open(
        path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666
    )
    return Sink(descriptor, "could not be written here")


class SegmentedLog(Sink):
    """A node's log on a mounted bucket, where others see what was written once a file is closed,
    and appending rewrites an object.

    Lines are gathered for some seconds and written into `node-K.log` until that is large, then into
    `node-K.log.0001`, ...; an agent that was started again begins a new one. An agent that is
    killed loses `GATHER_SECONDS` of lines.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._number = 0
        while self._path.exists():
            self._number += 1
        self._size = 0
        self._written_at = time.monotonic()
        super().__init__(-1, "could not be written here")

    @property
    def _path(self) -> Path:
        return (
            self._log
            if self._number == 0
            else self._log.with_name(f"{self._log.name}.{self._number:04d}")
        )

    def _gather(self) -> None:
        wait_seconds = self._written_at + GATHER_SECONDS - time.monotonic()
        self._changed.wait_for(
            lambda: self._hurried or self._bytes >= _ENOUGH_BYTES, max(0.0, wait_seconds)
        )

    def _write(self, data: bytes) -> int:
        lost = 0
        try:
            with self._path.open("ab") as segment:
                segment.write(data)
        except OSError:
            # Report it with the next piece, in a new segment: how much of this one was written is
            # unknown.
            lost = len(data)
            time.sleep(0.05)
        self._written_at = time.monotonic()
        self._size += len(data)
        if lost or self._size >= SEGMENT_BYTES:
            self._number, self._size = self._number + 1, 0
        return lost


class OutputLines:
    """Splitter of bytes into whole lines. It keeps an unfinished line, at most 1 MiB of it."""

    def __init__(self) -> None:
        self._open = b""
        self._redrawn_at = 0.0

    def feed(self, data: bytes, now: float) -> bytes:
        """Return the lines that `data` completes; `now` is in Unix seconds."""
        data = self._open + data
        ended = data.rfind(b"\n") + 1
        lines, self._open = data[:ended], data[ended:]
        if b"\r" in lines:
            lines = b"".join(_drawn(line) + b"\n" for line in lines.split(b"\n")[:-1])
        lines += self._redraw(now)
        if len(self._open) > _LINE_BYTES:
            lines, self._open = lines + self._open + b"\n", b""
        return lines

    def close(self) -> bytes:
        """Return the rest: a line without an end."""
        left, self._open = _drawn(self._open), b""
        return left + b"\n" if left else b""

    def _redraw(self, now: float) -> bytes:
        # A \r at the very end may be half of \r\n.
        drawings, separator, _ = self._open.rstrip(b"\r").rpartition(b"\r")
        if not separator:
            return b""
        self._open = self._open[len(drawings) :]
        text = _drawn(drawings)
        if not text or 0 <= now - self._redrawn_at < _SECONDS_OF_REDRAW:
            return b""
        self._redrawn_at = now
        return text + b"\n"


def prefixed(lines: bytes, prefix: bytes) -> bytes:
    """Put `prefix` before each of the whole lines."""
    return prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n" if lines else b""


def _drawn(line: bytes) -> bytes:
    """Return the last drawing of a line that was drawn several times, as a terminal would show
    it."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Pump:
    """Reader of an attempt's output until all writers are gone. Each line gets `prefix`, if there
    is one, and then prefixed lines are passed on; else the bytes as read. Redacts log, passed-on
    output and tail."""

    def __init__(
        self,
        reader: int,
        log: Sink,
        passed_on: Sink | None,
        prefix: bytes = b"",
        redactor: Redactor | None = None,
    ) -> None:
        self._prefix = prefix
        self._redacted = RedactedStream(redactor or Redactor())
        self._reader = reader
        self._log = log
        self._passed_on = passed_on
        self._tail = b""
        self._thread = threading.Thread(target=self._pump, daemon=True)
        self._thread.start()

    def finish(self, seconds: float) -> bytes:
        """Return the last 64 KiB, once all was read or `seconds` have passed (another process holds
        the pipe)."""
        self._thread.join(seconds)
        self._log.drain(seconds)
        return self._tail

    def _pump(self) -> None:
        splitter = OutputLines()
        ended = False
        while not ended:
            data = os.read(self._reader, _PIECE_BYTES)
            now, ended = time.time(), not data
            data = self._redacted.feed(data)
            self._tail = (self._tail + data[-_TAIL_BYTES:])[-_TAIL_BYTES:]
            lines = splitter.feed(data, now) + (splitter.close() if ended else b"")
            self._log.put(prefixed(lines, stamp(now) + self._prefix))
            if self._passed_on is not None:
                self._passed_on.put(prefixed(lines, self._prefix) if self._prefix else data)
        os.close(self._reader)


def prefixes_ranks(command: Sequence[str]) -> bool:
    """Whether a command starts its ranks through exec_command.py."""
    return any(os.path.basename(word) == "exec_command.py" for word in command)


class RankPipes:
    """A pipe for each rank that torchrun starts on a node in one attempt. Raises OSError where none
    can be made.

    A line gets `[default3]:` before it, which is what torchrun's `--tee` writes for local rank 3,
    and log readers know it. (`--tee` itself sends every line through a file that is never deleted
    and polled ten times a second.) The pipes lie in the launch directory, which a command in a
    container sees too, or on this host's own disk where that takes none (a mounted bucket). Those
    of a killed agent are removed when the next attempt of its node begins, where no process of this
    host reads them; the fence lets none begin while an earlier start's may still run.
    """

    def __init__(
        self,
        launch_directory: Path,
        node: int,
        count: int,
        log: Sink,
        passed_on: Sink | None,
        redactor: Redactor | None = None,
    ) -> None:
        prefix = f"node-{node}.ranks-"
        _clear(launch_directory, prefix)
        try:
            self.directory, ends = _make_pipes(prefix, count, launch_directory)
        except OSError:
            self.directory, ends = _make_pipes("drillyard-", count, None)
        self._writers = [writer for _, writer in ends]
        self._pumps = [
            Pump(reader, log, passed_on, f"[default{local}]:".encode(), redactor)
            for local, (reader, _) in enumerate(ends)
        ]

    def finish(self, seconds: float) -> list[bytes]:
        """Return the last 64 KiB of each rank, once everything was read or `seconds` have
        passed."""
        for writer in self._writers:
            os.close(writer)
        deadline = time.monotonic() + seconds
        tails = [pump.finish(max(0.0, deadline - time.monotonic())) for pump in self._pumps]
        shutil.rmtree(self.directory, ignore_errors=True)
        return tails


def _make_pipes(prefix: str, count: int, parent: Path | None) -> tuple[Path, list[tuple[int, int]]]:
    """Make a directory with `count` pipes; returns it and their ends (reader, writer). Raises
    OSError, leaving nothing."""
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    ends: list[tuple[int, int]] = []
    with contextlib.ExitStack() as unless_made:
        unless_made.callback(shutil.rmtree, directory, ignore_errors=True)
        for local in range(count):
            path = directory / str(local)
            os.mkfifo(path, 0o600)
            reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            unless_made.callback(os.close, reader)
            # Keep a writer, so that the reader meets no end of file before the rank has opened the
            # pipe.
            writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            unless_made.callback(os.close, writer)
            os.set_blocking(reader, True)
            with contextlib.suppress(OSError):
                # Beyond this user's limit for pipes the default size works too.
                fcntl.fcntl(reader, _F_SETPIPE_SZ, _PIPE_BYTES)
            ends.append((reader, writer))
        unless_made.pop_all()
    return directory, ends


def _clear(launch_directory: Path, prefix: str) -> None:
    """Remove directories of this node whose pipes no process of this host reads."""
    for directory in launch_directory.glob(f"{prefix}*"):
        if not any(_is_read(path) for path in directory.glob("*")):
            shutil.rmtree(directory, ignore_errors=True)


def _is_read(path: Path) -> bool:
    """Whether a process of this host has the reading end of a pipe open; the check does not disturb
    it."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        # ENXIO, where there is no reader.
        return False
    return True
