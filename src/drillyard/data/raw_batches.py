"""Raw batches of rows: the unit of work between the reader of a source and the processes that tokenise it.

A source is read once, in order, by one process, which does as little as possible: it cuts the stream into
batches of about a megabyte and hands them on undecoded. Parsing (UTF-8, JSON, Arrow to Python) is done where the
batch is consumed, so it is spread over all cores. Every batch can say where a row came from, which is what
an error message about that row needs.

Cost: a batch is pickled once (bytes or Arrow buffers, about 1 GB/s). Limit: one row must fit in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from drillyard.errors import UserError

Row = dict[str, Any]

Origin = tuple[str, str]
"""(file or data set, what its rows are counted in: line, row, or nothing where it is one row)."""


class RawBatch(Protocol):
    """Some consecutive rows of one source, not yet decoded."""

    @property
    def nbytes(self) -> int:
        """Size of the undecoded rows, for progress."""

    def rows(self) -> Iterator[tuple[int, Row]]:
        """Decoded rows with their numbers, which `where` turns into a place. Raises UserError on broken input."""

    @property
    def origins(self) -> tuple[Origin, ...]:
        """What the rows come from."""

    def place(self, number: int) -> tuple[int, int]:
        """Where a row comes from: the number of its origin, and the line or row there."""

    def where(self, number: int) -> str:
        """The place of a row, for an error message."""


NUMBER_BITS = 40
"""A place as one uint64: the number of the origin above these bits, the line or row below (a trillion of them)."""


def format_location(origin: Origin, number: int) -> str:
    """`rows.jsonl, line 7`; the name alone where the file is one row."""
    name, unit = origin
    return f"{name}, {unit} {number}" if unit else name


def utf8_error(file: str, line: int, line_offset: int, error: UnicodeDecodeError) -> UserError:
    """The error for bytes that are not UTF-8; `line_offset` is the offset of the decoded bytes in the file."""
    byte = error.object[error.start]
    return UserError(
        f"{file}, line {line}, byte {line_offset + error.start}: 0x{byte:02x} is not UTF-8 text ({error.reason}). "
        f"Convert the file to UTF-8, for example with iconv."
    )


def decode_utf8(data: bytes, file: str, first_line: int, offset: int) -> str:
    """`data` as text; an error names the file's line and byte offset."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        raise utf8_error(file, line, offset, error) from None


@dataclass(frozen=True, slots=True)
class JsonLines:
    """Whole lines of a JSON Lines file; `first_line` counts from 1, `offset` is in (decompressed) bytes."""

    file: str
    first_line: int
    offset: int
    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def rows(self) -> Iterator[tuple[int, Row]]:
        text = decode_utf8(self.data, self.file, self.first_line, self.offset)
        for number, line in enumerate(text.split("\n"), self.first_line):
            if line and not line.isspace():
                yield number, self._parse(number, line)

    def _parse(self, number: int, line: str) -> Row:
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(
                f"{self.where(number)}, column {error.colno}: not valid JSON ({error.msg}). "
                f"Each line must hold one JSON object; mend or remove this line."
            ) from None
        except RecursionError:
            raise UserError(f"{self.where(number)}: JSON is nested too deeply. Mend or remove this line.") from None
        if not isinstance(row, dict):
            hint = " The file is one JSON array; write one object per line." if isinstance(row, list) else ""
            raise UserError(f"{self.where(number)}: a JSON object is expected, found {type(row).__name__}.{hint}")
        return row

    @property
    def origins(self) -> tuple[Origin, ...]:
        return ((self.file, "line"),)

    def place(self, number: int) -> tuple[int, int]:
        return 0, number

    def where(self, number: int) -> str:
        return format_location(self.origins[0], number)


