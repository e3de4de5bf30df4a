"""JSON Lines, JSON arrays, CSV, Parquet and plain text, with gzip and zstd: streams of raw batches,
and their decoding.

Memory is constant: a file is read in blocks of about a megabyte, and a Parquet file through small
buffers even if it is one row group (`buffer_size`; a memory map or whole column chunks would cost
the size of the file). A damaged or truncated file is a UserError that names it.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, groupby
from pathlib import Path, PurePath
from typing import Any, BinaryIO, cast

import pyarrow as pa

from drillyard.data.json_documents import array_rows, json_type, require_no_single_object
from drillyard.data.raw_batches import BATCH_BYTES, RawBatch, Row, RowOrError, batched_rows
from drillyard.data.remote_objects import RemoteObject
from drillyard.errors import UserError

COMPRESSIONS = (".gz", ".zst")
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
TEXT_SUFFIXES = (
    ".txt",
    ".text",
    ".md",
    ".markdown",
    ".rst",
    ".tex",
    ".html",
    ".xml",
    ".log",
    ".sql",
    ".py",
    ".c",
    ".h",
    ".cc",
    ".cpp",
    ".hpp",
    ".cu",
    ".rs",
    ".go",
    ".java",
    ".js",
    ".ts",
    ".rb",
    ".sh",
    ".pl",
    ".lua",
)


SourceFile = Path | RemoteObject


def kind_of(file: SourceFile | PurePath) -> str | None:
    """`json`, `csv`, `parquet` or `text`, by the suffix before any compression suffix; None for
    other suffixes."""
    suffix = _data_suffix(file)
    if suffix == ".parquet":
        return "parquet" if file.suffix.lower() == ".parquet" else None
    if suffix == ".csv":
        return "csv"
    if suffix in JSON_SUFFIXES:
        return "json"
    return "text" if suffix in TEXT_SUFFIXES else None


def _data_suffix(file: SourceFile | PurePath) -> str:
    name = file.name.lower()
    for compression in COMPRESSIONS:
        name = name.removesuffix(compression)
    return Path(name).suffix


def size_of(file: SourceFile) -> int:
    """Bytes of a file or object as it is stored."""
    return file.stat().st_size if isinstance(file, Path) else file.size


def read_files(files: list[SourceFile]) -> Iterator[RawBatch]:
    """Raw batches of files of any kind, in the given order."""
    for kind, group in groupby(files, kind_of):
        if kind == "text":
            yield from _read_text_files(list(group))
        else:
            assert kind is not None
            for file in group:
                yield from _READERS[kind](file)


def _blocks_of(file: SourceFile) -> Iterator[bytes]:
    """Blocks of decompressed bytes. UserError if the file cannot be opened, or the archive or disk
    is damaged."""
    with _open_decompressed(file) as stream:
        try:
            while block := stream.read(BATCH_BYTES):
                yield block
        except (EOFError, zlib.error, OSError) as error:
            raise UserError(
                f"{file}: damaged or cut short ({error}). Fetch or write the file again."
            ) from None


def _open_decompressed(file: SourceFile) -> BinaryIO:
    try:
        stream = file.open("rb")
    except OSError as error:
        raise UserError(
            f"{file}: cannot be read ({error.strerror}). Check the path and its permissions."
        ) from None
    suffix = file.suffix.lower()
    if suffix == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=stream))
    if suffix == ".zst":
        # Arrow's stream reports a truncated frame; the zstandard package ends there without an
        # error.
        return cast(BinaryIO, pa.CompressedInputStream(stream, "zstd"))
    return stream


def _blocks_of_lines(blocks: Iterator[bytes]) -> Iterator[tuple[int, int, bytes]]:
    """Whole lines as (number of the first, byte offset, bytes). \\n ends a line; a byte order mark
    is skipped."""
    line, offset, pending = 1, 0, b""
    for block in blocks:
        if offset == 0 and not pending and block.startswith(b"\xef\xbb\xbf"):
            block, offset = block[3:], 3
        data = pending + block
        cut = data.rfind(b"\n") + 1
        pending = data[cut:]
        if cut:
            yield line, offset, data[:cut]
            line += data.count(b"\n")
            offset += cut
    if pending:
        yield line, offset, pending


def _decoded_utf8(data: bytes, file: str, first_line: int, offset: int) -> str:
    """`data` as text; an error names the file's line and byte offset."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        raise UserError(
            f"{file}, line {line}, byte {offset + error.start}: 0x{data[error.start]:02x} is not"
            f" UTF-8 text ({error.reason}). Convert the file to UTF-8, for example with iconv."
        ) from None


