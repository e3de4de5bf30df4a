"""Raw batches of rows: the unit of work between the reader of a source and the processes that tokenise it.

One process reads a source in order. It only cuts the stream into batches of about a megabyte and passes them on
undecoded. Parsing (UTF-8, JSON, Arrow to Python) is done where a batch is tokenised, so it runs on all cores. Every
batch knows the origin of its rows, which error messages need.

Cost: a batch is pickled once (bytes or Arrow buffers, about 1 GB/s). Limit: one row must fit in memory.
"""

from __future__ import annotations

import gzip
import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa
import xxhash

from drillyard.errors import UserError

Row = dict[str, Any]

Origin = tuple[str, str]
"""(file or data set, the unit that counts its rows: line, row, or "" if it is one row)."""

BATCH_BYTES = 1 << 20
"""Size of a raw batch: large enough that passing it on costs nothing, small enough to keep all cores busy."""

NUMBER_BITS = 40
"""A place as one uint64: the number of the origin above these bits, the line or row below (up to a trillion)."""


def format_location(origin: Origin, number: int) -> str:
    """`rows.jsonl, line 7`; the name alone if the file is one row."""
    name, unit = origin
    return f"{name}, {unit} {number}" if unit else name


class RawBatch(ABC):
    """Consecutive rows of one source, not yet decoded. Picklable."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Size of the undecoded rows, for progress."""

    @property
    @abstractmethod
    def origins(self) -> tuple[Origin, ...]:
        """The origins of the rows."""

    @abstractmethod
    def rows(self) -> Iterator[tuple[int, Row]]:
        """Decoded rows with the numbers that `place` and `where` take. Raises UserError on invalid input."""

    def place(self, number: int) -> tuple[int, int]:
        """Number of the row's origin, and its line or row there."""
        return 0, number

    def where(self, number: int) -> str:
        """The location of a row, for an error message."""
        origin, line = self.place(number)
        return format_location(self.origins[origin], line)


def utf8_error(file: str, line: int, line_offset: int, error: UnicodeDecodeError) -> UserError:
    """The error for bytes that are not UTF-8; `line_offset` is the offset of the decoded bytes in the file."""
    byte = error.object[error.start]
    return UserError(
        f"{file}, line {line}, byte {line_offset + error.start}: 0x{byte:02x} is not UTF-8 text ({error.reason}). "
        f"Convert the file to UTF-8, for example with iconv."
    )


def _decode_utf8(data: bytes, file: str, first_line: int, offset: int) -> str:
    """`data` as text; an error names the file's line and byte offset."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        raise utf8_error(file, line, offset, error) from None


def blocks_of(file: Path) -> Iterator[bytes]:
    """Blocks of decompressed bytes. UserError if the file cannot be opened, or the archive or disk is damaged."""
    with _open_decompressed(file) as stream:
        while True:
            try:
                block = stream.read(BATCH_BYTES)
            except (EOFError, zlib.error, OSError) as error:
                raise UserError(f"{file}: damaged or cut short ({error}). Fetch or write the file again.") from None
            if not block:
                return
            yield block


def _open_decompressed(file: Path) -> BinaryIO:
    try:
        stream = file.open("rb")
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}). Check the path and its permissions.") from None
    suffix = file.suffix.lower()
    if suffix == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=stream))
    if suffix == ".zst":
        # Arrow's stream reports a truncated frame; the zstandard package ends there without an error.
        return cast(BinaryIO, pa.CompressedInputStream(stream, "zstd"))
    return stream


def hash_bytes_of(file: Path) -> str:
    """xxh3-128 of a file's bytes in hex."""
    digest = xxhash.xxh3_128()
    buffer = bytearray(4 << 20)
    view = memoryview(buffer)
    try:
        with file.open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                digest.update(view[:count])
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}). Check the file and its permissions.") from None
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class JsonLines(RawBatch):
    """Whole lines of a JSON Lines file; `first_line` counts from 1, `offset` is in (decompressed) bytes."""

    file: str
    first_line: int
    offset: int
    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)

    @property
    def origins(self) -> tuple[Origin, ...]:
        return ((self.file, "line"),)

    def rows(self) -> Iterator[tuple[int, Row]]:
        text = _decode_utf8(self.data, self.file, self.first_line, self.offset)
        for number, line in enumerate(text.split("\n"), self.first_line):
            if line and not line.isspace():
                yield number, self._parse(number, line)

    def _parse(self, number: int, line: str) -> Row:
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(
                f"{self.where(number)}, column {error.colno}: not valid JSON ({error.msg}). "
                f"Each line must be one JSON object; fix or remove this line."
            ) from None
        except RecursionError:
            raise UserError(f"{self.where(number)}: JSON is nested too deeply. Fix or remove this line.") from None
        if not isinstance(row, dict):
            hint = " The file is one JSON array; write one object per line." if isinstance(row, list) else ""
            raise UserError(f"{self.where(number)}: expected a JSON object, found {type(row).__name__}.{hint}")
        return row


