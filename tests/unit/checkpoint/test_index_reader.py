"""Whatever the bytes of an index or an archive are, they are read or refused. Attacks are in
tests/security."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.security.test_checkpoints import DATA, good, saved, write

from drillyard.errors import UserError
from drillyard.training.checkpoint.archive_check import check_archive
from drillyard.training.checkpoint.dcp_storage import metadata_of
from drillyard.training.checkpoint.index_reader import ArchiveLocation, UnsafeCheckpoint, read_index
from drillyard.training.checkpoint.manifest import read_manifest

INDEX = good()[".metadata"]
ARCHIVE = saved(torch.zeros(4))
CHANGES = st.lists(
    st.tuples(st.integers(0, 5000), st.integers(0, 5), st.binary(max_size=6)),
    min_size=1,
    max_size=4,
)


def changed(content: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    """Some bytes at some places replaced by others."""
    for place, length, new in changes:
        at = place % (len(content) + 1)
        content = content[:at] + new + content[at + length :]
    return content


@given(CHANGES)
def test_a_changed_index_is_read_or_refused(changes: list[tuple[int, int, bytes]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = write(Path(directory), {**good(), ".metadata": changed(INDEX, changes)})
        with contextlib.suppress(UserError):
            metadata_of(read_index(path, read_manifest(path)), read_manifest(path))


@given(CHANGES)
def test_a_changed_archive_is_read_or_refused(changes: list[tuple[int, int, bytes]]) -> None:
    content = changed(ARCHIVE, changes)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / DATA).write_bytes(content)
        with contextlib.suppress(UnsafeCheckpoint):
            check_archive(Path(directory), ArchiveLocation(DATA, 0, len(content)))
