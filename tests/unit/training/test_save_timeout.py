"""How long a save may take: as long as an attempt may get no further, and well within the time of a
stopped run."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from drillyard.config.run import TimeoutsConfig
from drillyard.supervise.launch_contract import STOP_SECONDS
from drillyard.training.build import save_timeout, warns_of_long_saves


@pytest.mark.parametrize(
    ("timeouts", "expected"),
    [
        ({}, timedelta(minutes=30)),
        ({"watchdog_seconds": 4 * 3600.0}, timedelta(hours=4)),
        ({"watchdog_seconds": 60.0, "collective_seconds": 20.0}, timedelta(minutes=1)),
        ({"watchdog_seconds": 0.0}, timedelta(days=7)),
    ],
)
def test_the_limit_of_a_save_is_the_watchdogs(
    timeouts: dict[str, float], expected: timedelta
) -> None:
    assert save_timeout(TimeoutsConfig(**timeouts)) == expected


class Log:
    """The events and warnings of a run."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.warnings: list[str] = []

    def event(self, name: str, **fields: Any) -> None:
        self.events.append(name)

    def warn(self, text: str) -> None:
        self.warnings.append(text)


@pytest.mark.parametrize(
    ("limit", "seconds", "warnings"),
    [("60", 29.0, 0), ("60", 31.0, 1), (None, 31.0, 0), ("", 31.0, 0)],
)
def test_a_save_over_half_of_a_stopped_runs_time_is_warned_of_once(
    limit: str | None, seconds: float, warnings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(STOP_SECONDS, raising=False)
    if limit is not None:
        monkeypatch.setenv(STOP_SECONDS, limit)
    log: Any = Log()
    event = warns_of_long_saves(log)
    for _ in range(2):
        event("checkpoint_removed", step=1)
        event("checkpoint", step=2, seconds=seconds)
    assert log.events == ["checkpoint_removed", "checkpoint"] * 2
    assert len(log.warnings) == warnings
    assert all("31 s" in text and "60 s" in text for text in log.warnings)
