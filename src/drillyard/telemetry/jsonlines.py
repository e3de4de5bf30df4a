"""JSON lines that survive crashes: how every log of a run directory is written and read.

The idea: one `write()` of one whole line on a descriptor opened with O_APPEND. The kernel then places lines of several
processes after one another, a line is in the page cache the moment `write` returns (so a killed process loses nothing
that it logged), and the only damage a crash can do is one torn line. A writer that finds a torn last line starts on a
fresh one; a reader passes over lines that are not JSON objects.

JSON has no NaN or Infinity, and strict readers refuse them. Such a value is written as null, and the field
`nonfinite` of the same object names it, nested as it was: `{"loss": null, "nonfinite": {"loss": "nan"}}`. Finite
floats are written with `repr`, so they are read back to the bit.

A file that cannot be written (disk full, read-only, mount gone) never ends a training run: its lines wait in memory and
are written, whole and in order, when it can be again.

Cost: about 10 microseconds per line. Limits: appends are atomic on local file systems; on NFS and object-store mounts
only those of one host are. On an object-store mount a line is on this host alone until `sync` or `close`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from drillyard.errors import UserError
from drillyard.redaction import redact
from drillyard.safe_files import NO_ROOM, describe_os_error

WAITING_BYTES = 16 * 1024**2
# After these the descriptor is as good as before; after others the file may be another one when it is there again.
_SAME_DESCRIPTOR = NO_ROOM | {errno.EFBIG, errno.EINTR}

_encode = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(", ", ": ")).encode


def encode(record: dict[str, Any]) -> str:
    """One JSON object on one line, without its newline; non-finite floats become null and are named in `nonfinite`."""
    try:
        return _encode(record)
    except ValueError:
        finite, nonfinite = _split_nonfinite(record)
        return _encode({**finite, "nonfinite": nonfinite})


def _split_nonfinite(value: Any) -> tuple[Any, Any]:
    """`value` with null for non-finite floats, and these alone as text in the same nesting (None if there are none)."""
    if isinstance(value, float) and not math.isfinite(value):
        return None, repr(value)
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        parts = {str(key): _split_nonfinite(item) for key, item in items}
        finite = {key: part[0] for key, part in parts.items()}
        nonfinite = {key: part[1] for key, part in parts.items() if part[1] is not None}
        return (finite if isinstance(value, dict) else list(finite.values())), nonfinite or None
    return value, None


def _join_nonfinite(finite: Any, nonfinite: dict[str, Any]) -> None:
    """Put the non-finite floats back into their places."""
    for name, text in nonfinite.items():
        key = int(name) if isinstance(finite, list) else name
        if isinstance(text, dict):
            _join_nonfinite(finite[key], text)
        else:
            finite[key] = float(text)


def decode(line: bytes | str) -> dict[str, Any] | None:
    """The object of one line with its non-finite floats restored; None for a torn or foreign line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    try:
        _join_nonfinite(record, record.pop("nonfinite", {}))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return None
    return record


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file in order; a file that is not there has none, torn lines are passed over."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            record = decode(line)
            if record is not None:
                yield record


def _warn(text: str) -> None:
    with contextlib.suppress(OSError):
        # Standard error may be a file on the disk that the warning is about.
        print(f"warning: {text}", file=sys.stderr, flush=True)


