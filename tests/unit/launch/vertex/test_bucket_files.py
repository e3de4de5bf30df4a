"""Files of a bucket as the launcher sees them, and a node's log in segments as an agent writes
it."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from google.api_core import exceptions
from tests.module_time import set_time
from tests.unit.launch.requests import WORKLOAD, cluster, request

from drillyard.errors import UserError
from drillyard.launch.agent import output_pump
from drillyard.launch.agent.output_pump import SegmentedLog
from drillyard.launch.remote_files import ReadRequest
from drillyard.launch.vertex.bucket_files import BucketFiles

LAUNCH = "/gcs/my-bucket/runs/a/launch"


class Blob:
    def __init__(self, objects: dict[str, bytes], name: str) -> None:
        self._objects = objects
        self.name = name
        self.size = len(objects.get(name, b""))
        self.generation = 0
        self.time_created = datetime(2026, 1, 1, tzinfo=UTC)

    def download_as_bytes(self, start: int = 0, end: int | None = None, **_: Any) -> bytes:
        return self._objects[self.name][start : None if end is None else end + 1]

    def upload_from_string(
        self, content: bytes, if_generation_match: int | None = None, **_: Any
    ) -> None:
        self._require(if_generation_match)
        self._objects[self.name] = content
        self.reload()

    def reload(self, **_: Any) -> None:
        if self.name not in self._objects:
            raise exceptions.NotFound("no such object")  # type: ignore[no-untyped-call]
        self.generation = zlib.crc32(self._objects[self.name]) or 1

    def delete(self, if_generation_match: int | None = None, **_: Any) -> None:
        self._require(if_generation_match)
        del self._objects[self.name]

    def _require(self, generation: int | None) -> None:
        there = Blob(self._objects, self.name)
        if there.name in self._objects:
            there.reload()
        if generation is not None and generation != there.generation:
            raise exceptions.PreconditionFailed("another one")  # type: ignore[no-untyped-call]


class FakeBucket:
    """What BucketFiles asks of google.cloud.storage.Bucket; the real one is in
    tests/integration."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.fails: list[Exception] = []

    def list_blobs(self, prefix: str, **_: Any) -> Iterator[Blob]:
        if self.fails:
            raise self.fails.pop()
        return (
            Blob(self.objects, name) for name in sorted(self.objects) if name.startswith(prefix)
        )

    def blob(self, name: str) -> Blob:
        return Blob(self.objects, name)


@pytest.fixture
def bucket() -> FakeBucket:
    return FakeBucket()


@pytest.fixture
def files(bucket: FakeBucket, monkeypatch: pytest.MonkeyPatch) -> BucketFiles:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    made = BucketFiles(request(cluster("vertex", storage="{bucket: my-bucket}"), WORKLOAD).cluster)
    made._bucket = bucket  # type: ignore[assignment]
    return made


def test_parts_are_one_log(bucket: FakeBucket, files: BucketFiles) -> None:
    bucket.objects = {
        "runs/a/launch/node-0.log": b"0123",
        "runs/a/launch/node-0.log.0001": b"4567",
        "runs/a/launch/node-0.log.0002": b"89",
        "runs/a/launch/node-10.log": b"other",
        "runs/a/launch/deeper/node-1.log": b"no",
    }
    log = f"{LAUNCH}/node-0.log"
    assert files.find([f"{LAUNCH}/node-*.log"]) == [(log, 10), (f"{LAUNCH}/node-10.log", 5)]
    for begin in range(11):
        for length in range(12):
            (piece,) = files.read([ReadRequest(log, begin, length)])
            assert piece is not None
            assert piece.data == b"0123456789"[begin : begin + length]
            assert not piece.replaced


def test_a_log_that_got_shorter_is_read_from_its_beginning(
    bucket: FakeBucket, files: BucketFiles
) -> None:
    bucket.objects = {"runs/a/launch/node-0.log": b"new"}
    (piece,) = files.read([ReadRequest(f"{LAUNCH}/node-0.log", 10, 100)])
    assert piece is not None
    assert (piece.replaced, piece.data, piece.head) == (True, b"new", b"new")


def test_what_is_not_there_is_none(bucket: FakeBucket, files: BucketFiles) -> None:
    bucket.objects = {"runs/a/launch/": b""}
    assert files.read([ReadRequest(f"{LAUNCH}/node-0.log", 0, 1)]) == [None]
    assert files.tree("/gcs/my-bucket/runs/a") == []


def test_directories_become_objects_for_mounts_that_know_no_others(
    bucket: FakeBucket, files: BucketFiles
) -> None:
    files.write(LAUNCH, {"job.json": b"{}", "agent/cli.py": b"pass"})
    assert sorted(bucket.objects) == [
        "runs/a/launch/",
        "runs/a/launch/agent/",
        "runs/a/launch/agent/cli.py",
        "runs/a/launch/job.json",
    ]
    assert files.tree(LAUNCH) == [("agent/cli.py", 4), ("job.json", 2)]


