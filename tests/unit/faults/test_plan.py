"""Which faults a campaign draws: every kind and place has its share, and each can strike where it
is put."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drillyard.errors import UserError
from drillyard.faults.plan import (
    FAULT_KINDS,
    INJECTION_POINTS,
    MAX_FAULTS_PER_RUN,
    MIN_SAVES,
    Fault,
    FaultKind,
    PlannedRun,
    RunShape,
    draw_faults,
)

SHAPE = RunShape(steps=60, save_every=4, num_ranks=2)
AT_THE_ENDS = ("cache", "export")


def drawn_of(planned_runs: list[PlannedRun]) -> Counter[tuple[str, str]]:
    return Counter(
        (fault.kind, fault.place) for planned in planned_runs for fault in planned.faults
    )


@given(
    kinds=st.lists(st.sampled_from(FAULT_KINDS), min_size=1, unique=True),
    extra=st.integers(0, 60),
    seed=st.integers(0, 2**32),
    save_every=st.integers(1, 7),
    saves=st.integers(MIN_SAVES, 30),
    num_ranks=st.integers(1, 9),
)
def test_every_fault_can_strike_where_it_is_put(
    kinds: list[FaultKind], extra: int, seed: int, save_every: int, saves: int, num_ranks: int
) -> None:
    shape = RunShape(steps=saves * save_every, save_every=save_every, num_ranks=num_ranks)
    count = len(kinds) + extra
    planned_runs = draw_faults(kinds, count, seed, shape)
    faults = [fault for planned in planned_runs for fault in planned.faults]
    assert [fault.number for fault in faults] == list(range(1, count + 1))
    assert {fault.kind for fault in faults} == set(kinds)
    assert all(fault.target is None or 0 <= fault.target < num_ranks for fault in faults)
    assert all(0 <= fault.actor < num_ranks for fault in faults)
    for planned in planned_runs:
        assert 1 <= len(planned.faults) <= MAX_FAULTS_PER_RUN
        between = [fault for fault in planned.faults if fault.place not in AT_THE_ENDS]
        intervals = [(fault.step - 1) // save_every for fault in between]
        assert intervals == sorted(set(intervals))
        assert all(
            fault.first_interval <= k < saves - 2
            for fault, k in zip(between, intervals, strict=True)
        )
        places = [fault.place for fault in planned.faults]
        assert places.count("cache") <= 2 and places.count("export") <= 2
        assert places == sorted(places, key=lambda place: (place != "cache", place == "export"))


@given(seed=st.integers(0, 2**32))
def test_the_same_seed_draws_the_same_plan(seed: int) -> None:
    assert draw_faults(FAULT_KINDS, 40, seed, SHAPE) == draw_faults(FAULT_KINDS, 40, seed, SHAPE)


def test_another_seed_draws_other_moments() -> None:
    assert draw_faults(FAULT_KINDS, 40, 1, SHAPE) != draw_faults(FAULT_KINDS, 40, 2, SHAPE)


def test_a_hundred_faults_strike_every_place_and_every_target_there() -> None:
    planned_runs = draw_faults(FAULT_KINDS, 100, 0, SHAPE)
    counts = drawn_of(planned_runs)
    assert counts["kill", "step"] >= 8
    assert all(counts["kill", place] >= 6 for place in INJECTION_POINTS)
    targets = {
        (fault.place, fault.target)
        for planned in planned_runs
        for fault in planned.faults
        if fault.kind == "kill"
    }
    assert targets == {(place, target) for place in INJECTION_POINTS for target in (0, 1, None)}
    asked = {
        (fault.place, fault.target)
        for planned in planned_runs
        for fault in planned.faults
        if fault.kind == "term"
    }
    assert asked == {(place, target) for place in ("step", "shards") for target in (0, 1, None)}


def test_a_kill_in_the_resumed_attempt_and_a_flip_take_two_parts() -> None:
    faults = [
        fault for planned in draw_faults(FAULT_KINDS, 100, 0, SHAPE) for fault in planned.faults
    ]
    assert {fault.restarts for fault in faults if fault.place == "resume"} == {2}
    assert {fault.phases for fault in faults if fault.kind == "flip"} == {("hit", "flipped")}
    assert {fault.restarts for fault in faults if fault.kind == "disk-full"} == {0}


def test_where_file_sizes_stand_for_the_disk_the_metrics_of_rank_0_are_spared() -> None:
    planned_runs = draw_faults(["disk-full"], 5, 0, RunShape(60, 4, 2, "file-size"))
    assert {(fault.place, fault.actor) for planned in planned_runs for fault in planned.faults} == {
        ("shards", 1)
    }


def test_a_run_that_saves_too_rarely_is_refused() -> None:
    with pytest.raises(UserError, match=r"checkpoint\.every_steps=N"):
        draw_faults(FAULT_KINDS, 10, 0, RunShape(60, 20, 2))


def test_fewer_faults_than_kinds_are_refused() -> None:
    with pytest.raises(UserError, match="--count 4"):
        draw_faults(FAULT_KINDS, 4, 0, SHAPE)


@pytest.mark.parametrize(
    ("kind", "place", "target", "restarts", "phases", "checkpoints", "first", "name"),
    [
        ("kill", "step", 1, 1, ("hit",), 0, 0, "kill rank 1"),
        ("kill", "step", None, 1, ("hit",), 0, 0, "kill supervisor"),
        ("kill", "deletion", 0, 1, ("hit",), 0, 2, "kill rank 0"),
        ("kill", "resume", 0, 2, ("hit", "again"), 1, 2, "kill rank 0"),
        ("disk-full", "shards", 0, 0, ("hit",), 1, 2, "disk-full"),
        ("flip", "step", 0, 1, ("hit", "flipped"), 2, 3, "flip, kill rank 0"),
        ("term", "shards", 0, 1, ("hit",), 0, 0, "term rank 0"),
    ],
)
def test_what_each_fault_needs_and_costs(
    kind: Any,
    place: Any,
    target: int | None,
    restarts: int,
    phases: tuple[str, ...],
    checkpoints: int,
    first: int,
    name: str,
) -> None:
    fault = Fault(1, kind, place, target, 0, 8, 0.5)
    assert (fault.restarts, fault.phases, fault.checkpoints_needed) == (
        restarts,
        phases,
        checkpoints,
    )
    assert (fault.first_interval, fault.name) == (first, name)
    run = PlannedRun("chaos-01", (fault, fault))
    assert run.restarts == 2 * restarts and run.has(kind) and run.has(place) and not run.has("stop")


@pytest.mark.parametrize(
    ("kinds", "count", "numbers"),
    [
        (FAULT_KINDS, 5, [1, 1, 1, 1, 1]),
        (FAULT_KINDS, 19, [12, 1, 2, 2, 2]),
        (FAULT_KINDS, 38, [24, 2, 4, 4, 4]),
        (("kill", "stop"), 13, [12, 1]),
        (("stop",), 7, [7]),
    ],
)
def test_kinds_have_their_shares(kinds: Any, count: int, numbers: list[int]) -> None:
    planned = draw_faults(kinds, count, 1, SHAPE)
    found = Counter(fault.kind for one in planned for fault in one.faults)
    assert [found[kind] for kind in kinds] == numbers


@pytest.mark.parametrize(("steps", "refused"), [(23, True), (24, False), (27, False)])
def test_six_saves_are_enough(steps: int, refused: bool) -> None:
    shape = RunShape(steps=steps, save_every=4, num_ranks=2)
    assert shape.intervals == steps // 4 - 2
    if refused:
        with pytest.raises(UserError, match="at least 6"):
            draw_faults(["kill"], 1, 0, shape)
    else:
        assert len(draw_faults(["kill"], 1, 0, shape)) == 1
