"""gzip and zstd streams of any number of members or frames, read as far as they can be read.

The idea: a log may be cut anywhere and damaged anywhere, and what was packed before that place is whole. So damage ends
the stream as a file's end does, and `trouble` says what was found; whoever reads to the end tells the user.

Cost: that of zlib and zstandard; where gzip data are damaged, the last 256 KiB are unpacked again byte by byte.
Limits: of zstd what was packed in the damaged block (up to 128 KiB of text) is lost.
"""

from __future__ import annotations

import io
import zlib
from abc import abstractmethod
from collections.abc import Generator, Iterator
from typing import Any, BinaryIO, Final, cast

from drillyard.errors import UserError

_GZIP: Final = b"\x1f\x8b"
_GZIP_WINDOW: Final = 31
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_SKIPPABLE_ZSTD: Final = b"\x2a\x4d\x18"
_PIECE: Final = 1 << 18
_PIECE_OF_TEXT: Final = 1 << 20
_ZSTD_PIECE: Final = 1 << 13


class Packed(io.RawIOBase):
    """The text of a packed stream. `trouble` is None, or why it ended early."""

    kind: str
    trouble: str | None = None

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._ready = b""
        self._text = self._pieces()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._ready:
            try:
                self._ready = next(self._text)
            except StopIteration:
                return 0
        taken = self._ready[: len(buffer)]
        buffer[: len(taken)] = taken
        self._ready = self._ready[len(taken) :]
        return len(taken)

    def _pieces(self) -> Iterator[bytes]:
        """The text of all members."""
        packed = b""
        while packed := self._after_padding(packed):
            unpacker = self._unpacker()
            while not unpacker.eof:
                if not packed:
                    self.trouble = f"its {self.kind} data end in the middle (cut off, or still being written)"
                    return
                packed = yield from self._unpack(unpacker, packed)
                if self.trouble is not None:
                    return
                if not unpacker.eof:
                    packed = self._raw.read(_PIECE)

    def _after_padding(self, packed: bytes) -> bytes:
        """The next packed bytes that are no padding (zeros); none at the end."""
        while not (packed := packed.lstrip(b"\0")):
            packed = self._raw.read(_PIECE)
            if not packed:
                return b""
        return packed

    def _damaged(self, error: Exception) -> None:
        reason = str(error).rpartition(": ")[2]
        self.trouble = f"its {self.kind} data are damaged ({reason})"
        if "data check" in reason:
            # Checksums come at the end: the damage is anywhere before it.
            self.trouble += ", so some of its figures may be wrong"

    @abstractmethod
    def _unpacker(self) -> Any:
        """For the next member: `eof` tells when it has ended."""

    @abstractmethod
    def _unpack(self, unpacker: Any, packed: bytes) -> Generator[bytes, None, bytes]:
        """The text of the next packed bytes; returns those behind the member. Sets `trouble` where they are damaged."""


class Gzip(Packed):
    """All members of a gzip stream."""

    kind = "gzip"

    def _unpacker(self) -> Any:
        return zlib.decompressobj(_GZIP_WINDOW)

    def _unpack(self, unpacker: Any, packed: bytes) -> Generator[bytes, None, bytes]:
        while packed and not unpacker.eof:
            before = unpacker.copy()
            try:
                yield unpacker.decompress(packed, _PIECE_OF_TEXT)
            except zlib.error as error:
                yield self._until_damage(before, packed)
                self._damaged(error)
                return b""
            packed = unpacker.unconsumed_tail
        return bytes(unpacker.unused_data)

    def _until_damage(self, unpacker: Any, packed: bytes) -> bytes:
        """zlib gives nothing of a piece that has damage: what comes before it, byte by byte."""
        text = []
        for place in range(len(packed)):
            try:
                text.append(unpacker.decompress(packed[place : place + 1]))
            except zlib.error:
                break
        return b"".join(text)


class Zstandard(Packed):
    """All frames of a zstd stream."""

    kind = "zstd"

    def __init__(self, raw: BinaryIO) -> None:
        import zstandard

        self._zstandard = zstandard
        super().__init__(raw)

    def _unpacker(self) -> Any:
        return self._zstandard.ZstdDecompressor().decompressobj()

    def _unpack(self, unpacker: Any, packed: bytes) -> Generator[bytes, None, bytes]:
        # In small pieces: the text of one is in memory as a whole, and lost if the piece is damaged.
        begin = 0
        while begin < len(packed) and not unpacker.eof:
            piece = packed[begin : begin + _ZSTD_PIECE]
            begin += len(piece)
            try:
                yield unpacker.decompress(piece)
            except self._zstandard.ZstdError as error:
                self._damaged(error)
                return b""
        return bytes(unpacker.unused_data) + packed[begin:]


def is_packed(head: bytes) -> bool:
    """Whether a file that begins so (4 bytes) is gzip or zstd."""
    return head.startswith(_GZIP) or _is_zstd(head)


def _is_zstd(head: bytes) -> bool:
    # pzstd begins with a frame of its own that is to be skipped.
    return head[:4] == _ZSTD or (head[1:4] == _SKIPPABLE_ZSTD and 0x50 <= head[0] <= 0x5F)


def unpacked(raw: BinaryIO, name: str) -> BinaryIO:
    """`raw` itself, or what it holds when it is gzip or zstd. Raises UserError where zstandard is missing."""
    stream = raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(cast("io.RawIOBase", raw))
    magic = stream.peek(4)[:4]
    if magic.startswith(_GZIP):
        return io.BufferedReader(Gzip(stream), _PIECE_OF_TEXT)
    if _is_zstd(magic):
        try:
            return io.BufferedReader(Zstandard(stream), _PIECE_OF_TEXT)
        except ImportError as error:
            raise UserError(f"{name}: is zstd: install zstandard (pip install zstandard), or decompress it") from error
    return stream


def trouble(stream: BinaryIO) -> str | None:
    """Why a stream of `unpacked` ended before its end; None when it did not (or is still to be read)."""
    raw = stream.raw if isinstance(stream, io.BufferedReader) else None
    return raw.trouble if isinstance(raw, Packed) else None
