"""JSON objects as step lines: one parser for all formats that log them.

msgspec reads 5 times faster than the standard library but refuses NaN and Infinity, which Python's
own writer emits; such lines are read again by the standard library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from drillyard.measurement.formats.values import Values, number
from drillyard.measurement.lanes import nonfinite_flags

OBJECT: Final = rb"(\{[^\n]*\})[ \t]*"
"""A whole JSON object at the end of a line, as one group."""


def parsed_json(text: bytes | memoryview | str) -> Any:
    """The value of a JSON text. Raises ValueError for what is none, NaN and Infinity too, or is
    nested too deeply."""
    try:
        return msgspec.json.decode(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def load(text: bytes | memoryview) -> Any:
    """The value of a JSON text, NaN and Infinity included. Raises ValueError for what is none."""
    try:
        return parsed_json(text)
    except ValueError:
        try:
            # Damaged text in one field costs no other field.
            return json.loads(
                bytes(text).decode("utf-8", "replace"), strict=False, parse_int=_whole
            )
        except RecursionError as error:
            raise ValueError("nested too deeply") from error


def _whole(digits: str) -> int | float:
    """An integer of up to 18 digits, which fits into 64 bits; a longer one as a float, or
    infinity."""
    return int(digits) if len(digits) <= 18 else float(digits)


def load_all(texts: Values) -> list[dict[str, Any]]:
    """The objects of JSON texts. Raises ValueError if any is no JSON, or no object."""
    try:
        values: list[dict[str, Any]] = parsed_json(b"[" + b",".join(texts) + b"]")  # type: ignore[arg-type]
    except ValueError:
        values = []
    if len(values) != len(texts):
        values = [load(text or b"") for text in texts]
    if set(map(type, values)) - {dict}:
        raise ValueError("not a JSON object")
    return values


def gather(
    records: Sequence[dict[str, Any]], names: Mapping[str, Sequence[str]]
) -> dict[str, NDArray[Any]]:
    """Columns of numbers: for each column the first of its names that a record has. What is no
    number is NaN.

    The column `flags` comes with them.
    """
    columns: dict[str, NDArray[Any]] = {}
    printed: dict[str, Sequence[Any]] = {}
    present: set[str] = set().union(*records)
    for column, choices in names.items():
        for name in (name for name in choices if name in present):
            values = field(records, name)
            printed.setdefault(column, values)
            numbers, known = floats(values), columns.get(column)
            columns[column] = (
                numbers if known is None else np.where(np.isnan(known), numbers, known)
            )
    return {**columns, "flags": nonfinite_flags(len(records), columns, printed)}


def field(records: Sequence[dict[str, Any]], name: str) -> list[Any]:
    """One field of all records; None where a record lacks it."""
    try:
        return list(map(itemgetter(name), records))
    except KeyError:
        return [record.get(name) for record in records]


def floats(values: Sequence[Any]) -> NDArray[np.float64]:
    """An array of numbers; None and what is no number are NaN, text is read as a number where it is
    one."""
    try:
        if values and type(values[0]) is str:
            # Numbers in quotes: the JSON parser reads them 3 times faster than numpy does.
            return np.array(parsed_json("[" + ",".join(values) + "]"), np.float64).reshape(
                len(values)
            )
        return np.fromiter(values, np.float64, len(values))
    except (TypeError, ValueError, OverflowError):
        return np.array([_float(value) for value in values], np.float64)


def _float(value: Any) -> float:
    try:
        return number(value) if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        return float("nan")
