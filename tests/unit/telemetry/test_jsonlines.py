"""Logs survive crashes: whole lines, torn lines, non-finite numbers, several writers, full
disks."""

from __future__ import annotations

import json
import math
import os
import resource
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.facts import each_says, says

from drillyard.errors import UserError
from drillyard.telemetry import append_event, jsonlines, read_events
from drillyard.telemetry.jsonlines import LineFile, decode, encode, read_records

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text().filter(lambda k: k != "nonfinite"), inner)
    ),
    max_leaves=6,
)
records = st.dictionaries(st.text().filter(lambda key: key != "nonfinite"), values)


def refuse(token: str) -> float:
    raise AssertionError(f"{token} is not JSON")


@pytest.mark.slow
@given(records)
def test_any_record_is_strict_json_on_one_line_and_read_back_to_the_bit(record):
    line = encode(record)
    assert "\n" not in line
    json.loads(line, parse_constant=refuse)
    assert repr(decode(line)) == repr(record)


def test_a_loss_that_is_not_finite_is_null_and_named():
    line = encode({"step": 3, "loss": math.nan, "results": {"a": {"loss": -math.inf}}})
    assert json.loads(line) == {
        "step": 3,
        "loss": None,
        "results": {"a": {"loss": None}},
        "nonfinite": {"loss": "nan", "results": {"a": {"loss": "-inf"}}},
    }


@pytest.mark.slow
@given(st.lists(records, max_size=3), st.data())
@settings(max_examples=50)
def test_a_file_cut_anywhere_gives_the_records_before_the_cut_and_takes_new_ones(
    tmp_path_factory, rows, data
):
    path = tmp_path_factory.mktemp("cut") / "log.jsonl"
    file = LineFile(path, print)
    for row in rows:
        file.write(encode(row))
    file.close()
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    kept = [decode(line) for line in whole[:cut].split(b"\n")[:-1]]
    torn = whole[:cut].rpartition(b"\n")[2]
    complete = [row for row in [*kept, decode(torn) if torn else None] if row is not None]

    file = LineFile(path, print)
    file.write(encode({"after": 1}))
    file.close()
    assert [repr(row) for row in read_records(path)] == [
        repr(row) for row in [*complete, {"after": 1}]
    ]


def test_lines_of_several_writers_stand_whole_one_after_another(tmp_path):
    writers = [LineFile(tmp_path / "log.jsonl", print) for _ in range(3)]
    for number in range(30):
        writers[number % 3].write(encode({"number": number}))
    assert [row["number"] for row in read_records(tmp_path / "log.jsonl")] == list(range(30))


def test_appended_events_follow_a_torn_line(tmp_path):
    append_event(tmp_path, "run_start", world_size=2)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"time": "2026-01-31T00:0')
    append_event(tmp_path, "failure", reason="killed", failed_rank=1, exit_code=None)
    events = read_events(tmp_path)
    assert [event["event"] for event in events] == ["run_start", "failure"]
    assert events[1].keys() == {"time", "event", "reason", "failed_rank"}


def test_a_directory_that_cannot_be_written_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match=r"missing/events.jsonl: .*No such file"):
        append_event(tmp_path / "missing", "run_start")


def test_lines_wait_for_a_full_disk_and_are_then_written_whole_and_in_order(tmp_path, monkeypatch):
    seen: list[str] = []
    path = tmp_path / "log.jsonl"
    file = LineFile(path, seen.append)
    file.write(encode({"number": 0}))
    write, room = os.write, 6

    def full_disk(descriptor: int, data: bytes) -> int:
        nonlocal room
        if room == 0:
            raise OSError(28, "No space left on device")
        written, room = write(descriptor, data[:room]), 0
        return written

    monkeypatch.setattr(os, "write", full_disk)
    for number in range(1, 4):
        file.write(encode({"number": number}))
    assert path.read_text() == encode({"number": 0}) + "\n", (
        "no torn line is left for strict readers"
    )
    monkeypatch.undo()
    file.write(encode({"number": 4}))
    file.close()
    assert [row["number"] for row in read_records(path)] == [0, 1, 2, 3, 4]
    assert each_says(
        seen,
        [f"{path}: cannot be written (No space left on device", f"{path}: ... again ... 4 lines"],
    )
    assert file.lost_lines == 0


