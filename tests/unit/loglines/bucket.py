"""A Cloud Storage bucket on this machine: listing, metadata and reading of objects."""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlparse

import pytest


class Bucket(BaseHTTPRequestHandler):
    """The calls of the Cloud Storage JSON API that reading needs: list objects, look at one, and
    read a range of it."""

    objects: ClassVar[dict[str, bytes]] = {}
    requested: ClassVar[list[tuple[int, int]]] = []
    """First and last byte of what was read."""
    before: ClassVar[list[Callable[[], int | None]]] = []
    """What happens before the next requests for an object, one each; a status that it gives is the
    answer."""

    def do_GET(self) -> None:
        url = urlparse(self.path)
        query = parse_qs(url.query)
        # The client asks for the bucket too, by the way and at any time.
        if "/o/" in url.path and self.before and (status := self.before.pop(0)()) is not None:
            self.answer(status, b'{"error": {"message": "No answer now"}}')
            return
        if url.path.endswith("/o"):
            prefix = query.get("prefix", [""])[0]
            items = [self.item(name) for name in sorted(self.objects) if name.startswith(prefix)]
            self.answer(200, json.dumps({"kind": "storage#objects", "items": items}).encode())
            return
        name = unquote(url.path.partition("/o/")[2])
        if "/b/bucket/" not in url.path or name not in self.objects:
            self.answer(404, b'{"error": {"code": 404, "message": "No such object"}}')
        elif query.get("ifGenerationMatch", [self.generation(name)]) != [self.generation(name)]:
            self.answer(412, b'{"error": {"code": 412, "message": "conditionNotMet"}}')
        elif query.get("alt") == ["media"]:
            self.range(self.objects[name])
        else:
            self.answer(200, json.dumps(self.item(name)).encode())

    def item(self, name: str) -> dict[str, str]:
        size = str(len(self.objects[name]))
        return {
            "name": name,
            "bucket": "bucket",
            "size": size,
            "updated": "2026-01-02T03:04:05Z",
            "generation": self.generation(name),
        }

    def generation(self, name: str) -> str:
        return str(zlib.crc32(self.objects[name]) + 1)

    def range(self, whole: bytes) -> None:
        asked = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")
        first = int(asked[0])
        last = min(int(asked[1] or len(whole)), len(whole) - 1)
        if first >= len(whole):
            self.answer(416, b"")
            return
        self.requested.append((first, last))
        self.answer(
            206, whole[first : last + 1], {"Content-Range": f"bytes {first}-{last}/{len(whole)}"}
        )

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


@contextmanager
def local_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """The objects of the bucket `gs://bucket`, by name; they may be changed at any time."""
    server = HTTPServer(("127.0.0.1", 0), Bucket)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_port}")
    Bucket.objects, Bucket.before = {}, []
    try:
        yield Bucket.objects
    finally:
        server.shutdown()
        server.server_close()
