"""Printed numbers -> columns: what a group of a format's pattern means, and how exactly it was
printed.

Also patterns for step lines that are rows of `key: value`. Their repetitions are possessive (`*+`):
no value is tried shorter than it is, which doubles the speed of a match.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from drillyard.loglines.blocks import LineBlock
from drillyard.loglines.stamps import Stamps
from drillyard.measurement.lanes import nonfinite_flags

Values = Sequence[bytes | None]
Columns = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class MatchedLines:
    """The lines whose values are converted: their block, where each begins in it, their numbers,
    the stamp parser."""

    block: LineBlock
    begins: Sequence[int]
    lines: NDArray[np.int64]
    stamps: Stamps

    @property
    def count(self) -> int:
        return len(self.lines)


@dataclass(frozen=True, slots=True)
class Value:
    """Group and its column. `scale` multiplies (milliseconds: 1e-3); thousands may be grouped by
    commas."""

    column: str
    scale: float = 1.0
    integer: bool = False
    commas: bool = False


# The groups of the PerfLogger's and MaxText's step lines, in their order.
TIME_SPEED_LOSS: Final = (
    Value("step", integer=True),
    Value("seconds"),
    Value("printed_tflops_per_gpu"),
    Value("printed_tokens_per_second_per_gpu"),
    Value("loss"),
)


def decode_values(
    values: Sequence[Value], constants: Mapping[str, Any]
) -> Callable[[Sequence[Values], MatchedLines], Columns]:
    """A `Message.decode` for groups that are plain numbers; `constants` are columns of one
    value."""

    def decode(groups: Sequence[Values], place: MatchedLines) -> Columns:
        count = place.count
        columns: Columns = {name: np.full(count, value) for name, value in constants.items()}
        for value, texts in zip(values, groups, strict=True):
            columns[value.column] = numbers(value, texts)
            if value.column == "seconds":
                columns["seconds_precision"] = precisions(texts, value.scale)
        printed = {value.column: texts for value, texts in zip(values, groups, strict=True)}
        columns["flags"] = nonfinite_flags(count, columns, printed)
        return columns

    return decode


_ODD_NUMBER: Final = re.compile(
    r"(?P<word>[-+]?(?:nan|inf(?:inity)?))\.0*|(?P<whole>[-+]?\d+),(?P<rest>\d+(?:e[-+]?\d+)?)",
    re.IGNORECASE,
)


def number(text: bytes | str) -> float:
    """A printed number: what `float` reads, Lightning's `nan.0` and `inf.0`, and a decimal comma
    (`2,09`). Raises ValueError for anything else.

    Lightning pads what has no point to five characters, words too: `nan.0`, `-inf.`
    (src/lightning/pytorch/callbacks/progress/tqdm_progress.py,
    `format_num`).
    """
    try:
        return float(text)
    except ValueError:
        found = _ODD_NUMBER.fullmatch(text if isinstance(text, str) else text.decode("latin-1"))
        if found is None:
            raise
        return float(found["word"] or f"{found['whole']}.{found['rest']}")


def numbers(value: Value, texts: Values) -> NDArray[Any]:
    """The numbers of a group; NaN where an optional group is absent. Raises ValueError for what is
    no number."""
    if value.commas:
        texts = [text and text.replace(b",", b"") for text in texts]
    column: NDArray[Any]
    if value.integer:
        column = np.fromiter(map(int, texts), np.int64, len(texts))  # type: ignore[arg-type]
    else:
        try:
            column = np.array([float(text) if text else np.nan for text in texts])
        except ValueError:
            column = np.array([number(text) if text else np.nan for text in texts])
    return column if value.scale == 1.0 else column * value.scale


def precisions(texts: Values, scale: float) -> NDArray[np.float32]:
    """Half a unit of the last printed digit, times `scale`: of a column whose numbers differ in
    digits only, once."""
    joined = b"\n".join([text or b"" for text in texts])
    shapes = (
        joined.split(b"\n") if b"e" in joined.lower() else joined.translate(_ZEROS).split(b"\n")
    )
    units = {shape: half_unit(shape) * scale if shape else 0.0 for shape in set(shapes)}
    return np.array([units[shape] for shape in shapes[: len(texts)]], np.float32)


_ZEROS: Final = bytes.maketrans(b"123456789", b"000000000")


def half_unit(text: bytes) -> float:
    """Half a unit of the last digit of a printed number: `14.54` 0.005, `2e+3` 500, `nan` 0. At
    most 5e36."""
    mantissa, _, exponent = text.lower().replace(b",", b".").partition(b"e")
    if not mantissa.lstrip(b"+-")[:1].isdigit() and not mantissa.lstrip(b"+-").startswith(b"."):
        return 0.0
    decimals = len(mantissa) - mantissa.index(b".") - 1 if b"." in mantissa else 0
    return float(0.5 * 10.0 ** min(int(exponent or 0) - decimals, 37))


_WORDS: Final = re.compile(rb"(\d+(?:\.\d+)?) ?(d|h|m|s)[a-z]*(?:, ?| |$)")
_SECONDS: Final = {b"d": 86_400, b"h": 3_600, b"m": 60, b"s": 1}


def words_seconds(text: bytes | None) -> float:
    """Seconds of a printed duration: `1h 8m 9s`, `5:13:22`, `1 day, 2:03:04`. NaN for anything
    else."""
    rest, seconds = (text or b"").strip(), 0.0
    while found := _WORDS.match(rest):
        seconds += float(found[1]) * _SECONDS[found[2]]
        rest = rest[found.end() :]
    if re.fullmatch(rb"\d+(?::\d\d){1,2}(?:\.\d+)?", rest):
        clock = 0.0
        for part in rest.split(b":"):
            clock = clock * 60 + float(part)
        return seconds + clock
    return seconds if text and not rest else math.nan


BAR: Final = rb"[ \t]*+\|[ \t]*+"
NUMBER: Final = rb"([-+.0-9a-zA-Z]{1,64}+)"
"""Candidate for a number; `number` decides. If that fails, the line is damaged."""
COMMA_NUMBER: Final = rb"([-+.0-9a-zA-Z]{1,64}+(?:,\d{1,32}+(?:[eE][-+]?\d{1,4}+)?+)?+)"
"""In its place where a line has decimal commas."""
DECIMAL_COMMA: Final = re.compile(rb"(?<=\d),(?=\d)")
_NUMBERS: Final = {False: NUMBER, True: rb"([-+.,0-9a-zA-Z]{1,64}+)"}
_BLANKS: Final = re.compile(rb"[ \t]*+")
_END: Final = rb"(?=[\s|\]}/(]|,(?!\d)|\Z)"


def keyed_pattern(
    text: bytes,
    keys: Mapping[bytes, Value | None],
    *,
    equals: bytes = b":",
    separator: bytes = b"|",
) -> tuple[bytes, list[Value]]:
    """A pattern for lines with the keys of `text`, and what its groups are.

    `text` is `key: value | key: value |`, with `equals` for the colon and `separator` for the bar.
    Of keys that are not in `keys`, or None there, the value may be anything without a separator; so
    may what follows a number before the next separator (units, averages). What comes after the last
    value that can be read is left out.
    """
    bar, blanks = re.escape(separator), rb"[ \t]*+"
    anything = rb"[^\]\n" + bar + rb"]*+"
    find_key = re.compile(rb"([A-Za-z_][^\n" + bar + equals + rb"]*+)" + equals + rb"[ \t]*")
    pieces: list[bytes] = []
    values: list[Value] = []
    position = 0
    while found := find_key.match(text, position):
        after = text.find(separator, found.end())
        key = found[1].rstrip(b" \t")
        value = keys.get(key)
        if value is not None and any(value.column == known.column for known in values):
            value = None
        piece = re.escape(key) + blanks + equals + blanks
        if value is None:
            pieces.append(piece + anything)
        else:
            number = re.compile(_NUMBERS[value.commas] + _END).match(text, found.end())
            if number is None:
                break
            values.append(value)
            pieces.append(piece + _NUMBERS[value.commas] + _END + anything)
        if after < 0:
            break
        position = _BLANKS.match(text, after + 1).end()  # type: ignore[union-attr]
    return (bar + blanks).join(pieces), values
