"""Waiting for the first output of a launched run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from drillyard.errors import UserError
from drillyard.launch.run_status import Handle, RunStatus, State
from drillyard.watch import remote_run

HANDLE = Handle("slurm", "c", "tiny")


class Launched:
    """A run and its launcher, as `_wait_for_events` sees them: `moments` are (state, files, log) in
    turn."""

    handle = HANDLE
    words = str(HANDLE)

    def __init__(self, *moments: tuple[State, dict[str, bytes], list[bytes]]) -> None:
        self.moments = list(moments)
        self.launcher = SimpleNamespace(
            read=self.read, logs=lambda run, selection: iter(self.moments[0][2])
        )

    def status(self) -> RunStatus:
        return RunStatus(HANDLE, self.moments[0][0], 1)

    def read(self, run: str, path: str, offset: int) -> bytes:
        return self.moments[0][1].get(path, b"")[offset:]

    def pass_time(self, seconds: float) -> None:
        del self.moments[0]


EVENTS = {"events.jsonl": b'{"event": "run_start"}\n'}
WORKLOAD = {"launch/run.yaml": b"name: tiny\nworkload:\n  command: [x]\n"}
TRAINING = {"launch/run.yaml": b"name: tiny\nmodel: {}\n"}


@pytest.mark.parametrize(
    ("moments", "of_trainer"),
    [
        ([(State.running, EVENTS, [])], True),
        (
            [
                (State.queued, TRAINING, []),
                (State.running, TRAINING, [b"line\n"]),
                (State.running, EVENTS, []),
            ],
            True,
        ),
        ([(State.running, WORKLOAD, []), (State.running, WORKLOAD, [b"line\n"])], False),
        ([(State.succeeded, WORKLOAD, [b"line\n"])], False),
    ],
)
def test_the_first_output_is_awaited(
    moments: list[Any],
    of_trainer: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = Launched(*moments)
    monkeypatch.setattr(remote_run.time, "sleep", found.pass_time)
    assert remote_run._wait_for_events(found) == of_trainer
    # A line for each state, not for each look.
    assert capsys.readouterr().err.count("waiting") == len({state for state, _, _ in moments[:-1]})


def test_a_run_that_is_over_without_output_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Launched((State.running, TRAINING, []), (State.failed, TRAINING, [b"line\n"]))
    monkeypatch.setattr(remote_run.time, "sleep", found.pass_time)
    with pytest.raises(UserError, match="wrote nothing to watch"):
        remote_run._wait_for_events(found)
