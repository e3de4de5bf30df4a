"""JSON lines as columns, and damaged ones."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.measurement.lines import read_bytes

from drillyard.measurement.formats.jsonlines import gather, load_all

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
OBJECTS = st.dictionaries(
    st.sampled_from(["step", "loss", "time", "other", "st\u00e9p"]), VALUES, max_size=5
)


@pytest.mark.slow
@settings(max_examples=200)
@given(st.lists(OBJECTS, min_size=1, max_size=6), st.booleans())
def test_columns_hold_the_first_number_that_a_line_has(
    objects: list[dict[str, Any]], ascii_only: bool
) -> None:
    lines = [json.dumps(each, ensure_ascii=ascii_only).encode() for each in objects]
    columns = gather(
        load_all(lines), {"step": ("step",), "loss": ("loss", "time"), "grad_norm": ("absent",)}
    )
    assert "grad_norm" not in columns
    for column, names in (("step", ["step"]), ("loss", ["loss", "time"])):
        for row, each in enumerate(objects):
            numbers = [
                number for name in names if not math.isnan(number := _number(each.get(name)))
            ]
            if column in columns:
                np.testing.assert_equal(columns[column][row], numbers[0] if numbers else math.nan)
            else:
                assert not any(name in each for name in names)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


@pytest.mark.parametrize(
    "line",
    ["", "3", "[1]", "null", '{"step": 1', '{"step": 1} more', '{"step": 1}{"step": 2}', "hello"],
)
def test_what_is_no_object_is_an_error(line: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        load_all([b'{"step": 1}', line.encode()])


ROW = {
    "time": "2026-01-01T00:00:00.000000Z",
    "round": 0,
    "loss": 2.0,
    "step_seconds": 0.5,
    "num_gpus": 2,
}
DLL = {
    "timestamp": "1711000000.5",
    "type": "LOG",
    "data": {"loss": 2.0, "train_step_timing in s": 0.5},
}


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
def test_fields_that_hold_something_else_cost_no_step(
    record: dict[str, Any], odd: dict[str, Any]
) -> None:
    begin = "DLLL " if record is DLL else ""
    lines = [begin + json.dumps(record | odd | {"step": step}) + "\n" for step in range(1, 41)]
    log = read_bytes("".join(lines).encode())
    assert log.steps.step.tolist() == list(range(1, 41))
    assert log.steps.seconds.tolist() == [0.5] * 40


@pytest.mark.parametrize("closed", [False, True])
def test_a_line_that_is_nested_without_end_is_damaged(closed: bool) -> None:
    good = [json.dumps(ROW | {"step": step}) + "\n" for step in range(1, 4)]
    deep = (
        '{"step": 4, "step_seconds": 1, "x": '
        + "[" * 100_000
        + "]" * 100_000 * closed
        + "}" * closed
        + "\n"
    )
    assert read_bytes("".join([*good, deep]).encode()).steps.step.tolist() == [1, 2, 3]


def test_two_objects_on_a_line_are_none() -> None:
    with pytest.raises(ValueError, match="Extra data"):
        load_all([b'{"step": 1}{"step": 2}', b""])