def _decoded_blocks(blocks: Iterator[bytes], file: str) -> Iterator[str]:
    """The text of a file without a byte order mark, block by block."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    line, offset = 1, 0
    for block in chain(blocks, [None]):
        try:
            text = decoder.decode(block or b"", final=block is None)
        except UnicodeDecodeError as error:
            # The decoder's own input begins with what a block before left of a character.
            start = offset + len(block or b"") - len(error.object)
            _decoded_utf8(error.object, file, line, start)
            raise
        offset += len(block or b"")
        line += text.count("\n")
        yield text


def _read_json(file: SourceFile) -> Iterator[RawBatch]:
    """Rows of JSON Lines, or of a file that is one array of objects."""
    blocks = _blocks_of(file)
    first, second = next(blocks, b""), next(blocks, b"")
    blocks = chain([first, second], blocks)
    start = first.removeprefix(codecs.BOM_UTF8).lstrip()
    if start.startswith(b"["):
        yield from batched_rows(
            str(file), "row", array_rows(_decoded_blocks(blocks, str(file)), str(file))
        )
        return
    if start.startswith(b"{"):
        require_no_single_object(
            start.decode("utf-8", errors="replace"),
            str(file),
            is_whole=not second,
            is_jsonl=_data_suffix(file) != ".json",
        )
    for line, offset, data in _blocks_of_lines(blocks):
        yield json_lines_batch(str(file), line, offset, data)


def json_lines_batch(file: str, first_line: int, offset: int, data: bytes) -> RawBatch:
    """Whole lines of a JSON Lines file; `first_line` counts from 1, `offset` is in (decompressed)
    bytes."""
    return RawBatch(
        ((file, "line"),), len(data), partial(_decoded_json_lines, file, first_line, offset, data)
    )


def _decoded_json_lines(
    file: str, first_line: int, offset: int, data: bytes
) -> Iterator[tuple[int, RowOrError]]:
    lines: list[str | bytes]
    try:
        lines = [*data.decode("utf-8").split("\n")]
    except UnicodeDecodeError:
        lines = [*data.split(b"\n")]
    for number, line in enumerate(lines, first_line):
        if line and not line.isspace():
            try:
                text = line if isinstance(line, str) else _decoded_utf8(line, file, number, offset)
                yield number, _parsed_line(text, f"{file}, line {number}")
            except UserError as error:
                yield number, error
        offset += len(line) + 1


def _parsed_line(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where}, column {error.colno}: not valid JSON ({error.msg}). "
            "Each line must be one JSON object; fix or remove this line."
        ) from None
    except RecursionError:
        raise UserError(f"{where}: JSON is nested too deeply. Fix or remove this line.") from None
    if not isinstance(row, dict):
        raise UserError(
            f"{where}: expected a JSON object, found {json_type(row)}. Fix or remove this line."
        )
    return row


def _read_csv(file: SourceFile) -> Iterator[RawBatch]:
    """Rows of a CSV file with a header line; every value is text."""
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader(_decoded_lines(file), strict=True)

    def next_values() -> list[str] | UserError | None:
        """The values of the next row, or its error; None at the end. UserError where a quote is
        open at the end: it may have begun in any row."""
        try:
            return next(reader, None)
        except csv.Error as error:
            invalid = UserError(
                f"{file}, line {reader.line_num}: not valid CSV ({error}). Fix this line."
            )
            if str(error) == "unexpected end of data":
                raise invalid from None
            return invalid

    def rows() -> Iterator[tuple[int, RowOrError]]:
        header = next_values()
        if header is None:
            return
        if isinstance(header, UserError):
            raise header
        if len(set(header)) != len(header):
            raise UserError(
                f"{file}, line 1: a column name occurs twice in the header: {', '.join(header)}."
            )
        while (values := next_values()) is not None:
            number = reader.line_num
            if isinstance(values, UserError):
                yield number, values
            elif values and len(values) != len(header):
                yield (
                    number,
                    UserError(
                        f"{file}, line {number}: {len(values)} values, but the header has"
                        f" {len(header)} columns. Quote values with commas or line breaks."
                    ),
                )
            elif values:
                yield number, dict(zip(header, values, strict=True))

    return batched_rows(str(file), "line", rows())


def _decoded_lines(file: SourceFile) -> Iterator[str]:
    """Lines of a text file with their line ends kept."""
    for first, offset, data in _blocks_of_lines(_blocks_of(file)):
        for number, line in enumerate(io.BytesIO(data), first):
            yield _decoded_utf8(line, str(file), number, offset)
            offset += len(line)


def _read_parquet(file: SourceFile) -> Iterator[RawBatch]:
    """Batches of about a megabyte, for row groups of any size; none of an empty file, as for other
    kinds."""
    import pyarrow.parquet as pq

    try:
        if size_of(file) == 0:
            return
        source = file if isinstance(file, Path) else file.open()
        parquet = pq.ParquetFile(
            source, memory_map=False, pre_buffer=False, buffer_size=BATCH_BYTES
        )
        total = sum(
            parquet.metadata.row_group(i).total_byte_size
            for i in range(parquet.metadata.num_row_groups)
        )
        row_bytes = max(1, total // max(1, parquet.metadata.num_rows))
        size = min(8192, max(1, BATCH_BYTES // row_bytes))
        yield from arrow_batches(
            str(file), parquet.iter_batches(batch_size=size, use_threads=False)
        )
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{file}: not a readable Parquet file ({reason}). Fetch or write the file again."
        ) from None


def arrow_batches(origin: str, batches: Iterator[pa.RecordBatch]) -> Iterator[RawBatch]:
    """Arrow's batches of a Parquet file or of a Hugging Face data set as raw ones; rows count from
    1."""
    first = 1
    for batch in batches:
        yield RawBatch(
            ((origin, "row"),), int(batch.nbytes), partial(_decoded_arrow, origin, first, batch)
        )
        first += batch.num_rows


def _decoded_arrow(
    origin: str, first_row: int, batch: pa.RecordBatch
) -> Iterator[tuple[int, RowOrError]]:
    try:
        yield from enumerate(_arrow_rows(origin, first_row, batch), first_row)
    except UserError as error:
        if batch.num_rows == 1:
            yield first_row, error
            return
        for number in range(batch.num_rows):
            yield from _decoded_arrow(origin, first_row + number, batch.slice(number, 1))


def _arrow_rows(origin: str, first_row: int, batch: pa.RecordBatch) -> list[Row]:
    last = first_row + batch.num_rows - 1
    here = f"{origin}, row {first_row}" + (f" to {last}" if last > first_row else "")
    try:
        rows: list[Row] = batch.to_pylist()
        for column in batch.schema:
            if (plain := _from_arrow(column.type)) is not None:
                for row in rows:
                    row[column.name] = plain(row[column.name])
    except UnicodeDecodeError as error:
        raise UserError(
            f"{here}: a string is not UTF-8 ({error.reason}). Rewrite the file with valid strings."
        ) from None
    except json.JSONDecodeError as error:
        raise UserError(
            f"{here}: a value of a JSON column is not valid JSON ({error}). Rewrite the file with"
            " valid JSON."
        ) from None
    return rows


def _from_arrow(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """A function from Arrow's Python values of this type to those of JSON, or None if they are the
    same.

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
        fields = {
            child.name: change for child in kind if (change := _from_arrow(child.type)) is not None
        }
        if fields:
            return lambda value: (
                value and {key: fields.get(key, _unchanged)(item) for key, item in value.items()}
            )
    return None


def _unchanged(value: Any) -> Any:
    return value


def _read_text_files(files: list[SourceFile]) -> Iterator[RawBatch]:
    """Groups of files of about a megabyte, each file one row {text, path}; they are read where they
    are tokenised."""
    group: list[SourceFile] = []
    size = 0
    for number, file in enumerate(files, 1):
        group.append(file)
        size += size_of(file)
        if size >= BATCH_BYTES or number == len(files):
            yield RawBatch(
                tuple((str(file), "") for file in group),
                size,
                partial(_decoded_texts, tuple(group)),
            )
            group, size = [], 0


def _decoded_texts(files: tuple[SourceFile, ...]) -> Iterator[tuple[int, RowOrError]]:
    for number, file in enumerate(files):
        data = b"".join(_blocks_of(file))
        try:
            text = _decoded_utf8(data, str(file), 1, 0)
        except UserError as error:
            yield number, error
        else:
            yield number, {"text": text.removeprefix("\ufeff"), "path": str(file)}


_READERS: dict[str, Callable[[SourceFile], Iterator[RawBatch]]] = {
    "json": _read_json,
    "csv": _read_csv,
    "parquet": _read_parquet,
}
