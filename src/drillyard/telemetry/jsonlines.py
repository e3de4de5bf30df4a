"""JSON lines that survive crashes: how every log of a run directory is written and read.

The idea: one `write()` of one whole line on a descriptor opened with O_APPEND. The kernel then places lines of several
processes after one another, a line is in the page cache the moment `write` returns (so a killed process loses nothing
that it logged), and the only damage a crash can do is one torn line. A writer that finds a torn last line starts on a
fresh one; a reader passes over lines that are not JSON objects.

JSON has no NaN or Infinity, and strict readers refuse them. Such a value is written as null, and the field
`nonfinite` of the same object names it, nested as it was: `{"loss": null, "nonfinite": {"loss": "nan"}}`. Finite
floats are written with `repr`, so they are read back to the bit.

Cost: about 10 microseconds per line. Limits: appends are atomic on local file systems and not on NFS; telemetry that
fails (disk full, read-only) never ends a training run: it warns once on stderr, counts the lost lines and goes on.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drillyard.errors import UserError

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
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    _join_nonfinite(record, record.pop("nonfinite", {}))
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


class LineFile:
    """An append-only text file, one `write()` per line.

    Opening raises UserError (nothing has been lost yet, so the user should know); a failure to write later does not
    raise. `lost_lines` counts what could not be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost_lines = 0
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UserError(
                f"{path}: cannot be written: {error.strerror}. Choose a writable directory with `output:`."
            ) from error
        size = os.fstat(self._descriptor).st_size
        self._torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"

    def write(self, line: str) -> None:
        """Append `line` and a newline, after a newline of its own where the file ends in a torn line."""
        data = (("\n" if self._torn else "") + line + "\n").encode("utf-8", "backslashreplace")
        written = 0
        try:
            written = os.write(self._descriptor, data)
            if written == len(data):
                self._torn = False
                return
            reason = "the disk is full"
        except OSError as error:
            reason = error.strerror or str(error)
        self._torn = self._torn or written > 0
        self.lost_lines += 1
        if self.lost_lines == 1:
            print(f"warning: {self.path}: a line could not be written ({reason}); training goes on", file=sys.stderr)

    def close(self) -> None:
        """Close the file, and say how many lines were lost if any were."""
        os.close(self._descriptor)
        if self.lost_lines:
            print(f"warning: {self.path}: {self.lost_lines} lines could not be written", file=sys.stderr)
