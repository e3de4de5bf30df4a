"""What a node's command prints: stamped line by line into node-K.log, and passed on unchanged to the agent's output.

The ranks must never wait for a disk or a terminal. A thread reads the pipe in large pieces and hands them to sinks,
each with a thread and a bounded memory of its own; what a sink cannot take in time, or a full disk refuses, is left
out and said with its size when it takes lines again. All lines of one piece arrived together and get one stamp, so
stamping is one `bytes.replace` (hundreds of MB/s in CPython) and not a loop over lines.

A progress bar draws over its own line with carriage returns: of those drawings, one per second is kept as a line.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from .shared_modules import redaction

_PIECE_BYTES = 1 << 20
_SINK_BYTES = 64 << 20
_TAIL_BYTES = 64 << 10
_LINE_BYTES = 1 << 20
_SECONDS_OF_REDRAW = 1.0


def stamp(seconds: float) -> bytes:
    """`2026-11-21T22:55:10.123456Z `: UTC, always 28 bytes with the blank."""
    microseconds = round(seconds * 1e6)
    whole, rest = divmod(microseconds, 1_000_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)).encode() + b".%06dZ " % rest


class Stamper:
    """Bytes in, stamped whole lines out, each with `mark` after its stamp. A line that has not ended waits, at most
    1 MiB of it."""

    def __init__(self, mark: bytes = b"") -> None:
        self._mark = mark
        self._open = b""
        self._redrawn_at = 0.0

    def feed(self, data: bytes, now: float) -> bytes:
        """The lines that `data` completes; `now` is in Unix seconds."""
        data = self._open + data
        ended = data.rfind(b"\n") + 1
        lines, self._open = data[:ended], data[ended:]
        if b"\r" in lines:
            lines = b"".join(_drawn(line) + b"\n" for line in lines.split(b"\n")[:-1])
        lines += self._redraw(now)
        if len(self._open) > _LINE_BYTES:
            lines, self._open = lines + self._open + b"\n", b""
        return _stamped(lines, stamp(now) + self._mark)

    def close(self, now: float) -> bytes:
        """What is left of a line that never ended."""
        left, self._open = _drawn(self._open), b""
        return _stamped(left + b"\n", stamp(now) + self._mark) if left else b""

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


def _stamped(lines: bytes, mark: bytes) -> bytes:
    if not lines:
        return b""
    return mark + lines[:-1].replace(b"\n", b"\n" + mark) + b"\n"


def _bare(lines: bytes, mark: bytes) -> bytes:
    """Lines without the mark at the begin of each."""
    return lines[len(mark) :].replace(b"\n" + mark, b"\n")


def _drawn(line: bytes) -> bytes:
    """What a terminal would show of a line that was drawn several times: the last drawing."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Sink:
    """A file descriptor that is written by a thread of its own; `put` never waits."""

    def __init__(self, descriptor: int, gap: str, limit: int = _SINK_BYTES) -> None:
        self._descriptor = descriptor
        self._gap = gap
        self._limit = limit
        self._waiting: list[bytes] = []
        self._bytes = 0
        self._left_out = 0
        self._closed = False
        self._hurried = False
        self._writing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._write_on, daemon=True)
        self._thread.start()

    def put(self, data: bytes) -> None:
        """Have `data` written soon, in one piece, or leave it out where too much waits already."""
        if not data:
            return
        with self._changed:
            if self._bytes + len(data) > self._limit:
                self._left_out += len(data)
                return
            self._waiting.append(data)
            self._bytes += len(data)
            self._changed.notify_all()

    @property
    def busy_bytes(self) -> int:
        """What waits and was not handed to the descriptor yet."""
        with self._changed:
            return self._bytes

    def drain(self, seconds: float) -> None:
        """Wait until all is written, at most so long."""
        deadline = time.monotonic() + seconds
        with self._changed:
            self._hurried = True
            self._changed.notify_all()
            while (self._waiting or self._writing) and time.monotonic() < deadline:
                self._changed.wait(max(0.0, deadline - time.monotonic()))
            self._hurried = False

    def close(self) -> None:
        """Write what waits, for at most five seconds. The descriptor stays open."""
        self.drain(5.0)
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _write_on(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if not self._waiting:
                    return
                self._gather()
                data, self._waiting, self._bytes = b"".join(self._waiting), [], 0
                self._writing = True
                left_out, self._left_out = self._left_out, 0
            if left_out:
                data = self._note(left_out) + data
            lost = self._write(data)
            with self._changed:
                self._left_out += lost
                self._writing = False
                self._changed.notify_all()

    def _gather(self) -> None:
        """Wait for more, where writing often costs; `_changed` is held."""

    def _note(self, left_out: int) -> bytes:
        return stamp(time.time()) + f"=== {left_out} bytes of output {self._gap}\n".encode()

    def _write(self, data: bytes) -> int:
        """Write `data`; returns how many bytes could not be: a full disk, a reader that is gone."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._descriptor, view[:_PIECE_BYTES]) :]
            except OSError:
                # Tried again with the next piece: what is full now may not be then.
                time.sleep(0.05)
                return len(view)
        return 0


def open_log(path: Path) -> Sink:
    """The sink of a node's log, which is appended to. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    return Sink(descriptor, "could not be written here")


class Pump:
    """Reads what one round's command prints until all writers are gone. With `mark`, which each line gets then, what is
    passed on are marked lines; without, it is what was read. What `redactor` knows is in neither, nor in the tail."""

    def __init__(
        self,
        reader: int,
        log: Sink,
        passed_on: Sink | None,
        mark: bytes = b"",
        redactor: redaction.Redactor | None = None,
    ) -> None:
        self._mark = mark
        self._redacted = redaction.RedactedStream(redactor or redaction.Redactor())
        self._reader = reader
        self._log = log
        self._passed_on = passed_on
        self._tail = b""
        self._thread = threading.Thread(target=self._pump, daemon=True)
        self._thread.start()

    def finish(self, seconds: float) -> bytes:
        """The last 64 KiB, once everything was read or `seconds` have passed (somebody else holds the pipe)."""
        self._thread.join(seconds)
        self._log.drain(seconds)
        return self._tail

    def _pump(self) -> None:
        stamper = Stamper(self._mark)
        ended = False
        while not ended:
            data = os.read(self._reader, _PIECE_BYTES)
            now, ended = time.time(), not data
            data = self._redacted.feed(data)
            self._tail = (self._tail + data[-_TAIL_BYTES:])[-_TAIL_BYTES:]
            lines = stamper.feed(data, now) + (stamper.close(now) if ended else b"")
            self._log.put(lines)
            if self._passed_on is not None:
                self._passed_on.put(_bare(lines, stamp(now)) if self._mark else data)
        os.close(self._reader)
