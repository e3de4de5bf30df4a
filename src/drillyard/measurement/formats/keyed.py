"""Step lines that are rows of `key: value`: the pattern is made from the keys that one line has, in their order.

Repetitions are possessive (`*+`): no value is ever tried shorter than it is, which doubles the speed of a match.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from drillyard.measurement.formats.values import Value

BAR: Final = rb"[ \t]*+\|[ \t]*+"
_NUMBERS: Final = {False: rb"([-+.0-9a-zA-Z]{1,64}+)", True: rb"([-+.,0-9a-zA-Z]{1,64}+)"}
_BLANKS: Final = re.compile(rb"[ \t]*+")
_END: Final = rb"(?=[\s,|\]}/(]|\Z)"


def keyed_pattern(
    text: bytes, keys: Mapping[bytes, Value | None], *, equals: bytes = b":", separator: bytes = b"|"
) -> tuple[bytes, list[Value]]:
    """A pattern for lines with the keys of `text`, and what its groups are.

    `text` is `key: value | key: value |`, with `equals` for the colon and `separator` for the bar. Of keys that are not
    in `keys`, or None there, the value may be anything without a separator; so may what follows a number before the
    next separator (units, averages). What comes after the last value that can be read is left out.
    """
    bar = re.escape(separator)
    # One character is matched faster than one of a set.
    blanks = rb"[ \t]*+" if b"\t" in text else rb" *+"
    anything = rb"[^\]\n" + bar + rb"]*+"
    find_key = re.compile(rb"([A-Za-z_][^\n" + bar + equals + rb"]*+)" + equals + rb"[ \t]*")
    pieces: list[bytes] = []
    values: list[Value] = []
    position = 0
    while found := find_key.match(text, position):
        after = text.find(separator, found.end())
        stop = after if after >= 0 else len(text)
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
            whole = after >= 0 and not text[number.end() : stop].strip()
            # Before a separator a number needs no further sign of its end.
            pieces.append(piece + _NUMBERS[value.commas] + (blanks if whole else _END + anything))
        if after < 0:
            break
        position = _BLANKS.match(text, after + 1).end()  # type: ignore[union-attr]
    return (bar + blanks).join(pieces), values