def test_an_object_is_created_by_one_and_removed_as_that_one(
    bucket: FakeBucket, files: BucketFiles
) -> None:
    first = files.create(f"{LAUNCH}/lock", b"first")
    assert first is not None and files.create(f"{LAUNCH}/lock", b"second") is None
    there = files.stored(f"{LAUNCH}/lock")
    assert there is not None and (there.content, there.generation) == (b"first", first)
    bucket.objects["runs/a/launch/lock"] = b"second"
    files.remove(f"{LAUNCH}/lock", first)
    assert list(bucket.objects) == ["runs/a/launch/lock"]
    second = files.stored(f"{LAUNCH}/lock")
    assert second is not None
    files.remove(f"{LAUNCH}/lock", second.generation)
    assert bucket.objects == {} and files.stored(f"{LAUNCH}/lock") is None


def test_an_object_is_its_creators_although_the_answer_was_lost(
    bucket: FakeBucket, files: BucketFiles
) -> None:
    """Google's client sends the request again, and the bucket says that there is one."""
    bucket.objects["runs/a/launch/lock"] = b"first"
    assert files.create(f"{LAUNCH}/lock", b"first") is not None


def test_a_patient_reader_waits_for_a_bucket_that_has_answered(
    bucket: FakeBucket, files: BucketFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_time(monkeypatch, "drillyard.launch.remote_files", sleep=lambda seconds: None)
    bucket.objects = {"runs/a/launch/job.json": b"{}"}
    bucket.fails = [OSError("no route to host")]
    with pytest.raises(UserError, match="cannot be reached"):
        files.tree(LAUNCH)
    assert files.tree(LAUNCH) == [("job.json", 2)]
    files.patient = True
    bucket.fails = [OSError("no route to host")] * 3
    assert files.tree(LAUNCH) == [("job.json", 2)]


def test_threads_that_wait_for_a_bucket_report_once_that_it_is_away_and_once_that_it_is_back(
    bucket: FakeBucket,
    files: BucketFiles,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_time(monkeypatch, "drillyard.launch.remote_files", sleep=lambda seconds: None)
    bucket.objects = {f"runs/a/launch/node-{node}.log": b"log" for node in range(10)}
    requests = [ReadRequest(f"{LAUNCH}/{path}", 0, 3) for path, _ in files.tree(LAUNCH)]
    files.patient = True
    all_failed, all_retry = threading.Barrier(10), threading.Barrier(10)
    failed: set[str] = set()
    download = Blob.download_as_bytes

    def fails_once(blob: Blob, **options: Any) -> bytes:
        if blob.name not in failed:
            failed.add(blob.name)
            all_failed.wait(60)
            raise OSError("no route to host")
        all_retry.wait(60)
        return download(blob, **options)

    monkeypatch.setattr(Blob, "download_as_bytes", fails_once)
    assert [piece and piece.data for piece in files.read(requests)] == [b"log"] * 10
    away, back = capsys.readouterr().err.splitlines()
    assert "no route to host" in away and back == "drillyard: gs://my-bucket: connected again"


@pytest.mark.parametrize(
    "path",
    ["/gcs/other/runs/a/launch", "/home/me/launch", "/gcs/my-bucket-2/a", "gs://my-bucket/a"],
)
def test_a_path_outside_of_the_bucket_is_refused(
    bucket: FakeBucket, files: BucketFiles, path: str
) -> None:
    bucket.objects = {"runs/a/launch/job.json": b"{}"}
    for ask in (
        files.tree,
        files.text,
        files.remove,
        lambda path: files.write(path, {"job.json": b"{}"}),
    ):
        with pytest.raises(UserError, match=f"{path}.* is not in gs://my-bucket"):
            ask(path)
    with pytest.raises(UserError, match="is not in gs://my-bucket"):
        files.read([ReadRequest(f"{path}/job.json", 0, 1)])
    assert list(bucket.objects) == ["runs/a/launch/job.json"]


def test_an_agent_s_parts_hold_every_byte_and_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_pump, "SEGMENT_BYTES", 64)
    monkeypatch.setattr(output_pump, "GATHER_SECONDS", 0.0)
    log = tmp_path / "node-0.log"
    sink = SegmentedLog(log)
    lines = [f"line {number}\n".encode() for number in range(100)]
    for line in lines:
        sink.put(line)
        sink.drain(10)
    sink.close()
    written = sorted(tmp_path.iterdir())
    assert [path.name for path in written[:3]] == [
        "node-0.log",
        "node-0.log.0001",
        "node-0.log.0002",
    ]
    assert b"".join(path.read_bytes() for path in written) == b"".join(lines)
    again = SegmentedLog(log)
    again.put(b"after a restart\n")
    again.close()
    assert sorted(tmp_path.iterdir())[-1].read_bytes() == b"after a restart\n"


def test_lines_are_gathered_until_somebody_waits_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_pump, "GATHER_SECONDS", 600.0)
    sink = SegmentedLog(tmp_path / "node-0.log")
    sink.put(b"a\n")
    sink.put(b"b\n")
    assert not (tmp_path / "node-0.log").exists()
    sink.drain(10)
    assert (tmp_path / "node-0.log").read_bytes() == b"a\nb\n"
    sink.close()