@dataclass(frozen=True, slots=True)
class ArrowRows:
    """Rows of a Parquet file or of a Hugging Face data set on disk; `first_row` counts from 1."""

    file: str
    first_row: int
    batch: pa.RecordBatch

    @property
    def nbytes(self) -> int:
        return int(self.batch.nbytes)

    def rows(self) -> Iterator[tuple[int, Row]]:
        try:
            rows = self.batch.to_pylist()
            for column in self.batch.schema:
                if (plain := _from_arrow(column.type)) is not None:
                    for row in rows:
                        row[column.name] = plain(row[column.name])
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self.file}, rows {self.first_row} to {self.first_row + self.batch.num_rows - 1}: "
                f"a string is not UTF-8 ({error.reason}). Rewrite the file with valid strings."
            ) from None
        except json.JSONDecodeError as error:
            raise UserError(
                f"{self.file}, rows {self.first_row} to {self.first_row + self.batch.num_rows - 1}: "
                f"a value of a JSON column is not valid JSON ({error}). Rewrite the file with valid JSON."
            ) from None
        yield from enumerate(rows, self.first_row)

    @property
    def origins(self) -> tuple[Origin, ...]:
        return ((self.file, "row"),)

    def place(self, number: int) -> tuple[int, int]:
        return 0, number

    def where(self, number: int) -> str:
        return format_location(self.origins[0], number)


def _from_arrow(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """What turns Arrow's Python values of this type into those of JSON: JSON that is kept as text, and maps, which come
    as lists of pairs. None where they are the same."""
    if getattr(kind, "extension_name", None) == "arrow.json":
        return lambda value: None if value is None else json.loads(value)
    if pa.types.is_map(kind):
        inner = _from_arrow(kind.item_type) or _unchanged
        return lambda value: None if value is None else {key: inner(item) for key, item in value}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        items = _from_arrow(kind.value_type)
        return items and (lambda value: None if value is None else [items(item) for item in value])
    if pa.types.is_struct(kind):
        fields = {child.name: change for child in kind if (change := _from_arrow(child.type)) is not None}
        return (
            (lambda value: value and {key: fields.get(key, _unchanged)(item) for key, item in value.items()})
            if fields
            else None
        )
    return None


def _unchanged(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class TextFiles:
    """Plain text files; each is one row {text, path}."""

    files: tuple[Path, ...]
    nbytes: int

    def rows(self) -> Iterator[tuple[int, Row]]:
        from drillyard.data.file_readers import blocks_of

        for number, file in enumerate(self.files):
            data = b"".join(blocks_of(file))
            yield number, {"text": decode_utf8(data, str(file), 1, 0).removeprefix("\ufeff"), "path": str(file)}

    @property
    def origins(self) -> tuple[Origin, ...]:
        return tuple((str(file), "") for file in self.files)

    def place(self, number: int) -> tuple[int, int]:
        return number, 0

    def where(self, number: int) -> str:
        return str(self.files[number])


@dataclass(frozen=True, slots=True)
class PlainRows:
    """Rows that are Python dictionaries already (CSV, built-in data, streamed data sets).

    `numbers` holds a line or row number per row; `unit` says which.
    """

    origin: str
    unit: str
    numbers: tuple[int, ...]
    values: tuple[Row, ...]
    nbytes: int

    def rows(self) -> Iterator[tuple[int, Row]]:
        yield from zip(self.numbers, self.values, strict=True)

    @property
    def origins(self) -> tuple[Origin, ...]:
        return ((self.origin, self.unit),)

    def place(self, number: int) -> tuple[int, int]:
        return 0, number

    def where(self, number: int) -> str:
        return format_location(self.origins[0], number)


def batched_rows(origin: str, unit: str, rows: Iterator[tuple[int, Row]], batch_bytes: int) -> Iterator[PlainRows]:
    """Group decoded rows into batches of about `batch_bytes` characters of text."""
    numbers: list[int] = []
    values: list[Row] = []
    size = 0
    for number, row in rows:
        numbers.append(number)
        values.append(row)
        size += sum(len(value) for value in row.values() if isinstance(value, str)) + 64
        if size >= batch_bytes:
            yield PlainRows(origin, unit, tuple(numbers), tuple(values), size)
            numbers, values, size = [], [], 0
    if values:
        yield PlainRows(origin, unit, tuple(numbers), tuple(values), size)
