"""Division of a byte stream into blocks of whole lines, over which every log reader loops.

Blocks of a megabyte are searched in C, never line by line in Python. A block ends at a newline; an
unfinished last line is held back, and counted as unfinished when the stream ends.

Terminal colours are removed. A carriage return (progress bars redraw their line with it) becomes a
line's end for searching, while lines are counted by newlines alone, as editors do. A line longer
than `LONGEST_LINE` is skipped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    # Imported where it is needed: a tenth of a second of a command's start.
    import numpy as np
    from numpy.typing import NDArray

BLOCK_BYTES: Final = 1 << 20
LONGEST_LINE: Final = 1 << 20
LONGEST_SKIPPED_LINE: Final = 256 << 20
"""Of a log with a longer one, no more is read: it would take minutes to find the line's end."""
_HEAD_BYTES: Final = 256
_LINE_END: Final = ord("\n")

_COLOUR: Final = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)")
_SEVERAL_RETURNS: Final = re.compile(rb"(?<!\r)\r++\n")


@dataclass(frozen=True, slots=True)
class LineBlock:
    """Whole lines. `text` is what to search: no colours, every redraw a line of its own, each line
    with its end.

    `counted` has the same offsets as `text` with newlines only where the file has them: at `ends`.
    `first_line` is the number of its first line (from 1).
    """

    text: bytes
    counted: bytes
    first_line: int
    ends: NDArray[np.int64]
    head: bytes = b""
    """Beginning of the block's first line, when that line began in an earlier block (between two
    redraws)."""

    def line_head(self, offset: int) -> bytes:
        """Beginning of the file's line at `offset`, of which only the first drawing has a
        launcher's prefix."""
        begin = self.counted.rfind(b"\n", 0, offset) + 1
        return self.head if not begin and self.head else self.counted[begin : begin + _HEAD_BYTES]

    def line_numbers(self, offsets: Sequence[int]) -> NDArray[np.int64]:
        """Number in the file of the line at each offset."""
        return self.ends.searchsorted(offsets) + self.first_line

    @property
    def redrawn(self) -> bool:
        return self.text is not self.counted

    def line_at(self, offset: int) -> tuple[int, int]:
        """Begin and end (without its line end) of the line around `offset`."""
        begin = self.text.rfind(b"\n", 0, offset) + 1
        return begin, self.text.find(b"\n", offset)


class LineSplitter:
    """Splitter of a stream into blocks: `feed` bytes as they come, `finish` at the end.

    Counts `bytes`, finished `lines`, `unfinished` (1 after `finish` when the last line has no end),
    `overlong` lines, and the `skipped_bytes` of the last of those.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._head = b""
        self._skipping = False
        self.bytes = 0
        self.lines = 0
        self.unfinished = 0
        self.overlong = 0
        self.skipped_bytes = 0

    def feed(self, piece: bytes) -> LineBlock | None:
        """Return the block of all lines that are complete now; None if no line has ended."""
        self.bytes += len(piece)
        if self._skipping:
            end = piece.find(b"\n")
            if end < 0:
                self.skipped_bytes += len(piece)
                return None
            piece, self._skipping = piece[end + 1 :], False
            self.lines += 1
        if self._rest.endswith(b"\r"):
            # A redraw or half of a line end: the next byte decides.
            held = len(self._rest) - len(self._rest.rstrip(b"\r"))
            self._rest, piece = self._rest[:-held], b"\r" * held + piece
        end = max(piece.rfind(b"\n"), piece.rfind(b"\r", 0, len(piece.rstrip(b"\r")))) + 1
        if not end:
            self._rest += piece
            if len(self._rest) > LONGEST_LINE:
                self.skipped_bytes = len(self._rest)
                self._rest, self._skipping = b"", True
                self.overlong += 1
            return None
        raw = b"".join((self._rest, memoryview(piece)[:end]))
        self._rest = piece[end:]
        first = self.lines + 1
        counted = without_colours(raw)
        if b"\r" in counted:
            # Line ends of other systems, once or repeated: no redraw.
            counted = counted.replace(b"\r\n", b"\n")
            if b"\r\n" in counted:
                counted = _SEVERAL_RETURNS.sub(b"\n", counted)
        text = counted.replace(b"\r", b"\n") if b"\r" in counted else counted
        ends = line_ends(counted)
        self.lines += len(ends)
        head = self._head
        if counted.endswith(b"\n"):
            self._head = b""
        elif len(ends) or not head:
            self._head = counted[counted.rfind(b"\n") + 1 :][:_HEAD_BYTES]
        return LineBlock(text, counted, first, ends, head)

    def finish(self) -> None:
        """End the stream: the rest is an unfinished line."""
        self.unfinished = int(bool(self._rest) or self._skipping)


def line_ends(text: bytes | bytearray) -> NDArray[np.int64]:
    """Offsets at which the lines of a text end."""
    import numpy as np

    return np.flatnonzero(np.frombuffer(text, np.uint8) == _LINE_END)


class Readable(Protocol):
    """Source of bytes."""

    def read(self, count: int = -1, /) -> bytes:
        """Return at most `count` bytes; none at the end."""


def without_colours(text: bytes) -> bytes:
    """`text` without terminal escape sequences."""
    return _COLOUR.sub(b"", text) if b"\x1b" in text else text
