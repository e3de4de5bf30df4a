"""Merges logs of any size into one: lines in order of time, each with its source's prefix.

Every line has a key, its time stamp as text of fixed width (`2026-11-21T22:55:10.123456Z`); a line without a stamp has
the key of the line before it. Keys never decrease within a source. Lines are ordered by (key, source, place in the
source), and all lines up to the smallest (last key, source) of any source are final. `LogMerge` reads nothing itself;
memory is bounded by sources x piece. Cost: about 0.7 microseconds a line. Limits: a line of more than `LONGEST_LINE` is
broken there; a stamp must begin in the first 48 bytes of its line; stamps without a zone are taken for UTC.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from typing import Final, NamedTuple

from drillyard.loglines.stamps import STYLES, Stamps

LONGEST_LINE: Final = 2 << 20
KEY_BYTES: Final = 28
"""Of a stamp in the agents' form, with the blank after it."""
_DIGITS: Final = bytes.maketrans(b"123456789", b"000000000")
_SECONDS: Final = 19
"""Of an ISO stamp, without the fraction."""
_ZEROS: Final = b"0000-00-00T00:00:00.000000Z "
"""A stamp in the agents' form, all digits replaced by zeros."""
_STAMP_BEGINS: Final = 48
_ANY_STAMP: Final = re.compile(
    rb"[^\n]{0,%d}?(?<![\d.])(?:%s)"
    % (_STAMP_BEGINS, b"|".join(b"(?P<%s>%s)" % (name.encode(), style) for name, style in STYLES.items()))
)
_STYLES: Final = {name: re.compile(style) for name, style in STYLES.items()}
_FRACTION: Final = re.compile(rb"[.,](\d{1,9})")
_GOES_ON: Final = frozenset([b"0", b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"8", b"9", b".", b",", b"+", b"-", b"Z"])
"""Bytes that continue a stamp: a zone, more digits."""
_BEFORE_FRACTION: Final = 20
"""Bytes of a key up to the dot, included."""
LAST_KEY: Final = b"\xff"
_CACHED_SECONDS: Final = 100_000
_DAY_US: Final = 86_400_000_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

Keys = list[bytes]


class LogSource:
    """One of the merged logs. `order` decides between lines of one time.

    `keep` selects lines by their text, `since` drops lines with a smaller key; with `keep_untimed`, lines before the
    first stamp are kept.
    """

    def __init__(
        self,
        order: int,
        prefix: bytes,
        *,
        keep: Callable[[bytes], bool] | None = None,
        since: bytes = b"",
        keep_untimed: bool = False,
    ) -> None:
        self.order = order
        self.prefix = prefix
        self.ended = False
        self.paused = False
        """All that was written so far is read: the other logs do not wait for this one."""
        self._keep = keep
        self._since = since
        self._keep_untimed = keep_untimed
        self._open = b""
        self._last = b""
        self._times = StampKeys()
        self._keys: Keys = []
        self._lines: list[bytes] = []
        self._given = 0

    @property
    def chooses(self) -> bool:
        """Whether lines are selected by their text."""
        return self._keep is not None

    @property
    def held_lines(self) -> int:
        """How many lines are waiting to be taken."""
        return len(self._lines) - self._given

    @property
    def last_key(self) -> bytes:
        """The newest time seen; empty before the first."""
        return self._last

    def feed(self, data: bytes) -> None:
        """Add data; an unfinished line waits for the rest."""
        end = data.rfind(b"\n") + 1
        if not end:
            self._open += data
            if len(self._open) > LONGEST_LINE:
                self.cut()
            return
        self._add(self._open + data[:end])
        self._open = data[end:]

    def cut(self) -> None:
        """End the current line: the log has ended, or its file was replaced."""
        if self._open:
            rest, self._open = self._open + b"\n", b""
            self._add(rest)

    def finish(self) -> None:
        """End the log."""
        self.cut()
        self.ended = True

    def _add(self, block: bytes) -> None:
        lines = block.split(b"\n")
        lines.pop()
        keys = self._keys_of(lines)
        self._last = keys[-1]
        prefix, keep = self.prefix, self._keep
        if self._since > keys[0]:
            first, untimed = bisect_left(keys, self._since), bisect_right(keys, b"") if self._keep_untimed else 0
            keys, lines = keys[:untimed] + keys[first:], lines[:untimed] + lines[first:]
        if keep is not None:
            kept = [(key, line) for key, line in zip(keys, lines, strict=True) if keep(line)]
            keys, lines = [key for key, _ in kept], [line for _, line in kept]
        if self._given:
            del self._keys[: self._given], self._lines[: self._given]
            self._given = 0
        self._keys += keys
        self._lines += [prefix + line for line in lines] if prefix else lines

    def _keys_of(self, lines: list[bytes]) -> Keys:
        keys = [line[:KEY_BYTES] for line in lines] if all_stamped([lines[0][:KEY_BYTES]]) else []
        if not keys or not all_stamped(keys):
            keys = self._times.keys(lines, self._last)
        if keys[0] < self._last or sorted(keys) != keys:
            keys = list(accumulate(keys, max, initial=self._last))
            del keys[0]
        return keys

    def take(self, key: bytes, order: int) -> tuple[Keys, list[bytes]]:
        """Remove and return keys and lines up to the pair (key, order)."""
        cut = bisect_right if self.order <= order else bisect_left
        end = cut(self._keys, key, self._given)
        taken = self._keys[self._given : end], self._lines[self._given : end]
        self._given = end
        return taken


