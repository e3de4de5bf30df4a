"""What grows is followed: each poll gives what is new, and says where it began anew."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest
from tests.unit.loglines.bucket import Bucket, local_bucket

from drillyard.errors import UserError
from drillyard.loglines.follow import CloudFollower, Follower, StreamFollower


def polled(follower) -> list[bytes | None]:
    return list(follower.poll())


def test_a_file_is_awaited_read_on_and_begun_anew_when_truncated_or_replaced(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    follower = Follower(path)
    assert follower.absent() and polled(follower) == []
    path.write_bytes(b"one\ntw")
    assert polled(follower) == [b"one\ntw"]
    with path.open("ab") as file:
        file.write(b"o\n")
    assert polled(follower) == [b"o\n"] and polled(follower) == []
    path.write_bytes(b"new\n")
    assert polled(follower) == [None, b"new\n"]
    with path.open("ab") as file:
        file.write(b"last\n")
    path.rename(tmp_path / "run.log.1")
    path.write_bytes(b"next\n")
    assert polled(follower) == [b"last\n", None, b"next\n"]
    assert follower.restarts == 2
    follower.close()


def test_a_stream_gives_what_has_come_and_ends_with_its_writer() -> None:
    reading, writing = os.pipe()
    with open(reading, "rb") as stream, open(writing, "wb", buffering=0) as writer:
        follower = StreamFollower(stream)
        assert polled(follower) == []
        writer.write(b"on")
        assert polled(follower) == []
        writer.write(b"e\ntwo")
        assert polled(follower) == [b"one\ntwo"] and not follower.ended
        writer.close()
        assert polled(follower) == [] and follower.ended


def test_a_short_stream_is_read_too() -> None:
    reading, writing = os.pipe()
    with open(reading, "rb") as stream:
        os.write(writing, b"a\n")
        os.close(writing)
        follower = StreamFollower(stream)
        assert polled(follower) == [b"a\n"] and follower.ended


def test_an_object_is_fetched_as_far_as_it_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    with local_bucket(monkeypatch) as objects:
        objects["run.log"] = b"one\n" * 100
        Bucket.requested.clear()
        follower = CloudFollower("gs://bucket/run.log", seconds=0)
        assert polled(follower) == [b"one\n" * 100]
        assert polled(follower) == []
        objects["run.log"] += b"two\n"
        assert polled(follower) == [b"two\n"]
        # The second look reads the end of what is known, and what is new.
        assert Bucket.requested == [(0, 399), (336, 399), (400, 403)]
        objects["run.log"] = b"another\n" * 100
        assert polled(follower) == [None, b"another\n" * 100]
        objects["run.log"] = b"short\n"
        assert polled(follower) == [None, b"short\n"]
        del objects["run.log"]
        assert polled(follower) == []
        assert follower.restarts == 2


def test_an_object_is_not_looked_at_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with local_bucket(monkeypatch) as objects:
        objects["run.log"] = b"one\n"
        follower = CloudFollower("gs://bucket/run.log", seconds=3600)
        assert polled(follower) == [b"one\n"]
        objects["run.log"] += b"two\n"
        assert polled(follower) == []


def test_a_compressed_object_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    with local_bucket(monkeypatch) as objects:
        objects["run.log.gz"] = gzip.compress(b"one\n")
        with pytest.raises(UserError, match="is compressed"):
            polled(CloudFollower("gs://bucket/run.log.gz"))
