"""Executes a plan of `plan.py`: each stage runs on all hosts in parallel, and nothing starts before all checks pass.

Ctrl-C before the first file is written changes nothing. From then until all agents have started it is deferred. Where
an agent cannot start, those that did are stopped. Of several launches of one run at once, one gets the submit lock; the
others report that and undo nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from drillyard.config.cluster import ClusterConfig
from drillyard.errors import UserError
from drillyard.hardware import load_catalog
from drillyard.hardware.capacity import machine_of
from drillyard.launch import submit_lock
from drillyard.launch.agent.job import Job
from drillyard.launch.hosts import checks as host_checks
from drillyard.launch.hosts import plan as host_plan
from drillyard.launch.hosts.checks import HostAnswer
from drillyard.launch.plan import Plan, PlanFile
from drillyard.launch.programs import Host, Programs, archive, defer_interrupt, parallel_map
from drillyard.launch.submit_lock import LOCK, UNLOCK
from drillyard.launch.sync_archive import archive_of_directory, print_edited_notice
from drillyard.version import __version__

MOST_AT_ONCE = 64
"""Programs of this machine that run at the same time: each is an ssh with a connection of its own."""
_SECONDS: Mapping[str, float | None] = {host_plan.CHECK: 180.0, host_plan.SHARE: 180.0, host_plan.CARRY: None}
"""Time limits of stages; None: no limit."""
_OTHER_SECONDS = 120.0
_WITH_SECRET = (host_plan.CHECK, host_plan.SHARE, host_plan.FORGET, LOCK, host_plan.WRITE, UNLOCK)
"""Stages that get the submission's secret, which is in no plan."""
_RUNS_ALREADY = " runs here already (submission "
"""An agent's `start` prints this about an agent of another submission (agent/respawn.py)."""


def ask_all(
    hosts: Sequence[str],
    argvs: Sequence[Sequence[str]],
    programs: Programs,
    *,
    stdin: bytes = b"",
    seconds: float | None,
) -> list[HostAnswer]:
    """Run one command per host, at most MOST_AT_ONCE at a time; what each gave, in the order given."""

    def ask(host: str, argv: Sequence[str]) -> HostAnswer:
        asked_at = time.time()
        try:
            result = programs.run(argv, stdin=stdin, timeout=seconds)
        except UserError as error:
            late = "no answer after" in str(error)
            return HostAnswer(host, None, f"no answer after {seconds:.0f} s" if late else str(error))
        return HostAnswer(host, result, "", asked_at, time.time())

    return parallel_map(lambda asked: ask(*asked), list(zip(hosts, argvs, strict=True)), MOST_AT_ONCE)


