"""Platforms `ssh` and `local`: runs on hosts without a scheduler; local is this machine alone,
without ssh.

Agents write a run's state into its launch directory, and the head host (the first of `ssh.hosts`,
node 0) has an index of its runs, so every machine that reaches the head host sees the same runs.

Each stage of a plan (plan.py) runs on all hosts in parallel, and nothing starts before all checks
pass. Ctrl-C before the first file is written changes nothing. From then until all agents have
started it is deferred. Where an agent cannot start, those that did are stopped. Of several launches
of one run at once, one gets the submit lock; the others report that and undo nothing.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import shlex
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drillyard.config.cluster import ClusterConfig
from drillyard.errors import UnreachableError, UserError
from drillyard.hardware import load_catalog
from drillyard.hardware.capacity import machine_of
from drillyard.launch.agent.job import LAUNCHED_FROM, Job
from drillyard.launch.agent.submit import TAKEN
from drillyard.launch.hosts.config import SshConfig
from drillyard.launch.hosts.host_facts import (
    HostAnswer,
    judge,
    no_answer_reason,
    not_shared,
    problem_lines,
)
from drillyard.launch.hosts.plan import (
    CHECK,
    FORGET,
    SHARE,
    START,
    UNLOCK,
    WRITE,
    layout_of,
    plan_again,
    plan_of,
)
from drillyard.launch.launched_from import NameGiven, recorded, require_launched_here
from drillyard.launch.launcher import (
    AFTER_STOP_SECONDS,
    Launcher,
    NotListedError,
    cancel_notice,
)
from drillyard.launch.plan import Plan, new_secret
from drillyard.launch.prepared_run import SENT_AGENT, accelerators_of, agent_files
from drillyard.launch.remote_files import Files, open_files, print_notices, read_file
from drillyard.launch.request import LaunchRequest
from drillyard.launch.run_status import Handle, RunStatus, State, reported_status
from drillyard.launch.submit_lock import being_launched_error
from drillyard.launch.sync_archive import CARRY, archive_of_directory
from drillyard.plan_files import PlanFile
from drillyard.programs import (
    Host,
    Programs,
    Result,
    archive,
    defer_interrupt,
    parallel_map,
    require_success,
)
from drillyard.supervise.process_identity import this_process

MOST_AT_ONCE = 64
"""Programs of this machine that run at the same time: each is an ssh with a connection of its
own."""
_SECONDS = {CHECK: 180.0, SHARE: 180.0, WRITE: 180.0, CARRY: None}
"""Time limits of stages; None: no limit."""
_OTHER_SECONDS = 120.0
"""Time limit of all that is quick."""
_RUNS_ALREADY = " runs here already (submission "
"""An agent's `start` prints this about an agent of another submission (agent/respawn.py)."""
_STOP = (
    'if [ -O "$1" ] && [ -O "$1/agent" ] && [ -O "$1/agent/__main__.py" ] && [ -e "$1/job.json" ];'
    ' then exec "$0" "$1/agent" stop --launch-directory "$1" --patience "$2"'
    ' ${3:+--submission "$3"}; fi; set -- stop --launch-directory "$1" --patience "$2"'
    ' ${3:+--submission "$3"}; ' + SENT_AGENT
)
"""Stops a run with its own agent, which needs no free disk space, where this user owns it; with the
agent that is sent where the run's directory was deleted. "$3": only what this submission has
started."""
_STOP_SECONDS = 180.0
"""Time limit of stopping, after the grace period: for a slow login, a file system that hangs."""
_NOTHING_TO_SAVE_SECONDS = 10.0
"""The grace period of agents that were just started."""


@dataclass(frozen=True)
class HostRun:
    """A run in the index of the head host."""

    launch_directory: str
    status: RunStatus
    job_title: str = ""


