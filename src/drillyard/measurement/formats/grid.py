"""Step lines that differ in their digits only, read as a matrix of characters: no text is made of any value.

The idea: a program prints its numbers with fixed formats, so the lines of a block have few *templates*: equal length,
equal characters, and digits at the same places. Lines of one template are rows of a matrix whose exclusive-or with the
template is 0 where a character is the same and the digit's value where it is free to vary. One comparison checks all
lines, and a number is a sum over columns. A template is learned by matching its first line with the layout's pattern,
once as it is and once with each digit in place of all of them: digits that the pattern insists on are not free.

Numbers are those that `float` gives, to the bit: up to 15 digits are a whole number below 2^53, which is multiplied or
divided once by a power of ten up to 10^22, which is exact too (W. D. Clinger, How to Read Floating Point Numbers
Accurately, 1990). All others are read from their texts.

Cost: about 0.3 microseconds a line and 15 ns a value. Limits: a log whose lines have too many templates (numbers that
are printed with all their digits) is given up, and read by the pattern alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, overload

import numpy as np
from numpy.typing import NDArray

_FEWEST_LINES: Final = 64
_MOST_TEMPLATES: Final = 96
_MOST_WIDTHS: Final = 32
_LINES_PER_TEMPLATE: Final = 24
_LINES_PER_NEW_TEMPLATE: Final = 256
"""Where templates have fewer lines than this in a block, or come more often, the pattern is faster."""
_WIDEST: Final = 4096
_EXACT_DIGITS: Final = 15
_POWERS: Final = 10.0 ** np.arange(23)
_DIGITS: Final = b"0123456789"
_ONE_DIGIT: Final = [bytes.maketrans(_DIGITS, bytes([digit]) * 10) for digit in _DIGITS]
_NUMBER: Final = re.compile(rb"([-+]?)(?=[\d.,]*\d)([\d,]*)(?:\.(\d*))?(?:[eE]([-+]?)(\d{1,3}))?")

Match = Callable[[bytes], re.Match[bytes] | None]


@dataclass(frozen=True, slots=True)
class _Template:
    """Lines of one length that agree but in their free digits."""

    line: bytes
    """One of them, with zeros for its free digits."""
    spans: tuple[tuple[int, int], ...]
    """Where the groups are; (-1, -1) for one that is not there."""
    characters: NDArray[np.uint8]
    most: NDArray[np.uint8]
    """What the exclusive-or with `characters` may be at most: 9 where a digit is free, else 0."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The lines of a block that have one template. `rows` is None when those are all."""

    template: _Template
    rows: NDArray[np.int64] | None
    digits: NDArray[np.uint8]


class Templates:
    """The templates of one layout. `match` is its pattern for a whole line."""

    def __init__(self, match: Match) -> None:
        self._match = match
        self._of_width: dict[int, list[_Template]] = {}
        self._spare: float = _MOST_TEMPLATES
        self._given_up = False

    def read(self, text: bytes, lines: int) -> list[Cells] | None:
        """The groups of all lines of a block; None where it has not `lines` lines of this layout, or where the pattern
        reads them faster."""
        if self._given_up or lines < _FEWEST_LINES:
            return None
        content = np.frombuffer(text, np.uint8)
        ends = np.flatnonzero(content == ord("\n"))
        if len(ends) != lines:
            return None
        begins = np.append(0, ends[:-1] + 1)
        lengths = ends + 1 - begins
        widths = np.flatnonzero(np.bincount(np.minimum(lengths, _WIDEST + 1)))
        if widths[-1] > _WIDEST or len(widths) > _MOST_WIDTHS:
            self._given_up = widths[-1] <= _WIDEST
            return None
        parts: list[_Part] = []
        for width in widths.tolist():
            rows = np.flatnonzero(lengths == width) if len(widths) > 1 else None
            if not self._divide(_rows(text, begins if rows is None else begins[rows], width), rows, parts):
                return None
        if len(parts) > lines // _LINES_PER_TEMPLATE:
            self._given_up = True
        self._spare = min(_MOST_TEMPLATES, self._spare + lines / _LINES_PER_NEW_TEMPLATE)
        count = len(parts[0].template.spans)
        return [Cells(lines, parts, group) for group in range(count)]

    def _divide(self, lines: NDArray[np.uint8], rows: NDArray[np.int64] | None, parts: list[_Part]) -> bool:
        """Divide lines of one width among templates, learning those that are new. False when one cannot be learned."""
        known = self._of_width.setdefault(lines.shape[1], [])
        for index in range(_MOST_TEMPLATES):
            if index == len(known):
                template = self._learn(lines[0].tobytes())
                if template is None:
                    return False
                known.append(template)
            template = known[index]
            digits = lines ^ template.characters
            fits = digits <= template.most
            if fits.all():
                parts.append(_Part(template, rows, digits))
                if index:
                    known.insert(0, known.pop(index))
                return True
            mine = fits.all(axis=1)
            if mine.any():
                rows = np.arange(len(lines)) if rows is None else rows
                parts.append(_Part(template, rows[mine], digits[mine]))
                lines, rows = lines[~mine], rows[~mine]
        return False

    def _learn(self, line: bytes) -> _Template | None:
        found = self._match(line)
        if found is None or found.end() != len(line) or b"\0" in line:
            return None
        if self._spare < 1:
            self._given_up = True
            return None
        self._spare -= 1
        spans = _spans(found)
        free = [place for place, character in enumerate(line) if character in _DIGITS]
        if not self._same(spans, (line.translate(table) for table in _ONE_DIGIT)):
            free = [place for place in free if self._same(spans, _with_each_digit(line, place))]
        characters = np.frombuffer(line, np.uint8).copy()
        characters[free] = ord("0")
        most = np.zeros(len(line), np.uint8)
        most[free] = 9
        return _Template(characters.tobytes(), spans, characters, most)

    def _same(self, spans: tuple[tuple[int, int], ...], lines: Iterator[bytes]) -> bool:
        return all((found := self._match(line)) is not None and _spans(found) == spans for line in lines)


