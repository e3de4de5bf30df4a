"""The manifest: what was written comes back, and no byte of it can change unnoticed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drillyard.training.checkpoint import manifest as files
from drillyard.training.checkpoint.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    ManifestError,
    decode,
    encode,
    is_file_name,
    json_value,
    read_manifest,
    write_manifest,
)

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=6), JSON, max_size=4)
MANIFESTS = st.builds(
    Manifest,
    step=st.integers(0, 10**9),
    world_size=st.integers(1, 10**5),
    torch_version=st.text(max_size=12),
    created=st.text(max_size=30),
    files=st.dictionaries(
        st.text(max_size=12).filter(is_file_name),
        st.builds(FileRecord, st.integers(0, 2**50), st.text("0123456789abcdef", max_size=32)),
    ),
    identity=OBJECTS,
    metadata=OBJECTS,
)
SMALL = Manifest(
    50,
    2,
    "2.15.0",
    "2026-01-31T12:00:00.000Z",
    {".metadata": FileRecord(3, "0" * 32)},
    {"name": "a"},
)


@given(MANIFESTS)
def test_what_is_encoded_is_decoded(manifest: Manifest) -> None:
    assert decode(encode(manifest)) == manifest


def test_every_change_of_a_single_byte_is_noticed() -> None:
    raw = encode(SMALL)
    for position in range(len(raw)):
        for mask in (0x01, 0x20, 0xFF):
            damaged = bytearray(raw)
            damaged[position] ^= mask
            with pytest.raises(ManifestError):
                decode(bytes(damaged))


def test_every_truncation_and_every_addition_is_noticed() -> None:
    raw = encode(SMALL)
    for length in range(len(raw)):
        with pytest.raises(ManifestError):
            decode(raw[:length])
    for damaged in (raw + b"\n", b" " + raw, raw + raw):
        with pytest.raises(ManifestError):
            decode(damaged)


@given(st.binary(max_size=200))
def test_garbage_is_an_error_of_ours(raw: bytes) -> None:
    with pytest.raises(ManifestError):
        decode(raw)


def test_a_manifest_of_a_later_format_is_refused_with_both_versions() -> None:
    later = Manifest(1, 1, "3.0", "", {}, format_version=FORMAT_VERSION + 1)
    with pytest.raises(ManifestError, match=f"version {FORMAT_VERSION + 1} .*{FORMAT_VERSION}"):
        decode(encode(later))


def test_a_non_finite_number_becomes_null_and_an_object_is_refused() -> None:
    assert json_value({"loss": math.nan, "parts": (1, math.inf)}) == {
        "loss": None,
        "parts": [1, None],
    }
    with pytest.raises(TypeError, match="set"):
        json_value({"a": {1, 2}})
    assert json.loads(encode(Manifest(1, 1, "", "", {}, metadata={"loss": math.nan})))[
        "metadata"
    ] == {"loss": None}


def test_writing_a_manifest_leaves_no_other_file_and_replaces_an_older_one(tmp_path: Path) -> None:
    write_manifest(tmp_path, Manifest(1, 1, "", "", {}))
    write_manifest(tmp_path, SMALL)
    assert read_manifest(tmp_path) == SMALL
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST_NAME]


def test_a_write_that_fails_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_manifest(tmp_path, SMALL)

    def disk_full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", disk_full)
    with pytest.raises(OSError, match="No space left"):
        write_manifest(tmp_path, Manifest(2, 1, "", "", {}))
    assert read_manifest(tmp_path) == SMALL
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST_NAME]


def test_the_checksum_of_a_file_is_that_of_its_bytes_across_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "READ_CHUNK_BYTES", 7)
    for size in (0, 1, 6, 7, 8, 100):
        data = bytes(range(size))
        (tmp_path / "file").write_bytes(data)
        assert files.file_checksum(tmp_path / "file") == files.checksum(data)
    assert (
        files.checksum(b"") == "99aa06d3014798d86001c324468d497f"
    )  # the published XXH3-128 of no bytes
