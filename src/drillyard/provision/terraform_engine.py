"""Drives Terraform or OpenTofu: init, plan, apply of exactly what was planned, destroy, import.

Every command runs in a session of its own and dies with this process: the kernel kills the program
(PR_SET_PDEATHSIG), and a watcher the providers that it has started. It also has two limits of its
own, in all and without a line of output, after which it gets SIGTERM and then its group SIGKILL:
with a backend that does not answer, Terraform ignores SIGTERM for minutes.

The state is in a bucket, under the lock that the caller holds (`state_lock.py`, in Terraform's own
format), so commands run with -lock=false. Nothing in the directory is the only copy of anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from drillyard.errors import UnreachableError, UserError
from drillyard.provision.google.endpoints import require_terraform_endpoints
from drillyard.provision.provider_errors import (
    KINDS,
    Diagnostic,
    ErrorKind,
    provider_error,
)
from drillyard.provision.running_command import Limits, RunningCommand
from drillyard.provision.terraform_output import (
    EventLines,
    PlannedChanges,
    planned_changes,
)
from drillyard.provision.terraform_program import TerraformProgram
from drillyard.safe_files import replace_file
from drillyard.supervise import reaper
from drillyard.supervise.rank_process import start_process

MARK = "DRILLYARD_TERRAFORM"
"""In the environment of everything that one command of Terraform starts: a token of its own."""
_NOT_INHERITED = re.compile(r"TF_CLI_ARGS.*|TF_(DATA_DIR|WORKSPACE|INPUT|LOG.*|VAR_.*)")
"""Variables that would move the state, change a command, or write secrets to a log."""
_TEXT_ERROR = re.compile(
    r"Error: (?P<summary>[^\n]+)\n+(?P<detail>.*?)(?=\n\s*Error: |\Z)", re.DOTALL
)
_BOX = re.compile(r"^[│╷╵] ?", re.MULTILINE)
_UP, _DESTROY, _UNSAVED = "up.tfplan", "destroy.tfplan", "errored.tfstate"
_WRITTEN = ("main.tf.json", "backend.tf.json", ".terraform.lock.hcl", _UP, _DESTROY, _UNSAVED)
"""Files in the working directory; Terraform's directory .terraform beside them."""


class Terraform:
    """One configuration in `directory`, whose state is in a bucket. `report` gets lines of
    progress; `command` is what the user repeats after an error. `environment`: variables of the
    provider; `kinds`: its errors."""

    def __init__(
        self,
        program: TerraformProgram,
        directory: Path,
        *,
        project: str,
        command: str,
        report: Callable[[str], None],
        limits: Limits | None = None,
        environment: Mapping[str, str] | None = None,
        kinds: Sequence[ErrorKind] = KINDS,
    ) -> None:
        self._program = program
        self._environment, self.kinds = dict(environment or {}), kinds
        self.directory = directory
        self._project, self._command = project, command
        self._report = report
        self._limits = limits or Limits()
        self.saved_state = True
        """Whether the last command ended by itself and saved the state: every outcome is in it."""

    def init(self, document: Mapping[str, Any], backend: Mapping[str, Any]) -> None:
        """Write the configuration and install its providers. Raises UserError."""
        kept = {"terraform": {"backend": backend}}
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Terraform refuses a section without content.
        filled = {key: value for key, value in document.items() if value}
        for name, content in (("main.tf.json", filled), ("backend.tf.json", kept)):
            # Indented: errors quote the whole line.
            text = json.dumps(content, indent=2) + "\n"
            replace_file(self.directory / name, text.encode())
        self._checked("init", "-input=false", "-reconfigure", "-json")

    def validate(self) -> None:
        """Check the configuration against the providers. Raises UserError with the first error."""
        ended = self._run("validate", "-json")
        report = json.loads("\n".join(ended.lines) or "{}")
        errors = [
            Diagnostic(row.get("summary", ""), row.get("detail", ""), row.get("address", ""))
            for row in report.get("diagnostics", [])
            if row.get("severity") == "error"
        ]
        if errors or ended.code:
            raise self._error("validate", errors or ended.errors)

    def plan(self, *, destroy: bool = False, replace: Sequence[str] = ()) -> PlannedChanges:
        """Compare configuration, state and cloud; the saved plan. `replace`: addresses of what is
        made again, even unchanged. Raises UserError."""
        file = self.directory / (_DESTROY if destroy else _UP)
        again = [f"-replace={each}" for each in replace]
        options = [*(["-destroy"] if destroy else again), "-lock=false", f"-out={file.name}"]
        self._checked("plan", "-input=false", "-json", *options)
        shown = self._checked("show", "-json", file.name)
        return planned_changes(file, json.loads("\n".join(shown.lines)))

    def apply(self, changes: PlannedChanges) -> None:
        """Apply exactly the saved plan. Raises UserError, KeyboardInterrupt after Ctrl-C: what
        ended until then is in the state."""
        name = changes.file.name
        self._checked("apply", "-input=false", "-json", "-lock=false", name, shown=True)

    def import_resource(self, address: str, identifier: str) -> bool:
        """Take something that exists into the state; False where it does not exist. Raises
        UserError."""
        options = ("-input=false", "-lock=false", "-no-color")
        ended = self._run("import", *options, address, identifier)
        if ended.code == 0:
            return True
        if any("non-existent remote object" in each.summary for each in ended.errors):
            return False
        raise self._error(f"import {address}", ended.errors)

    def forget(self, address: str) -> None:
        """Remove a resource from the state, and leave it in the cloud."""
        self._checked("state", "rm", "-lock=false", address)

    def taint(self, address: str) -> None:
        """Let the next apply replace a resource: its creation may have ended half-way."""
        self._checked("taint", "-lock=false", address)

    def _checked(self, *words: str, shown: bool = False) -> _Ended:
        ended = self._run(*words, shown=shown)
        if ended.code:
            raise self._error(words[0], ended.errors)
        return ended

    def _error(self, what: str, errors: Sequence[Diagnostic]) -> UserError:
        doing = f"{self._program.name} {what}"
        return provider_error(
            errors,
            project=self._project,
            command=self._command,
            doing=doing,
            kinds=self.kinds,
        )

    def _run(self, *words: str, shown: bool = False) -> _Ended:
        """Run a command to its end. Raises UnreachableError past a limit, KeyboardInterrupt where
        it was asked to stop."""
        # Terraform writes it where the bucket does not take the state; the bucket's is older then.
        unsaved = self.directory / _UNSAVED
        unsaved.unlink(missing_ok=True)
        self.saved_state = False
        token = secrets.token_hex(16)
        watcher = reaper.ParentWatcher(reaper.__file__, token, MARK)
        reader, writer = os.pipe()
        try:
            with tempfile.TemporaryFile() as stderr, open(reader, "rb", buffering=0) as stdout:
                try:
                    process = start_process(
                        [self._program.path, f"-chdir={self.directory}", *words],
                        {**engine_environment(token), **self._environment},
                        writer,
                        stderr.fileno(),
                    )
                finally:
                    os.close(writer)
                events = EventLines()
                command = RunningCommand(process, self._limits, self._report)
                try:
                    for line in command.lines(stdout):
                        if (progress := events.read(line)) and shown:
                            self._report(progress)
                finally:
                    command.kill()
                self.saved_state = command.ended_in_order and not unsaved.exists()
                if command.was_stopped:
                    raise KeyboardInterrupt
                if command.late:
                    raise UnreachableError(
                        f"{self._program.name} {words[0]}: {command.late}; it was ended\nThe state"
                        f" may lack what was in progress; {self._command} finds it"
                    )
                return _ended(process.returncode, events, stderr)
        finally:
            watcher.close()


