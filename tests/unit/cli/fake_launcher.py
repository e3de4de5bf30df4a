"""A launcher whose scheduler is a dictionary: runs in the states that a test gives them, files in a
real directory."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from drillyard.config.cluster import ClusterConfig
from drillyard.config.platforms import platforms
from drillyard.errors import UserError
from drillyard.launch.launcher import Launcher
from drillyard.launch.logs.reader import run_logs
from drillyard.launch.plan import Plan
from drillyard.launch.remote_files import Files, LocalFiles, copy_files, read_file
from drillyard.launch.request import LaunchRequest, LogSelection
from drillyard.launch.run_status import Handle, RunStatus, State
from drillyard.plan_files import PlanFile


@dataclass(frozen=True)
class FakeRun:
    """A run as its launcher finds it."""

    status: RunStatus
    launch_directory: str
    job_title: str = ""


class FakeLauncher(Launcher[FakeRun]):
    """The runs of one cluster."""

    def __init__(self, platform: str, cluster: str, directory: Path) -> None:
        self.platform, self.name, self.directory = platform, cluster, directory
        self.statuses: dict[str, list[RunStatus]] = {}
        self.down: str | None = None
        self.asked: list[str] = []

    def add(self, run: str, *states: State, **fields: Any) -> Path:
        """A run that is in these states, one per question, the last one for ever. Returns its
        directory."""
        directory = self._run(run)
        (directory / "launch").mkdir(parents=True)
        job = {"nodes": 2, "processes_per_node": 2, "run_directory": str(directory)}
        (directory / "launch" / "job.json").write_text(json.dumps(job))
        handle = Handle(self.platform, self.name, run)
        given = {"nodes": 2, "run_directory": str(directory), **fields}
        self.statuses[run] = [RunStatus(handle, state, **given) for state in states]
        return directory

    def _answer(self, question: str) -> None:
        self.asked.append(question)
        if self.down is not None:
            raise UserError(self.down)

    def runs(self) -> list[RunStatus]:
        self._answer("runs")
        return [statuses[0] for statuses in self.statuses.values()]

    def status(self, run: str) -> RunStatus:
        self._answer("status")
        if run not in self.statuses:
            raise UserError(
                f"{run}: no such run on {self.name}; there are: {', '.join(self.statuses)}"
            )
        statuses = self.statuses[run]
        return statuses.pop(0) if len(statuses) > 1 else statuses[0]

    def logs(self, run: str, wanted: LogSelection) -> Iterator[bytes]:
        launch = f"{self._run(run)}/launch"
        return run_logs(launch, LocalFiles(), wanted, over=lambda: self.status(run).state.over)

    def find(self, names: Collection[str] | None = None) -> list[FakeRun]:
        wanted = self.statuses if names is None else names
        return [FakeRun(self.status(run), f"{self._run(run)}/launch") for run in wanted]

    def plan(self, request: LaunchRequest) -> Plan:
        raise NotImplementedError

    def execute(self, plan: Plan, secrets_json: PlanFile, existing: Sequence[FakeRun]) -> None:
        raise NotImplementedError

    def files(self) -> Files:
        return LocalFiles()

    def _run(self, run: str) -> Path:
        return self.directory / self.name / run

    def stop(self, run: FakeRun) -> RunStatus:
        stopped = replace(run.status, state=State.cancelled)
        self.statuses[run.status.handle.run] = [stopped]
        return stopped

    def resubmit(self, run: FakeRun, secrets_json: PlanFile) -> None:
        pass

    def artifacts(self, run: str) -> list[tuple[str, int]]:
        return LocalFiles().tree(str(self._run(run)))

    def fetch(self, run: str, paths: list[str], destination: str) -> None:
        copy_files(LocalFiles(), str(self._run(run)), paths, destination)

    def read(self, run: str, path: str, offset: int) -> bytes:
        self._answer(f"read {path}")
        return read_file(LocalFiles(), str(self._run(run) / path), offset)


class World:
    """The clusters of a test, in an address book of its own."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.clusters: dict[str, FakeLauncher] = {}
        self._monkeypatch = monkeypatch
        monkeypatch.setenv("XDG_CONFIG_HOME", str(directory / "config"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
        (directory / "empty").mkdir()
        monkeypatch.chdir(directory / "empty")
        known = platforms()
        fake = {
            name: replace(known[name], launcher=self._launcher_of) for name in ("slurm", "local")
        }
        monkeypatch.setattr("drillyard.launch.launcher.platforms", lambda: {**known, **fake})

    def _launcher_of(self, cluster: ClusterConfig, programs: Any) -> FakeLauncher:
        return self.clusters[cluster.name]

    def add(self, name: str, *, known: bool = True) -> FakeLauncher:
        """A Slurm cluster, in the address book unless said otherwise."""
        self.clusters[name] = FakeLauncher("slurm", name, self.directory / "shared")
        if known:
            book = self.directory / "config" / "drillyard" / "clusters"
            book.mkdir(parents=True, exist_ok=True)
            (book / f"{name}.yaml").write_text(self.config(name))
        return self.clusters[name]

    @staticmethod
    def config(name: str) -> str:
        """A cluster.yaml."""
        return f"name: {name}\nplatform: slurm\nnodes: 2\nprocesses_per_node: 2\n"
