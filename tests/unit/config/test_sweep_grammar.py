"""What `--sweep` may say, how large it may be, and what is refused before anything is computed."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.facts import says

from drillyard.config.sweep_grammar import (
    MAX_NAME,
    MOST_POINTS,
    SHORT,
    Axis,
    SweepPoint,
    combinations,
    launch_points,
    parse_axes,
)
from drillyard.deprecation import RENAMED_KEYS, RenamedWarning
from drillyard.errors import UserError


def values(text: str) -> list[object]:
    (axis,) = parse_axes([text])
    return axis.values


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


def test_each_option_is_a_key_and_several_keys_in_one_are_read_with_a_warning(
    recwarn: pytest.WarningsRecorder,
) -> None:
    expected = (
        Axis("machine", "machine", ("a", "b")),
        Axis("nodes", "nodes", range(1, 3)),
        Axis("micro_batch_size", "training.micro_batch_size", ("4",)),
    )
    assert parse_axes(["machine=a,b", "nodes=1..2", "micro_batch_size=4"]) == expected
    assert not recwarn.list
    with pytest.warns(RenamedWarning, match="--sweep machine=a,b --sweep nodes=1..2"):
        assert parse_axes(["machine=a,b,nodes=1..2", "micro_batch_size=4"]) == expected


def test_an_old_key_is_swept_under_its_new_name_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(RENAMED_KEYS, "data.seq_len", "data.sequence_length")
    monkeypatch.setitem(RENAMED_KEYS, "num_nodes", "nodes")
    with pytest.warns(RenamedWarning, match=r"data\.seq_len is now data\.sequence_length"):
        assert parse_axes(["data.seq_len=64,128"]) == parse_axes(["data.sequence_length=64,128"])
    with pytest.warns(RenamedWarning, match="num_nodes is now nodes"):
        assert parse_axes(["shard=1,num_nodes=1..2"])[1] == Axis("nodes", "nodes", range(1, 3))
    with pytest.warns(RenamedWarning):
        (point, _) = launch_points(["data.seq_len=64,128"], "run")
    assert point == SweepPoint("sequence_length-64", ("data.sequence_length=64",))


def test_a_short_key_is_suggested() -> None:
    with pytest.raises(UserError, match="did you mean lora_rank"):
        parse_axes(["lora_rnk=8,16"])
    assert parse_axes(["lora_rank=8"])[0].path == "model.lora.rank"


def test_points_are_all_combinations_the_last_key_fastest() -> None:
    found = list(combinations(parse_axes(["nodes=1..2", "shard=auto,8"])))
    assert [tuple(point.values()) for point in found] == [(1, "auto"), (1, 8), (2, "auto"), (2, 8)]
    assert list(found[0]) == ["nodes", "shard"]


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("node=1..3", r"'node'.*nodes"),
        ("micro-batch-size=1,2", "'micro-batch-size'.*micro_batch_size"),
        ("zzz=1", r"'zzz'.*micro_batch_size"),
        ("1..3", "'1..3' .*no key"),
        ("", "'' .*no key"),
        ("nodes=", r"nodes .*empty value"),
        ("nodes=1,,2", r"nodes .*empty value"),
        ("=3", "'=3' .*no key"),
        ("nodes=3..1", "runs backwards; write 1..3"),
        ("nodes=1..3..0", "step of 0"),
        ("nodes=0..8..x2", r"factors .*at 1"),
        ("nodes=1..8..x1", "at least 2"),
        ("nodes=1..3,7", "mixes a range"),
        ("nodes=1,nodes=2", r"nodes .*twice"),
        ("shard={a: 1}", "not a value"),
        ("shard=[", "shard=\\[.*not valid YAML"),
    ],
)
def test_what_is_no_sweep_is_refused(text: str, facts: str) -> None:
    with pytest.raises(UserError, match=facts):
        list(combinations(parse_axes([text])))


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
        parse_axes([text])
    assert len(values(f"nodes=1..{MOST_POINTS}")) == MOST_POINTS


@given(first=st.integers(0, 500), length=st.integers(0, 500), step=st.integers(1, 50))
def test_a_range_is_every_step_from_its_first_to_its_last(
    first: int, length: int, step: int
) -> None:
    assert values(f"nodes={first}..{first + length}..{step}") == list(
        range(first, first + length + 1, step)
    )


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
            named = [
                schema["$defs"][one["$ref"].rpartition("/")[2]] for one in options if "$ref" in one
            ]
            here = next(
                one["properties"][key] for one in [here, *named] if key in one.get("properties", {})
            )


def test_a_point_is_named_after_what_differs() -> None:
    points = launch_points(["training.optimizer.learning_rate=1e-5,2E-5"], "run")
    assert [(point.name, point.overrides) for point in points] == [
        ("learning_rate-1e-5", ("training.optimizer.learning_rate=1e-5",)),
        ("learning_rate-2e-5", ("training.optimizer.learning_rate=2E-5",)),
    ]


def test_several_sweeps_give_every_combination_the_last_one_fastest() -> None:
    points = launch_points(["a.b=1,2", "c.d=x,y"], "run")
    assert [point.overrides for point in points] == [
        ("a.b=1", "c.d=x"),
        ("a.b=1", "c.d=y"),
        ("a.b=2", "c.d=x"),
        ("a.b=2", "c.d=y"),
    ]


def test_commas_in_brackets_belong_to_the_value() -> None:
    points = launch_points(
        ["training.optimizer.betas=[0.9, 0.95],[0.8,0.9]", 'data.columns={"a": "x,y"}'], "run"
    )
    assert points[0].overrides == (
        "training.optimizer.betas=[0.9, 0.95]",
        'data.columns={"a": "x,y"}',
    )
    assert len(points) == 2


@pytest.mark.parametrize("text", ["a=1,b=2", "'a=1','output=2'", "'0..3','4..7'"])
def test_texts_with_signs_of_the_grammar(text: str) -> None:
    points = launch_points([f"workload.environment.F={text}"], "run")
    assert [point.overrides for point in points] == [
        (f"workload.environment.F={each}",) for each in text.split(",")
    ]


def test_long_or_equal_names_become_numbers() -> None:
    long = launch_points(["a.key=" + ",".join(f"{'v' * 60}{n}" for n in range(11))], "run")
    assert [point.name for point in long] == [f"{n:02}" for n in range(11)]
    assert [point.name for point in launch_points(["a.path=/a/b,/a-b"], "run")] == ["0", "1"]


@pytest.mark.parametrize(
    ("sweeps", "facts"),
    [
        (["learning_rate"], "'learning_rate' ... no key"),
        (["a.b=1,2", "a.b=3"], "a.b ... twice"),
        (["a.b=1,1"], "a.b: ... 1 ... twice"),
        (
            ["training.micro_batch_size=1,2", "micro_batch_size=4"],
            "training.micro_batch_size ... twice",
        ),
        (["nodes=1,2"], "nodes: ... cluster config"),
        (["a.b=1,,2"], "a.b ... empty value"),
    ],
)
def test_what_cannot_be_launched_is_refused(sweeps: list[str], facts: str) -> None:
    with pytest.raises(UserError) as raised:
        launch_points(sweeps, "run")
    assert says(str(raised.value), facts)


@given(
    st.lists(
        st.text("abcXYZ0129._-/ ", min_size=1, max_size=40)
        .map(str.strip)
        .filter(lambda text: bool(text) and ".." not in text),
        min_size=1,
        unique=True,
    )
)
def test_names_are_different_and_fit_a_run_config(values: list[str]) -> None:
    points = launch_points(["a.key=" + ",".join(values)], "run")
    names = [f"run-{point.name}" for point in points]
    assert len(set(names)) == len(values)
    assert all(re.fullmatch(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?", name) for name in names)
    assert all(len(name) <= MAX_NAME for name in names)