@pytest.mark.slow
@given(st.lists(st.integers(0, 40), max_size=40), st.lists(records, min_size=1, max_size=6))
@settings(max_examples=50)
def test_a_disk_that_takes_parts_of_lines_never_costs_or_doubles_one(tmp_path_factory, rooms, rows):
    path = tmp_path_factory.mktemp("parts") / "log.jsonl"
    file = LineFile(path, lambda text: None)
    write = os.write

    def some_room(descriptor: int, data: bytes) -> int:
        room = rooms.pop() if rooms else len(data)
        if room == 0:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[:room])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", some_room)
        for row in rows:
            file.write(encode(row))
        rooms.clear()
        file.close()
    assert [repr(row) for row in read_records(path)] == [repr(row) for row in rows]


def test_a_file_whose_mount_was_gone_is_reopened_in_its_own_directory_alone(tmp_path):
    seen: list[str] = []
    directory, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    directory.mkdir()
    file = LineFile(directory / "log.jsonl", seen.append)
    file.write(encode({"number": 0}))
    directory.rename(elsewhere)
    os.dup2(os.open("/dev", os.O_RDONLY), file._descriptor)
    for number in range(1, 3):
        file.write(encode({"number": number}))
    assert not directory.exists()
    elsewhere.rename(directory)
    file.write(encode({"number": 3}))
    file.close()
    assert [row["number"] for row in read_records(directory / "log.jsonl")] == [0, 1, 2, 3]
    assert len(seen) == 2 and says(seen[1], "again, with the 3 lines")


def test_a_disk_with_room_for_part_of_a_line_is_full(tmp_path):
    file = LineFile(tmp_path / "log.jsonl", lambda text: None)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, most))
    try:
        for number in range(20):
            file.write(encode({"number": number}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert (tmp_path / "log.jsonl").read_text().endswith("}\n")
    file.close()
    assert [row["number"] for row in read_records(tmp_path / "log.jsonl")] == list(range(20))


def test_lines_that_a_mount_took_with_it_are_written_again(tmp_path):
    path = tmp_path / "log.jsonl"
    file = LineFile(path, lambda text: None)
    for number in range(4):
        file.write(encode({"number": number}))
        if number == 1:
            file.sync()
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    path.write_bytes(path.read_bytes() + b'{"by": "another"}\n')
    os.dup2(os.open("/dev", os.O_RDONLY), file._descriptor)
    file.write(encode({"number": 4}))
    file.close()
    assert list(read_records(path)) == [
        *({"number": n} for n in range(3)),
        {"by": "another"},
        {"number": 3},
        {"number": 4},
    ]


def test_lines_beyond_what_memory_may_hold_are_counted_and_reported(monkeypatch):
    seen: list[str] = []
    monkeypatch.setattr(jsonlines, "WAITING_BYTES", 10)
    file = LineFile(Path("/dev/full"), seen.append)
    for _ in range(5):
        file.write("{}")
    file.close()
    assert file.lost_lines == 5
    assert len(seen) == 2 and says(seen[1], "/dev/full: 5 lines ... lost")


def test_an_event_that_cannot_be_written_is_an_error_for_the_caller(tmp_path):
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"events.jsonl: .*No space left on device"):
        append_event(tmp_path, "run_start")


def test_a_line_whose_nonfinite_part_was_damaged_is_passed_over():
    line = encode({"loss": math.nan, "norms": [1.0, math.inf]})
    for damaged in (
        line.replace('"nan"', '"nbn"'),
        line.replace('"loss": "nan"', '"loss": []'),
        '{"nonfinite": 3}',
    ):
        assert damaged != line and decode(damaged) is None
