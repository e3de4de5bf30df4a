"""Kills a command at its N-th step: the N-th request to the state's bucket, change of the cloud or
call of a stage."""

from __future__ import annotations

import subprocess
import threading

from tests.integration.provision.nebius_project import NebiusProject
from tests.integration.provision.project import Project, kill, until

from drillyard.supervise.reaper import marked_processes


class Steps:
    """Counts the steps of a project's commands. `kill_at`: the step, from 1, at which the command
    is killed; the service completes the step all the same, as a cloud does."""

    def __init__(self, project: Project | NebiusProject, *options: str) -> None:
        self.project, self._options = project, options
        self.count = 0
        self.lines: list[str] = []
        self._kill_at: int | None = None
        self._command: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        project.store.on_request = self._step
        project.cloud.on_begin = self._step

    def _step(self, *words: str) -> None:
        with self._lock:
            self.count += 1
            self.lines.append(" ".join(words))
            if self.count == self._kill_at and self._command is not None:
                self._command.kill()

    def run(self, verb: str, kill_at: int | None = None) -> int | None:
        """Run a command; its exit code, -9 where it was killed. Waits until everything that it has
        started is gone."""
        self.count, self.lines, self._kill_at = 0, [], kill_at
        with self._lock:
            self._command = self.project.start(verb, "--yes", *self._options)
        _, self.errors = self._command.communicate(timeout=600)
        require_no_process(self.project)
        return self._command.returncode


def require_no_process(project: Project | NebiusProject) -> None:
    """Everything that the project's commands have started ends within seconds."""
    until(
        lambda: not marked_processes(*project.mark),
        "a process of a command that has ended still runs",
    )


def kill_and_wait(project: Project | NebiusProject, command: subprocess.Popen[str]) -> None:
    kill(command)
    require_no_process(project)
