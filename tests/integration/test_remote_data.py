"""Data in a bucket: fake-gcs-server behind a proxy that cuts answers, refuses them, or lets the object change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tests.integration.gcs import BUCKET, Bucket

ROWS = "".join(json.dumps({"text": f"row {n} " + "word " * (n % 40)}) + "\n" for n in range(3000)).encode()


@dataclass
class Faults:
    """What happens to the next answers with content: bytes after which each ends, or statuses instead of them."""

    cuts: list[int] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    new_content: bytes | None = None


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Bucket]:
    bucket = Bucket(tmp_path / "gcs")
    bucket.start_server()
    upload(bucket, ROWS)
    yield bucket
    bucket.discard()


def upload(bucket: Bucket, content: bytes) -> None:
    address = f"{bucket.endpoint}/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name=data%2Frows.jsonl"
    request = urllib.request.Request(address, data=content, headers={"Content-Type": "application/octet-stream"})
    with urllib.request.urlopen(request, timeout=10):
        pass


@contextmanager
def proxy(bucket: Bucket, faults: Faults) -> Iterator[str]:
    """The address of a proxy for reading from the bucket."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_content = "alt=media" in self.path
            if is_content and faults.statuses:
                self.send_error(faults.statuses.pop(0))
                return
            headers = {"Range": self.headers["Range"]} if "Range" in self.headers else {}
            try:
                with urllib.request.urlopen(
                    urllib.request.Request(bucket.endpoint + self.path, headers=headers), timeout=10
                ) as answer:
                    status, body = answer.status, answer.read()
            except urllib.error.HTTPError as error:
                status, body = error.code, error.read()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            cut = faults.cuts.pop(0) if is_content and faults.cuts else len(body)
            self.wfile.write(body[:cut])
            if is_content and faults.new_content is not None:
                upload(bucket, faults.new_content)
                faults.new_content = None

        def log_message(self, *_: Any) -> None: ...

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listener.daemon_threads = True
    thread = Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.server_port}"
    listener.shutdown()
    listener.server_close()
    thread.join()


def build(tmp_path: Path, source: str, host: str) -> subprocess.CompletedProcess[str]:
    """`drillyard data build` into a cache of its own."""
    cache = tmp_path / f"cache-{source.partition(':')[0].strip('/').replace('/', '-')}"
    run = tmp_path / "run.yaml"
    data = {"source": source, "sequence_length": 64, "tokenizer": {"train": "bpe", "vocab_size": 300}}
    config = {
        "name": "remote",
        "model": {"config": {"architecture": "llama"}, "init": "random"},
        "data": data | {"cache_directory": str(cache)},
        "training": {"steps": 1, "optimizer": {"learning_rate": 1e-3}},
    }
    run.write_text(json.dumps(config))
    return subprocess.run(
        [sys.executable, "-m", "drillyard", "data", "build", str(run)],
        env={**os.environ, "STORAGE_EMULATOR_HOST": host},
        capture_output=True,
        text=True,
        check=False,
    )


def cached(tmp_path: Path, scheme: str) -> dict[str, bytes]:
    """Files of the only tokenised cache, without the manifest."""
    (directory,) = next(tmp_path.glob(f"cache-{scheme}*")).glob("tokenized/*")
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "manifest.json"}


def test_the_cache_has_the_bits_of_the_local_file_through_cuts_and_failures(bucket: Bucket, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(ROWS)
    local = build(tmp_path, str(tmp_path / "rows.jsonl"), "")
    assert local.returncode == 0, local.stderr
    faults = Faults(cuts=[1000, 0, len(ROWS) - 1], statuses=[503])
    with proxy(bucket, faults) as host:
        remote = build(tmp_path, f"gs://{BUCKET}/data/rows.jsonl", host)
    assert remote.returncode == 0, remote.stderr
    assert faults == Faults()
    assert cached(tmp_path, "gs") == cached(tmp_path, str(tmp_path).strip("/").replace("/", "-"))


def test_an_object_that_changes_in_mid_read_is_one_clear_error(bucket: Bucket, tmp_path: Path) -> None:
    with proxy(bucket, Faults(new_content=ROWS[: len(ROWS) // 2])) as host:
        result = build(tmp_path, f"gs://{BUCKET}/data/rows.jsonl", host)
    assert result.returncode == 2
    assert "changed" in result.stderr and "rows.jsonl" in result.stderr
    assert list(tmp_path.glob("cache-gs/tokenized/*")) == []


def test_a_refused_object_is_one_clear_error(bucket: Bucket, tmp_path: Path) -> None:
    with proxy(bucket, Faults(statuses=[403] * 100)) as host:
        result = build(tmp_path, f"gs://{BUCKET}/data/rows.jsonl", host)
    assert result.returncode == 2
    assert "403" in result.stderr and f"gs://{BUCKET}/data/rows.jsonl" in result.stderr
    assert len(result.stderr.strip().splitlines()) <= 2
