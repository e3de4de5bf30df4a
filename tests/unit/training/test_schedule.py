"""The learning rate is a pure function of the step with the shapes people know by these names."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drillyard.config.run import RunConfig, ScheduleConfig
from drillyard.errors import UserError
from drillyard.training.optimizer import learning_rate
from drillyard.training.order_check import num_steps

NAMES = ["cosine", "linear", "constant", "warmup-stable-decay"]


def rates(total: int, **settings: object) -> list[float]:
    schedule = ScheduleConfig.model_validate(settings)
    return [
        learning_rate(step, peak=1.0, total_steps=total, schedule=schedule) for step in range(total)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_warmup_is_linear_and_reaches_the_peak_in_its_last_step(name: str) -> None:
    values = rates(100, name=name, warmup_steps=10)
    assert values[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])


def test_cosine_is_half_way_in_the_middle() -> None:
    values = rates(110, name="cosine", warmup_steps=10)
    assert values[60] == pytest.approx(0.5)
    assert values[35] == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))


def test_warmup_stable_decay_is_flat_then_falls_linearly() -> None:
    values = rates(100, name="warmup-stable-decay", decay_steps=20, final_fraction=0.1)
    assert values[:81] == [1.0] * 81
    assert values[90] == pytest.approx(1 - 0.9 * 0.5)


@given(
    name=st.sampled_from(NAMES),
    total=st.integers(2, 500),
    warmup=st.integers(0, 50),
    final=st.floats(0, 1),
)
def test_never_leaves_its_bounds_and_falls_after_warmup(
    name: str, total: int, warmup: int, final: float
) -> None:
    values = rates(total, name=name, warmup_steps=warmup, final_fraction=final)
    assert all(0 <= value <= 1 for value in values)
    after = values[warmup:]
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(after))
    assert all(value >= final - 1e-12 for value in after)


def steps_of_ten_epochs(**schedule: object) -> int:
    """Of 38 sequences in batches of 4: 100 steps."""
    config = RunConfig.model_validate(
        {
            "name": "run",
            "model": {"id": "some/model"},
            "data": {"source": "rows.jsonl", "sequence_length": 64},
            "training": {"epochs": 10, "optimizer": {"learning_rate": 1e-3}, "schedule": schedule},
        }
    )
    return num_steps(config, 38, 4)


@pytest.mark.parametrize(
    ("schedule", "key"),
    [
        ({"warmup_steps": 100}, "warmup_steps"),
        ({"name": "warmup-stable-decay", "warmup_steps": 50, "decay_steps": 51}, "decay_steps"),
        ({"name": "warmup-stable-decay", "warmup_steps": 81}, "decay_steps"),
    ],
)
def test_a_schedule_that_does_not_fit_into_the_epochs_is_refused(
    schedule: dict[str, object], key: str
) -> None:
    with pytest.raises(UserError, match=rf"training\.schedule\.{key}: "):
        steps_of_ten_epochs(**schedule)


def test_the_advice_for_a_default_decay_works() -> None:
    with pytest.raises(UserError, match=r"decay_steps.* 19"):
        steps_of_ten_epochs(name="warmup-stable-decay", warmup_steps=81)
    assert steps_of_ten_epochs(name="warmup-stable-decay", warmup_steps=81, decay_steps=19) == 100
