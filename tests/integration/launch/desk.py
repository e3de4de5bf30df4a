"""Where a user sits who launches runs: a directory with configs, a HOME, and the commands that are
given there."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from tests.integration.tiny_run import DRILLYARD, STARTED, TIMEOUT_SECONDS


class Desk:
    """A user of one cluster, whose HOME has nothing from before."""

    def __init__(self, directory: Path, cluster: dict[str, Any]) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "cluster.yaml").write_text(yaml.safe_dump(cluster), encoding="utf-8")
        self.environment = {**os.environ, "HOME": str(directory / "home")}
        for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
            self.environment.pop(name, None)

    def second_project(self, directory: Path) -> Desk:
        """The same user in another directory, with the same cluster config."""
        text = (self.directory / "cluster.yaml").read_text(encoding="utf-8")
        other = Desk(directory, yaml.safe_load(text))
        other.environment = self.environment
        return other

    def require_refused(self, run: Path, owner: Desk, handle: str) -> None:
        """No command here ends or replaces the run of another project by its name."""
        name = handle.rpartition("/")[2]
        for words in (("launch", run), ("launch", run, "--replace")):
            refused = self.say(*words)
            assert refused.returncode == 2, refused.stderr
            assert f"launched from {owner.directory}" in refused.stderr, refused.stderr
            assert f"drillyard runs cancel {handle}" in refused.stderr
            assert "--replace" not in refused.stderr
        refused = self.say("runs", "cancel", name)
        assert refused.returncode == 2, refused.stderr
        assert f"launched from {owner.directory}" in refused.stderr, refused.stderr
        assert f"drillyard runs cancel {handle}" in refused.stderr

    def write_run(self, name: str, workload: dict[str, Any], **settings: Any) -> Path:
        """A run config with a workload."""
        path = self.directory / f"{name}.yaml"
        path.write_text(
            yaml.safe_dump({"name": name, "workload": workload, **settings}), encoding="utf-8"
        )
        return path

    def start(self, *arguments: object, **options: Any) -> subprocess.Popen[str]:
        """Start a command of drillyard."""
        command = [*DRILLYARD, *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        process = subprocess.Popen(command, cwd=self.directory, env=self.environment, **pipes)
        STARTED.append(process)
        return process

    def say(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Give a command of drillyard, to its end."""
        process = self.start(*arguments)
        out, error = process.communicate(timeout=TIMEOUT_SECONDS)
        return subprocess.CompletedProcess(process.args, process.returncode, out, error)

    def launch(self, run: Path, *options: str) -> str:
        """Launch a run, which must work; its handle."""
        done = self.say("launch", run, *options)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def status(self, handle: str) -> dict[str, Any]:
        """What `runs status` says."""
        done = self.say("runs", "status", handle, "--json")
        assert done.returncode == 0, done.stderr
        output: dict[str, Any] = json.loads(done.stdout)
        return output

    def wait_for(self, handle: str, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The status, once it is as wanted."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not wanted(status := self.status(handle)):
            assert time.monotonic() < deadline, status
            time.sleep(0.5)  # each look is a process, on the cores that what it waits for needs
        return status
