"""A web server of objects in memory that can fail in chosen ways; it counts what it was asked
for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, TypeVar


@dataclass
class ObjectServer:
    """Objects by path, and how the next requests for them fail.

    `cut`: bytes after which each response ends. `cut_at`: positions in an object where one response
    ends. `failures`: statuses of the next requests of bytes. `change_after`: (requests of bytes,
    object, new content).
    """

    objects: dict[str, bytes]
    url: str = ""
    cut: int | None = None
    cut_at: set[int] = field(default_factory=set)
    failures: list[int] = field(default_factory=list)
    refused: int | None = None
    has_ranges: bool = True
    change_after: tuple[int, str, bytes] | None = None
    ranges: list[tuple[str, int, int]] = field(default_factory=list)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path.partition("?")[0]
        if path not in self.objects or self.refused is not None:
            handler.send_error(self.refused or 404)
            return
        if handler.command == "GET" and self.failures:
            handler.send_error(self.failures.pop(0))
            return
        content = self.objects[path]
        begin, end = 0, len(content)
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", handler.headers.get("Range", ""))
        if asked and self.has_ranges:
            begin, end = int(asked[1]), min(len(content), int(asked[2] or len(content)) + 1)
        handler.send_response(206 if asked and self.has_ranges else 200)
        if asked and self.has_ranges:
            handler.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(content)}")
        handler.send_header("Content-Length", str(end - begin))
        handler.send_header("ETag", f'"{hash(content)}"')
        handler.end_headers()
        if handler.command == "HEAD":
            return
        sent = content[begin:end] if self.cut is None else content[begin:end][: self.cut]
        for position in sorted(self.cut_at):
            if begin <= position < begin + len(sent):
                sent = content[begin:position]
                self.cut_at.remove(position)
                break
        self.ranges.append((path, begin, len(sent)))
        handler.wfile.write(sent)
        if len(sent) < end - begin:
            handler.close_connection = True
        if self.change_after is not None and len(self.ranges) >= self.change_after[0]:
            _, name, new = self.change_after
            self.objects[name], self.change_after = new, None


Server = TypeVar("Server", bound=ObjectServer)


@contextmanager
def serving(
    objects: dict[str, bytes], kind: type[Server] = ObjectServer, host: str = "127.0.0.1"
) -> Iterator[Server]:
    """Serve objects at `url` until the end of the block."""
    server = kind(objects)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            server.answer(self)

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None: ...

    listener = ThreadingHTTPServer((host, 0), Handler)
    listener.daemon_threads = True
    server.url = f"http://{host}:{listener.server_port}"
    thread = Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()
