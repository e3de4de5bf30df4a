"""Paths name files, directories, stdin and cloud objects; compression is told by the content."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlparse

import pytest
import zstandard

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


def test_damaged_compression_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    packed = bytearray(gzip.compress(b"hello\n" * 1000))
    packed[12] ^= 255
    path.write_bytes(packed)
    with pytest.raises(UserError, match=r"x\.gz: cannot be read"):
        content(str(path))


def test_what_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        find_files([str(tmp_path / "none")])
    with pytest.raises(UserError, match="has no files"):
        find_files([str(tmp_path)])


class Bucket(BaseHTTPRequestHandler):
    """The two calls of the Cloud Storage JSON API that reading needs: list objects, and read a range of one."""

    objects: ClassVar[dict[str, bytes]] = {}

    def do_GET(self) -> None:
        url = urlparse(self.path)
        query = parse_qs(url.query)
        if url.path.endswith("/o"):
            prefix = query.get("prefix", [""])[0]
            items = [self.item(name) for name in sorted(self.objects) if name.startswith(prefix)]
            self.answer(200, json.dumps({"kind": "storage#objects", "items": items}).encode())
            return
        name = unquote(url.path.partition("/o/")[2])
        if "/b/bucket/" not in url.path or name not in self.objects:
            self.answer(404, b'{"error": {"code": 404, "message": "No such object"}}')
        elif query.get("alt") == ["media"]:
            self.range(self.objects[name])
        else:
            self.answer(200, json.dumps(self.item(name)).encode())

    def item(self, name: str) -> dict[str, str]:
        size = str(len(self.objects[name]))
        return {"name": name, "bucket": "bucket", "size": size, "updated": "2026-01-02T03:04:05Z", "generation": "1"}

    def range(self, whole: bytes) -> None:
        asked = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")
        first = int(asked[0])
        last = min(int(asked[1] or len(whole)), len(whole) - 1)
        if first >= len(whole):
            self.answer(416, b"")
            return
        self.answer(206, whole[first : last + 1], {"Content-Range": f"bytes {first}-{last}/{len(whole)}"})

    def answer(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {
            "Content-Length": str(len(body)),
            "Content-Type": "application/json",
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    server = HTTPServer(("127.0.0.1", 0), Bucket)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_port}")
    Bucket.objects = {}
    yield Bucket.objects
    server.shutdown()
    server.server_close()


def test_cloud_objects(bucket: dict[str, bytes]) -> None:
    bucket["runs/a/log.txt"] = b"hello\n" * 9
    bucket["runs/a/log.txt.gz"] = gzip.compress(b"packed\n")
    bucket["runs/ab/other.txt"] = b"no"
    assert content("gs://bucket/runs/a/log.txt") == b"hello\n" * 9
    assert content("gs://bucket/runs/a/log.txt.gz") == b"packed\n"
    files = find_files(["gs://bucket/runs/a"])
    assert [file.name for file in files] == ["gs://bucket/runs/a/log.txt", "gs://bucket/runs/a/log.txt.gz"]
    assert files[0].size == 54
    with pytest.raises(UserError, match="no such object"):
        find_files(["gs://bucket/elsewhere"])
