"""Printed numbers -> columns: what a group of a format's pattern means, and how exactly it was printed.

Values are converted column by column, never one by one: from the digits where the lines of a block have few templates
(grid.py), else by the JSON parser, which reads all numbers of a column at once, and by `float` where JSON knows no such
number. All three give the same bits, but for the sign of a printed -0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from drillyard.loglines.blocks import line_ends
from drillyard.measurement.formats.grid import Cells
from drillyard.measurement.lanes import nonfinite_flags

if TYPE_CHECKING:
    from drillyard.measurement.formats.text_format import MatchedLines

Values = Sequence[bytes | None]
Columns = dict[str, NDArray[Any]]


_BLANK: Final = ord(" ")


class WholeLines(Sequence[bytes | None]):
    """The lines of a text, which need not be taken apart; the last has its end too.

    Each begins with `blanks` blanks that are none of its own.
    """

    def __init__(self, text: bytes | bytearray, lines: int, blanks: int = 0) -> None:
        self.text = text
        self.blanks = blanks
        self._lines = lines

    @classmethod
    def of(cls, texts: Sequence[bytes | None]) -> WholeLines:
        """Texts put together again; None is an empty line."""
        return cls(b"\n".join([*(text or b"" for text in texts), b""]), len(texts))

    @classmethod
    def behind(cls, opening: bytes, text: bytes, lines: int) -> WholeLines | None:
        """Lines that all begin with `opening`, which is made blank; None if one does not."""
        whole = cls(bytearray(text), lines, len(opening))
        begins = whole.begins - len(opening)
        if len(begins) != lines or whole.begins[-1] > len(text):
            return None
        characters = np.frombuffer(whole.text, np.uint8)
        for place, character in enumerate(opening):
            if (characters[begins + place] != character).any():
                return None
            characters[begins + place] = _BLANK
        return whole

    @cached_property
    def begins(self) -> NDArray[np.int64]:
        """Where in the text each line begins, behind its blanks."""
        return np.append(0, line_ends(self.text)[:-1] + 1) + self.blanks

    def __len__(self) -> int:
        return self._lines

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        lines = [bytes(line[self.blanks :]) for line in self.text[:-1].split(b"\n")]
        return lines[index]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self[:])


@dataclass(frozen=True, slots=True)
class Value:
    """How one group becomes a column. `scale` multiplies (milliseconds: 1e-3); thousands may be grouped by commas."""

    column: str
    scale: float = 1.0
    integer: bool = False
    commas: bool = False


def parsed_json(text: bytes | memoryview | str) -> Any:
    """The value of a JSON text. Raises ValueError for what is none, NaN and Infinity too, or is nested too deeply."""
    try:
        return msgspec.json.decode(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def decode_values(
    values: Sequence[Value], constants: Mapping[str, Any]
) -> Callable[[Sequence[Values], MatchedLines], Columns]:
    """A `Message.decode` for groups that are plain numbers; `constants` are columns of one value."""

    def decode(groups: Sequence[Values], place: MatchedLines) -> Columns:
        count = place.count
        columns: Columns = {name: np.full(count, value) for name, value in constants.items()}
        for value, texts in zip(values, groups, strict=True):
            columns[value.column] = numbers(value, texts)
            if value.column == "seconds":
                columns["seconds_precision"] = precisions(texts, value.scale)
        printed = {value.column: texts for value, texts in zip(values, groups, strict=True)}
        columns["flags"] = nonfinite_flags(columns, printed)
        return columns

    return decode


def numbers(value: Value, texts: Values) -> NDArray[Any]:
    """The numbers of a group; NaN where an optional group is not there. Raises ValueError for what is no number."""
    if isinstance(texts, Cells):
        read = texts.numbers(value.integer, value.commas)
        if read is not None:
            return read if value.scale == 1.0 else read * value.scale
    if len(texts) > 1 and texts[0] and texts[0] == texts[-1] and texts.count(texts[0]) == len(texts):
        # Batch sizes and counts that stay the same are most columns of some formats.
        return np.repeat(numbers(value, texts[:1]), len(texts))
    column = _json_numbers(texts, np.int64 if value.integer else np.float64, value.commas)
    if column is None and value.commas:
        texts = [text and text.replace(b",", b"") for text in texts]
    if column is None and value.integer:
        column = np.fromiter(map(int, texts), np.int64, len(texts))  # type: ignore[arg-type]
    elif column is None:
        column = np.array([float(text) if text else np.nan for text in texts])
    return column if value.scale == 1.0 else column * value.scale


def _json_numbers(texts: Values, dtype: type[Any], commas: bool) -> NDArray[Any] | None:
    """All numbers at once by the JSON parser, 5 times faster than `float`; None where one is no JSON number."""
    try:
        joined = b"\n".join(texts)  # type: ignore[arg-type]
        if b"l" in joined or b"u" in joined:
            return None  # null, true, false
        if commas:
            joined = joined.replace(b",", b"")
        column = np.array(parsed_json(b"[" + joined.replace(b"\n", b",") + b"]"), dtype)
    except (TypeError, ValueError, OverflowError):
        return None
    return column if len(column) == len(texts) else None


def precisions(texts: Values, scale: float) -> NDArray[np.float32]:
    """Half a unit of the last printed digit, times `scale`."""
    if isinstance(texts, Cells) and not any(_has_exponent(text) for text, _ in texts.printed()):
        precision = np.empty(len(texts), np.float32)
        for text, rows in texts.printed():
            precision[rows] = half_unit(text) * scale if text else 0.0
        return precision
    if (alike := _alike(texts)) is not None:
        return np.full(len(texts), half_unit(alike) * scale, np.float32)
    try:
        printed = np.array(texts, np.bytes_)
    except TypeError:
        printed = np.array([text or b"" for text in texts], np.bytes_)
    digits = printed.view(np.uint8).reshape(len(printed), -1)
    if (digits > ord("9")).any():
        return np.array([half_unit(text) if text else 0.0 for text in texts], np.float32) * np.float32(scale)
    dots = digits == ord(".")
    decimals = np.where(dots.any(axis=1), np.count_nonzero(digits, axis=1) - dots.argmax(axis=1) - 1, 0)
    halves = 0.5 * 10.0**-decimals * scale
    return np.where(digits[:, 0] == 0, 0.0, halves).astype(np.float32)


def _alike(texts: Values) -> bytes | None:
    """One of plain numbers that all have their point at the same place; None where they differ in that."""
    try:
        widths = set(map(len, texts))  # type: ignore[arg-type]
    except TypeError:
        return None
    first = texts[0] or b""
    point = first.find(b".")
    if len(widths) > 1 or point < 0:
        return None
    joined = b"".join(texts)  # type: ignore[arg-type]
    same = joined[point :: len(first)].count(b".") == joined.count(b".") == len(texts)
    return first if same and not joined.translate(None, b"0123456789.") else None


def _has_exponent(text: bytes | None) -> bool:
    return text is not None and b"e" in text.lower()


def half_unit(text: bytes) -> float:
    """Half a unit of the last digit of a printed number: `14.54` 0.005, `2e+3` 500, `nan` 0. At most 5e36."""
    mantissa, _, exponent = text.lower().partition(b"e")
    if not mantissa.lstrip(b"+-")[:1].isdigit() and not mantissa.lstrip(b"+-").startswith(b"."):
        return 0.0
    decimals = len(mantissa) - mantissa.index(b".") - 1 if b"." in mantissa else 0
    return float(0.5 * 10.0 ** min(int(exponent or 0) - decimals, 37))