class HostsLauncher(Launcher[HostRun]):
    """Runs of a cluster whose config lists its hosts."""

    def __init__(self, cluster: ClusterConfig, programs: Programs) -> None:
        super().__init__(cluster, programs)
        self._layout = layout_of(cluster, sys.executable)
        self._hosts = self._layout.hosts

    def plan(self, request: LaunchRequest) -> Plan:
        return plan_of(request)

    def drain(self, node: str, reason: str) -> str | None:
        if isinstance(self.cluster.section, SshConfig):
            instead = "take it out of ssh.hosts, and lower nodes by one, until it is repaired"
            raise UserError(self._cannot_drain(node, instead))
        return super().drain(node, reason)

    def nodes_short_of_gpus(self, request: LaunchRequest) -> dict[str, str]:
        if not (needed := accelerators_of(request)):
            return {}
        answers = self.host_answers()
        found = {answer.host: (answer.parsed() or {}).get("gpus") for answer in answers}
        return {
            host: f"offers {gpus} of {needed} GPUs (/dev/nvidia0, ...)"
            for host, gpus in found.items()
            if isinstance(gpus, int) and gpus < needed
        }

    def host_answers(self, *words: str) -> list[HostAnswer]:
        """What each host says of itself, in the order of the hosts: the agent's `check`, with
        further words such as --runs."""
        return self._ask(self._hosts, ["check", *words], _OTHER_SECONDS)

    def node_names(self, status: RunStatus) -> tuple[str, ...]:
        ssh = self.cluster.section
        return tuple(ssh.hosts) if isinstance(ssh, SshConfig) else status.hosts

    def find(self, names: Collection[str] | None = None) -> list[HostRun]:
        runs = []
        for seen in self._ask_head(["list", "--cluster", self.cluster.name]).printed_json():
            entry = seen["entry"]
            if "launch_directory" in entry and entry.get("platform") == self.cluster.platform:
                handle = Handle(self.cluster.platform, self.cluster.name, entry["run"])
                runs.append(HostRun(entry["launch_directory"], run_status(handle, seen)))
        return runs

    def files(self) -> Files:
        return open_files(self._hosts[0], self.programs)

    def execute(self, plan: Plan, secrets_json: PlanFile, existing: Sequence[HostRun]) -> None:
        for run in existing:
            self._end_leftovers(run)
        # A copy that has the secret: it is never shown or written as a plan.
        plan = replace(plan, files=(*plan.files, new_secret()))
        self._check(plan)
        copied = self._do(plan, CARRY)
        _require_done(plan, copied, "the working directory could not be copied")
        for answer in copied:
            print_notices(answer.stderr)
        with defer_interrupt(str(plan.handle)):
            try:
                self._write(plan, secrets_json)
                answers = self._do(plan, START)
                try:
                    _require_own(plan, answers)
                    _require_done(
                        plan, answers, "the run could not be started, and what was is stopped"
                    )
                except UserError:
                    self._undo_start(plan, answers)
                    raise
            finally:
                # Where that fails too, the lock expires with this process or with time.
                self._do(plan, UNLOCK)

    def _undo_start(self, plan: Plan, answers: Sequence[HostAnswer]) -> None:
        """Stop the agents of this submission, where one may have started, and take its entry off
        the index; agents and the entry of another one stay."""
        submission = _submission_of(plan)
        own = [
            host
            for host, answer in zip(self._hosts, answers, strict=True)
            if _other_submission(submission, answer) is None
        ]
        if own:
            seconds = _NOTHING_TO_SAVE_SECONDS
            self._ask_to_stop(own, plan.launch_directory, seconds, submission)
        words = ["forget", "--cluster", self.cluster.name, "--run", plan.handle.run]
        self._ask_head([*words, "--submission", submission])

    def _check(self, plan: Plan) -> None:
        job, cluster = plan.job, self.cluster
        machine = machine_of(cluster, load_catalog(cluster.hardware)) if cluster.machine else None
        answers = self._do(plan, CHECK)
        try:
            problems = judge(answers, job, plan.image, machine)
            if not problems:
                output = posixpath.dirname(job.run_directory)
                answers += self._do(plan, SHARE)
                problems = not_shared(answers[len(self._hosts) :], output, self._hosts[0].title)
        finally:
            if answers[0].parsed() is not None:
                self._do(plan, FORGET)
        if problems:
            count = len(self._hosts)
            what = (
                f"{count} hosts were checked"
                if count > 1
                else f"{self._hosts[0].title} was checked"
            )
            raise _error(plan, f"nothing was started; {what}", problems, answers)

    def _write(self, plan: Plan, secrets_json: PlanFile) -> None:
        """Take the submit lock and write the launch directory. Raises UserError where another
        launch has the lock."""
        client = PlanFile("client", json.dumps(this_process().as_json()))
        (answer,) = answers = self._do(plan, WRITE, client, secrets_json)
        if answer.result is not None and answer.result.returncode == TAKEN:
            raise being_launched_error(plan.handle, answer.stderr.strip())
        _require_done(plan, answers, "the launch directory could not be written")
        print_notices(answer.stderr)

    def _do(self, plan: Plan, stage: str, *sent: PlanFile) -> list[HostAnswer]:
        """Execute a stage in parallel. Their input is `sent`, the secret and the files they name,
        or the directory."""
        steps = plan.stage(stage)
        if not steps:
            return []
        # A stage has a step for every host, for the first, or for all but the first; all get the
        # same input.
        hosts = self._hosts[-len(steps) :] if stage == SHARE else self._hosts[: len(steps)]
        if (directory := steps[0].sends_directory) is not None:
            stdin = archive_of_directory(Path(directory), self.programs)
        else:
            stdin = archive(
                [
                    *sent,
                    *(
                        file
                        for file in plan.files
                        if file.path in ("secret", LAUNCHED_FROM, *steps[0].sends)
                    ),
                ]
            )
        titles, argvs = [host.title for host in hosts], [step.argv for step in steps]
        return ask_all(
            titles, argvs, self.programs, stdin=stdin, seconds=_SECONDS.get(stage, _OTHER_SECONDS)
        )

    def resubmit(self, run: HostRun, secrets_json: PlanFile) -> None:
        job = Job(**self._job_json(run))
        if job.nodes != len(self._hosts):
            raise UserError(
                f"{run.status.handle}: was launched on {job.nodes} hosts, and the cluster config"
                f" has {len(self._hosts)}; launch its run config again: it continues from its"
                " checkpoint"
            )
        self.execute(plan_again(self._layout, job), secrets_json, [run])

    def may_still_run(self, run: HostRun) -> bool:
        # Its leader died and reported nothing, perhaps on a host that does not answer now.
        return run.status.state is State.failed

    def stop(self, run: HostRun) -> RunStatus:
        seconds = self._stop_seconds(run)
        handle = run.status.handle
        with cancel_notice(handle, seconds):
            problems = self._stop_agents(run.launch_directory, seconds + AFTER_STOP_SECONDS)
        if problems:
            stopped = len(self._hosts) - len(problems)
            raise UserError(
                "\n".join(
                    [f"{handle}: is stopped on {stopped} of {len(self._hosts)} hosts;", *problems]
                )
            )
        status = self.status(handle.run)
        if status.native["agent"] != "none":
            return status
        if status.state.over:
            # The run's directory was deleted, so no agent could record the end.
            return replace(
                status,
                state=State.cancelled,
                reason=f"{status.reason}; none of its processes is left",
            )
        # The launch was killed before it started an agent.
        self._ask_head(["forget", "--cluster", self.cluster.name, "--run", handle.run])
        return replace(
            status, state=State.cancelled, reason="cancelled before anything was started"
        )

    # The index of the head host.

    def _ask(
        self, hosts: Sequence[Host], words: Sequence[str], seconds: float, script: str = SENT_AGENT
    ) -> list[HostAnswer]:
        """Run a verb of the agent on each host. `script` runs it, with the agent's source as its
        input."""
        titles = [host.title for host in hosts]
        argvs = [host.argv(["sh", "-c", script, self._layout.python, *words]) for host in hosts]
        return ask_all(titles, argvs, self.programs, stdin=archive(agent_files()), seconds=seconds)

    def _ask_head(self, words: Sequence[str]) -> Result:
        """Run a verb of the agent on the head host."""
        (answer,) = self._ask(self._hosts[:1], words, _OTHER_SECONDS)
        if answer.result is None or answer.result.unreachable:
            raise HeadUnreachable(f"{answer.host}: {no_answer_reason(answer)}")
        try:
            return require_success(answer.result, f"{answer.host}: its runs cannot be listed")
        except UserError as error:
            raise HeadFailed(str(error)) from None

    def _stop_seconds(self, run: HostRun) -> float:
        """The grace period that job.json gives the run; the file may be missing, incomplete or of
        another version."""
        try:
            return float(self._job_json(run)["stop_seconds"])
        except (UserError, ValueError, KeyError, TypeError, RecursionError):
            return Job.stop_seconds

    def _job_json(self, run: HostRun) -> Any:
        text = read_file(self._files, posixpath.join(run.launch_directory, "job.json"), 0)
        if not text:
            raise UserError(
                f"{run.status.handle}: {run.launch_directory} was deleted; launch the run config"
                " again"
            )
        return json.loads(text)

    # Stopping agents.

    def _end_leftovers(self, run: HostRun) -> None:
        """End agents whose leader died: they wait for it for up to `join_seconds`.

        The check of all hosts that follows reports agents that could not be ended and hosts that do
        not answer.
        """
        if run.status.state is not State.failed or run.status.ended_at is not None:
            # A leader that recorded the run's end has stopped the other agents.
            return
        words = ["stop", "--launch-directory", run.launch_directory]
        words += ["--patience", f"{_NOTHING_TO_SAVE_SECONDS:g}", "--keep-state"]
        self._ask(self._hosts, words, _NOTHING_TO_SAVE_SECONDS + _STOP_SECONDS)

    def _stop_agents(self, launch_directory: str, grace_seconds: float) -> list[str]:
        """Stop a run's agents on all hosts; returns the problems, host by host."""
        problems = []
        for answer in self._ask_to_stop(self._hosts, launch_directory, grace_seconds):
            if answer.parsed() is None:
                silent = answer.result is None or answer.result.unreachable
                advice = f"\n  {self._unreached_advice}" if silent else ""
                problems.append(f"{answer.host}: {no_answer_reason(answer)}{advice}")
        return problems

    def _ask_to_stop(
        self,
        hosts: Sequence[Host],
        launch_directory: str,
        grace_seconds: float,
        submission: str | None = None,
    ) -> list[HostAnswer]:
        words = [launch_directory, f"{grace_seconds:g}", *([submission] if submission else [])]
        return self._ask(hosts, words, grace_seconds + _STOP_SECONDS, _STOP)

    def stop_unlisted(self, run: str, given: NameGiven | None, error: NotListedError) -> UserError:
        """Where the head host cannot be reached: stop the run on the other hosts; returns the error
        that reports both. Only agents of this user are stopped."""
        if not isinstance(error, HeadUnreachable):
            return error
        others = self._hosts[1:]
        handle = Handle(self.cluster.platform, self.cluster.name, run)
        launches: dict[str, list[Host]] = {}
        for host, answer in zip(
            others, self._ask(others, ["check", "--runs"], _OTHER_SECONDS), strict=True
        ):
            facts = answer.parsed() or {}
            for each in facts.get("runs", []):
                if (each["cluster"], each["run"], each["user"]) == (
                    self.cluster.name,
                    run,
                    facts.get("user"),
                ):
                    if given is not None:
                        origin = recorded(each["launched_from"])
                        require_launched_here(handle, origin, given, "cancel")
                    launches.setdefault(each["launch_directory"], []).append(host)
        seconds = Job.stop_seconds + AFTER_STOP_SECONDS
        ended = [
            answer
            for launch, hosts in launches.items()
            for answer in self._ask_to_stop(hosts, launch, seconds)
        ]
        stopped = [answer.host for answer in ended if answer.parsed() is not None]
        result = (
            f"{run} is stopped on {', '.join(stopped)}"
            if stopped
            else f"{run} runs on no other host"
        )
        return UnreachableError(f"{error}\n{result}; {self._unreached_advice}")

    @property
    def _unreached_advice(self) -> str:
        several = "its part of the run cannot continue without the others and ends by itself"
        state = several if len(self._hosts) > 1 else "the run continues there"
        return f"{state}; repeat the command when it is back"


