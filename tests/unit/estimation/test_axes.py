"""What `--sweep` may say, how large it may be, and what is refused before anything is computed."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drillyard.errors import UserError
from drillyard.estimation.axes import MOST_POINTS, SHORT, Axis, parse_axes, points


def values(text: str) -> list[object]:
    (axis,) = parse_axes(text)
    return list(axis.values)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nodes=1..4", [1, 2, 3, 4]),
        ("nodes=8..40..16", [8, 24, 40]),
        ("nodes=1..64..x2", [1, 2, 4, 8, 16, 32, 64]),
        ("nodes=3..100..x10", [3, 30]),
        ("nodes=4", [4]),
        ("nodes=4,2,4", [4, 2]),
        ("machine=a4-highgpu-8g,7", ["a4-highgpu-8g", "7"]),
        ("activation_checkpointing=none,full", ["none", "full"]),
        ("training.optimizer.learning_rate=1.0e-4", [1e-4]),
    ],
)
def test_values_of_an_axis(text: str, expected: list[object]) -> None:
    assert values(text) == expected


def test_a_list_ends_at_the_next_key() -> None:
    assert parse_axes("machine=a,b,nodes=1..2,micro_batch_size=4") == (
        Axis("machine", "machine", ("a", "b")),
        Axis("nodes", "nodes", range(1, 3)),
        Axis("micro_batch_size", "training.micro_batch_size", (4,)),
    )


def test_points_are_all_combinations_the_last_key_fastest() -> None:
    found = list(points(parse_axes("nodes=1..2,shard=auto,8")))
    assert [tuple(point.values()) for point in found] == [(1, "auto"), (1, 8), (2, "auto"), (2, 8)]
    assert list(found[0]) == ["nodes", "shard"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node=1..3", r"'node'.*nodes"),
        ("zzz=1", r"'zzz'.*micro_batch_size"),
        ("1..3", "'1..3' has no key"),
        ("", "'' has no key"),
        ("nodes=", r"nodes .*empty value"),
        ("nodes=1,,2", r"nodes .*empty value"),
        ("=3", r"empty value|'' is not"),
        ("nodes=3..1", "runs backwards; write 1..3"),
        ("nodes=1..3..0", "a step of 0"),
        ("nodes=0..8..x2", "factors begin at 1"),
        ("nodes=1..8..x1", "at least 2"),
        ("nodes=1..3,7", "mixes a range"),
        ("nodes=1,nodes=2", r"nodes .*twice"),
        ("shard={a: 1}", "not a value"),
        ("shard=[", "shard=\\[.*not valid YAML"),
    ],
)
def test_what_is_no_sweep_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        parse_axes(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("micro_batch_size=1..1000,nodes=1..1000", "1,000,000"),
        ("nodes=1..1000000000000000000000000", "1,000,000,000,000,000,000,000,000"),
        ("nodes=1..4097", "4,097"),
    ],
)
def test_a_sweep_that_is_too_large_is_refused_with_its_size(text: str, size: str) -> None:
    with pytest.raises(UserError, match=f"{size} points .*at most {MOST_POINTS:,}"):
        parse_axes(text)
    assert len(values(f"nodes=1..{MOST_POINTS}")) == MOST_POINTS


@given(first=st.integers(0, 500), length=st.integers(0, 500), step=st.integers(1, 50))
def test_a_range_is_every_step_from_its_first_to_its_last(first: int, length: int, step: int) -> None:
    assert values(f"nodes={first}..{first + length}..{step}") == list(range(first, first + length + 1, step))


@given(first=st.integers(1, 50), last=st.integers(1, 10**9), factor=st.integers(2, 9))
def test_factors_reach_as_far_as_the_last(first: int, last: int, factor: int) -> None:
    last = max(first, last)
    found = values(f"nodes={first}..{last}..x{factor}")
    assert found[0] == first and found[-1] <= last < found[-1] * factor  # type: ignore[operator]
    assert all(after == before * factor for before, after in itertools.pairwise(found))  # type: ignore[operator]


def test_every_short_name_is_a_setting_of_the_run_config() -> None:
    from drillyard.config.load import json_schema

    schema = json_schema("run")
    for path in SHORT.values():
        here = schema
        for key in path.split("."):
            options = [here, *here.get("anyOf", []), *here.get("allOf", [])]
            named = [schema["$defs"][one["$ref"].rpartition("/")[2]] for one in options if "$ref" in one]
            here = next(one["properties"][key] for one in [here, *named] if key in one.get("properties", {}))