@dataclass(frozen=True, slots=True)
class ArrowRows(RawBatch):
    """Rows of a Parquet file or of a Hugging Face data set on disk; `first_row` counts from 1."""

    file: str
    first_row: int
    batch: pa.RecordBatch

    @property
    def nbytes(self) -> int:
        return int(self.batch.nbytes)

    @property
    def origins(self) -> tuple[Origin, ...]:
        return ((self.file, "row"),)

    def rows(self) -> Iterator[tuple[int, Row]]:
        here = f"{self.file}, rows {self.first_row} to {self.first_row + self.batch.num_rows - 1}"
        try:
            rows = self.batch.to_pylist()
            for column in self.batch.schema:
                if (plain := _from_arrow(column.type)) is not None:
                    for row in rows:
                        row[column.name] = plain(row[column.name])
        except UnicodeDecodeError as error:
            raise UserError(
                f"{here}: a string is not UTF-8 ({error.reason}). Rewrite the file with valid strings."
            ) from None
        except json.JSONDecodeError as error:
            raise UserError(
                f"{here}: a value of a JSON column is not valid JSON ({error}). Rewrite the file with valid JSON."
            ) from None
        yield from enumerate(rows, self.first_row)


def _from_arrow(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """A function from Arrow's Python values of this type to those of JSON, or None if they are the same.

    They differ for JSON stored as text, and for maps, which Arrow gives as lists of pairs.
    """
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
class TextFiles(RawBatch):
    """Plain text files; each is one row {text, path}."""

    files: tuple[Path, ...]
    size: int

    @property
    def nbytes(self) -> int:
        return self.size

    @property
    def origins(self) -> tuple[Origin, ...]:
        return tuple((str(file), "") for file in self.files)

    def rows(self) -> Iterator[tuple[int, Row]]:
        for number, file in enumerate(self.files):
            data = b"".join(blocks_of(file))
            yield number, {"text": _decode_utf8(data, str(file), 1, 0).removeprefix("\ufeff"), "path": str(file)}

    def place(self, number: int) -> tuple[int, int]:
        return number, 0


@dataclass(frozen=True, slots=True)
class PlainRows(RawBatch):
    """Rows that are Python dictionaries already (CSV, built-in data, streamed data sets).

    `numbers`: the line or row number of each row; `unit` is which of the two.
    """

    origin: str
    unit: str
    numbers: tuple[int, ...]
    values: tuple[Row, ...]
    size: int

    @property
    def nbytes(self) -> int:
        return self.size

    @property
    def origins(self) -> tuple[Origin, ...]:
        return ((self.origin, self.unit),)

    def rows(self) -> Iterator[tuple[int, Row]]:
        yield from zip(self.numbers, self.values, strict=True)


def batched_rows(origin: str, unit: str, rows: Iterator[tuple[int, Row]]) -> Iterator[PlainRows]:
    """Group decoded rows into batches of about `BATCH_BYTES` characters of text."""
    numbers: list[int] = []
    values: list[Row] = []
    size = 0
    for number, row in rows:
        numbers.append(number)
        values.append(row)
        size += sum(len(value) for value in row.values() if isinstance(value, str)) + 64
        if size >= BATCH_BYTES:
            yield PlainRows(origin, unit, tuple(numbers), tuple(values), size)
            numbers, values, size = [], [], 0
    if values:
        yield PlainRows(origin, unit, tuple(numbers), tuple(values), size)
