"""JSON lines that survive crashes: how every log of a run directory is written and read.

One `write()` of one whole line on a descriptor opened with O_APPEND: the kernel places lines of
several processes after one another, a killed process loses nothing that it logged, and a crash
damages one line at most. A writer that finds a torn last line starts a new one; a reader skips
lines that are not JSON objects.

JSON has no NaN or Infinity. Such a value is written as null, and the field `nonfinite` of the same
object names it, nested as it was: `{"loss": null, "nonfinite": {"loss": "nan"}}`. Finite floats are
written with `repr` and read back to the bit.

A file that cannot be written (disk full, read-only, mount gone) never ends a training run: its
lines wait in memory and are written, whole and in order, once that is possible again.

Cost: about 10 microseconds per line. Limits: appends are atomic on local file systems; on NFS and
object-store mounts only those of one host are. On an object-store mount a line is on this host
alone until `sync` or `close`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from drillyard.errors import UserError
from drillyard.guarded_files import read_lines
from drillyard.redaction import redact
from drillyard.safe_files import NO_ROOM, describe_os_error

WAITING_BYTES = 16 * 1024**2
# After these errors the descriptor is still good; after others the path may lead to another file.
_SAME_DESCRIPTOR = NO_ROOM | {errno.EFBIG, errno.EINTR}

_encode = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(", ", ": ")).encode


def encode(record: dict[str, Any]) -> str:
    """One JSON object on one line, without its newline; non-finite floats become null and are named
    in `nonfinite`."""
    try:
        return _encode(record)
    except ValueError:
        finite, nonfinite = _split_nonfinite(record)
        return _encode({**finite, "nonfinite": nonfinite})


def _split_nonfinite(value: Any) -> tuple[Any, Any]:
    """`value` with null for non-finite floats, and those floats as text in the same nesting (None
    without any)."""
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
    for name, text in nonfinite.items():
        key = int(name) if isinstance(finite, list) else name
        if isinstance(text, dict):
            _join_nonfinite(finite[key], text)
        else:
            finite[key] = float(text)


def decode(line: bytes | str) -> dict[str, Any] | None:
    """The object of one line with its non-finite floats restored; None for a torn or foreign
    line."""
    try:
        record = json.loads(line)
        if not isinstance(record, dict):
            return None
        _join_nonfinite(record, record.pop("nonfinite", {}))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RecursionError):
        return None
    return record


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file in order; none for a missing file. Torn lines are skipped.

    Raises UnsafeFileError for a line that is too long to be one, and for a device or a
    pipe.
    """
    with contextlib.suppress(FileNotFoundError):
        for line in read_lines(path):
            if (record := decode(line)) is not None:
                yield record


class LineFile:
    """An append-only text file, one `write()` per line; several processes and threads may write to
    it.

    Opening raises UserError: nothing has been lost yet. A later failure to write does not raise:
    the line waits in memory, and each further `write` tries again, on a reopened file where the
    mount was lost; lines since the last `sync` that the reopened file lacks are written again.
    `warn(text)` is called when that begins and when it is over. Lines beyond `WAITING_BYTES` of
    waiting ones are lost; `lost_lines` counts them.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self.path = path
        self.lost_lines = 0
        self._warn = warn
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
                f"{path}: cannot be written: {describe_os_error(error)}, or choose another"
                " directory with `output:`."
            ) from error

    def write(self, line: str) -> None:
        """Append `line` and a newline; a torn last line is ended first."""
        self._append((redact(line) + "\n").encode("utf-8", "backslashreplace"))

    def sync(self) -> None:
        """Flush to the disk, and close and reopen: object-store mounts upload on close."""
        self._append(b"")
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
                return  # the next write reopens it, and writes what is missing or warns

    def close(self) -> None:
        """Write what waits, warn of lost lines, and close the file."""
        if self._waiting:
            self._append(b"")
        with self._lock:
            self.lost_lines += self._waiting.count(b"\n")
            self._waiting.clear()
        if self.lost_lines:
            self._warn(f"{self.path}: {self.lost_lines} lines could not be written and are lost")
        with self._lock:
            self._close()

    def _append(self, data: bytes) -> None:
        if (warning := self._try_append(data)) is not None:
            self._warn(warning)

    def _try_append(self, data: bytes) -> str | None:
        """Write what waits and then `data`; returns a warning when a problem begins or ends."""
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
            return (
                f"{self.path}: is written again, with the {waited} lines that have waited"
                if ends
                else None
            )

    def _write_all(self) -> None:
        """Write all that waits; lines written before an OSError wait no longer."""
        assert self._descriptor is not None
        newline = b"\n" if self._torn else b""
        data, written = newline + self._waiting, 0
        try:
            while written < len(data):
                # After a partial write the next one takes the rest or raises.
                written += os.write(self._descriptor, data[written:])
        finally:
            if written >= len(newline):
                self._settle(written - len(newline))

    def _settle(self, taken: int) -> None:
        """Drop the first `taken` bytes of what waits. A line written in part is cut off the file
        and waits whole."""
        lacks_only_newline = self._waiting[taken : taken + 1] == b"\n"
        whole = taken if lacks_only_newline else self._waiting.rfind(b"\n", 0, taken) + 1
        self._torn = taken > whole and not self._taken_back(taken - whole)
        self._unsynced += self._waiting[:whole]
        del self._waiting[:whole]
        del self._unsynced[: max(0, len(self._unsynced) - WAITING_BYTES)]

    def _taken_back(self, num_bytes: int) -> bool:
        """Cut off the last bytes written, so that strict readers find whole lines only; False where
        another process has appended meanwhile (then a newline follows)."""
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
        """The lines since the last sync that the reopened file lacks: they were lost with its
        mount."""
        assert self._descriptor is not None
        start = min(self._synced_bytes, os.fstat(self._descriptor).st_size)
        there = set(os.pread(self._descriptor, 2 * WAITING_BYTES, start).splitlines(keepends=True))
        lines, self._unsynced = self._unsynced.splitlines(keepends=True), bytearray()
        return b"".join(bytes(line) for line in lines if bytes(line) not in there)

    def _open(self) -> None:
        """Open or create the file (a mount lost before its first upload has none), but never its
        directory: without the mount that would be another one."""
        self._descriptor = os.open(
            self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666
        )
        status = os.fstat(self._descriptor)
        if stat.S_ISFIFO(status.st_mode):
            # Nobody reads it, so it takes 64 KiB and then blocks its writer.
            self._close()
            raise OSError(errno.EINVAL, "it is a named pipe: remove it")
        size = status.st_size
        self._torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"

    def _close(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
        self._descriptor = None
