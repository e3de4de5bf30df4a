"""Reading and writing Megatron-LM's pair of files: tokens in `.bin`, sequences and documents in
`.idx`.

Both are mapped in place and never copied. Layout of `.idx`, little-endian, as megatron-core 0.16
writes it (module `megatron.core.datasets.indexed_dataset`):

    magic MMIDIDX\\0\\0, uint64 version 1, uint8 code of the dtype, uint64 sequences n, uint64
    document bounds m int32[n] tokens of each sequence, int64[n] its byte offset in .bin, int64[m]
    document bounds, in sequences

A GPT file has one sequence per document; other files may cut a document into sentences. Opening
checks that both files fit each other, which costs a pass over `.idx` (12 bytes per sequence).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from drillyard.data.mapped_sequences import map_file
from drillyard.errors import UserError
from drillyard.safe_files import describe_os_error

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
DTYPES: dict[int, np.dtype[Any]] = {4: np.dtype("<i4"), 8: np.dtype("<u2")}
"""Types of tokens by their code. Megatron knows more codes, but its tools write tokens as these two
only."""
SMALL_VOCABULARY = 65_500
"""Vocabularies below this size are written as uint16, like Megatron's own
(`DType.optimal_dtype`)."""
_HEADER = struct.Struct("<9sQBQQ")
_SCANNED_TOKENS = 1 << 22


@dataclass(frozen=True)
class IndexedFile:
    """An open pair of files.

    tokens: [N], uint16 or int32. lengths: int32 [n], tokens of each sequence. offsets: int64 [n],
    its first byte in `.bin`. bounds: int64 [m], numbers of the sequences that begin a document, and
    n at the end.
    """

    path: Path
    tokens: npt.NDArray[Any]
    lengths: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    bounds: npt.NDArray[np.int64]

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """First byte of each document in `.bin`, in the order of the file."""
        if len(self.bounds) == len(self.offsets) + 1 and bool((np.diff(self.bounds) == 1).all()):
            return self.offsets
        ends = np.append(self.offsets, self.tokens.nbytes)
        return np.asarray(ends[self.bounds[:-1]], np.int64)

    def token_range(self) -> tuple[int, int]:
        """Smallest and largest token, (0, 0) of an empty file. Reads all of `.bin`."""
        parts = [
            self.tokens[at : at + _SCANNED_TOKENS]
            for at in range(0, len(self.tokens), _SCANNED_TOKENS)
        ]
        return min((int(part.min()) for part in parts), default=0), max(
            (int(part.max()) for part in parts), default=0
        )


def pair_of(path: str) -> tuple[Path, Path] | None:
    """`.bin` and `.idx` of a path that names one of them, or their common prefix; None for any
    other path.

    UserError if one of the two is missing.
    """
    named = Path(path).expanduser()
    if named.suffix in (".bin", ".idx"):
        tokens, index = named.with_suffix(".bin"), named.with_suffix(".idx")
        for file, other in ((tokens, index), (index, tokens)):
            if not file.is_file():
                raise UserError(
                    f"{file}: no such file. Megatron data are a .bin and an .idx of one name: copy"
                    f" it beside {other}."
                )
        return tokens, index
    pair = Path(f"{named}.bin"), Path(f"{named}.idx")
    return pair if not named.exists() and all(file.is_file() for file in pair) else None


def open_indexed(tokens_path: Path, index_path: Path) -> IndexedFile:
    """Map a pair of files. UserError if one is not Megatron's or does not fit the other."""
    try:
        header = index_path.open("rb").read(_HEADER.size)
        content = map_file(index_path, np.uint8)
        stored = map_file(tokens_path, np.uint8)
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read ({describe_os_error(error)}).") from None
    if not header.startswith(MAGIC):
        raise UserError(
            f"{index_path}: not an index of Megatron data (it does not begin with MMIDIDX)."
            f" {_REMEDY}"
        )
    if len(header) < _HEADER.size:
        raise _misfit(index_path, f"it ends after {len(header)} bytes, within its header")
    _, version, code, sequences, bounds = _HEADER.unpack(header)
    if version != VERSION or code not in DTYPES:
        raise UserError(
            f"{index_path}: version {version} with tokens of dtype code {code}; supported is"
            f" version 1 with int32 (4) or uint16 (8). {_REMEDY}"
        )
    expected = _HEADER.size + 12 * sequences + 8 * bounds
    if len(content) != expected:
        raise _misfit(
            index_path, f"it has {len(content)} bytes, and {sequences} sequences need {expected}"
        )
    at = _HEADER.size
    lengths = np.frombuffer(content, "<i4", sequences, at)
    offsets = np.frombuffer(content, "<i8", sequences, at + 4 * sequences)
    documents = np.frombuffer(content, "<i8", bounds, at + 12 * sequences)
    dtype = DTYPES[code]
    _require_fit(index_path, tokens_path, lengths, offsets, documents, dtype.itemsize, len(stored))
    return IndexedFile(tokens_path, stored.view(dtype), lengths, offsets, documents)


