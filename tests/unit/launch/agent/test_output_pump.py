"""What a command prints on its way to the log: stamps, redrawn lines, a full disk."""

from __future__ import annotations

import os
import time
from datetime import datetime
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from drillyard.launch.agent.output_pump import OutputLines, Pump, Sink, open_log, prefixed, stamp

NOW = 1_795_303_624.5
MARK = stamp(NOW)


def split(pieces: list[bytes]) -> bytes:
    splitter = OutputLines()
    return b"".join(splitter.feed(piece, NOW) for piece in pieces) + splitter.close()


@given(st.floats(0, 4e9))
def test_a_stamp_is_utc_to_the_microsecond(seconds: float) -> None:
    text = stamp(seconds).decode()
    assert len(text) == 28 and text.endswith("Z ")
    assert abs(datetime.fromisoformat(text.strip()).timestamp() - seconds) < 1e-5


def test_microseconds_are_carried() -> None:
    assert stamp(1.9999999) == b"1970-01-01T00:00:02.000000Z "


@given(st.lists(st.binary(max_size=30)))
def test_every_line_is_kept_and_stamped_once(pieces: list[bytes]) -> None:
    pieces = [piece.replace(b"\r", b"") for piece in pieces]
    text = b"".join(pieces)
    lines = text.split(b"\n")
    assert prefixed(split(pieces), MARK) == b"".join(
        MARK + line + b"\n" for line in (lines if lines[-1] else lines[:-1])
    )


@given(st.lists(st.sampled_from([b"a", b"\n", b"\r", b"\r\n", b"bc"]), max_size=40))
def test_the_last_drawing_of_a_line_is_kept_however_it_is_cut(pieces: list[bytes]) -> None:
    logged = split(pieces).splitlines()
    shown = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in b"".join(pieces).split(b"\n")]
    last = iter(logged)
    assert all(line in last for line in shown if line)


def test_a_redrawn_line_is_logged_once_per_second() -> None:
    splitter = OutputLines()
    logged = b"".join(
        splitter.feed(b"\r%d %%" % step, NOW + step / 10) for step in range(100)
    ).splitlines()
    assert 9 <= len(logged) <= 10 and logged[0] == b"0 %"
    assert splitter.close() == b"99 %\n"


def test_a_line_without_end_does_not_grow_for_ever() -> None:
    splitter = OutputLines()
    out = b"".join(splitter.feed(b"x" * 100_000, NOW) for _ in range(100))
    assert len(out) > 8_000_000


def test_a_full_disk_holds_nobody_up() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    sink = Sink(full, "could not be written here")
    for _ in range(1000):
        sink.put(b"line\n" * 1000)
    sink.close()
    os.close(full)


def test_what_a_sink_cannot_take_is_said_with_its_size() -> None:
    reader, writer = os.pipe()
    sink = Sink(writer, "not shown here", limit=100_000)
    # The first piece fills the pipe, which nobody reads yet; the second waits; the third is too
    # much.
    sink.put(b"a" * 90_000)
    while sink._bytes:
        time.sleep(0.001)
    sink.put(b"b" * 90_000)
    sink.put(b"c" * 90_000)
    os.set_blocking(reader, True)
    got = b""
    while len(got) < 180_000:
        got += os.read(reader, 1 << 16)
    sink.put(b"d\n")
    while not got.endswith(b"d\n"):
        got += os.read(reader, 1 << 16)
    sink.close()
    assert b"=== 90000 bytes of output not shown here\n" in got
    assert got.count(b"a") >= 90_000 and b"c" * 100 not in got
    os.close(reader)
    os.close(writer)


def test_a_pump_writes_the_log_and_keeps_the_end(tmp_path: Path) -> None:
    log = open_log(tmp_path / "node-0.log")
    reader, writer = os.pipe()
    pump = Pump(reader, log, None)
    os.write(writer, b"one\ntwo")
    os.close(writer)
    assert pump.finish(10) == b"one\ntwo"
    log.close()
    lines = (tmp_path / "node-0.log").read_bytes().splitlines()
    assert [line[28:] for line in lines] == [b"one", b"two"]
