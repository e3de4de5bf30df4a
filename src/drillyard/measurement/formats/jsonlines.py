"""JSON objects as step lines: one parser for all formats that log them.

msgspec reads 5 times faster than the standard library but refuses NaN and Infinity, which Python's own writer emits;
such lines are read again by the standard library. Where a format knows the names that it wants, no more of a line than
those is made, in half the time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from drillyard.measurement.formats.values import Values, parsed_json
from drillyard.measurement.lanes import NONFINITE_COLUMNS, nonfinite_flags

OBJECT: Final = rb"(\{[^\n]*\})[ \t]*"
"""A whole JSON object at the end of a line, as one group."""


def load(text: bytes | memoryview) -> Any:
    """The value of a JSON text, NaN and Infinity included. Raises ValueError for what is none."""
    try:
        return parsed_json(text)
    except ValueError:
        try:
            return json.loads(bytes(text), parse_int=_whole)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error


def _whole(digits: str) -> int | float:
    """An integer of up to 18 digits, which fits into 64 bits; a longer one as a float, or infinity."""
    return int(digits) if len(digits) <= 18 else float(digits)


ABSENT: Final = float("nan")
"""What a row has for a field that its object lacks: this very number, so that a column of rows is one of numbers."""


class JsonRows:
    """Objects of which only the wanted fields were kept, as columns."""

    def __init__(self, rows: Sequence[msgspec.Struct]) -> None:
        names = rows[0].__struct_encode_fields__ if rows else ()
        # One list of all values and every so-manieth of them: twice as fast as zip, which goes through all rows anew
        # for each column.
        values = list(chain.from_iterable(map(msgspec.structs.astuple, rows)))
        self._columns = {name: values[place :: len(names)] for place, name in enumerate(names)}
        self._count = len(rows)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, name: str) -> Sequence[Any]:
        """A wanted field of all objects; None where one lacks it."""
        column = self._columns.get(name, [])
        # Counting compares identity first, so that no other NaN is meant.
        if not column.count(ABSENT):
            return column
        return [None if value is ABSENT else value for value in column]

    def raw(self, name: str) -> Sequence[Any]:
        """The same with `ABSENT` for None, at no cost."""
        return self._columns.get(name, [])

    def floats(self, name: str) -> NDArray[np.float64]:
        """A wanted field as numbers; NaN where an object lacks it, and for what is no number."""
        column = self._columns.get(name, [])
        if column and column[0] is None and column.count(None) == len(column):
            return np.full(len(column), np.nan)
        return floats(column)

    def anywhere(self, name: str) -> bool:
        """Whether any object has the field."""
        column = self._columns.get(name, [])
        return bool(column) and (column[0] is not ABSENT or column.count(ABSENT) < len(column))

    def has(self, row: int, name: str) -> bool:
        """Whether an object has the field."""
        return self._columns[name][row] is not ABSENT


class FieldSelection:
    """Reads objects of which only some fields are wanted, into rows that have these as attributes (see `ABSENT`).

    A name in `inside` is that of an object in the object, of which again only some fields are wanted; it is None where
    it is something else. Only names that are identifiers can be read as attributes.
    """

    def __init__(self, *names: str, **inside: FieldSelection) -> None:
        attributes = {name if name.isidentifier() else f"_{place}": name for place, name in enumerate(names)}
        fields: list[tuple[str, Any, Any]] = [(attribute, Any, ABSENT) for attribute in attributes]
        fields += [(name, wanted.row | None, None) for name, wanted in inside.items()]
        self.row: type[msgspec.Struct] = msgspec.defstruct("Row", fields, rename=attributes, gc=False)
        self._inside = inside
        self._decoder = msgspec.json.Decoder(self.row)

    def load_all(self, texts: Values) -> list[Any]:
        """The objects of JSON texts as rows. Raises ValueError if any is no JSON, or no object."""
        try:
            rows: list[Any] = self._decoder.decode_lines(b"\n".join(texts))  # type: ignore[arg-type]
            # As many objects as texts, each with its braces at both ends: there is one object in each.
            if len(rows) == len(texts) and all(text and text[:1] == b"{" and text[-1:] == b"}" for text in texts):
                return rows
        except (msgspec.DecodeError, RecursionError, TypeError):
            pass
        return [self._row(value) for value in load_all(texts)]

    def _row(self, value: dict[str, Any]) -> Any:
        row = self.row()
        for attribute, name in zip(row.__struct_fields__, row.__struct_encode_fields__, strict=True):
            if name in self._inside:
                within = value.get(name)
                setattr(row, attribute, self._inside[name]._row(within) if isinstance(within, dict) else None)
            elif name in value:
                setattr(row, attribute, value[name])
        return row


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


def gather(records: JsonRows | Sequence[dict[str, Any]], names: Mapping[str, Sequence[str]]) -> dict[str, NDArray[Any]]:
    """Columns of numbers: for each column the first of its names that a record has. What is no number is NaN.

    The column `flags` comes with them.
    """
    columns: dict[str, NDArray[Any]] = {}
    printed: dict[str, str] = {}
    anywhere = records.anywhere if isinstance(records, JsonRows) else _names_of(records, names).__contains__
    for column, choices in names.items():
        for name in choices:
            if not anywhere(name):
                continue
            values = records.floats(name) if isinstance(records, JsonRows) else floats(field(records, name))
            known = columns.get(column)
            columns[column] = values if known is None else np.where(np.isnan(known), values, known)
            printed.setdefault(column, name)
    odd = [name for name in NONFINITE_COLUMNS if name in columns and not np.isfinite(columns[name]).all()]
    if not odd:
        return {**columns, "flags": np.zeros(len(records), np.uint8)}
    return {**columns, "flags": nonfinite_flags(columns, {name: field(records, printed[name]) for name in odd})}


def _names_of(records: Sequence[dict[str, Any]], names: Mapping[str, Sequence[str]]) -> set[str]:
    """All names that records have; those of the first where it has all that are asked for."""
    present = set(records[0]) if records else set()
    if all(name in present for choices in names.values() for name in choices):
        return present
    return present.union(*records)


def field(records: JsonRows | Sequence[dict[str, Any]], name: str) -> Sequence[Any]:
    """One field of all records; None where a record lacks it."""
    if isinstance(records, JsonRows):
        return records[name]
    try:
        return list(map(itemgetter(name), records))
    except KeyError:
        return [record.get(name) for record in records]


def floats(values: Sequence[Any]) -> NDArray[np.float64]:
    """An array of numbers; None and what is no number are NaN, text is read as a number where it is one."""
    try:
        if values and type(values[0]) is str:
            # Numbers in quotes: the JSON parser reads them 3 times faster than numpy does.
            return np.array(parsed_json("[" + ",".join(values) + "]"), np.float64).reshape(len(values))
        return np.fromiter(values, np.float64, len(values))
    except (TypeError, ValueError, OverflowError):
        return np.array([_float(value) for value in values], np.float64)


def _float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return float("nan")