class _Form(NamedTuple):
    """ISO stamps that differ in their digits alone, at the same place of their lines."""

    shape: bytes
    """With the byte behind it, all digits replaced by zeros."""
    begin: int
    second: int
    """Where the whole seconds end, ..."""
    digits: slice
    """... where the digits of their fraction are that a key has, ..."""
    rest: bytes
    """... and what a key has after those."""
    zone: bytes


class StampKeys:
    """Keys of lines that have stamps of other forms, or none.

    Most lines of a block have stamps of one form. Then each second is converted once for all its lines, and the
    fraction is copied: three slices a line, and no pattern.
    """

    def __init__(self) -> None:
        self._stamps = Stamps()
        self._seconds: dict[bytes, bytes | None] = {}
        self._usual = ("iso", 0)
        self._latest = b""

    def keys(self, lines: list[bytes], before: bytes) -> Keys:
        """One key a line; `before` for lines until the first stamp. Dates of tomorrow or later are not times of
        lines."""
        self._latest = key_of(round(time.time() * 1e6) + _DAY_US)
        form = self._form_in(lines)
        if form is None:
            return [before := self._key_of(line, before) for line in lines]
        shape, begin, second, digits, rest, zone = form
        end = begin + len(shape)
        begins: dict[bytes, bytes | None] = {}
        keys = []
        for line in lines:
            key = None
            if line[begin:end].translate(_DIGITS) == shape:
                text = line[begin:second]
                if text not in begins:
                    begins[text] = self._second(text + zone)
                key = begins[text]
            before = self._key_of(line, before) if key is None else key + line[digits] + rest
            keys.append(before)
        return keys

    def _form_in(self, lines: list[bytes]) -> _Form | None:
        """The form of the first line with a stamp at the usual place; None where that is not an ISO stamp."""
        style, begin = self._usual
        if style != "iso":
            return None
        stamps = (_STYLES["iso"].match(line, begin) for line in lines)
        whole = (each for each in stamps if each and each.string[each.end() : each.end() + 1] not in _GOES_ON)
        found = next(whole, None)
        if found is None:
            return None
        stamp, second = found[0], begin + _SECONDS
        fraction = _FRACTION.match(stamp, _SECONDS)
        behind = _SECONDS if fraction is None else fraction.end()
        shown = min(max(behind - _SECONDS - 1, 0), 6)
        return _Form(
            shape=found.string[begin : found.end() + 1].translate(_DIGITS),
            begin=begin,
            second=second,
            digits=slice(second + 1, second + 1 + shown),
            rest=b"0" * (6 - shown) + b"Z ",
            zone=stamp[behind:],
        )

    def _second(self, stamp: bytes) -> bytes | None:
        """The first bytes of a key, from an ISO stamp without a fraction; None for what is not a time of a line."""
        key = self._seconds[stamp] if stamp in self._seconds else self.key("iso", stamp)
        return None if key is None or key >= self._latest else key[:_BEFORE_FRACTION]

    def _key_of(self, line: bytes, before: bytes) -> bytes:
        if all_stamped([line[:KEY_BYTES]]):
            return line[:KEY_BYTES]
        key = self._key_in(line)
        return before if key is None or key >= self._latest else key

    def _key_in(self, line: bytes) -> bytes | None:
        # Most lines have their stamp where the line before had it.
        style, column = self._usual
        usual = _STYLES[style].match(line, column)
        if usual is not None:
            return self.key(style, usual[0])
        found = _ANY_STAMP.match(line)
        if found is None:
            return None
        style = str(found.lastgroup)
        self._usual = style, found.start(style)
        return self.key(style, found[style])

    def key(self, style: str, stamp: bytes) -> bytes | None:
        """A stamp as a key; None for what is not a date."""
        fraction = _FRACTION.search(stamp, 10)
        digits = b"000000"
        if fraction is not None:
            digits = (fraction[1] + b"000000")[:6]
            stamp = stamp[: fraction.start()] + (b".0" if style in ("glog", "epoch") else b"") + stamp[fraction.end() :]
        if stamp not in self._seconds:
            if len(self._seconds) > _CACHED_SECONDS:
                self._seconds.clear()
            (moment,) = self._stamps.convert(style, [stamp])
            self._seconds[stamp] = None if moment is None else key_of(moment)[:_BEFORE_FRACTION]
        second = self._seconds[stamp]
        return None if second is None else second + digits + b"Z "


