"""What a replay is planned from, what it refuses, and how bits are compared. Real replays:
tests/integration."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.facts import says
from tests.unit.training.conftest import numerics_on

from drillyard.errors import UserError
from drillyard.training.replay import (
    BitDifference,
    ReplayVerdict,
    compare,
    plan_replay,
    read_verdict,
    remove_earlier_replay,
    require_same_conditions,
)

MakeRun = Callable[..., Path]


def test_the_plan_starts_at_the_newest_checkpoint_before_the_step(make_run: MakeRun) -> None:
    plan = plan_replay(make_run((2, 40, 2), checkpoints=(10, 20, 30)), 24)
    assert [info.step for info in plan.checkpoints] == [20, 10]
    assert plan.world_size == 2
    assert plan.expected[24] == (2.0 + 1 / 24, 1 / 3)
    assert max(plan.expected) == 24
    assert plan.numerics == numerics_on(2)


def test_a_checkpoint_of_the_step_itself_is_too_late(make_run: MakeRun) -> None:
    directory = make_run((2, 40, 2), checkpoints=(10, 20))
    assert [info.step for info in plan_replay(directory, 20).checkpoints] == [10]
    with pytest.raises(UserError, match=r"no checkpoint.*10, 20\)"):
        plan_replay(directory, 10)


def test_the_layout_is_that_of_the_attempt_and_trackers_are_off(make_run: MakeRun) -> None:
    plan = plan_replay(make_run((2, 20, 2), (22, 40, 4), checkpoints=(20,)), 26)
    assert plan.world_size == 4
    assert plan.config.training.gradient_accumulation == 1
    assert plan.config.training.global_batch_size == 4
    assert not plan.config.logging.tensorboard


def test_the_settings_are_those_of_the_start_whatever_the_config_says_since(
    make_run: MakeRun,
) -> None:
    compiled = {
        "settings": {
            "training.compile": True,
            "model.attention": "sdpa",
            "training.threads_per_rank": 3,
        }
    }
    plan = plan_replay(
        make_run((2, 20, 2), (22, 40, 2), checkpoints=(20,), numerics=({}, compiled)), 26
    )
    assert plan.config.training.compile is True
    assert plan.config.model.attention == "sdpa"
    assert plan.config.training.threads_per_rank == 3
    assert (plan.config.parallelism.shard, plan.config.parallelism.replicate) == (2, 1)


def test_a_stretch_that_was_computed_in_two_ways_is_refused(make_run: MakeRun) -> None:
    directory = make_run((2, 24, 2), (26, 40, 4), checkpoints=(20,))
    assert plan_replay(directory, 24).world_size == 2
    with pytest.raises(UserError, match=r"step 25: world_size 2.*4; gradient_accumulation 2"):
        plan_replay(directory, 30)


@pytest.mark.parametrize(
    ("part", "name", "now"),
    [
        ("settings", "training.compile", True),
        ("conditions", "numerics revision", 2),
        ("conditions", "NCCL_ALGO", "Tree"),
    ],
)
def test_a_stretch_over_a_change_of_rounding_is_refused_and_the_change_is_named(
    make_run: MakeRun, part: str, name: str, now: object
) -> None:
    directory = make_run(
        (2, 24, 2), (26, 40, 2), checkpoints=(20, 30), numerics=({}, {part: {name: now}})
    )
    assert plan_replay(directory, 24).numerics == numerics_on(2)
    with pytest.raises(UserError, match=f"one way .*{name} .*{now}"):
        plan_replay(directory, 28)
    # From a checkpoint after the change there is one way; an older one, should this be damaged, is
    # no substitute.
    assert [info.step for info in plan_replay(directory, 32).checkpoints] == [30]


def test_a_checkpoint_that_a_later_start_saved_again_is_not_where_a_lost_step_began(
    make_run: MakeRun,
) -> None:
    """Steps 22 to 26 were done, lost and not yet done again, when the checkpoint of step 20 was
    saved once more."""
    directory = make_run((2, 26, 2), (12, 20, 4), checkpoints=(10, 20))
    assert [info.step for info in plan_replay(directory, 26).checkpoints] == [10]
    assert plan_replay(directory, 26).world_size == 2


def test_what_was_logged_is_reported_by_its_place_and_not_by_a_clock(make_run: MakeRun) -> None:
    """Step 26 was logged after the clock had been set back; steps 22 and 24 were then done again,
    and otherwise."""
    directory = make_run((2, 26, 2), checkpoints=(20,))
    metrics = directory / "metrics.jsonl"
    *earlier, last = map(json.loads, metrics.read_text().splitlines())
    again = [
        {**record, "loss": 9.0, "time": "1999-01-01T00:00:00Z"}
        for record in earlier
        if record["step"] > 20
    ]
    lines = [*earlier, {**last, "time": "2000-01-01T00:00:00Z"}, *again]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert plan_replay(directory, 26).expected == {
        step: (2.0 + 1 / step, 1 / 3) for step in range(2, 27, 2)
    }


def test_a_run_that_did_not_record_its_rounding_is_refused(make_run: MakeRun) -> None:
    directory = make_run((2, 20, 2), checkpoints=(10,))
    events = directory / "events.jsonl"
    events.write_text(events.read_text().replace('"numerics"', '"else"'))
    with pytest.raises(UserError, match="not record"):
        plan_replay(directory, 14)


def test_a_step_that_was_not_logged_is_refused(make_run: MakeRun, tmp_path: Path) -> None:
    directory = make_run((2, 20, 2), checkpoints=(10,))
    with pytest.raises(UserError, match="12 and 14"):
        plan_replay(directory, 13)
    with pytest.raises(UserError, match="holds no run"):
        plan_replay(tmp_path, 13)


def test_other_settings_software_or_hardware_are_refused_by_name_and_are_no_sign_of_a_fault(
    make_run: MakeRun,
) -> None:
    plan = plan_replay(make_run((2, 20, 2), checkpoints=(10,)), 14)
    require_same_conditions(plan, numerics_on(2))
    for name, other in (("torch", "2.16.0"), ("hardware", "another CPU"), ("numerics revision", 2)):
        here = numerics_on(2)
        here["conditions"][name] = other
        with pytest.raises(UserError, match=f"cannot be compared.*{name}: .*{other} here"):
            require_same_conditions(plan, here)
    here = numerics_on(2)
    del here["conditions"]["torch"]
    with pytest.raises(UserError, match=r"torch: 2\.15\.0 .*not set"):
        require_same_conditions(plan, here)


def test_one_bit_is_a_difference_and_the_same_nan_is_none() -> None:
    one_bit_more = math.nextafter(2.0, 3.0)
    expected = {2: (2.0, 1.0), 4: (math.nan, 1.0), 6: (2.0, math.inf)}
    assert compare(expected, {2: [2.0, 1.0], 4: [math.nan, 1.0], 6: [2.0, math.inf]}) == []
    found = compare(expected, {2: [one_bit_more, 1.0], 4: [2.5, 1.0]})
    assert found[0] == BitDifference(2, "loss", 2.0, one_bit_more)
    assert (found[1].step, found[1].metric, found[1].replayed) == (4, "loss", 2.5)
    assert compare({2: (0.0, 1.0)}, {2: [-0.0, 1.0]}) != []


def test_a_verdict_is_read_as_it_was_written_and_says_where_and_by_how_much(tmp_path: Path) -> None:
    verdict = ReplayVerdict(
        8,
        "step-4",
        [6, 8],
        [BitDifference(6, "grad_norm", 1.0, 1.25), BitDifference(8, "loss", 2.0, math.nan)],
    )
    verdict.write(tmp_path)
    again = read_verdict(tmp_path)
    assert repr(again) == repr(verdict)
    text = again.in_words()
    assert says(text, "different: 2 of 2 logged steps ... step-4")
    assert says(text, "step 6, grad_norm: 1.0 ... 1.25 ... 0.25 ... 0.2")
    assert "step 8" not in text


def test_what_an_earlier_replay_left_is_removed(make_run: MakeRun) -> None:
    plan = plan_replay(make_run((2, 20, 2), checkpoints=(10,)), 14)
    remove_earlier_replay(plan)
    (plan.directory / "logs").mkdir(parents=True)
    ReplayVerdict(14, "step-10", [12, 14], []).write(plan.directory)
    remove_earlier_replay(plan)
    assert [path.name for path in plan.directory.iterdir()] == ["logs"]
