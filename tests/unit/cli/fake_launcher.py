"""A launcher whose scheduler is a dictionary: runs in the states that a test gives them, files in a
real directory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drillyard.config.cluster import ClusterConfig
from drillyard.config.platforms import platforms
from drillyard.errors import UserError
from drillyard.launch.logs.reader import run_logs
from drillyard.launch.remote_files import LocalFiles, copy_files, read_file
from drillyard.launch.request import Cancellation, LogSelection
from drillyard.launch.run_status import Handle, RunStatus, State


class FakeLauncher:
    """The runs of one cluster."""

    reads_after_end = True

    def __init__(self, platform: str, cluster: str, directory: Path) -> None:
        self.platform, self.cluster, self.directory = platform, cluster, directory
        self.statuses: dict[str, list[RunStatus]] = {}
        self.down: str | None = None
        self.asked: list[str] = []

    def add(self, run: str, *states: State, **fields: Any) -> Path:
        """A run that is in these states, one per question, the last one for ever. Returns its
        directory."""
        directory = self.directory / self.cluster / run
        (directory / "launch").mkdir(parents=True)
        job = {"nodes": 2, "processes_per_node": 2, "run_directory": str(directory)}
        (directory / "launch" / "job.json").write_text(json.dumps(job))
        handle = Handle(self.platform, self.cluster, run)
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
                f"{run}: no such run on {self.cluster}; there are: {', '.join(self.statuses)}"
            )
        statuses = self.statuses[run]
        return statuses.pop(0) if len(statuses) > 1 else statuses[0]

    def logs(self, run: str, wanted: LogSelection) -> Iterator[bytes]:
        launch = self.directory / self.cluster / run / "launch"
        return run_logs(str(launch), LocalFiles(), wanted, over=lambda: self.status(run).state.over)

    def cancel(self, run: str, *, given: object = None) -> Cancellation:
        status = self.status(run)
        if status.state.over:
            return Cancellation(status, status.state)
        self.statuses[run] = [replace(status, state=State.cancelled)]
        return Cancellation(self.statuses[run][0], None)

    def resume(self, run: str, *, given: object = None) -> Handle:
        status = self.status(run)
        if not status.state.over:
            raise UserError(
                f"{status.handle}: is {status.state}; only a run that is over can be resumed"
            )
        return status.handle

    def artifacts(self, run: str) -> list[tuple[str, int]]:
        return LocalFiles().tree(str(self.directory / self.cluster / run))

    def fetch(self, run: str, paths: list[str], destination: str) -> None:
        copy_files(LocalFiles(), str(self.directory / self.cluster / run), paths, destination)

    def read(self, run: str, path: str, offset: int) -> bytes:
        self._answer(f"read {path}")
        return read_file(LocalFiles(), str(self.directory / self.cluster / run / path), offset)


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
