"""Where the ranks' words go."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from drillyard.supervise.console_output import LineForwarder, PlainOutput, TerminalOutput, open_log
from drillyard.supervise.heartbeat import Heartbeat


def forwarded(chunks: list[bytes], log: int) -> str:
    stream = io.StringIO()
    forwarder = LineForwarder(log, PlainOutput(stream))
    for chunk in chunks:
        forwarder.feed(chunk)
    forwarder.finish()
    return stream.getvalue()


@given(
    st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\r")), st.integers(1, 7)
)
def test_lines_arrive_whole_wherever_the_bytes_are_cut(text: str, size: int) -> None:
    data = text.encode()
    log = os.open(os.devnull, os.O_WRONLY)
    got = forwarded([data[i : i + size] for i in range(0, len(data), size)], log)
    os.close(log)
    assert got == (text if text.endswith("\n") or not text else text + "\n")


def test_the_log_gets_every_byte_as_it_is(tmp_path: Path) -> None:
    log, offset = open_log(tmp_path / "rank-0.log", "=== attempt 0")
    forwarded([b"\xff\x00", b"a\r\nb"], log)
    assert (tmp_path / "rank-0.log").read_bytes()[offset:] == b"\xff\x00a\r\nb"


def test_an_attempt_begins_on_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "rank-1.log"
    path.write_text("cut in the mid")
    _, offset = open_log(path, "=== attempt 1")
    assert path.read_text() == "cut in the mid\n=== attempt 1\n" and offset == path.stat().st_size


def test_a_full_disk_is_said_once_and_lines_still_reach_the_console(
    capsys: pytest.CaptureFixture[str],
) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    assert forwarded([b"one\n", b"two\n"], full) == "one\ntwo\n"
    os.close(full)
    assert capsys.readouterr().err.count("No space left on device") == 1


def test_a_reader_that_is_gone_does_not_end_the_run() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "w") as stream:
        output = PlainOutput(stream)
        output.lines("one\n")
        output.lines("two\n")


def test_on_a_terminal_lines_stand_above_the_bar_which_follows_the_steps() -> None:
    stream = io.StringIO()
    output = TerminalOutput(Console(file=stream, force_terminal=True, width=100), "demo", 200)
    output.lines(
        "Step: 50 | Time: 0.1000s | TFLOPs/s/GPU: 0.01000 | Tokens/s/GPU: 20.00 | Loss:"
        " 2.0000\n[not markup]\n"
    )
    output.refresh(Heartbeat(1.0, 50, 200, "training"))
    output.close()
    shown = stream.getvalue()
    assert "50/200" in shown and "[not markup]" in shown and "Loss: 2.0000" in shown


def test_the_bar_shows_the_phase_and_knows_its_total_from_the_rank_and_not_from_the_config() -> (
    None
):
    stream = io.StringIO()
    output = TerminalOutput(Console(file=stream, force_terminal=True, width=100), "demo", None)
    output.refresh(Heartbeat(1.0, None, None, "data"))
    assert "demo | data" in stream.getvalue()
    output.refresh(Heartbeat(2.0, 30, 76, "training"))
    assert "30/76" in stream.getvalue()


def test_the_time_left_rests_on_the_steps_of_this_round(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    console = Console(file=io.StringIO(), force_terminal=True, width=100, get_time=lambda: now[0])
    output = TerminalOutput(console, "demo", 200)
    output.refresh(Heartbeat(1.0, 100, 200, "loading"))
    for step in (101, 102, 103):
        now[0] += 60
        output.refresh(Heartbeat(1.0, step, 200, "training"))
    left = output._progress.tasks[0].time_remaining
    assert left is not None and abs(left - 97 * 60) <= 60


class GoneReader(io.StringIO):
    """A stream whose reader is gone: a closed terminal, or a `tee` that was interrupted first."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    def fileno(self) -> int:
        return self._descriptor


@pytest.mark.parametrize("watched", [False, True])
def test_a_reader_that_is_gone_ends_no_run(
    watched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = GoneReader(tmp_path / "gone")
    monkeypatch.setattr("sys.stderr", gone)
    monkeypatch.setattr("sys.stdout", gone)
    output: PlainOutput | TerminalOutput = PlainOutput(gone)
    if watched:
        output = TerminalOutput(Console(file=gone, force_terminal=True), "run", 10)
    output.say("an attempt failed")
    output.error("error: fix this")
    output.lines("Step: 1\n")
    output.refresh(Heartbeat(0.0, 1, 10, "training"))
    output.close()
    assert os.readlink(f"/proc/self/fd/{gone.fileno()}") == os.devnull, "later flushes go nowhere"
