"""A save may take as long as an attempt may get no further."""

from __future__ import annotations

from datetime import timedelta

import pytest

from drillyard.config.run import TimeoutsConfig
from drillyard.training.build import save_timeout


@pytest.mark.parametrize(
    ("timeouts", "expected"),
    [
        ({}, timedelta(minutes=30)),
        ({"watchdog_seconds": 4 * 3600.0}, timedelta(hours=4)),
        ({"watchdog_seconds": 60.0, "collective_seconds": 20.0}, timedelta(minutes=1)),
        ({"watchdog_seconds": 0.0}, timedelta(days=7)),
    ],
)
def test_the_limit_of_a_save_is_the_watchdogs(timeouts: dict[str, float], expected: timedelta) -> None:
    assert save_timeout(TimeoutsConfig(**timeouts)) == expected
