"""Pruning: what is kept has been read and is good, what goes is older, and a kill at any point
leaves a good one."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.checkpoint.made import CONTENT, damage_silently, make_checkpoint

from drillyard.errors import UserError
from drillyard.training.checkpoint import inventory
from drillyard.training.checkpoint.inventory import (
    list_checkpoints,
    remove_checkpoint,
    set_aside_checkpoint,
)
from drillyard.training.checkpoint.manifest import MANIFEST_NAME
from drillyard.training.checkpoint.verification import (
    PrunePlan,
    choose_step,
    plan_prune,
    select_checkpoints,
    verify_all_files,
)


def make(run: Path, step: int, kind: str, loss: float | None) -> None:
    path = make_checkpoint(
        run, step, held_out_loss=loss, format_version=2 if kind == "later" else 1
    )
    if kind == "silently damaged":
        damage_silently(path)
    elif kind == "cut":
        (path / ".metadata").write_bytes(b"")
    elif kind == "incomplete":
        (path / MANIFEST_NAME).unlink()
    elif kind == "abandoned":
        set_aside_checkpoint(path)


def plan_for(run: Path, keep: int, keep_best: bool = True, left_overs: bool = False) -> PrunePlan:
    return plan_prune(
        list_checkpoints(run),
        keep,
        keep_best,
        left_overs=left_overs,
        problem_with=lambda info: verify_all_files(info).problem,
    )


def prune(run: Path, *args: Any) -> PrunePlan:
    plan = plan_for(run, *args)
    for info in plan.remove:
        remove_checkpoint(info.path)
    return plan


def steps(run: Path) -> list[int]:
    return [info.step for info in list_checkpoints(run)]


def good_steps(run: Path) -> list[int]:
    """Judged without the code under test: every byte of every file is there."""
    return [
        info.step
        for info in list_checkpoints(run)
        if info.complete
        and all((info.path / name).read_bytes() == data for name, data in CONTENT.items())
    ]


class Killed(BaseException):
    """As final as SIGKILL: nothing of ours catches it."""


KINDS = st.sampled_from(
    ["good", "good", "good", "silently damaged", "cut", "incomplete", "abandoned", "later"]
)
CHECKPOINTS = st.lists(st.tuples(KINDS, st.none() | st.sampled_from([1.0, 2.0, 3.0])), max_size=7)


@pytest.mark.slow
@settings(max_examples=80)
@given(CHECKPOINTS, st.integers(1, 3), st.booleans(), st.booleans(), st.integers(0, 30))
def test_a_prune_killed_anywhere_leaves_the_good_ones_it_promised_and_goes_on_from_there(
    checkpoints: list[tuple[str, float | None]],
    keep: int,
    keep_best: bool,
    left_overs: bool,
    killed_after: int,
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        run = Path(folder)
        for number, (kind, loss) in enumerate(checkpoints):
            make(run, 10 * (number + 1), kind, loss)
        before, good_before = steps(run), good_steps(run)
        losses = {
            10 * (n + 1): loss
            for n, (_, loss) in enumerate(checkpoints)
            if 10 * (n + 1) in good_before
        }
        measured = [(loss, -step) for step, loss in losses.items() if loss is not None]
        promised = set(good_before[-keep:]) | (
            {-min(measured)[1]} if measured and keep_best else set()
        )

        patch.setattr(inventory, "sync_directory", lambda path: None)
        remove_entry, done = inventory._remove_entry, 0

        def remove_until_killed(path: Path) -> None:
            nonlocal done
            if done == killed_after:
                raise Killed
            remove_entry(path)
            done += 1

        with patch.context() as killing:
            killing.setattr(inventory, "_remove_entry", remove_until_killed)
            try:
                prune(run, keep, keep_best, left_overs)
            except Killed:
                assert promised <= set(good_steps(run))
        plan = prune(run, keep, keep_best, left_overs)

        assert promised <= set(good_steps(run))
        if not good_before:
            assert steps(run) == before and plan.remove == []
        kinds = {10 * (number + 1): kind for number, (kind, _) in enumerate(checkpoints)}
        gone = [step for step in before if step not in steps(run)]
        assert all(kinds[step] not in ("cut", "later") for step in gone)
        if left_overs:
            assert not good_before or all(
                kinds[s] not in ("incomplete", "abandoned") for s in steps(run)
            )
        else:
            assert all(kinds[step] in ("good", "silently damaged") for step in gone)


def test_a_damaged_one_does_not_count_so_that_an_older_good_one_stays(tmp_path: Path) -> None:
    for step, kind in ((10, "good"), (20, "good"), (30, "good"), (40, "silently damaged")):
        make(tmp_path, step, kind, None)
    plan = prune(tmp_path, 2)
    assert [info.step for info in plan.keep] == [30, 20] and [
        info.step for info in plan.remove
    ] == [10]
    ((damaged, problem),) = plan.damaged
    assert damaged.step == 40 and problem.startswith("__1_0.distcp: wrong checksum")
    assert steps(tmp_path) == [20, 30, 40]


def test_keeping_one_with_a_damaged_newest_keeps_the_one_before(tmp_path: Path) -> None:
    for step, kind in ((10, "good"), (20, "good"), (30, "silently damaged")):
        make(tmp_path, step, kind, None)
    prune(tmp_path, 1)
    assert good_steps(tmp_path) == [20]


def test_when_the_best_is_damaged_the_next_best_stays_and_so_does_it(tmp_path: Path) -> None:
    for step, kind, loss in (
        (10, "silently damaged", 1.0),
        (20, "good", 2.0),
        (30, "good", 3.0),
        (40, "good", 4.0),
    ):
        make(tmp_path, step, kind, loss)
    plan = prune(tmp_path, 1)
    assert steps(tmp_path) == [10, 20, 40] and [info.step for info, _ in plan.damaged] == [10]


def test_without_a_good_one_nothing_goes_not_even_left_overs(tmp_path: Path) -> None:
    for step, kind in (
        (10, "silently damaged"),
        (20, "silently damaged"),
        (30, "incomplete"),
        (40, "abandoned"),
    ):
        make(tmp_path, step, kind, None)
    plan = prune(tmp_path, 1, True, True)
    assert plan.keep == plan.remove == [] and steps(tmp_path) == [10, 20, 30, 40]


def test_nothing_is_read_when_nothing_can_go(tmp_path: Path) -> None:
    for step in (10, 20):
        make(tmp_path, step, "good", None)

    def must_not_be_asked(_: Any) -> str | None:
        raise AssertionError

    plan = plan_prune(
        list_checkpoints(tmp_path), 2, True, left_overs=True, problem_with=must_not_be_asked
    )
    assert [info.step for info in plan.keep] == [20, 10] and plan.remove == []


def test_a_path_means_a_run_its_checkpoints_or_one_of_them(tmp_path: Path) -> None:
    for step in (10, 20):
        make(tmp_path, step, "good", None)
    directory = tmp_path / "checkpoints"
    for path in (tmp_path, directory):
        target = select_checkpoints(path)
        assert (target.directory, target.run_directory, target.one) == (directory, tmp_path, None)
        assert [info.step for info in target.checkpoints] == [10, 20]
    target = select_checkpoints(directory / "step-00000020")
    assert target.one is not None and target.one.step == 20 and target.run_directory == tmp_path
    assert choose_step(select_checkpoints(tmp_path), 10).step == 10
    with pytest.raises(UserError, match=r"step 15; .*10, 20"):
        choose_step(select_checkpoints(tmp_path), 15)
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "nowhere"):
        with pytest.raises(UserError, match="no checkpoints"):
            select_checkpoints(path)
