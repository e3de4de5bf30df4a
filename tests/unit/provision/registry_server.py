"""A registry of images on this machine: manifests by tag, which it gives for a token of their
repository alone."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

INDEX = "application/vnd.oci.image.index.v1+json"


def manifest(name: str) -> bytes:
    """The index of an image; another `name` is another image."""
    return json.dumps({"schemaVersion": 2, "mediaType": INDEX, "name": name}).encode()


class RegistryServer:
    """`tags`: manifest by (repository, tag). `changed` sees each answer before it is sent: request,
    status, headers and body, and returns the last three. `log`: method, path and Authorization of
    every request."""

    def __init__(self) -> None:
        self.tags: dict[tuple[str, str], bytes] = {}
        self.tokens: dict[str, str] = {}
        """Repository by token."""
        self.log: list[tuple[str, str, str | None]] = []
        self.changed: Callable[..., tuple[int, dict[str, str], bytes]] = lambda request, *answer: (
            answer[0],
            answer[1],
            answer[2],
        )
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = urlsplit(self.path).path
                server.log.append((self.command, path, self.headers["Authorization"]))
                status, headers, body = server.changed(self, *server._answer(self))
                self.send_response(status)
                headers = {"Content-Length": str(len(body)), **headers}
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def push(self, image: str, name: str) -> str:
        """Let the tag of REPOSITORY:TAG name an image; the image's digest."""
        repository, _, tag = image.rpartition(":")
        self.tags[repository, tag] = manifest(name)
        return digest_of(self.tags[repository, tag])

    def _answer(self, request: BaseHTTPRequestHandler) -> tuple[int, dict[str, str], bytes]:
        path, query = urlsplit(request.path).path, parse_qs(urlsplit(request.path).query)
        if path == "/token":
            (scope,) = query["scope"]
            token = f"token-{len(self.tokens)}"
            self.tokens[token] = scope.split(":")[1]
            return 200, {}, json.dumps({"token": token}).encode()
        repository, _, tag = path.removeprefix("/v2/").rpartition("/manifests/")
        token = (request.headers["Authorization"] or "").removeprefix("Bearer ")
        if self.tokens.get(token) != repository:
            realm = f'Bearer realm="http://{self.address}/token",service="here",scope="x"'
            return 401, {"WWW-Authenticate": realm}, b"{}"
        found = self.tags.get((repository, tag))
        if found is None:
            return 404, {}, b"{}"
        return 200, {"Content-Type": INDEX, "Docker-Content-Digest": digest_of(found)}, found


def digest_of(body: bytes) -> str:
    return f"sha256:{hashlib.sha256(body).hexdigest()}"
