"""A stream of bytes as blocks of whole lines: what every reader of logs loops over.

The idea: work on megabyte blocks in C (find, count, one pattern over many lines), never on single lines in Python. A
block ends with a line's end, so no line is ever seen in halves; what comes after the last line's end is held back until
it is finished and counted as unfinished when the stream ends without it. A step record can so never be read from a line
that was cut.

Terminal colours are taken out. A carriage return (progress bars redraw their line with it) becomes a line's end for
searching, while lines are counted by newlines alone, as editors do.

Cost: about 1 ms per MiB with colours, 0.3 ms without, most of it for memory that is touched for the first time. Limits:
a line longer than `LONGEST_LINE` is no log line (binary files): it is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    # Only who reads much needs it: a tenth of a second of a command's start.
    import numpy as np
    from numpy.typing import NDArray

BLOCK_BYTES: Final = 1 << 20
LONGEST_LINE: Final = 1 << 20
_HEAD_BYTES: Final = 256
_LINE_END: Final = ord("\n")

_COLOUR: Final = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)")
_MANY_COLOURS: Final = 24
_SEVERAL_RETURNS: Final = re.compile(rb"(?<!\r)\r++\n")


@dataclass(frozen=True, slots=True)
class LineBlock:
    """Whole lines. `text` is what to search: no colours, every redraw a line of its own, each line with its end.

    `first_line` is the number of its first line (from 1), `lines` how many it has. `counted` has the same offsets as
    `text` with newlines only where the file has them.
    """

    text: bytes
    counted: bytes
    first_line: int
    lines: int
    head: bytes = b""
    """The beginning of the line in which the block begins, when that is in a block before (between two redraws)."""

    def line_head(self, offset: int) -> bytes:
        """The beginning of the file's line at `offset`, of which only the first drawing has a launcher's prefix."""
        begin = self.counted.rfind(b"\n", 0, offset) + 1
        return self.head if not begin and self.head else self.counted[begin : begin + _HEAD_BYTES]

    @property
    def redrawn(self) -> bool:
        """Whether lines were redrawn, so that `text` has more of them than the file."""
        return self.text is not self.counted

    def line_number(self, offset: int, since: int = 0, line: int = 0) -> int:
        """The number of the line at `offset`; going through a block in order, pass the offset before and its line."""
        return (line or self.first_line) + self.counted.count(b"\n", since, offset)

    def line_at(self, offset: int) -> tuple[int, int]:
        """Where the line around `offset` begins and ends (without its end)."""
        begin = self.text.rfind(b"\n", 0, offset) + 1
        return begin, self.text.find(b"\n", offset)


class LineSplitter:
    """Turns pieces of a stream into blocks: `feed` bytes as they come, `finish` at the end.

    Counts: `bytes`, `lines` (finished ones), `unfinished` (1 after `finish` when the last line has no end),
    `overlong` lines.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._head = b""
        self._skipping = False
        self.bytes = 0
        self.lines = 0
        self.unfinished = 0
        self.overlong = 0

    def feed(self, piece: bytes) -> LineBlock | None:
        """The block of all lines that are whole now; None when no line's end has come."""
        self.bytes += len(piece)
        if self._skipping:
            end = piece.find(b"\n")
            if end < 0:
                return None
            piece, self._skipping = piece[end + 1 :], False
            self.lines += 1
        if self._rest.endswith(b"\r"):
            # Whether that was a redraw or half of a line's end, only what follows it tells.
            held = len(self._rest) - len(self._rest.rstrip(b"\r"))
            self._rest, piece = self._rest[:-held], b"\r" * held + piece
        end = max(piece.rfind(b"\n"), piece.rfind(b"\r", 0, len(piece.rstrip(b"\r")))) + 1
        if not end:
            self._rest += piece
            if len(self._rest) > LONGEST_LINE:
                self._rest, self._skipping = b"", True
                self.overlong += 1
            return None
        raw = b"".join((self._rest, memoryview(piece)[:end]))
        self._rest = piece[end:]
        first = self.lines + 1
        lines = count_lines(raw)
        self.lines += lines
        counted = without_colours(raw)
        if b"\r" in counted:
            # How other systems and terminals end a line, once or several times over: no redraw.
            counted = counted.replace(b"\r\n", b"\n")
            if b"\r\n" in counted:
                counted = _SEVERAL_RETURNS.sub(b"\n", counted)
        text = counted.replace(b"\r", b"\n") if b"\r" in counted else counted
        head = self._head
        if counted.endswith(b"\n"):
            self._head = b""
        elif lines or not head:
            self._head = counted[counted.rfind(b"\n") + 1 :][:_HEAD_BYTES]
        return LineBlock(text, counted, first, lines, head)

    def finish(self) -> None:
        """The stream has ended: what is left is an unfinished line."""
        self.unfinished = int(bool(self._rest) or self._skipping)


def count_lines(text: bytes) -> int:
    """How many lines' ends there are: four times as fast as `bytes.count` where lines are short."""
    import numpy as np

    return int(np.count_nonzero(np.frombuffer(text, np.uint8) == _LINE_END))


def line_ends(text: bytes | bytearray) -> NDArray[np.int64]:
    """Where the lines of a text end."""
    import numpy as np

    return np.flatnonzero(np.frombuffer(text, np.uint8) == _LINE_END)


class Readable(Protocol):
    """Anything that gives bytes."""

    def read(self, count: int = -1, /) -> bytes:
        """At most `count` bytes; none at the end."""


def read_blocks(stream: Readable, blocks: LineSplitter) -> Iterator[LineBlock]:
    """All blocks of a stream, read `BLOCK_BYTES` at a time."""
    while piece := stream.read(BLOCK_BYTES):
        block = blocks.feed(piece)
        if block is not None:
            yield block
    blocks.finish()


def without_colours(text: bytes) -> bytes:
    """`text` without terminal escape sequences. Logs use few of them, so each is replaced as a whole."""
    if b"\x1b" not in text:
        return text
    for _ in range(_MANY_COLOURS):
        found = _COLOUR.search(text)
        if found is None:
            return text
        text = text.replace(found[0], b"")
    return _COLOUR.sub(b"", text)
