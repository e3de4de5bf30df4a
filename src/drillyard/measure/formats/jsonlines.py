"""JSON objects as step lines: one parser for all formats that log them.

orjson reads 5 times faster than the standard library but refuses NaN and Infinity, which Python's own writer emits;
such lines are read again by the standard library. Where a format knows the names that it wants, msgspec makes no more
of a line than those, in half the time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, Final

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

from drillyard.measure.columns import nonfinite_flags
from drillyard.measure.formats.values import Values, WholeLines

OBJECT: Final = rb"(\{[^\n]*\})[ \t]*"
"""A whole JSON object at the end of a line, as one group."""


def load(text: bytes | memoryview) -> Any:
    """The value of a JSON text, NaN and Infinity included. Raises ValueError for what is none."""
    try:
        return orjson.loads(text)
    except ValueError:
        try:
            return json.loads(bytes(text))
        except RecursionError as error:
            raise ValueError("nested too deeply") from error


class Wanted:
    """Reads objects of which only some fields are wanted; a field that an object lacks is None."""

    def __init__(self, *names: str) -> None:
        self.row = msgspec.defstruct("Row", [(name, Any, None) for name in names], gc=False)
        self._decoder = msgspec.json.Decoder(self.row)

    def load_all(self, texts: Values) -> list[Any]:
        """The objects of JSON texts, fields as attributes. Raises ValueError if any is no JSON, or no object."""
        try:
            joined = texts.text if isinstance(texts, WholeLines) else b"\n".join(texts)  # type: ignore[arg-type]
            rows: list[Any] = self._decoder.decode_lines(joined)
            whole = joined.count(b"\n{") + 1 == len(texts)
        except (msgspec.DecodeError, RecursionError):
            whole = False
        if whole and len(rows) == len(texts):
            return rows
        names = self.row.__struct_fields__
        return [self.row(*map(value.get, names)) for value in load_all(texts)]


def load_all(texts: Values) -> list[dict[str, Any]]:
    """The objects of JSON texts. Raises ValueError if any is no JSON, or no object."""
    try:
        values: list[dict[str, Any]] = orjson.loads(b"[" + b",".join(texts) + b"]")  # type: ignore[arg-type]
    except ValueError:
        values = []
    if len(values) != len(texts):
        values = [load(text or b"") for text in texts]
    if set(map(type, values)) - {dict}:
        raise ValueError("not a JSON object")
    return values


def gather(records: Sequence[Any], names: Mapping[str, Sequence[str]]) -> dict[str, NDArray[Any]]:
    """Columns of numbers: for each column the first of its names that a record has. What is no number is NaN.

    Records are objects, or rows of `Wanted`. The column `flags` comes with them.
    """
    rows = bool(records) and isinstance(records[0], msgspec.Struct)
    present = set(records[0].__struct_fields__ if rows else records[0]) if records else set()
    if not rows and not all(name in present for choices in names.values() for name in choices):
        present = present.union(*records)
    columns: dict[str, NDArray[Any]] = {}
    printed: dict[str, list[Any]] = {}
    for column, choices in names.items():
        for name in choices:
            if name not in present:
                continue
            raw = field(records, name)
            values = floats(raw)
            known = columns.get(column)
            columns[column] = values if known is None else np.where(np.isnan(known), values, known)
            printed.setdefault(column, raw)
    flags = nonfinite_flags(columns, printed) if columns else np.zeros(len(records), np.uint8)
    return {**columns, "flags": flags}


def field(records: Sequence[Any], name: str) -> list[Any]:
    """One field of all records; None where a record lacks it."""
    if records and isinstance(records[0], msgspec.Struct):
        return list(map(attrgetter(name), records))
    try:
        return list(map(itemgetter(name), records))
    except KeyError:
        return [record.get(name) for record in records]


def floats(values: Sequence[Any]) -> NDArray[np.float64]:
    """An array of numbers; None and what is no number are NaN, text is read as a number where it is one."""
    try:
        if values and type(values[0]) is str:
            # Numbers in quotes: the JSON parser reads them 3 times faster than numpy does.
            return np.array(orjson.loads("[" + ",".join(values) + "]"), np.float64).reshape(len(values))
        return np.array(values, np.float64).reshape(len(values))
    except (TypeError, ValueError, OverflowError):
        return np.array([_float(value) for value in values])


def _float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return float("nan")
