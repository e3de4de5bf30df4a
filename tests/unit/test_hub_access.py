"""A hub that denies access: each thing that is fetched from it names the page on which to ask, and
never the token."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from drillyard.hub_access import denied_status

FETCH = """
import sys
from drillyard.config.run_model import ModelConfig
from drillyard.data.tokenizer import _load_pretrained
from drillyard.errors import UserError
from drillyard.models.meta_model import load_config
from drillyard.models.pretrained import model_directory
fetches = (lambda name: load_config(ModelConfig(id=name)), model_directory, _load_pretrained)
for name in sys.argv[1:]:
    for fetch in fetches:
        try:
            fetch(name)
        except UserError as error:
            print(str(error), end="\\n\\n")
"""
DENIALS: dict[str, tuple[int, dict[str, str]]] = {
    "org/login": (401, {}),
    "org/gated-login": (401, {"X-Error-Code": "GatedRepo"}),
    "org/gated": (403, {"X-Error-Code": "GatedRepo"}),
    "org/forbidden": (403, {}),
}
"""Models, and how the hub denies each."""


@contextmanager
def refusing(seen: list[str | None]) -> Iterator[str]:
    """The address of a hub that denies every model of DENIALS; `seen` gets each Authorization
    header."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers["Authorization"])
            (status, headers), *others = [
                DENIALS[name] for name in DENIALS if f"/{name}/" in f"{self.path}/"
            ]
            assert not others
            self.send_response(status)
            for name, value in {**headers, "Content-Length": "0"}.items():
                self.send_header(name, value)
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            """Keep the test's output free of requests."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_gated_model_names_the_page_and_never_the_token(tmp_path: Path) -> None:
    seen: list[str | None] = []
    with refusing(seen) as url:
        settings = {
            "HF_ENDPOINT": url,
            "HF_TOKEN": "hf_secret",
            "HF_HOME": str(tmp_path),
            "HF_HUB_OFFLINE": "0",
        }
        done = subprocess.run(
            [sys.executable, "-c", FETCH, *DENIALS],
            env={**os.environ, **settings, "TRANSFORMERS_OFFLINE": "0"},
            capture_output=True,
            text=True,
            check=True,
        )
    errors = done.stdout.strip().split("\n\n")
    expected = [(name, status) for name, (status, _) in DENIALS.items() for _ in range(3)]
    for error, (name, status) in zip(errors, expected, strict=True):
        assert f"{url}/{name}" in error and str(status) in error and len(error.splitlines()) <= 2
    assert "Bearer hf_secret" in seen
    assert "hf_secret" not in done.stdout + done.stderr
    assert not [
        path for path in tmp_path.rglob("*") if path.is_file() and b"hf_secret" in path.read_bytes()
    ]


def test_other_errors_are_not_taken_for_a_denial() -> None:
    first, second = OSError("no route to host"), ValueError("not a config")
    first.__cause__, second.__cause__ = second, first
    assert denied_status(first) is None
    assert denied_status(None) is None
