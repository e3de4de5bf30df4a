"""Platform `acme`: runs as jobs of the Acme queue, whose commands are `acme put`, `acme list` and
`acme delete`.

A whole launcher in one module of a distribution of its own. The queue has the jobs; the run
directory has the logs, checkpoints and the agents' state. Both are read on this machine.
"""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from pydantic import Field

from drillyard.config.platforms import Capabilities, PlatformFacts, PlatformSection
from drillyard.hardware.machines import Machine
from drillyard.launch.launcher import Launcher
from drillyard.launch.plan import Plan, Program, new_secret
from drillyard.launch.prepared_run import prepare
from drillyard.launch.remote_files import Files, open_files
from drillyard.launch.request import LaunchFinding, LaunchRequest, error
from drillyard.launch.run_status import Handle, RunStatus, State
from drillyard.plan_files import ExplainedField, PlanFile
from drillyard.programs import Host, archive, require_success

SCRIPT = "job.sh"
UNPACK = 'umask 077; mkdir -p "$0" && cd "$0" && tar -xf - && exec acme put "$1" "$0/job.sh"'


class AcmeConfig(PlatformSection):
    """Settings of the Acme queue: the section `acme` of cluster.yaml."""

    priority: int = Field(default=5, description="Priority of the job, 1 to 9.")


def checks(request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
    """What the queue refuses. Pure."""
    section = request.cluster.section_as(AcmeConfig)
    if not 1 <= section.priority <= 9:
        yield error(
            "cluster", "acme.priority", f"{section.priority} is not a priority of the queue: 1 to 9"
        )


@dataclass(frozen=True)
class AcmeRun:
    """A job of the queue."""

    handle: Handle
    launch_directory: str
    status: RunStatus

    @property
    def job_title(self) -> str:
        """For error messages."""
        return f"job {self.handle.run}"


class AcmeLauncher(Launcher[AcmeRun]):
    """Runs of one Acme queue."""

    facts = PlatformFacts(
        optional=("acme", "machine", "python", "storage"),
        section=AcmeConfig,
        machines="own",
        capabilities=Capabilities(queue=True),
    )

    def plan(self, request: LaunchRequest) -> Plan:
        """A job script that starts the agent on each node, and the command that queues it. Pure."""
        prepared = prepare(request, checks=[checks])
        section = request.cluster.section_as(AcmeConfig)
        launch, run = prepared.job.launch_directory, prepared.handle.run
        agent = (
            f'exec python3 {launch}/agent run --job {launch}/job.json --node-rank "$ACME_RANK"'
            ' --leader "$ACME_HEAD"'
        )
        script = (
            f"#!/bin/sh\n# acme: priority={section.priority} nodes={prepared.job.nodes}\n{agent}\n"
        )
        files = (PlanFile(SCRIPT, script, 0o755), *prepared.files)
        argv = ("sh", "-c", UNPACK, launch, run)
        put = Program(
            "write the launch directory and queue the job", argv, tuple(file.path for file in files)
        )
        priority = ExplainedField(
            f"{SCRIPT}: priority", str(section.priority), "as set", "cluster.yaml: acme"
        )
        fields = (*prepared.fields, priority)
        return replace(
            prepared, code="there already", steps=(put,), files=files, fields=fields, script=SCRIPT
        )

    def find(self, names: Collection[str] | None = None) -> list[AcmeRun]:
        """`acme list` prints a job a line: its name, state, and the path of its script."""
        listed = require_success(
            self.programs.run(["acme", "list"]), "the queue cannot be read"
        ).stdout
        return [self._run(*line.split()) for line in listed.splitlines()]

    def _run(self, name: str, state: str, script: str) -> AcmeRun:
        handle, launch = Handle("acme", self.cluster.name, name), posixpath.dirname(script)
        directory = posixpath.dirname(launch)
        return AcmeRun(
            handle,
            launch,
            RunStatus(handle, State(state), self.cluster.nodes, run_directory=directory),
        )

    def files(self) -> Files:
        return open_files(Host(), self.programs)

    def execute(self, plan: Plan, secrets_json: PlanFile, existing: Sequence[AcmeRun]) -> None:
        sent = archive([*plan.files, new_secret(), secrets_json])
        for step in plan.stage(""):
            result = self.programs.run(step.argv, stdin=sent)
            require_success(result, f"{plan.handle}: nothing was submitted")

    def resubmit(self, run: AcmeRun, secrets_json: PlanFile) -> None:
        argv = ["sh", "-c", UNPACK, run.launch_directory, run.handle.run]
        require_success(
            self.programs.run(argv, stdin=archive([secrets_json])),
            f"{run.handle}: was not queued again",
        )

    def stop(self, run: AcmeRun) -> RunStatus:
        require_success(
            self.programs.run(["acme", "delete", run.handle.run]),
            f"{run.handle}: cannot be deleted",
        )
        return self.status(run.handle.run)