def all_stamped(begins: Sequence[bytes], before: bytes = b"") -> bool:
    """Whether each of these is `before` and a stamp in the agents' form: one comparison for all."""
    return b"".join(begins).translate(_DIGITS) == (before + _ZEROS) * len(begins)


def key_of(microseconds: int) -> bytes:
    """A time, in microseconds since 1970, as a key."""
    return (_EPOCH + timedelta(microseconds=microseconds)).strftime("%Y-%m-%dT%H:%M:%S.%fZ ").encode()


class LogMerge:
    """The sources of one merged log."""

    def __init__(self) -> None:
        self.sources: list[LogSource] = []

    def add(self, source: LogSource) -> LogSource:
        """Add a source."""
        self.sources.append(source)
        self.sources.sort(key=lambda each: each.order)
        return source

    def final(self, most: bytes = LAST_KEY) -> bytes:
        """All lines that are final, up to the time `most`."""
        open_sources = [
            (source.last_key, source.order) for source in self.sources if not (source.ended or source.paused)
        ]
        if not open_sources:
            return self.upto(most)
        return self._taken(*min(min(open_sources), (most, self.sources[-1].order)))

    def newest(self) -> bytes:
        """The newest time of any source."""
        return max((source.last_key for source in self.sources), default=b"")

    def upto(self, key: bytes) -> bytes:
        """All lines of that time or before, final or not."""
        return self._taken(key, self.sources[-1].order if self.sources else 0)

    def _taken(self, key: bytes, order: int) -> bytes:
        keys: Keys = []
        lines: list[bytes] = []
        parts = 0
        for source in self.sources:
            if source.held_lines:
                some_keys, some_lines = source.take(key, order)
                keys += some_keys
                lines += some_lines
                parts += bool(some_lines)
        if not lines:
            return b""
        if parts > 1:
            # Stable: lines of one time stay in the order of sources, those of a source in their own.
            lines = [lines[place] for place in sorted(range(len(lines)), key=keys.__getitem__)]
        return b"\n".join(lines) + b"\n"
