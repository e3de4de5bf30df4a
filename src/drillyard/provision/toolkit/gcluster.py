"""Drives Cluster Toolkit's program: create, deploy, destroy, of the files of the plan.

gcluster starts Terraform and Packer, and they end at once, without saving anything, when it does
(https://github.com/hashicorp/terraform-exec, tfexec/cmd_linux.go). So Ctrl-C is passed on to these
and not to gcluster. All of them end with this process, as Terraform's own engine ends what it has
started (`terraform_engine.py`). The directory can be made again: the states are in the bucket.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from drillyard.errors import NotFoundError, UnreachableError, UserError
from drillyard.hardware.cluster_toolkit import toolkit_release
from drillyard.programs import Programs
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.provider_errors import Diagnostic, provider_error
from drillyard.provision.running_command import Limits, RunningCommand
from drillyard.provision.terraform_engine import MARK, engine_environment
from drillyard.safe_files import replace_file
from drillyard.supervise import reaper
from drillyard.supervise.rank_process import start_process

NAME = "gcluster"
_REPOSITORY = "https://github.com/GoogleCloudPlatform/cluster-toolkit"
_SECONDS = 60.0
_SILENT_SECONDS = 3600.0
"""It need not pass on what Terraform says, which takes half an hour for some file systems."""
_KEPT_LINES = 400
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_BOX = re.compile(r"^[│╷╵] ?")
_ERROR = re.compile(r"Error: (?P<summary>[^\n]+)\n+(?P<detail>.*?)(?=\n\s*Error: |\Z)", re.DOTALL)
_STOP_FIRST = ("terraform", "tofu", "packer")


@dataclass(frozen=True)
class GclusterProgram:
    """A program that was found on PATH. `version`: (1, 95, 0)."""

    path: str
    version: tuple[int, ...]


def find_gcluster() -> GclusterProgram:
    """The program on PATH. Raises NotFoundError where there is none, UserError where it is too old
    or prints no version; both say how to get it."""
    wanted = toolkit_release().version
    how = (
        f"it is built from its source (needs Go and make):\n  git clone --depth 1 --branch"
        f" v{wanted} {_REPOSITORY}\n  make -C cluster-toolkit\n  export"
        ' PATH="$PWD/cluster-toolkit:$PATH"'
    )
    path = shutil.which(NAME)
    if path is None:
        raise NotFoundError(
            f"{NAME}: is not on PATH; Cluster Toolkit {wanted} makes Slurm clusters, and {how}"
        )
    printed = Programs().run([path, "--version"], timeout=_SECONDS)
    found = re.search(r"\bv?(\d+)\.(\d+)\.(\d+)", printed.stdout)
    if found is None:
        raise UserError(f"{path}: prints no version; {wanted} is needed, and {how}")
    version = tuple(int(number) for number in found.groups())
    if version < tuple(int(number) for number in wanted.split(".")):
        raise UserError(
            f"{path}: is {'.'.join(found.groups())}, and {wanted} or newer is needed; {how}"
        )
    return GclusterProgram(path, version)


class Gcluster:
    """The deployment of a plan in `directory`. All methods raise UserError, UnreachableError past a
    limit, and KeyboardInterrupt after Ctrl-C."""

    def __init__(
        self,
        program: GclusterProgram,
        plan: ClusterPlan,
        directory: Path,
        *,
        command: str,
        report: Callable[[str], None],
        limits: Limits,
    ) -> None:
        self._program, self._plan, self._command = program, plan, command
        self._report = report
        self._limits = replace(limits, silent=max(limits.silent, _SILENT_SECONDS))
        self.directory = directory

    @property
    def _deployment(self) -> Path:
        return self.directory / self._plan.name

    def create(self) -> None:
        """Write the plan's files, and make the deployment of them."""
        assert self._plan.toolkit is not None
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in ("blueprint.yaml", "deployment.yaml"):
            text, mode = self._plan.toolkit.files[name]
            replace_file(self.directory / name, text.encode(), mode=mode)
        # What an earlier command left there was of other files.
        if self._deployment.exists():
            shutil.rmtree(self._deployment)
        files = ("-d", "deployment.yaml", "blueprint.yaml")
        self._run("create", "-l", "ERROR", "-o", str(self.directory), *files)

    def deploy(self, skip: Sequence[str] = ()) -> None:
        """Bring what exists to what the deployment says; `skip`: groups that stay as they are."""
        self._run("deploy", str(self._deployment), "--auto-approve", *_skip(skip))

    def export(self, group: str) -> None:
        """Give the outputs of a group to the groups after it, as a new directory lacks them."""
        self._run("export-outputs", str(self._deployment / group))

    def destroy(self, skip: Sequence[str]) -> None:
        """Destroy the groups, the last one first, without those of `skip`."""
        self._run("destroy", str(self._deployment), "--auto-approve", *_skip(skip))

    def remove(self) -> None:
        """Remove the deployment from this machine."""
        if self._deployment.exists():
            shutil.rmtree(self._deployment)
        for name in ("blueprint.yaml", "deployment.yaml"):
            (self.directory / name).unlink(missing_ok=True)

    def _run(self, *words: str) -> None:
        token = secrets.token_hex(16)
        watcher = reaper.ParentWatcher(reaper.__file__, token, MARK)
        reader, writer = os.pipe()
        kept: deque[str] = deque(maxlen=_KEPT_LINES)
        before = Path.cwd()
        try:
            with open(reader, "rb", buffering=0) as stdout:
                try:
                    # Its files are named from its directory.
                    os.chdir(self.directory)
                    argv = [self._program.path, *words]
                    process = start_process(argv, engine_environment(token), writer, writer)
                finally:
                    os.close(writer)
                    os.chdir(before)
                command = RunningCommand(
                    process, self._limits, self._report, lambda: _stopped_first(token)
                )
                try:
                    for line in command.lines(stdout):
                        text = _BOX.sub("", _COLOURS.sub("", line)).rstrip()
                        kept.append(text)
                        if text:
                            self._report(f"{NAME}: {text}")
                finally:
                    command.kill()
                    reaper.end_marked_processes(token, MARK)
                if command.was_stopped:
                    raise KeyboardInterrupt
                if command.late:
                    raise UnreachableError(
                        f"{NAME} {words[0]}: {command.late}; it was ended\nGo on: {self._command}"
                    )
                if process.returncode:
                    raise self._error(words[0], kept)
        finally:
            watcher.close()

    def _error(self, what: str, kept: Sequence[str]) -> UserError:
        text = "\n".join(kept)
        found = [
            Diagnostic(row["summary"].strip(), row["detail"].strip())
            for row in _ERROR.finditer(text)
        ]
        found = found or [Diagnostic("\n".join(text.strip().splitlines()[-5:]))]
        return provider_error(
            found, project=self._plan.project, command=self._command, doing=f"{NAME} {what}"
        )


def _skip(groups: Sequence[str]) -> list[str]:
    return ["--skip", ",".join(groups)] if groups else []


def _stopped_first(token: str) -> list[int]:
    """The Terraforms and Packers that it has started."""
    found = []
    for pid in reaper.marked_processes(token, MARK):
        with suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() in _STOP_FIRST:
                found.append(pid)
    return found
