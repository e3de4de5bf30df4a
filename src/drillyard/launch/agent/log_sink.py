"""Where a node's output is written: files and terminals that may be slow, full or gone, by a thread for each.

On a mounted bucket (Cloud Storage FUSE) others see what was written to a file once it is closed, and appending rewrites
an object. There a `SegmentedLog` gathers lines for some seconds and writes them into `node-K.log` until that is large,
then into `node-K.log.0001`, ...; a file is open only while it is written, and an agent that was started again begins
a new one. Cost: an object of at most some MiB is rewritten every few seconds while something is printed, and an agent
that is killed loses `GATHER_SECONDS` of lines.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

_PIECE_BYTES = 1 << 20
_SINK_BYTES = 64 << 20
GATHER_SECONDS = 5.0
SEGMENT_BYTES = 4 << 20
_ENOUGH_BYTES = 16 << 20


def stamp(seconds: float) -> bytes:
    """`2026-11-21T22:55:10.123456Z `: UTC, always 28 bytes with the blank."""
    microseconds = round(seconds * 1e6)
    whole, rest = divmod(microseconds, 1_000_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)).encode() + b".%06dZ " % rest


def stamped_line(text: str) -> bytes:
    """A line of a node's log, as of now."""
    return stamp(time.time()) + text.encode(errors="replace") + b"\n"


class Sink:
    """A file descriptor that is written by a thread of its own; `put` never waits. What cannot be written in time, or
    meets a full disk, is left out; its size is written, with the words `gap`, once lines can be written again."""

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
        """Queue `data` to be written in one piece, or leave it out where too much waits already."""
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


class SegmentedLog(Sink):
    """A node's log on a mounted bucket."""

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
        return self._log if self._number == 0 else self._log.with_name(f"{self._log.name}.{self._number:04d}")

    def _gather(self) -> None:
        patience = self._written_at + GATHER_SECONDS - time.monotonic()
        self._changed.wait_for(
            lambda: self._hurried or self._closed or self._bytes >= _ENOUGH_BYTES, max(0.0, patience)
        )

    def _write(self, data: bytes) -> int:
        try:
            with self._path.open("ab") as segment:
                segment.write(data)
        except OSError:
            # Reported with the next piece, in a new segment: how much of this one is there is unknown.
            self._number, self._size = self._number + 1, 0
            time.sleep(0.05)
            return len(data)
        finally:
            self._written_at = time.monotonic()
        self._size += len(data)
        if self._size >= SEGMENT_BYTES:
            self._number, self._size = self._number + 1, 0
        return 0
