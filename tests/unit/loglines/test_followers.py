"""What grows is followed: each poll gives what is new, and says where it began again."""

from __future__ import annotations

import gzip
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.facts import says
from tests.unit.loglines.bucket import Bucket, local_bucket

from drillyard.errors import UserError
from drillyard.loglines import followers
from drillyard.loglines.followers import CloudFollower, FileFollower, StreamFollower, follower
from drillyard.loglines.sources import LogFile, open_log


def polled(follower) -> list[bytes | None]:
    return list(follower.poll())


def test_a_file_is_awaited_read_on_and_begun_again_when_truncated_or_replaced(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.log"
    follower = FileFollower(path)
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
    follower.close()


def test_a_file_that_is_rewritten_in_place_begins_again(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_bytes(b"one\n")
    follower = FileFollower(path)
    assert polled(follower) == [b"one\n"]
    path.write_bytes(b"another one\n")
    assert polled(follower) == [None, b"another one\n"]
    path.write_bytes(b"aaaaaaaaaaa\n")
    assert polled(follower) == [None, b"aaaaaaaaaaa\n"] and polled(follower) == []
    long = bytes(range(256)) * 3
    path.write_bytes(long)
    assert polled(follower) == [None, long]
    with path.open("ab") as file:
        file.write(b"more")
    assert polled(follower) == [b"more"]
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


def test_a_stream_that_is_always_ready_is_given_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followers, "_POLL_BYTES", 8)
    monkeypatch.setattr(followers, "_PIECE", 4)
    reading, writing = os.pipe()
    with open(reading, "rb") as stream:
        os.write(writing, b"0123456789abcdefgh")
        follower = StreamFollower(stream)
        assert polled(follower) == [b"0123", b"4567"] and follower.behind and not follower.ended
        assert polled(follower) == [b"89ab", b"cdef"] and follower.behind
        assert polled(follower) == [b"gh"] and not follower.behind
        os.close(writing)
        assert polled(follower) == [] and follower.ended and not follower.behind


def test_a_standard_input_that_is_closed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match="standard input"):
        follower(LogFile("-"))
    with pytest.raises(UserError, match="standard input"), open_log(LogFile("-")):
        pass


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


def now_and_then(objects: dict[str, bytes], content: bytes | None) -> Callable[[], None]:
    """The object is replaced, or deleted, before a request."""

    def act() -> None:
        if content is None:
            del objects["run.log"]
        else:
            objects["run.log"] = content

    return act


@pytest.mark.parametrize("gone", [False, True], ids=["412", "404"])
def test_an_object_that_is_replaced_while_it_is_read_is_looked_at_again(
    gone: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(followers, "_CLOUD_PIECE", 4)
    with local_bucket(monkeypatch) as objects:
        objects["run.log"] = b"one\ntwo\n"
        follower = CloudFollower("gs://bucket/run.log", seconds=0)
        longer = b"one\ntwo\nmore\n"
        # Looked at, first piece; then it is another one.
        Bucket.before[:] = [
            lambda: None,
            lambda: None,
            now_and_then(objects, None if gone else longer),
        ]
        assert polled(follower) == [b"one\n"]
        objects["run.log"] = longer
        assert polled(follower) == [b"two\n", b"more", b"\n"] and polled(follower) == []
        # The same where the look at what is known meets another object, and what is there then is
        # not new.
        objects["run.log"] += b"last\n"
        longest = objects["run.log"]
        Bucket.before[:] = [lambda: None, now_and_then(objects, None if gone else longest + b"!\n")]
        assert polled(follower) == []
        objects["run.log"] = longest
        assert b"".join(polled(follower)) == b"last\n"
        assert capsys.readouterr().err == ""


def test_a_service_that_does_not_answer_is_asked_again_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with local_bucket(monkeypatch) as objects:
        objects["run.log"] = b"one\n"
        follower = CloudFollower("gs://bucket/run.log", seconds=0)
        Bucket.before[:] = [lambda: 503, lambda: None, lambda: 500, lambda: 429]
        assert polled(follower) == polled(follower) == polled(follower) == []
        (said,) = capsys.readouterr().err.splitlines()
        assert says(said, "gs://bucket/run.log: 503 ... 10 minutes")
        assert polled(follower) == [b"one\n"] and Bucket.before == []
        # Another time is said again, and has its own timeout; that is over at some time.
        monkeypatch.setattr(followers, "_CLOUD_TIMEOUT_SECONDS", -1.0)
        Bucket.before[:] = [lambda: 503, lambda: 503]
        assert polled(follower) == [] and len(capsys.readouterr().err.splitlines()) == 1
        with pytest.raises(UserError, match=r"gs://bucket/run\.log: .*503 "):
            polled(follower)


def test_a_service_that_cannot_be_reached_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with local_bucket(monkeypatch) as objects:
        objects["run.log"] = b"one\n"
        follower = CloudFollower("gs://bucket/run.log", seconds=0)
        assert polled(follower) == [b"one\n"]
    assert polled(follower) == polled(follower) == []
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_what_is_forbidden_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with local_bucket(monkeypatch):
        Bucket.before[:] = [lambda: 403]
        with pytest.raises(UserError, match="403 "):
            polled(CloudFollower("gs://bucket/run.log"))


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
