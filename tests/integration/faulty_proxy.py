"""A proxy for reading from an object store, that cuts answers, refuses them, or lets the object
change."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

PASSED_ON = (
    "Range",
    "If-Match",
    "Authorization",
    "Content-Type",
    "X-Amz-Date",
    "X-Amz-Content-SHA256",
)
RETURNED = ("ETag", "Content-Range", "Content-Type", "Last-Modified", "X-Repo-Commit")


@dataclass
class Faults:
    """What happens to the next answers with content: bytes after which each ends, or statuses
    instead of them.

    `change` is called once, after the first of them. `reached` counts answers with content.
    """

    cuts: list[int] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    change: Callable[[], None] | None = None
    reached: int = 0

    @property
    def all_happened(self) -> bool:
        return not self.cuts and not self.statuses and self.change is None and self.reached > 0


@contextmanager
def proxy(endpoint: str, faults: Faults, is_content: Callable[[str, str], bool]) -> Iterator[str]:
    """The address of a proxy before the server at `endpoint`. Faults go where `is_content` (method,
    path) is true."""

    class Handler(BaseHTTPRequestHandler):
        def pass_on(self) -> None:
            content = is_content(self.command, self.path)
            faults.reached += content
            if content and faults.statuses:
                self.send_error(faults.statuses.pop(0))
                return
            headers = {name: self.headers[name] for name in PASSED_ON if name in self.headers}
            sent = (
                self.rfile.read(int(self.headers["Content-Length"]))
                if "Content-Length" in self.headers
                else None
            )
            request = urllib.request.Request(
                endpoint + self.path, data=sent, headers=headers, method=self.command
            )
            try:
                with urllib.request.urlopen(request, timeout=10) as answer:
                    status, found, body = answer.status, answer.headers, answer.read()
            except urllib.error.HTTPError as error:
                status, found, body = error.code, error.headers, error.read()
            self.send_response(status)
            length = found["Content-Length"] if self.command == "HEAD" else str(len(body))
            self.send_header("Content-Length", length or "0")
            for name in RETURNED:
                if name in found:
                    self.send_header(name, found[name])
            self.end_headers()
            cut = faults.cuts.pop(0) if content and faults.cuts else len(body)
            self.wfile.write(body[:cut])
            if content and faults.change is not None:
                change, faults.change = faults.change, None
                change()

        do_GET = do_HEAD = do_POST = pass_on

        def log_message(self, *_: Any) -> None: ...

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listener.daemon_threads = True
    thread = Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.server_port}"
    listener.shutdown()
    listener.server_close()
    thread.join()
