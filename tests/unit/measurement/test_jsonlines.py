"""JSON lines: what is read of the wanted fields alone is what the whole objects hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.measurement.lines import read_bytes

from drillyard.measurement.formats.jsonlines import FieldSelection, JsonRows, field, floats, gather, load_all

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.sampled_from(["step", "loss", "time", "other", "st\u00e9p"]), VALUES, max_size=5)
WANTED = FieldSelection("step", "loss", "time")


@settings(max_examples=200, deadline=None)
@given(st.lists(OBJECTS, min_size=1, max_size=6), st.booleans())
def test_wanted_fields_are_those_of_the_whole_objects(objects: list[dict[str, Any]], ascii_only: bool) -> None:
    lines = [json.dumps(each, ensure_ascii=ascii_only).encode() for each in objects]
    rows, plain = JsonRows(WANTED.load_all(lines)), load_all(lines)
    for name in ("step", "loss", "time"):
        assert repr(list(rows[name])) == repr(field(plain, name))
        assert rows.floats(name).tobytes() == floats(field(plain, name)).tobytes()
        assert rows.anywhere(name) == any(name in each for each in plain)
        assert [rows.has(row, name) for row in range(len(rows))] == [name in each for each in plain]
    figures = {"step": ("step",), "loss": ("loss", "time"), "grad_norm": ("time",)}
    for gathered, slow in zip(gather(rows, figures).items(), gather(plain, figures).items(), strict=True):
        assert (gathered[0], gathered[1].tobytes()) == (slow[0], slow[1].tobytes())


INSIDE = FieldSelection("step", data=FieldSelection("loss", "train loss"))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(["loss", "train loss", "x"]), VALUES) | VALUES, min_size=1, max_size=4))
def test_wanted_fields_of_an_object_inside_are_those_of_the_whole_objects(inner: list[Any]) -> None:
    lines = [json.dumps({"step": step, "data": each}).encode() for step, each in enumerate(inner)]
    rows = JsonRows(INSIDE.load_all(lines))
    assert list(rows["step"]) == list(range(len(inner)))
    for kept, each in zip(rows["data"], inner, strict=True):
        assert (kept is None) == (not isinstance(each, dict))
        if isinstance(each, dict):
            data = JsonRows([kept])
            for name in ("loss", "train loss"):
                assert repr(data[name][0]) == repr(each.get(name))
                assert data.has(0, name) == (name in each)


@pytest.mark.parametrize(
    "line", ["", "3", "[1]", "null", '{"step": 1', '{"step": 1} more', '{"step": 1}{"step": 2}', "hello"]
)
def test_what_is_no_object_is_an_error(line: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        WANTED.load_all([b'{"step": 1}', line.encode()])


ROW = {"time": "2026-01-01T00:00:00.000000Z", "round": 0, "loss": 2.0, "step_seconds": 0.5, "num_gpus": 2}
DLL = {"timestamp": "1711000000.5", "type": "LOG", "data": {"loss": 2.0, "train_step_timing in s": 0.5}}


@pytest.mark.parametrize(
    ("record", "odd"),
    [
        (ROW, {"nonfinite": {"__class__": "1"}}),
        (ROW, {"nonfinite": {"__struct_fields__": "1", "step_seconds": "0.5"}}),
        (ROW, {"time": "2026-01-01T00:00:00\n.000000Z"}),
        (ROW, {"time": "now"}),
        (ROW, {"time": ""}),
        (ROW, {"time": "2026-01-01T00:00:0\u00e9.00000Z"}),
        (ROW, {"time": 12}),
        (ROW, {"round": [1, 2], "window_steps": {"a": 1}}),
        (DLL, {"timestamp": [1, 2], "elapsedtime": [1, 2]}),
        (DLL, {"data": {"loss": [1, 2], "train_step_timing in s": 0.5}}),
    ],
)
def test_fields_that_hold_something_else_cost_no_step(record: dict[str, Any], odd: dict[str, Any]) -> None:
    begin = "DLLL " if record is DLL else ""
    lines = [begin + json.dumps(record | odd | {"step": step}) + "\n" for step in range(1, 41)]
    log = read_bytes("".join(lines).encode())
    assert log.steps.step.tolist() == list(range(1, 41))
    assert log.steps.seconds.tolist() == [0.5] * 40


@pytest.mark.parametrize("closed", [False, True])
def test_a_line_that_is_nested_without_end_is_damaged(closed: bool) -> None:
    good = [json.dumps(ROW | {"step": step}) + "\n" for step in range(1, 4)]
    deep = '{"step": 4, "step_seconds": 1, "x": ' + "[" * 100_000 + "]" * 100_000 * closed + "}" * closed + "\n"
    assert read_bytes("".join([*good, deep]).encode()).steps.step.tolist() == [1, 2, 3]


def test_two_objects_on_a_line_are_none() -> None:
    with pytest.raises(ValueError, match="Extra data"):
        WANTED.load_all([b'{"step": 1}{"step": 2}', b""])
