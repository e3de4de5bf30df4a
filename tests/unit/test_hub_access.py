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

import pytest

from drillyard.hub_access import denied_status

FETCH = """
from drillyard.config.run import ModelConfig
from drillyard.data.tokenizer import _load_pretrained
from drillyard.errors import UserError
from drillyard.models.meta_model import load_config
from drillyard.models.pretrained import model_directory
for fetch in (lambda name: load_config(ModelConfig(id=name)), model_directory, _load_pretrained):
    try:
        fetch("org/gated")
    except UserError as error:
        print(str(error), end="\\n\\n")
"""


@contextmanager
def refusing(status: int, headers: dict[str, str], seen: list[str | None]) -> Iterator[str]:
    """The address of a hub that answers everything with `status`; `seen` gets each Authorization
    header."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers["Authorization"])
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


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (401, {}),
        (401, {"X-Error-Code": "GatedRepo"}),
        (403, {"X-Error-Code": "GatedRepo"}),
        (403, {}),
    ],
)
def test_a_gated_model_names_the_page_and_never_the_token(
    status: int, headers: dict[str, str], tmp_path: Path
) -> None:
    seen: list[str | None] = []
    with refusing(status, headers, seen) as url:
        settings = {
            "HF_ENDPOINT": url,
            "HF_TOKEN": "hf_secret",
            "HF_HOME": str(tmp_path),
            "HF_HUB_OFFLINE": "0",
        }
        done = subprocess.run(
            [sys.executable, "-c", FETCH],
            env={**os.environ, **settings, "TRANSFORMERS_OFFLINE": "0"},
            capture_output=True,
            text=True,
            check=True,
        )
    errors = done.stdout.strip().split("\n\n")
    assert len(errors) == 3
    for error in errors:
        assert f"{url}/org/gated" in error and str(status) in error and len(error.splitlines()) <= 2
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
