"""The plan: everything a launch writes and calls, computed first. `submit` executes it, `--dry-run`
prints it.

A plan is a value: the same configs give the same plan, byte for byte. It contains `${env:NAME}` as
text and no secret; submission reads the values from this machine's environment into secrets.json,
which only its owner may read.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drillyard import redaction
from drillyard.config.environment import REFERENCE
from drillyard.errors import UserError
from drillyard.launch.agent.job import Job
from drillyard.launch.run_status import Handle
from drillyard.plan_files import ExplainedField, PlanFile


@dataclass(frozen=True)
class Program:
    """A program to run on this machine (ssh, for one on another). `argv` is exactly what is
    executed.

    Its standard input is a tar archive: of the plan's files at `sends`, or of the files of this
    machine's directory `sends_directory` that git does not ignore. `parallel`: neighbours of one
    stage with this set run at the same time.
    """

    purpose: str
    argv: tuple[str, ...]
    sends: tuple[str, ...] = ()
    sends_directory: str | None = None
    parallel: bool = False
    stage: str = ""
    """Stage of the launcher that it belongs to; each launcher names its own."""
    reads: tuple[str, ...] = ()
    """The plan's files that it reads: below the directory in which it is started."""


@dataclass(frozen=True)
class Call:
    """A request to a service: `method` on `target`, with `body` as JSON (protobuf's JSON form for
    Google's)."""

    purpose: str
    method: str
    target: str
    body: dict[str, Any]
    sends: tuple[str, ...] = ()


Step = Program | Call


@dataclass(frozen=True)
class Plan:
    """One run on one cluster. `prepared_run.prepare` begins it; the launcher adds what only it
    knows: code and steps.

    Paths are the cluster's.
    """

    job: Job
    files: tuple[PlanFile, ...]
    """Of the launch directory: job.json, run.yaml, cluster.yaml, agent/*.py, the workload's and the
    launcher's own."""
    fields: tuple[ExplainedField, ...] = ()
    warnings: tuple[str, ...] = ()
    image: str | None = None
    mounts: tuple[str, ...] = ()
    """`host:container` or one path for both, the run's directory and the project's included."""
    code: str = ""
    """Way in which the code gets to the nodes: carried from here, in the image, or there
    already."""
    steps: tuple[Step, ...] = ()
    script: str = ""
    """Path of the job script among `files`, which a dry run prints whole; empty: there is none."""
    sweep: tuple[Job, ...] = ()
    """The jobs of all points of a sweep, where the steps submit them together."""

    @property
    def jobs(self) -> tuple[Job, ...]:
        """The jobs that the steps submit."""
        return self.sweep or (self.job,)

    @property
    def handle(self) -> Handle:
        return Handle(self.job.platform, self.job.cluster, self.job.run)

    @property
    def nodes(self) -> int:
        return self.job.nodes

    @property
    def processes_per_node(self) -> int:
        return self.job.processes_per_node

    @property
    def run_directory(self) -> str:
        return self.job.run_directory

    @property
    def launch_directory(self) -> str:
        return self.job.launch_directory

    def file(self, path: str) -> PlanFile:
        return next(file for file in self.files if file.path == path)

    def stage(self, stage: str) -> list[Program]:
        return [step for step in self.steps if isinstance(step, Program) and step.stage == stage]


CONFIG_FILES = ("run.yaml", "cluster.yaml", "job.json")
"""Files of a launch directory that may refer to secrets; the workload's own are below files/."""


def secret_names(files: Sequence[PlanFile]) -> tuple[str, ...]:
    """The environment variables to which configs refer by ${env:NAME}, those of a sweep's other
    runs included."""
    paths = [(file, file.path.split("/")) for file in files]
    texts = [
        file.content
        for file, (*above, name) in paths
        if name in CONFIG_FILES and above[-1:] != ["files"]
    ]
    return tuple(sorted({name for text in texts for name in REFERENCE.findall(text)}))


def secrets_file(files: Sequence[PlanFile]) -> PlanFile:
    """secrets.json for these configs, from this machine's environment. Raises UserError for an
    unset variable."""
    names = secret_names(files)
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise UserError(
            f"the run's configs refer to ${{env:{missing[0]}}}; not set on this machine:"
            f" {', '.join(missing)}; nothing was sent: export {missing[0]}=..."
        )
    for name in names:
        redaction.add_secret(name, os.environ[name])
    return PlanFile(
        "secrets.json", json.dumps({name: os.environ[name] for name in names}) + "\n", 0o600
    )


def new_secret() -> PlanFile:
    """The key of a submission, by which its agents authenticate each other (agent/protocol.py); no
    plan has it."""
    return PlanFile("secret", f"{secrets.token_hex(32)}\n", 0o600)
