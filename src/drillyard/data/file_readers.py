"""Readers of JSON Lines, CSV, Parquet and plain text, with gzip and zstd, as streams of raw batches.

Memory is constant: a file is read in blocks of about a megabyte, and a Parquet file through small buffers even if it is
one row group (`buffer_size`; a memory map or whole column chunks would cost the size of the file). A damaged or
truncated file is a UserError that names it.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

from drillyard.data.raw_batches import (
    BATCH_BYTES,
    ArrowRows,
    JsonLines,
    PlainRows,
    RawBatch,
    Row,
    TextFiles,
    batched_rows,
    blocks_of,
    utf8_error,
)
from drillyard.errors import UserError

COMPRESSIONS = (".gz", ".zst")
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
TEXT_SUFFIXES = (
    ".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".html", ".xml", ".log", ".sql", ".py", ".c", ".h", ".cc",
    ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".js", ".ts", ".rb", ".sh", ".pl", ".lua",
)  # fmt: skip


def kind_of(file: Path) -> str | None:
    """`json`, `csv`, `parquet` or `text`, by the suffix before any compression suffix; None for other suffixes."""
    name = file.name.lower()
    for compression in COMPRESSIONS:
        name = name.removesuffix(compression)
    suffix = Path(name).suffix
    if suffix == ".parquet":
        return "parquet" if file.suffix.lower() == ".parquet" else None
    if suffix == ".csv":
        return "csv"
    if suffix in JSON_SUFFIXES:
        return "json"
    return "text" if suffix in TEXT_SUFFIXES else None


def read_json_lines(file: Path) -> Iterator[JsonLines]:
    """Blocks of whole lines. Lines are separated by \\n; a byte order mark is skipped."""
    line, offset, pending = 1, 0, b""
    for block in blocks_of(file):
        if offset == 0 and not pending and block.startswith(b"\xef\xbb\xbf"):
            block, offset = block[3:], 3
        cut = block.rfind(b"\n") + 1
        if cut == 0:
            pending += block
            continue
        data = pending + block[:cut]
        yield JsonLines(str(file), line, offset, data)
        line += data.count(b"\n")
        offset += len(data)
        pending = block[cut:]
    if pending:
        yield JsonLines(str(file), line, offset, pending)


def _decoded_lines(file: Path) -> Iterator[str]:
    """Lines of a text file with their line ends kept; an error names line and byte."""
    for batch in read_json_lines(file):
        offset = batch.offset
        for number, line in enumerate(io.BytesIO(batch.data), batch.first_line):
            try:
                yield line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise utf8_error(str(file), number, offset, error) from None
            offset += len(line)


def read_csv(file: Path) -> Iterator[PlainRows]:
    """Rows of a CSV file with a header line; every value is text."""
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader(_decoded_lines(file), strict=True)

    def rows() -> Iterator[tuple[int, Row]]:
        try:
            header = next(reader, None)
            if header is None:
                return
            if len(set(header)) != len(header):
                raise UserError(f"{file}, line 1: a column name occurs twice in the header: {', '.join(header)}.")
            for values in reader:
                if not values:
                    continue
                if len(values) != len(header):
                    raise UserError(
                        f"{file}, line {reader.line_num}: {len(values)} values, but the header has {len(header)} "
                        f"columns. Quote values with commas or line breaks."
                    )
                yield reader.line_num, dict(zip(header, values, strict=True))
        except csv.Error as error:
            raise UserError(f"{file}, line {reader.line_num}: not valid CSV ({error}). Fix this line.") from None

    return batched_rows(str(file), "line", rows())


def read_parquet(file: Path) -> Iterator[ArrowRows]:
    """Batches of about a megabyte, for row groups of any size."""
    import pyarrow.parquet as pq

    try:
        parquet = pq.ParquetFile(file, memory_map=False, pre_buffer=False, buffer_size=BATCH_BYTES)
        total = sum(parquet.metadata.row_group(i).total_byte_size for i in range(parquet.metadata.num_row_groups))
        row_bytes = max(1, total // max(1, parquet.metadata.num_rows))
        first = 1
        for batch in parquet.iter_batches(batch_size=min(8192, max(1, BATCH_BYTES // row_bytes)), use_threads=False):
            yield ArrowRows(str(file), first, batch)
            first += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{file}: not a readable Parquet file ({reason}). Fetch or write the file again.") from None


def read_text_files(files: list[Path]) -> Iterator[TextFiles]:
    """Groups of files of about a megabyte; the files themselves are read where the batch is tokenised."""
    group: list[Path] = []
    size = 0
    for file in files:
        group.append(file)
        size += file.stat().st_size
        if size >= BATCH_BYTES:
            yield TextFiles(tuple(group), size)
            group, size = [], 0
    if group:
        yield TextFiles(tuple(group), size)


_READERS: dict[str, Callable[[Path], Iterator[RawBatch]]] = {
    "json": read_json_lines,
    "csv": read_csv,
    "parquet": read_parquet,
}


def read_files(files: list[Path]) -> Iterator[RawBatch]:
    """Raw batches of files of any kind, in the given order."""
    texts: list[Path] = []
    for file in files:
        kind = kind_of(file)
        assert kind is not None, file
        if kind == "text":
            texts.append(file)
            continue
        yield from read_text_files(texts)
        texts = []
        yield from _READERS[kind](file)
    yield from read_text_files(texts)
