"""The points of a sweep: every combination, a name for each, and what is no sweep."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drillyard.errors import UserError
from drillyard.launch.sweep import MAX_NAME, sweep_points


def test_a_point_is_named_after_what_differs() -> None:
    points = sweep_points(["training.optimizer.learning_rate=1e-5,2E-5"], "run")
    assert [(point.name, point.overrides) for point in points] == [
        ("learning_rate-1e-5", ("training.optimizer.learning_rate=1e-5",)),
        ("learning_rate-2e-5", ("training.optimizer.learning_rate=2E-5",)),
    ]


def test_several_sweeps_give_every_combination_the_last_one_fastest() -> None:
    points = sweep_points(["a.b=1,2", "c=x,y"], "run")
    assert [point.overrides for point in points] == [
        ("a.b=1", "c=x"),
        ("a.b=1", "c=y"),
        ("a.b=2", "c=x"),
        ("a.b=2", "c=y"),
    ]


def test_commas_in_brackets_belong_to_the_value() -> None:
    points = sweep_points(["training.optimizer.betas=[0.9, 0.95],[0.8,0.9]", 'data.columns={"a": "x,y"}'], "run")
    assert points[0].overrides == ("training.optimizer.betas=[0.9, 0.95]", 'data.columns={"a": "x,y"}')
    assert len(points) == 2


def test_long_or_equal_names_become_numbers() -> None:
    long = sweep_points(["key=" + ",".join(f"{'v' * 60}{n}" for n in range(11))], "run")
    assert [point.name for point in long] == [f"{n:02}" for n in range(11)]
    assert [point.name for point in sweep_points(["path=/a/b,/a-b"], "run")] == ["0", "1"]


@pytest.mark.parametrize(
    ("sweeps", "said"),
    [
        (["learning_rate"], "is not KEY=VALUE,VALUE"),
        (["a=1,2", "a=3"], "is given twice"),
        (["a=1,1"], "the value 1 is there twice"),
        (["a=1,,2"], "a value is missing"),
    ],
)
def test_what_is_no_sweep_is_said(sweeps: list[str], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        sweep_points(sweeps, "run")


@given(
    st.lists(st.text("abcXYZ0129._-/ ", min_size=1, max_size=40).map(str.strip).filter(bool), min_size=1, unique=True)
)
def test_names_are_different_and_fit_a_run_config(values: list[str]) -> None:
    points = sweep_points(["key=" + ",".join(values)], "run")
    names = [f"run-{point.name}" for point in points]
    assert len(set(names)) == len(values)
    assert all(re.fullmatch(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?", name) for name in names)
    assert all(len(name) <= MAX_NAME for name in names)
