"""Following a run directory: whatever moment a file is looked at, no line is lost, halved or taken
twice."""

from __future__ import annotations

import io
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tests.unit.reporting import runs
from tests.unit.watch.test_live_run import followed

from drillyard.errors import UserError
from drillyard.reporting.event_text import EventText
from drillyard.watch.live_run import LiveRun
from drillyard.watch.screen import progress_line
from drillyard.watch.watcher import FIRST_EVENTS, FollowedRun, _events_after, _watch_lines

NAMES = ("events.jsonl", "metrics.jsonl")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return runs.write_run(tmp_path_factory.mktemp("whole") / "trial", steps=40)


@settings(max_examples=25)
@given(cuts=st.lists(st.floats(0, 1), max_size=6).map(sorted))
def test_a_file_that_grows_in_any_pieces_gives_the_same_run(tmp_path_factory, whole, cuts):
    growing = tmp_path_factory.mktemp("growing")
    for name in NAMES:
        (growing / name).touch()
    following = FollowedRun(growing)
    for begin, end in zip([0.0, *cuts], [*cuts, 1.0], strict=True):
        for name in NAMES:
            data = (whole / name).read_bytes()
            with (growing / name).open("ab") as file:
                file.write(data[round(begin * len(data)) : round(end * len(data))])
        following.poll()
    run, expected = following.run, followed(whole)
    assert run.steps == expected.steps
    assert list(map(repr, run.losses)) == list(map(repr, expected.losses))
    assert list(run.events) == list(expected.events)
    assert (run.tokens, run.phase, run.account) == (expected.tokens, "completed", expected.account)


def test_a_run_has_ended_when_its_last_word_is_its_end(whole, tmp_path):
    following = FollowedRun(whole)
    following.poll()
    assert following.ended
    going = FollowedRun(runs.write_run(tmp_path / "trial", steps=10, end=None))
    going.poll()
    assert not going.ended


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no events\.jsonl"):
        FollowedRun(tmp_path)


def test_a_log_is_no_run_directory_and_the_error_says_what_follows_it(tmp_path):
    log = tmp_path / "run.log"
    log.write_text("Step: 1\n")
    with pytest.raises(UserError, match="drillyard metrics -f"):
        FollowedRun(log)


@pytest.mark.parametrize("lines", ["Step: 1\n", "[1]\n{}\n", "\n"])
def test_a_directory_whose_events_are_no_events_is_refused_and_not_waited_for(tmp_path, lines):
    (tmp_path / "events.jsonl").write_text(lines)
    with pytest.raises(UserError, match=r"no line is an event.* -f .*/events\.jsonl"):
        FollowedRun(tmp_path).poll()


def test_the_first_event_may_come_later_and_behind_a_torn_line(whole, tmp_path):
    lines = (whole / "events.jsonl").read_bytes().splitlines(keepends=True)
    events = tmp_path / "events.jsonl"
    events.write_bytes(lines[0][:10])
    following = FollowedRun(tmp_path)
    following.poll()
    events.write_bytes(lines[0][:10] + b"\n" + b"".join(lines))
    following.poll()
    assert following.run.phase == "completed"


def test_a_file_that_can_no_longer_be_read_is_an_error_with_its_directory(
    whole, tmp_path, monkeypatch
):
    shutil.copytree(whole, tmp_path / "trial")
    following = FollowedRun(tmp_path / "trial")
    (tmp_path / "trial" / "metrics.jsonl").unlink()
    (tmp_path / "trial" / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"metrics.jsonl: is a directory"):
        following.poll()


def test_lines_show_each_event_and_the_step_once(whole):
    output = io.StringIO()
    _watch_lines(FollowedRun(whole), Console(file=output, width=100), interval=0.01)
    lines = output.getvalue().splitlines()
    assert [line for line in lines if line.startswith("step ")] == [
        progress_line(followed(whole), 0)
    ]
    assert [
        sum(words in line for line in lines) for words in ("settings resolved", "run is complete")
    ] == [1, 1]


def test_events_are_printed_once_and_of_an_earlier_time_only_the_last_few():
    run = LiveRun("trial")
    events = [
        EventText(None, "warning", "warning", f"event {number}")
        for number in range(FIRST_EVENTS + 3)
    ]
    run.events.extend(events)
    assert _events_after(run, None) == events[-FIRST_EVENTS:]
    assert _events_after(run, events[-1]) == []
    assert _events_after(run, events[-2]) == events[-1:]
    # The one printed last is no longer kept: all that are kept came after it.
    assert _events_after(run, EventText(None, "warning", "warning", "event 0")) == events
