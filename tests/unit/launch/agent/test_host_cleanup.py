"""Stopping a run whose launch directory no longer names its processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.module_time import set_time

from drillyard.launch.agent import host_cleanup, index, submit
from drillyard.launch.agent.job import run_token
from drillyard.supervise.process_identity import running_process, this_process
from drillyard.supervise.reaper import RUN_MARK


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


@contextmanager
def agent_of(launch: Path, submission: str, node: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is announced as an agent, and marked as the run's."""
    (launch / "agents").mkdir(parents=True, exist_ok=True)
    mark = {**os.environ, RUN_MARK: run_token(str(launch))}
    with subprocess.Popen(["sleep", "1000"], env=mark) as process:
        announced = {"node": node, "submission": submission, "keeper": None}
        announced["agent"] = running_process(process.pid).as_json()
        (launch / "agents" / f"{submission}.json").write_text(json.dumps(announced))
        try:
            yield process
        finally:
            process.kill()


def test_a_submission_that_failed_ends_its_own_agents_alone(tmp_path: Path) -> None:
    options = Namespace(
        launch_directory=str(tmp_path),
        submission="mine",
        keep_state=False,
        mark_only=False,
        grace_seconds=10.0,
    )
    (tmp_path / "secrets.json").write_text("{}")
    with agent_of(tmp_path, "mine") as mine, agent_of(tmp_path, "theirs", 1) as theirs:
        assert host_cleanup.stop(options) == 0
        assert mine.wait(10) == -signal.SIGTERM and theirs.poll() is None
        assert (tmp_path / "secrets.json").exists()
        assert [path.name for path in tmp_path.glob("cancelled.*")] == ["cancelled.mine"]
        # Nothing of it is left there: the other one's agent stays.
        assert host_cleanup.stop(options) == 0 and theirs.poll() is None


def test_on_one_machine_a_name_is_that_of_one_launch_directory_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def place(project: str, submission: str) -> int:
        launch = tmp_path / project / "runs" / "same" / "launch"
        entry = {"run": "same", "cluster": "here", "platform": "local"}
        sent = tmp_path / f"sent-{submission}"
        sent.mkdir()
        (sent / "job.json").write_text("{}")
        (sent / "client").write_text(json.dumps(this_process().as_json()))
        text = json.dumps({**entry, "launch_directory": str(launch)})
        options = Namespace(
            sent=str(sent), launch_directory=str(launch), submission=submission, entry=text
        )
        return submit.place(options)

    launch = tmp_path / "a" / "runs" / "same" / "launch"
    assert place("a", "first") == 0
    # The other one is about to start its agents, then they run, then they have ended.
    assert place("b", "second") == submit.TAKEN
    assert f"first, 0 s ago; a lock ends after 900 s, in {launch}" in capsys.readouterr().err
    submit.unlock(Namespace(launch_directory=str(launch), submission="first"))
    with agent_of(launch, "first"):
        assert place("b", "third") == submit.TAKEN
    assert f"first, running there, in {launch}" in capsys.readouterr().err
    assert place("b", "fourth") == 0
    (entry,) = (tmp_path / "state" / "drillyard" / "here").glob("*.json")
    assert json.loads(entry.read_text())["submission"] == "fourth"
    assert index.noted_directory(entry.read_text()) is None
