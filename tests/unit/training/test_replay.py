"""What a replay is planned from, what it refuses, and how bits are compared. Real replays: tests/integration."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.training.conftest import SOFTWARE

from drillyard.errors import UserError
from drillyard.training.replay import (
    Difference,
    Verdict,
    clear,
    compare,
    plan_replay,
    read_verdict,
    require_same_conditions,
)

MakeRun = Callable[..., Path]


def test_the_plan_starts_at_the_newest_checkpoint_before_the_step(make_run: MakeRun) -> None:
    plan = plan_replay(make_run((2, 40, 2), checkpoints=(10, 20, 30)), 24)
    assert [info.step for info in plan.checkpoints] == [20, 10]
    assert plan.world_size == 2
    assert plan.expected[24] == (2.0 + 1 / 24, 1 / 3)
    assert max(plan.expected) == 24
    assert plan.conditions == {"hardware": "a CPU", "torch": "2.15.0", "transformers": "5.0", "threads": 1}


def test_a_checkpoint_of_the_step_itself_is_too_late(make_run: MakeRun) -> None:
    directory = make_run((2, 40, 2), checkpoints=(10, 20))
    assert [info.step for info in plan_replay(directory, 20).checkpoints] == [10]
    with pytest.raises(UserError, match=r"no checkpoint before this step is kept \(there are: 10, 20\)"):
        plan_replay(directory, 10)


def test_the_layout_is_that_of_the_round_and_trackers_are_off(make_run: MakeRun) -> None:
    plan = plan_replay(make_run((2, 20, 2), (22, 40, 4), checkpoints=(20,)), 26)
    assert plan.world_size == 4
    assert plan.config.training.gradient_accumulation == 1
    assert plan.config.training.global_batch_size == 4
    assert not plan.config.logging.tensorboard


def test_a_stretch_of_two_layouts_is_refused(make_run: MakeRun) -> None:
    directory = make_run((2, 24, 2), (26, 40, 4), checkpoints=(20,))
    assert plan_replay(directory, 24).world_size == 2
    with pytest.raises(UserError, match="done on 2 and 4 ranks in turn"):
        plan_replay(directory, 30)


def test_a_step_that_was_not_logged_is_refused(make_run: MakeRun, tmp_path: Path) -> None:
    directory = make_run((2, 20, 2), checkpoints=(10,))
    with pytest.raises(UserError, match="the nearest that were are 12 and 14"):
        plan_replay(directory, 13)
    with pytest.raises(UserError, match="holds no run"):
        plan_replay(tmp_path, 13)


def test_other_software_or_hardware_is_refused(make_run: MakeRun) -> None:
    plan = plan_replay(make_run((2, 20, 2), checkpoints=(10,)), 14)
    here = {**SOFTWARE, "hardware": "a CPU"}
    require_same_conditions(plan, here)
    for name, other in (("torch", "2.16.0"), ("hardware", "another CPU"), ("threads", 2)):
        with pytest.raises(UserError, match=f"{name} .* then, {other} here.*would prove nothing"):
            require_same_conditions(plan, here | {name: other})


def test_one_bit_is_a_difference_and_the_same_nan_is_none() -> None:
    one_bit_more = math.nextafter(2.0, 3.0)
    expected = {2: (2.0, 1.0), 4: (math.nan, 1.0), 6: (2.0, math.inf)}
    assert compare(expected, {2: [2.0, 1.0], 4: [math.nan, 1.0], 6: [2.0, math.inf]}) == []
    found = compare(expected, {2: [one_bit_more, 1.0], 4: [2.5, 1.0]})
    assert found[0] == Difference(2, "loss", 2.0, one_bit_more)
    assert (found[1].step, found[1].metric, found[1].replayed) == (4, "loss", 2.5)
    assert compare({2: (0.0, 1.0)}, {2: [-0.0, 1.0]}) != []


def test_a_verdict_is_read_as_it_was_written_and_says_where_and_by_how_much(tmp_path: Path) -> None:
    verdict = Verdict(
        8, "step-4", [6, 8], [Difference(6, "grad_norm", 1.0, 1.25), Difference(8, "loss", 2.0, math.nan)]
    )
    verdict.write(tmp_path)
    again = read_verdict(tmp_path)
    assert repr(again) == repr(verdict)
    text = again.in_words()
    assert text.startswith("different: 2 of 2 logged steps, from step-4")
    assert "step 6, grad_norm: 1.0 was logged, 1.25 is computed now (by 0.25, relative 0.2)" in text
    assert "step 8" not in text


def test_what_an_earlier_replay_left_is_removed(make_run: MakeRun) -> None:
    plan = plan_replay(make_run((2, 20, 2), checkpoints=(10,)), 14)
    clear(plan)
    (plan.directory / "logs").mkdir(parents=True)
    Verdict(14, "step-10", [12, 14], []).write(plan.directory)
    clear(plan)
    assert [path.name for path in plan.directory.iterdir()] == ["logs"]
