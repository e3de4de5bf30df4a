"""Data in object stores behind a proxy with faults: GCS (fake-gcs-server), S3 (moto) and a hub that
is played here."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer
from tests.integration.faulty_proxy import Faults, proxy
from tests.integration.gcs import BUCKET, Bucket

ROWS = "".join(
    json.dumps({"text": f"row {n} " + "word " * (n % 40)}) + "\n" for n in range(3000)
).encode()
SECRET = "hf_" + "s" * 34


@dataclass
class Store:
    """An object store with ROWS at `address`. `settings` is the environment that finds it at an
    endpoint."""

    address: str
    upload: Callable[[bytes], None]
    settings: Callable[[str], dict[str, str]]
    behind: Callable[[Faults], AbstractContextManager[str]]


@pytest.fixture
def gs(tmp_path: Path) -> Iterator[Store]:
    bucket = Bucket(tmp_path / "gcs")
    bucket.start_server()
    place = (
        f"{bucket.endpoint}/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name=data%2Frows.jsonl"
    )

    def upload(content: bytes) -> None:
        send("POST", place, content)

    upload(ROWS)
    yield Store(
        f"gs://{BUCKET}/data/rows.jsonl",
        upload,
        lambda host: {"STORAGE_EMULATOR_HOST": host},
        lambda faults: proxy(bucket.endpoint, faults, lambda method, path: "alt=media" in path),
    )
    bucket.discard()


@pytest.fixture
def s3() -> Iterator[Store]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    # Its state is that of the process.
    send("POST", f"{endpoint}/moto-api/reset", b"")
    account = {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    client = boto3.client(
        "s3", "us-east-1", endpoint_url=endpoint, aws_access_key_id="a", aws_secret_access_key="b"
    )
    client.create_bucket(Bucket="shelf")

    def upload(content: bytes) -> None:
        client.put_object(Bucket="shelf", Key="data/rows.jsonl", Body=content)

    upload(ROWS)
    yield Store(
        "s3://shelf/data/rows.jsonl",
        upload,
        lambda host: {"AWS_ENDPOINT_URL": host, **account},
        lambda faults: proxy(
            endpoint, faults, lambda method, path: method == "GET" and path.endswith("rows.jsonl")
        ),
    )
    server.stop()


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as reading a file of a data set takes."""

    content = ROWS

    def do_GET(self) -> None:
        if "/resolve/" in self.path:
            self.file()
        elif "/tree/" in self.path:
            self.answer([self.entry])
        else:
            self.answer(
                {
                    "id": "org/rows",
                    "sha": self.commit,
                    "siblings": [],
                    "private": False,
                    "gated": False,
                }
            )

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer([self.entry])

    @property
    def entry(self) -> dict[str, Any]:
        return {"type": "file", "path": "rows.jsonl", "size": len(self.content), "oid": self.commit}

    @property
    def commit(self) -> str:
        return hashlib.sha1(self.content).hexdigest()

    def file(self) -> None:
        body, status = self.content, 200
        if (wanted := self.headers["Range"]) is not None:
            start, _, end = wanted.removeprefix("bytes=").partition("-")
            body, status = body[int(start) : int(end) + 1], 206
        self.answer(body, status)

    def answer(self, body: Any, status: int = 200) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header(
            "Content-Type", "application/octet-stream" if content is body else "application/json"
        )
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", self.commit)
        self.send_header("ETag", f'"{self.commit}"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def hf(tmp_path: Path) -> Iterator[Store]:
    handler = type("OwnHub", (Hub,), {})
    listener = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    listener.daemon_threads = True
    Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    kept = {"HF_TOKEN": SECRET, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}
    yield Store(
        "hf://datasets/org/rows/rows.jsonl",
        lambda content: setattr(handler, "content", content),
        lambda host: {"HF_ENDPOINT": host, **kept},
        lambda faults: proxy(
            f"http://127.0.0.1:{listener.server_port}",
            faults,
            lambda method, path: method == "GET" and "/resolve/" in path,
        ),
    )
    listener.shutdown()
    listener.server_close()


@pytest.fixture(params=["gs", "s3", "hf"])
def store(request: pytest.FixtureRequest) -> Store:
    found: Store = request.getfixturevalue(request.param)
    return found


def send(method: str, address: str, content: bytes) -> None:
    kind = {"Content-Type": "application/octet-stream"}
    with urllib.request.urlopen(
        urllib.request.Request(address, content, kind, method=method), timeout=10
    ):
        pass


def build(
    tmp_path: Path, source: str, settings: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """`drillyard data build` into a cache of its own: one for addresses, one for paths."""
    cache = tmp_path / ("cache-of-address" if "://" in source else "cache-of-path")
    run = tmp_path / "run.yaml"
    data = {
        "source": source,
        "sequence_length": 64,
        "tokenizer": {"train": "bpe", "vocab_size": 300},
    }
    config = {
        "name": "remote",
        "model": {"config": {"architecture": "llama"}, "init": "random"},
        "data": data | {"cache_directory": str(cache)},
        "training": {"steps": 1, "optimizer": {"learning_rate": 1e-3}},
    }
    run.write_text(json.dumps(config))
    return subprocess.run(
        [sys.executable, "-m", "drillyard", "data", "build", str(run)],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
    )


def cached(tmp_path: Path, kind: str) -> dict[str, bytes]:
    """Files of the only tokenised cache, without the manifest."""
    (directory,) = tmp_path.glob(f"cache-of-{kind}/tokenized/*")
    return {
        path.name: path.read_bytes() for path in directory.iterdir() if path.name != "manifest.json"
    }


def test_the_cache_has_the_bits_of_the_local_file_through_cuts_and_failures(
    store: Store, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(ROWS)
    local = build(tmp_path, str(tmp_path / "rows.jsonl"), {})
    assert local.returncode == 0, local.stderr
    faults = Faults(cuts=[1000, 0, len(ROWS) - 1], statuses=[503])
    with store.behind(faults) as host:
        remote = build(tmp_path, store.address, store.settings(host))
    assert remote.returncode == 0, remote.stderr
    assert faults.all_happened
    assert cached(tmp_path, "address") == cached(tmp_path, "path")


def test_an_object_that_changes_in_mid_read_is_one_clear_error(
    store: Store, tmp_path: Path
) -> None:
    faults = Faults(change=lambda: store.upload(ROWS[: len(ROWS) // 2]))
    with store.behind(faults) as host:
        result = build(tmp_path, store.address, store.settings(host))
    assert result.returncode == 2, result.stderr
    assert faults.all_happened
    assert "changed" in result.stderr and "rows.jsonl" in result.stderr
    assert list(tmp_path.glob("cache-of-address/tokenized/*")) == []


def test_a_refused_object_is_one_clear_error(store: Store, tmp_path: Path) -> None:
    with store.behind(Faults(statuses=[403] * 100)) as host:
        result = build(tmp_path, store.address, store.settings(host))
    assert result.returncode == 2, result.stderr
    assert "403" in result.stderr and store.address in result.stderr
    assert len(result.stderr.strip().splitlines()) <= 2


def test_the_token_of_the_hub_is_in_no_file(hf: Store, tmp_path: Path) -> None:
    with hf.behind(Faults()) as host:
        result = build(tmp_path, hf.address, hf.settings(host))
    assert result.returncode == 0, result.stderr
    assert SECRET not in result.stdout + result.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and not [path for path in files if SECRET.encode() in path.read_bytes()]