def _spans(found: re.Match[bytes]) -> tuple[tuple[int, int], ...]:
    return tuple(found.span(group + 1) for group in range(found.re.groups))


def _with_each_digit(line: bytes, place: int) -> Iterator[bytes]:
    return (line[:place] + _DIGITS[digit : digit + 1] + line[place + 1 :] for digit in range(10))


def _rows(text: bytes, begins: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
    """The `width` characters from each of `begins` on, as a matrix (lines, width)."""
    windows = np.ndarray((len(text) - width + 1,), np.dtype((np.void, width)), buffer=text, strides=(1,))
    return windows[begins].view(np.uint8).reshape(-1, width)


class Cells(Sequence[bytes | None]):
    """The values of one group, line by line: a sequence of their texts, which are made only when asked for."""

    def __init__(self, lines: int, parts: Sequence[_Part], group: int) -> None:
        self._lines = lines
        self._parts = parts
        self._group = group

    def __len__(self) -> int:
        return self._lines

    @overload
    def __getitem__(self, index: int) -> bytes | None: ...

    @overload
    def __getitem__(self, index: slice) -> list[bytes | None]: ...

    def __getitem__(self, index: int | slice) -> bytes | list[bytes | None] | None:
        return self._texts[index]

    def __iter__(self) -> Iterator[bytes | None]:
        return iter(self._texts)

    @cached_property
    def _texts(self) -> list[bytes | None]:
        if self._parts[0].rows is None:
            return self._texts_of(self._parts[0])
        texts: list[bytes | None] = [None] * self._lines
        for part in self._parts:
            assert part.rows is not None
            for row, text in zip(part.rows.tolist(), self._texts_of(part), strict=True):
                texts[row] = text
        return texts

    def _texts_of(self, part: _Part) -> list[bytes | None]:
        begin, end = part.template.spans[self._group]
        if begin < 0:
            return [None] * len(part.digits)
        if begin == end:
            return [b""] * len(part.digits)
        texts: list[bytes | None] = self._characters(part).tolist()
        return texts

    def _characters(self, part: _Part) -> NDArray[np.bytes_]:
        begin, end = part.template.spans[self._group]
        characters = np.ascontiguousarray(part.digits[:, begin:end] ^ part.template.characters[begin:end])
        return characters.view(f"S{end - begin}")[:, 0]

    def printed(self) -> list[tuple[bytes | None, NDArray[np.int64] | slice]]:
        """What the values look like, with zeros for their digits, and which rows do."""
        looks: list[tuple[bytes | None, NDArray[np.int64] | slice]] = []
        for part in self._parts:
            begin, end = part.template.spans[self._group]
            text = None if begin < 0 else part.template.line[begin:end]
            looks.append((text, slice(None) if part.rows is None else part.rows))
        return looks

    def fixed_width(self) -> Any:
        """All values as an array of bytes where they have one width, else themselves."""
        widths = {end - begin for begin, end in (part.template.spans[self._group] for part in self._parts)}
        if len(widths) > 1 or not max(widths):
            return self
        if self._parts[0].rows is None:
            return self._characters(self._parts[0])
        values = np.empty(self._lines, f"S{max(widths)}")
        for part in self._parts:
            values[part.rows] = self._characters(part)
        return values

    def numbers(self, integer: bool, commas: bool) -> NDArray[Any] | None:
        """The numbers that the values are, in float64 or int64; None where they have to be read from their texts.

        With `commas`, those before the point group thousands and are left out.
        """
        numbers = np.empty(self._lines, np.int64 if integer else np.float64)
        for part in self._parts:
            begin, end = part.template.spans[self._group]
            if begin < 0 and not integer:
                found: Any = np.nan
            else:
                found = _numbers(part, begin, end, integer, commas)
            if found is None:
                return None
            numbers[slice(None) if part.rows is None else part.rows] = found
        return numbers


def _numbers(part: _Part, begin: int, end: int, integer: bool, commas: bool) -> NDArray[Any] | None:
    template = part.template
    text = template.line[begin:end] if begin >= 0 else b""
    look = _NUMBER.fullmatch(text)
    if look is None or (b"," in text and not commas):
        return None
    digits = [place for place in range(begin, end) if template.line[place] in _DIGITS]
    mantissa = digits[: len(digits) - len(look[5] or b"")]
    decimals = len(look[3] or b"")
    every_digit_is_free = (template.most[digits] == 9).all()
    if not every_digit_is_free or len(mantissa) > _EXACT_DIGITS or (integer and text.strip(_DIGITS)):
        return None
    whole = _sum(part.digits, mantissa)
    if integer:
        return whole
    numbers: NDArray[np.float64]
    if look[5] is None:
        numbers = whole / _POWERS[decimals]
    else:
        exponents = _sum(part.digits, digits[len(mantissa) :])
        tens = (-exponents if look[4] == b"-" else exponents) - decimals
        if tens.min() < -22 or tens.max() > 22:
            return None
        power = _POWERS[np.abs(tens)]
        numbers = np.where(tens < 0, whole / power, whole * power)
    return -numbers if look[1] == b"-" else numbers


def _sum(digits: NDArray[np.uint8], places: Sequence[int]) -> NDArray[np.int64]:
    """The whole number that the digits at `places` are, for each row."""
    whole = digits[:, places[0]].astype(np.int64)
    for place in places[1:]:
        whole *= 10
        whole += digits[:, place]
    return whole
