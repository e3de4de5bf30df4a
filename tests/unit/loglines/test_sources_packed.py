"""gzip and zstd are read as far as they can be, and it is said where that is not to the end."""

from __future__ import annotations

import gzip
import io
import random

import pytest
import zstandard
from tests.facts import says

from drillyard.loglines.sources import is_packed, trouble, unpacked

RANDOM = random.Random(1)
TEXT = b"".join(b"line %d has %d\n" % (number, RANDOM.getrandbits(60)) for number in range(40_000))
THIRD = len(TEXT) // 3
THIRDS = [TEXT[:THIRD], TEXT[THIRD : 2 * THIRD], TEXT[2 * THIRD :]]
KINDS = pytest.mark.parametrize(
    "compress", [gzip.compress, zstandard.ZstdCompressor(write_checksum=True).compress]
)
ZSTD_BLOCK = 128 << 10


def read(packed: bytes) -> tuple[bytes, str | None]:
    stream = unpacked(io.BytesIO(packed), "x")
    return stream.read(), trouble(stream)


@KINDS
def test_members_and_frames_one_behind_the_other_are_one_text(compress) -> None:
    packed = b"".join(map(compress, THIRDS))
    assert is_packed(packed[:4])
    assert read(packed) == (TEXT, None)
    # Padding as on tapes and of block devices, longer than is read at a time.
    assert read(packed + bytes(600_000)) == (TEXT, None)


def test_frames_that_are_to_be_skipped_are_no_text() -> None:
    packed = b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + zstandard.compress(TEXT)
    assert is_packed(packed[:4])
    assert read(packed) == (TEXT, None)


@KINDS
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_what_is_cut_off_gives_the_text_before_it(compress, share) -> None:
    packed = compress(TEXT)
    text, why = read(packed[: int(len(packed) * share)])
    assert TEXT.startswith(text)
    assert len(text) > len(TEXT) * share * 0.9 - ZSTD_BLOCK
    assert why is not None and says(why, "in the middle")


@KINDS
def test_a_cut_between_members_is_no_damage_that_anybody_could_see(compress) -> None:
    assert read(compress(THIRDS[0])) == (THIRDS[0], None)


@KINDS
def test_damage_gives_the_text_before_it(compress) -> None:
    packed = [bytearray(compress(third)) for third in THIRDS]
    packed[1][:4] = b"\1\2\3\4"
    text, why = read(b"".join(packed))
    assert text == THIRDS[0]
    assert why is not None and "are damaged (" in why


def test_damage_inside_of_gzip_loses_nothing_before_it() -> None:
    header = gzip.compress(TEXT)[:10]
    # The length of a stored block and its complement do not agree: zlib notices there and then.
    member = header + b"\0\5\0\xfa\xffhello" + b"\0\5\0\1\1nobody"
    text, why = read(member)
    assert text == b"hello"
    assert why is not None and "invalid stored block lengths" in why


@KINDS
def test_a_wrong_checksum_keeps_the_text_and_doubts_it(compress) -> None:
    packed = bytearray(compress(TEXT))
    packed[-6 if compress is gzip.compress else -2] ^= 255
    text, why = read(bytes(packed))
    assert TEXT.startswith(text) and len(TEXT) - len(text) <= ZSTD_BLOCK
    assert why is not None and "damaged" in why
    assert ("may be wrong" in why) == (compress is gzip.compress)


def test_plain_text_is_itself() -> None:
    assert read(b"hello") == (b"hello", None)
    assert read(b"") == (b"", None)
