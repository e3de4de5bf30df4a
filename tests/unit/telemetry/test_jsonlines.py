"""Logs survive crashes: whole lines, torn lines, non-finite numbers, several writers, full disks."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drillyard.errors import UserError
from drillyard.telemetry import append_event, read_events
from drillyard.telemetry.jsonlines import LineFile, decode, encode, read_records

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text().filter(lambda k: k != "nonfinite"), inner),
    max_leaves=6,
)
records = st.dictionaries(st.text().filter(lambda key: key != "nonfinite"), values)


def refuse(token: str) -> float:
    raise AssertionError(f"{token} is not JSON")


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


@given(st.lists(records, max_size=3), st.data())
@settings(max_examples=50)
def test_a_file_cut_anywhere_gives_the_records_before_the_cut_and_takes_new_ones(tmp_path_factory, rows, data):
    path = tmp_path_factory.mktemp("cut") / "log.jsonl"
    file = LineFile(path)
    for row in rows:
        file.write(encode(row))
    file.close()
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    kept = [decode(line) for line in whole[:cut].split(b"\n")[:-1]]
    torn = whole[:cut].rpartition(b"\n")[2]
    complete = [row for row in [*kept, decode(torn) if torn else None] if row is not None]

    file = LineFile(path)
    file.write(encode({"after": 1}))
    file.close()
    assert [repr(row) for row in read_records(path)] == [repr(row) for row in [*complete, {"after": 1}]]


def test_lines_of_several_writers_stand_whole_one_after_another(tmp_path):
    writers = [LineFile(tmp_path / "log.jsonl") for _ in range(3)]
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


def test_a_directory_that_cannot_be_written_is_the_users_to_mend(tmp_path):
    with pytest.raises(UserError, match=r"missing/events.jsonl: cannot be written: No such file or directory"):
        append_event(tmp_path / "missing", "run_start")


def test_a_full_disk_warns_once_and_loses_only_its_own_lines(tmp_path, monkeypatch, capsys):
    file = LineFile(tmp_path / "log.jsonl")
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
    monkeypatch.undo()
    file.write(encode({"number": 4}))
    file.close()
    assert [row["number"] for row in read_records(tmp_path / "log.jsonl")] == [0, 4]
    assert capsys.readouterr().err.splitlines() == [
        f"warning: {tmp_path / 'log.jsonl'}: a line could not be written (the disk is full); training goes on",
        f"warning: {tmp_path / 'log.jsonl'}: 3 lines could not be written",
    ]


def test_a_device_without_space_does_not_raise(capsys):
    file = LineFile(Path("/dev/full"))
    file.write("{}")
    assert file.lost_lines == 1
    assert "No space left on device" in capsys.readouterr().err
