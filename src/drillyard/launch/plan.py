"""The plan: everything a launch writes and calls, computed first. What is executed is this object.

A plan is a value: the same configs give the same plan, byte for byte. Its steps are executed in order by `submit`, and
`--dry-run` prints them; so the two cannot differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drillyard.launch.run_status import Handle


@dataclass(frozen=True)
class PlanFile:
    """A generated file; `path` is relative to the launch directory."""

    path: str
    content: str
    mode: int = 0o644


@dataclass(frozen=True)
class Program:
    """A program that is run on this machine: ssh, where it is to run on another. `argv` is exactly what is executed.

    `sends`: paths of the plan's files, whose tar archive is its standard input. `sends_directory`: a directory of this
    machine whose files, those that git does not ignore, are its standard input as a tar archive.
    `parallel`: neighbours of one stage with this set run at the same time.
    """

    purpose: str
    argv: tuple[str, ...]
    sends: tuple[str, ...] = ()
    sends_directory: str | None = None
    parallel: bool = False
    stage: str = ""
    """Which of the launcher's stages it belongs to; each launcher names its own."""


@dataclass(frozen=True)
class Call:
    """A request to a service: `method` on `target`, with `body` as JSON (protobuf's JSON form for Google's)."""

    purpose: str
    method: str
    target: str
    body: dict[str, Any]
    sends: tuple[str, ...] = ()


Step = Program | Call


@dataclass(frozen=True)
class ExplainedField:
    """One generated field, and why it has its value: what `--explain` prints."""

    place: str
    """Such as `job.sbatch: --requeue`, `environment: NCCL_NET`."""
    value: str
    reason: str
    source: str
    """The setting (`cluster.yaml: slurm.partition`), the fact with its origin, or `drillyard` for a choice of ours."""


@dataclass(frozen=True)
class Plan:
    """One run on one cluster, ready to be executed. Paths are the cluster's."""

    handle: Handle
    nodes: int
    processes_per_node: int
    run_directory: str
    launch_directory: str
    code: str
    """How the code gets to the nodes, in words: carried from here, in the image, or there already."""
    files: tuple[PlanFile, ...]
    steps: tuple[Step, ...]
    fields: tuple[ExplainedField, ...]
    warnings: tuple[str, ...] = ()
    script: str = ""
    """Path of the job script among `files`, which a dry run prints whole; empty: there is none."""

    def file(self, path: str) -> PlanFile:
        """The file of that path."""
        return next(file for file in self.files if file.path == path)

    def stage(self, stage: str) -> list[Program]:
        """The programs of one stage, in order."""
        return [step for step in self.steps if isinstance(step, Program) and step.stage == stage]
