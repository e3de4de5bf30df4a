"""Paths name files, directories, stdin and cloud objects; compression is recognised by the
content."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard
from tests.unit.loglines.bucket import local_bucket

from drillyard.errors import UserError
from drillyard.loglines.sources import find_files, open_log


def content(name: str) -> bytes:
    [file] = find_files([name])
    with open_log(file) as stream:
        return stream.read()


def test_directories_are_read_in_full_each_file_once(tmp_path: Path) -> None:
    for name in ("b.log", "a/c.log"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    files = find_files([str(tmp_path), str(tmp_path / "b.log")])
    assert [file.name for file in files] == [str(tmp_path / "a/c.log"), str(tmp_path / "b.log")]
    assert [file.size for file in files] == [7, 5]


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstandard.compress])
def test_content_is_decompressed_whatever_its_name(compress, tmp_path: Path) -> None:
    path = tmp_path / "plain.txt"
    path.write_bytes(compress(b"hello\n" * 1000))
    assert content(str(path)) == b"hello\n" * 1000


def test_what_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        find_files([str(tmp_path / "none")])
    with pytest.raises(UserError, match="has no files"):
        find_files([str(tmp_path)])


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    with local_bucket(monkeypatch) as objects:
        yield objects


def test_cloud_objects(bucket: dict[str, bytes]) -> None:
    bucket["runs/a/log.txt"] = b"hello\n" * 9
    bucket["runs/a/log.txt.gz"] = gzip.compress(b"packed\n")
    bucket["runs/ab/other.txt"] = b"no"
    assert content("gs://bucket/runs/a/log.txt") == b"hello\n" * 9
    assert content("gs://bucket/runs/a/log.txt.gz") == b"packed\n"
    files = find_files(["gs://bucket/runs/a"])
    assert [file.name for file in files] == [
        "gs://bucket/runs/a/log.txt",
        "gs://bucket/runs/a/log.txt.gz",
    ]
    assert files[0].size == 54
    with pytest.raises(UserError, match="no such object"):
        find_files(["gs://bucket/elsewhere"])
