"""Raw batches of rows: the unit of work between the reader of a source and the processes that
tokenise it.

One process reads a source in order. It only cuts the stream into batches of about a megabyte and
passes them on undecoded. Parsing (UTF-8, JSON, Arrow to Python) is done where a batch is tokenised,
so it runs on all cores. Every batch knows the origin of its rows, which error messages need.

Cost: a batch is pickled once (bytes or Arrow buffers, about 1 GB/s). Limit: one row must fit in
memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import xxhash

from drillyard.errors import UserError

Row = dict[str, Any]

RowOrError = Row | UserError
"""A row, or the error of one that cannot be decoded."""

Origin = tuple[str, str]
"""(file or data set, the unit that counts its rows: line, row, or "" if it is one row)."""

BATCH_BYTES = 1 << 20
"""Size of a raw batch: large enough that passing it on costs nothing, small enough to keep all
cores busy."""

NUMBER_BITS = 40
"""A place as one uint64: the number of the origin above these bits, the line or row below (up to a
trillion)."""


def format_location(origin: Origin, number: int) -> str:
    """`rows.jsonl, line 7`; the name alone if the file is one row."""
    name, unit = origin
    return f"{name}, {unit} {number}" if unit else name


@dataclass(frozen=True, slots=True)
class RawBatch:
    """Consecutive rows of one source, not yet decoded: one origin of many rows, or many origins of
    one row each.

    `nbytes`: size of the undecoded rows, for progress. `rows()`: decoded rows with the numbers that
    `place` and `where` take, a UserError in the place of one that cannot be decoded; raises
    UserError where the end of a row is not known. Picklable: `rows` is a partial of a function
    of a module.
    """

    origins: tuple[Origin, ...]
    nbytes: int
    rows: Callable[[], Iterable[tuple[int, RowOrError]]]

    def place(self, number: int) -> tuple[int, int]:
        """Number of the row's origin, and its line or row there."""
        return (0, number) if self.origins[0][1] else (number, 0)

    def where(self, number: int) -> str:
        """The location of a row, for an error message."""
        origin, line = self.place(number)
        return format_location(self.origins[origin], line)


def decoded_row(item: RowOrError) -> Row:
    """The row. Raises the error of one that could not be decoded."""
    if isinstance(item, UserError):
        raise item
    return item


def batched_rows(
    origin: str, unit: str, rows: Iterator[tuple[int, RowOrError]]
) -> Iterator[RawBatch]:
    """Group rows that are dictionaries already into batches of about `BATCH_BYTES` characters of
    text."""
    held: list[tuple[int, RowOrError]] = []
    size = 0
    for number, row in rows:
        held.append((number, row))
        values = row.values() if isinstance(row, dict) else ()
        size += sum(len(value) for value in values if isinstance(value, str)) + 64
        if size >= BATCH_BYTES:
            yield RawBatch(((origin, unit),), size, partial(iter, held))
            held, size = [], 0
    if held:
        yield RawBatch(((origin, unit),), size, partial(iter, held))


def first_rows(batches: Iterator[RawBatch], limit: int) -> Iterator[RawBatch]:
    """The first `limit` rows of batches. They are decoded here, in the process that reads."""
    for batch in batches:
        rows = list(islice(batch.rows(), limit))
        yield replace(batch, rows=partial(iter, rows))
        limit -= len(rows)
        if limit <= 0:
            return


def first_batches(batches: Iterator[RawBatch], nbytes: int) -> Iterator[RawBatch]:
    """The first batches that have `nbytes` together, or all of them."""
    for batch in batches:
        yield batch
        nbytes -= batch.nbytes
        if nbytes <= 0:
            return


def json_digest(value: Any) -> str:
    """xxh3-128 in hex of a value as JSON, whatever the order of its keys; what JSON lacks counts by
    its repr."""
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True, default=repr).encode())


def hash_bytes_of(file: Path) -> str:
    """xxh3-128 of a file's bytes in hex."""
    try:
        with file.open("rb", buffering=0) as stream:
            return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()
    except OSError as error:
        raise UserError(
            f"{file}: cannot be read ({error.strerror}). Check the file and its permissions."
        ) from None
