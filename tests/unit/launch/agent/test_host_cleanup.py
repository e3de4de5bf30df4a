"""Stopping a run whose launch directory no longer names its processes."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

import pytest
from tests.module_time import set_time

from drillyard.launch.agent import host_cleanup


@dataclass
class Exiting:
    """A process that answers SIGTERM and loses its environment two looks before it is gone."""

    pid: int = 4711
    looks: int = 3
    signals: list[int] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        if self.signals:
            self.looks -= 1
        return self.looks > 0


def test_a_process_that_takes_a_moment_to_exit_was_asked_and_not_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = Exiting()
    monkeypatch.setattr(
        host_cleanup, "marked_processes", lambda *_: [] if process.signals else [process.pid]
    )
    monkeypatch.setattr(host_cleanup, "_signal", lambda each, number: each.signals.append(number))
    message = host_cleanup._end([process], "token", 60.0)
    assert message == [{"process": 4711, "ended": "asked"}] and process.signals == [signal.SIGTERM]


def test_what_a_killed_agent_left_is_killed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[str] = []
    monkeypatch.setattr(host_cleanup, "marked_processes", lambda *_: [] if killed else [4711])
    monkeypatch.setattr(host_cleanup, "end_marked_processes", lambda token, _: killed.append(token))
    set_time(monkeypatch, host_cleanup.__name__, sleep=lambda _: pytest.fail("it waited"))
    assert host_cleanup._end([], "token", 60.0) == [] and killed == ["token"]
