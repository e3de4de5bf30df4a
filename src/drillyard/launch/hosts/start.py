"""The start of a run on hosts: the stages of its plan (plan.py), one after the other.

Each stage runs on all its hosts in parallel, and nothing starts before all checks pass. Ctrl-C
before the first file is written changes nothing. From then until all agents have started it is
deferred. Where an agent cannot start, those that did are stopped. Of several launches of one run at
once, one gets the submit lock; the others report that and undo nothing.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from drillyard.config.cluster import ClusterConfig
from drillyard.errors import UnreachableError, UserError
from drillyard.hardware import load_catalog
from drillyard.hardware.capacity import machine_of
from drillyard.launch.agent.job import LAUNCHED_FROM
from drillyard.launch.agent.submit import TAKEN
from drillyard.launch.hosts.host_agents import (
    NOTHING_TO_SAVE_SECONDS,
    QUICK_SECONDS,
    HostAgents,
    ask_all,
)
from drillyard.launch.hosts.host_facts import (
    HostAnswer,
    judge,
    no_answer_reason,
    not_shared,
    problem_lines,
)
from drillyard.launch.hosts.plan import CHECK, FORGET, SHARE, START, UNLOCK, WRITE
from drillyard.launch.plan import Plan, new_secret
from drillyard.launch.remote_files import print_notices
from drillyard.launch.submit_lock import being_launched_error
from drillyard.launch.sync_archive import CARRY, archive_of_directory
from drillyard.plan_files import PlanFile
from drillyard.programs import archive, defer_interrupt
from drillyard.supervise.process_identity import this_process

_SECONDS = {CHECK: 180.0, SHARE: 180.0, WRITE: 180.0, CARRY: None}
"""Time limits of stages; None: no limit."""
_RUNS_ALREADY = " runs here already (submission "
"""An agent's `start` prints this about an agent of another submission (agent/respawn.py)."""


def start_run(
    plan: Plan, secrets_json: PlanFile, agents: HostAgents, cluster: ClusterConfig
) -> None:
    """Check all hosts, carry, write and start. Raises UserError; then nothing of this submission
    runs."""
    # A copy that has the secret: it is never shown or written as a plan.
    plan = replace(plan, files=(*plan.files, new_secret()))
    start = _Start(plan, agents)
    start.check(cluster)
    copied = start.do(CARRY)
    _require_done(plan, copied, "the working directory could not be copied")
    for answer in copied:
        print_notices(answer.stderr)
    with defer_interrupt(str(plan.handle)):
        try:
            start.write(secrets_json)
            answers = start.do(START)
            try:
                _require_own(plan, answers)
                _require_done(
                    plan, answers, "the run could not be started, and what was is stopped"
                )
            except UserError:
                start.undo(answers)
                raise
        finally:
            # Where that fails too, the lock expires with this process or with time.
            start.do(UNLOCK)


@dataclass(frozen=True)
class _Start:
    """One submission."""

    plan: Plan
    agents: HostAgents

    def check(self, cluster: ClusterConfig) -> None:
        """Raise UserError with the problems of all hosts."""
        plan, hosts = self.plan, self.agents.hosts
        job = plan.job
        machine = machine_of(cluster, load_catalog(cluster.hardware)) if cluster.machine else None
        answers = self.do(CHECK)
        try:
            problems = judge(answers, job, plan.image, machine)
            if not problems:
                output = posixpath.dirname(job.run_directory)
                answers += self.do(SHARE)
                problems = not_shared(answers[len(hosts) :], output, hosts[0].title)
        finally:
            if answers[0].parsed() is not None:
                self.do(FORGET)
        if problems:
            count = len(hosts)
            what = f"{count} hosts were checked" if count > 1 else f"{hosts[0].title} was checked"
            raise _error(plan, f"nothing was started; {what}", problems, answers)

    def write(self, secrets_json: PlanFile) -> None:
        """Take the submit lock and write the launch directory. Raises UserError where another
        launch has the lock."""
        client = PlanFile("client", json.dumps(this_process().as_json()))
        (answer,) = answers = self.do(WRITE, client, secrets_json)
        if answer.result is not None and answer.result.returncode == TAKEN:
            raise being_launched_error(self.plan.handle, answer.stderr.strip())
        _require_done(self.plan, answers, "the launch directory could not be written")
        print_notices(answer.stderr)

    def do(self, stage: str, *sent: PlanFile) -> list[HostAnswer]:
        """Execute a stage in parallel. Their input is `sent`, the secret and the files they name,
        or the directory."""
        hosts, steps = self.agents.hosts, self.plan.stage(stage)
        if not steps:
            return []
        # A stage has a step for every host, for the first, or for all but the first; all get the
        # same input.
        hosts = hosts[-len(steps) :] if stage == SHARE else hosts[: len(steps)]
        if (directory := steps[0].sends_directory) is not None:
            stdin = archive_of_directory(Path(directory), self.agents.programs)
        else:
            stdin = archive(
                [
                    *sent,
                    *(
                        file
                        for file in self.plan.files
                        if file.path in ("secret", LAUNCHED_FROM, *steps[0].sends)
                    ),
                ]
            )
        titles, argvs = [host.title for host in hosts], [step.argv for step in steps]
        return ask_all(
            titles,
            argvs,
            self.agents.programs,
            stdin=stdin,
            seconds=_SECONDS.get(stage, QUICK_SECONDS),
        )

    def undo(self, answers: Sequence[HostAnswer]) -> None:
        """Stop the agents of this submission, where one may have started, and take its entry off
        the index; agents and the entry of another one stay."""
        submission = _submission_of(self.plan)
        own = [
            host
            for host, answer in zip(self.agents.hosts, answers, strict=True)
            if _other_submission(submission, answer) is None
        ]
        if own:
            launch = self.plan.launch_directory
            self.agents.stop(own, launch, NOTHING_TO_SAVE_SECONDS, submission)
        self.agents.forget(self.plan.handle.run, "--submission", submission)


def _require_done(plan: Plan, answers: Sequence[HostAnswer], what: str) -> None:
    """Raise UserError where a command failed on a host."""
    failed = [
        answer for answer in answers if answer.result is None or answer.result.returncode != 0
    ]
    if failed:
        raise _error(
            plan,
            what,
            problem_lines((answer.host, no_answer_reason(answer)) for answer in failed),
            failed,
        )


def _require_own(plan: Plan, answers: Sequence[HostAnswer]) -> None:
    """Raise UserError where another submission's agent runs on a host: this one must not stop
    it."""
    submission = _submission_of(plan)
    for answer in answers:
        if (whose := _other_submission(submission, answer)) is not None:
            raise being_launched_error(plan.handle, f"{answer.host}: {whose}")


def _submission_of(plan: Plan) -> str:
    """As the hosts derive it from the secret that they were sent (plan.py)."""
    return hashlib.sha256(plan.file("secret").content.encode()).hexdigest()[:16]


def _other_submission(own: str, started: HostAnswer) -> str | None:
    """The other submission whose agent a host has in place of that of `own`; None: it has none."""
    found = (started.parsed() or {}).get("submission", own)
    if found != own:
        return f"submission {found}"
    return started.stderr.strip() if _RUNS_ALREADY in started.stderr else None


def _error(
    plan: Plan, what: str, problems: Sequence[str], answers: Sequence[HostAnswer]
) -> UserError:
    silent = any(answer.result is None or answer.result.unreachable for answer in answers)
    kind = UnreachableError if silent else UserError
    return kind("\n".join([f"{plan.handle}: {what}:", *(f"  {line}" for line in problems)]))
