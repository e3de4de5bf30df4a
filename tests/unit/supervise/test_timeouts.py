"""Limits of time are ordered: collective < watchdog < launcher."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drillyard.config.run import RunConfig, TimeoutsConfig
from drillyard.config.run_checks import require_valid
from drillyard.errors import UserError


def run_config(**timeouts: float | None) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "small",
            "model": {"config": {"architecture": "llama"}, "init": "random"},
            "data": {"source": "a.txt", "sequence_length": 64, "tokenizer": "a"},
            "training": {"steps": 1, "optimizer": {"learning_rate": 1e-3}},
            "timeouts": timeouts,
        }
    )


@given(st.floats(1e-3, 1e9))
def test_the_default_of_the_collective_is_below_any_watchdog(watchdog: float) -> None:
    assert TimeoutsConfig(watchdog_seconds=watchdog).collective < watchdog
    require_valid(run_config(watchdog_seconds=watchdog))


@pytest.mark.parametrize(
    "timeouts",
    [
        {"collective_seconds": 60, "watchdog_seconds": 60},
        {"collective_seconds": 3600},
        {"launcher_grace_seconds": 1800},
        {"watchdog_seconds": 0, "collective_seconds": 600, "launcher_grace_seconds": 300},
    ],
)
def test_limits_in_another_order_are_refused_and_all_three_are_named(
    timeouts: dict[str, float],
) -> None:
    with pytest.raises(UserError) as refusal:
        require_valid(run_config(**timeouts))
    named = ("collective_seconds", "watchdog_seconds", "launcher_grace_seconds")
    assert all(name in str(refusal.value) for name in named)


def test_a_watchdog_that_is_off_leaves_the_others_alone() -> None:
    require_valid(run_config(watchdog_seconds=0, collective_seconds=7200))
    require_valid(run_config(collective_seconds=30, watchdog_seconds=60, launcher_grace_seconds=90))