def ask_all(
    hosts: Sequence[str],
    argvs: Sequence[Sequence[str]],
    programs: Programs,
    *,
    stdin: bytes = b"",
    seconds: float | None,
) -> list[HostAnswer]:
    """Run one command per host, at most MOST_AT_ONCE at a time; what each gave, in the order
    given."""

    def ask(host: str, argv: Sequence[str]) -> HostAnswer:
        asked_at = time.time()
        try:
            result = programs.run(argv, stdin=stdin, timeout=seconds)
        except UserError as error:
            text = str(error).partition("\ncommand: ")[0]
            for prefix in (shlex.join(argv), host):
                text = text.removeprefix(f"{prefix}: ")
            return HostAnswer(host, None, text, is_reached=not isinstance(error, UnreachableError))
        return HostAnswer(host, result, "", asked_at, time.time())

    return parallel_map(
        lambda asked: ask(*asked), list(zip(hosts, argvs, strict=True)), MOST_AT_ONCE
    )


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


class HeadFailed(NotListedError):
    """The head host cannot list its runs."""


class HeadUnreachable(HeadFailed, UnreachableError):
    """ssh cannot reach the head host."""


def run_status(handle: Handle, seen: dict[str, Any]) -> RunStatus:
    """The status of a run from an agent's `list`: {entry, state, agent, problem}."""
    entry, problem = seen.get("entry") or {}, seen.get("problem")
    submitted_at = entry.get("submitted_at")
    unreported = {
        "state": "failed" if problem else "starting",
        "reason": problem or "no agent has reported yet",
    }
    own = seen.get("state") or {**unreported, "nodes": entry.get("nodes", 1), "since": submitted_at}
    return reported_status(
        handle,
        State(own["state"]),
        own,
        submitted_at=submitted_at,
        run_directory=own.get("run_directory") or entry.get("run_directory"),
        native={"agent": seen.get("agent"), "launch_directory": entry.get("launch_directory")},
    )