@dataclass(frozen=True)
class _Ended:
    code: int
    lines: list[str]
    """Output that is not events: a document."""
    errors: list[Diagnostic]


def _ended(code: int, events: EventLines, stderr: IO[bytes]) -> _Ended:
    errors = list(events.errors)
    if code and not errors:
        stderr.seek(0)
        text = _BOX.sub("", stderr.read().decode(errors="replace"))
        said = [*events.rest, text]
        found = [match for each in said for match in _TEXT_ERROR.finditer(each)]
        errors = [Diagnostic(row["summary"].strip(), row["detail"].strip()) for row in found]
        errors = errors or [Diagnostic("\n".join(said).strip() or f"exit code {code}")]
    return _Ended(code, events.rest, errors)


def engine_environment(token: str) -> dict[str, str]:
    """The environment of a program that runs Terraform; all that it starts has the mark `token`."""
    kept = {key: value for key, value in os.environ.items() if not _NOT_INHERITED.fullmatch(key)}
    reached = require_terraform_endpoints()
    servers = reached.terraform_environment()
    if not reached.is_emulated:
        servers = {key: kept.get(key) or value for key, value in servers.items()}
    own = {"TF_IN_AUTOMATION": "1", "TF_INPUT": "0", "CHECKPOINT_DISABLE": "1", MARK: token}
    return {**kept, **servers, **own}


def working_directory(project: str, cluster: str) -> Path:
    """The directory of a cluster's configuration, providers and saved plans: made again whenever it
    is missing."""
    return _clusters() / project / cluster


def status_directory(project: str, cluster: str) -> Path:
    """That of `cluster status`, which holds no lock: an `up` may work at the same time."""
    return working_directory(project, f"{cluster}.status")


def remove_working_directory(directory: Path) -> None:
    """Remove what commands have left in a working directory; files of others stay, with it."""
    for name in _WRITTEN:
        with contextlib.suppress(OSError):
            (directory / name).unlink()
    with contextlib.suppress(OSError):
        shutil.rmtree(directory / ".terraform")
    remove_empty_directories(directory)


def remove_empty_directories(directory: Path) -> None:
    """Remove the directory of a cluster, and those above it, where nothing is left in them."""
    for each in (directory, directory.parent, _clusters()):
        with contextlib.suppress(OSError):
            each.rmdir()


def _clusters() -> Path:
    root = os.environ.get("DRILLYARD_CACHE") or Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "drillyard"
    )
    return Path(root).expanduser() / "clusters"