class LineFile:
    """An append-only text file, one `write()` per line; several processes and threads may write to it.

    Opening raises UserError (nothing has been lost yet, so the user should know). A failure to write later does not
    raise: the line waits in memory, and every further `write` tries again, on a file opened anew where the old one is
    gone with its mount; lines since the last `sync` that are then missing are written again. `tell(text)` is called
    once when that begins and once when it is over. Lines that come when `WAITING_BYTES` are waiting already are lost;
    `lost_lines` counts them.
    """

    def __init__(self, path: Path, tell: Callable[[str], None] = _warn) -> None:
        self.path = path
        self.lost_lines = 0
        self._tell = tell
        self._lock = threading.Lock()
        self._waiting = bytearray()
        self._descriptor: int | None = None
        self._in_trouble = False
        self._torn = False
        self._unsynced = bytearray()
        self._synced_bytes = 0
        try:
            self._open()
            self._synced_bytes = os.fstat(self._descriptor or 0).st_size
        except OSError as error:
            raise UserError(
                f"{path}: cannot be written: {describe_os_error(error)}, or choose another directory with `output:`."
            ) from error

    def write(self, line: str) -> None:
        """Append `line` and a newline, after a newline of its own where the file ends in a torn line."""
        self._report(self._append((redact(line) + "\n").encode("utf-8", "backslashreplace")))

    def sync(self) -> None:
        """Make what was written durable: flushed to the disk, and closed, which is when object-store mounts upload."""
        self._report(self._append(b""))
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is None:
                return
            try:
                try:
                    os.fsync(descriptor)
                    size = os.fstat(descriptor).st_size
                finally:
                    os.close(descriptor)
                self._synced_bytes = size
                self._unsynced.clear()
                self._open()
            except OSError:
                # The next write opens it again, and then finds out what is missing, or tells that it cannot.
                return

    def close(self) -> None:
        """Write what waits, say how many lines are lost if any are, and close the file."""
        if self._waiting:
            self._report(self._append(b""))
        with self._lock:
            self.lost_lines += self._waiting.count(b"\n")
            self._waiting.clear()
        if self.lost_lines:
            self._tell(f"{self.path}: {self.lost_lines} lines could not be written and are lost")
        with self._lock:
            self._close()

    def _append(self, data: bytes) -> str | None:
        """Write what waits and `data` behind it; returns what there is to tell."""
        with self._lock:
            if data and len(self._waiting) + len(data) > WAITING_BYTES:
                self.lost_lines += 1
            else:
                self._waiting += data
            waited = self._waiting.count(b"\n")
            try:
                if self._descriptor is None:
                    self._open()
                    self._waiting[:0] = self._vanished()
                self._write_all()
            except OSError as error:
                if error.errno not in _SAME_DESCRIPTOR:
                    self._close()
                begins, self._in_trouble = not self._in_trouble, True
                text = (
                    f"{self.path}: cannot be written ({describe_os_error(error)}); "
                    "its lines wait in memory, training goes on"
                )
                return text if begins else None
            ends, self._in_trouble = self._in_trouble, False
            return f"{self.path}: is written again, with the {waited} lines that have waited" if ends else None

    def _write_all(self) -> None:
        """Write all that waits; where that fails, what lines were taken wait no longer. Raises OSError."""
        assert self._descriptor is not None
        newline = b"\n" if self._torn else b""
        data, written = newline + self._waiting, 0
        try:
            while written < len(data):
                # After a write that took a part, the next one takes the rest or says why not.
                written += os.write(self._descriptor, data[written:])
        finally:
            if written >= len(newline):
                self._settle(written - len(newline))

    def _settle(self, taken: int) -> None:
        """Account for `taken` bytes of what waits. A line that was taken in part is taken back, and waits on whole."""
        lacks_only_newline = self._waiting[taken : taken + 1] == b"\n"
        whole = taken if lacks_only_newline else self._waiting.rfind(b"\n", 0, taken) + 1
        self._torn = taken > whole and not self._taken_back(taken - whole)
        self._unsynced += self._waiting[:whole]
        del self._waiting[:whole]
        del self._unsynced[: max(0, len(self._unsynced) - WAITING_BYTES)]

    def _taken_back(self, num_bytes: int) -> bool:
        """Cut off the last bytes that were written, so that strict readers find whole lines alone.

        Not when another process has appended meanwhile, which a full disk hardly lets it: then a newline follows.
        """
        assert self._descriptor is not None
        end = os.lseek(self._descriptor, 0, os.SEEK_CUR)
        if os.fstat(self._descriptor).st_size != end:
            return False
        try:
            os.ftruncate(self._descriptor, end - num_bytes)
        except OSError:
            return False
        return True

    def _vanished(self) -> bytes:
        """The lines since the last sync that the file, opened again, does not have: they went with its mount."""
        assert self._descriptor is not None
        start = min(self._synced_bytes, os.fstat(self._descriptor).st_size)
        there = set(os.pread(self._descriptor, 2 * WAITING_BYTES, start).splitlines(keepends=True))
        lines, self._unsynced = self._unsynced.splitlines(keepends=True), bytearray()
        return b"".join(bytes(line) for line in lines if bytes(line) not in there)

    def _report(self, text: str | None) -> None:
        if text is not None:
            self._tell(text)

    def _open(self) -> None:
        """Open the file, or make it: on an object-store mount that went before the first upload it is not there.

        The directory is never made: where its mount is gone, that would be another one.
        """
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        size = os.fstat(self._descriptor).st_size
        self._torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"

    def _close(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                # A write that failed late; the next one would have told.
                os.close(self._descriptor)
        self._descriptor = None