_REMEDY = "Write the pair again, for example with `drillyard data build --to megatron`."


def _misfit(index_path: Path, what: str) -> UserError:
    return UserError(f"{index_path}: damaged or cut short: {what}. {_REMEDY}")


def _require_fit(
    index_path: Path,
    tokens_path: Path,
    lengths: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
    bounds: npt.NDArray[np.int64],
    itemsize: int,
    num_bytes: int,
) -> None:
    """Raise UserError unless the sequences follow each other without gaps and end where `.bin`
    does."""
    if len(lengths) and int(lengths.min()) < 0:
        raise _misfit(index_path, f"sequence {int(np.argmax(lengths < 0))} has a negative length")
    ends = np.append(offsets[1:], num_bytes)
    if len(lengths) and (
        int(offsets[0]) != 0
        or not np.array_equal(ends[:-1], (offsets + lengths * np.int64(itemsize))[:-1])
    ):
        raise _misfit(index_path, "its sequences do not follow each other")
    needed = int(offsets[-1]) + int(lengths[-1]) * itemsize if len(lengths) else 0
    if needed != num_bytes:
        raise UserError(
            f"{index_path} does not fit {tokens_path}: its sequences take {needed} bytes, and the"
            f" file has {num_bytes}. {_REMEDY}"
        )
    if (
        not len(bounds)
        or int(bounds[0]) != 0
        or int(bounds[-1]) != len(lengths)
        or bool((np.diff(bounds) < 0).any())
    ):
        raise _misfit(index_path, f"its document bounds do not run from 0 to {len(lengths)}")


class IndexedFileWriter:
    """Writes documents of one sequence each, byte for byte as Megatron-LM does. Use as a context
    manager.

    Files appear under their names only when both are complete; an error leaves neither.
    """

    def __init__(self, prefix: Path, vocab_size: int) -> None:
        self.paths = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
        self._drafts = [path.with_name(f".{path.name}.draft") for path in self.paths]
        self._code = 8 if vocab_size < SMALL_VOCABULARY else 4
        self._lengths: list[npt.NDArray[np.int32]] = []
        self.num_tokens = 0

    def __enter__(self) -> IndexedFileWriter:
        self._stream = self._drafts[0].open("wb")
        return self

    def add(self, tokens: npt.NDArray[Any], lengths: Iterable[int]) -> None:
        """Append documents: their tokens one after the other, and the number of tokens of each."""
        self._stream.write(tokens.astype(DTYPES[self._code]).tobytes())
        self._lengths.append(np.fromiter(lengths, np.int32))
        self.num_tokens += len(tokens)

    @property
    def num_documents(self) -> int:
        """Documents so far."""
        return sum(map(len, self._lengths))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stream.close()
        try:
            if kind is None:
                self._drafts[1].write_bytes(b"".join(self._index()))
                for draft, path in zip(self._drafts, self.paths, strict=True):
                    draft.rename(path)
        finally:
            for draft in self._drafts:
                draft.unlink(missing_ok=True)

    def _index(self) -> Iterable[bytes]:
        lengths = np.concatenate([np.zeros(0, np.int32), *self._lengths]).astype("<i4")
        ends = np.cumsum(lengths, dtype=np.int64) * DTYPES[self._code].itemsize
        yield _HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(lengths) + 1)
        yield lengths.tobytes()
        yield (
            (ends - lengths.astype(np.int64) * DTYPES[self._code].itemsize).astype("<i8").tobytes()
        )
        yield np.arange(len(lengths) + 1, dtype="<i8").tobytes()