class HostSubmission:
    """One submission of a plan."""

    def __init__(
        self, plan: Plan, hosts: Sequence[Host], cluster: ClusterConfig, programs: Programs, undo: Callable[[], None]
    ) -> None:
        self._plan = plan
        self._titles = [host.title for host in hosts]
        self._cluster = cluster
        self._programs = programs
        self._undo = undo
        self._job = Job(**json.loads(plan.file("job.json").content))
        self._secret = PlanFile("secret", secrets.token_hex(32) + "\n", 0o600)

    def execute(self, found_secrets: PlanFile) -> None:
        """Check, write, record and start. Raises UserError, with nothing left running."""
        self._check()
        for answer in self._all_well(host_plan.CARRY, "the working directory could not be copied"):
            print_edited_notice(answer.stderr)
        with defer_interrupt(str(self._plan.handle)):
            try:
                self._lock()
                self._all_well(host_plan.WRITE, "the launch directory could not be written", found_secrets)
                self._all_well(host_plan.RECORD, "the run could not be entered into the index")
                answers = self._do(host_plan.START)
                self._require_own(answers[0])
                try:
                    self._judge(answers, "the run could not be started, and what was is stopped")
                except UserError:
                    self._undo()
                    raise
            finally:
                # Where that fails too, the lock expires with this process or with time.
                self._do(UNLOCK)

    def _lock(self) -> None:
        """Take the submit lock. Raises UserError where another launch has it."""
        (answer,) = answers = self._do(LOCK, submit_lock.client())
        if answer.result is not None and answer.result.returncode == submit_lock.LOCKED_BY_OTHER:
            raise submit_lock.being_launched_error(self._plan.handle, answer.stderr.strip())
        self._judge(answers, "the launch directory could not be locked")
        submit_lock.print_unlocked_notice(answer.stderr)
        agents = (answer.parsed() or {}).get("agents")
        if agents:
            whose = f"submission {agents[0].get('submission')}, running there"
            raise submit_lock.being_launched_error(self._plan.handle, whose)

    def _require_own(self, head: HostAnswer) -> None:
        """Raise UserError where another submission's agent runs on the head host: this one must not stop it."""
        answer = head.parsed() or {}
        own = hashlib.sha256(self._secret.content.encode()).hexdigest()[:16]
        if answer.get("submission", own) != own or _RUNS_ALREADY in head.stderr:
            whose = f"submission {answer['submission']}" if "submission" in answer else head.stderr.strip()
            raise submit_lock.being_launched_error(self._plan.handle, whose)

    def _check(self) -> None:
        job, cluster = self._job, self._cluster
        machine = machine_of(cluster, load_catalog(cluster.hardware)) if cluster.machine else None
        needed = host_checks.HostRequirements(
            run=job.run,
            launch_directory=job.launch_directory,
            port=job.port,
            version=__version__,
            image=cluster.image,
            machine=cluster.machine,
            gpus=machine.num_accelerators if machine else None,
        )
        answers = self._do(host_plan.CHECK)
        try:
            problems = host_checks.judge(answers, needed)
            if not problems:
                output = os.path.dirname(job.run_directory)
                problems = host_checks.not_shared(self._do(host_plan.SHARE), output, self._titles[0])
        finally:
            if answers[0].parsed() is not None:
                self._do(host_plan.FORGET)
        if problems:
            count = len(self._titles)
            what = f"{count} hosts were checked" if count > 1 else f"{self._titles[0]} was checked"
            raise self._error(f"nothing was started; {what}", problems)

    def _all_well(self, stage: str, what: str, *sent: PlanFile) -> list[HostAnswer]:
        answers = self._do(stage, *sent)
        self._judge(answers, what)
        return answers

    def _judge(self, answers: Sequence[HostAnswer], what: str) -> None:
        problems = host_checks.HostProblems()
        for answer in answers:
            if answer.result is None or answer.result.returncode != 0:
                problems.add(answer.host, host_checks.no_answer_reason(answer))
        if problems.found:
            raise self._error(what, problems.lines())

    def _error(self, what: str, problems: Sequence[str]) -> UserError:
        return UserError("\n".join([f"{self._plan.handle}: {what}:", *(f"  {line}" for line in problems)]))

    def _do(self, stage: str, *sent: PlanFile) -> list[HostAnswer]:
        """Execute the plan's steps of a stage in parallel; `sent`: files that are in no plan."""
        steps = self._plan.stage(stage)
        if not steps:
            return []
        # A stage has a step for every host, for the first, or for all but the first; all get the same input.
        titles = self._titles[-len(steps) :] if stage == host_plan.SHARE else self._titles[: len(steps)]
        if (directory := steps[0].sends_directory) is not None:
            stdin = archive_of_directory(Path(directory), self._programs)
        else:
            secret = [self._secret] if stage in _WITH_SECRET else []
            stdin = archive([*secret, *sent, *(file for file in self._plan.files if file.path in steps[0].sends)])
        seconds = _SECONDS.get(stage, _OTHER_SECONDS)
        return ask_all(titles, [step.argv for step in steps], self._programs, stdin=stdin, seconds=seconds)
