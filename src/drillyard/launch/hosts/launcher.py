"""Platforms `ssh` and `local`: runs on hosts without a scheduler; local is this machine alone, without ssh.

Agents write a run's state into its launch directory, and the head host (the first of `ssh.hosts`, node 0) has an index
of its runs, so every machine that reaches the head host sees the same runs.
"""

from __future__ import annotations

import json
import os
import posixpath
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from drillyard.config.cluster import ClusterConfig
from drillyard.errors import UnreachableError, UserError
from drillyard.launch.agent.job import Job
from drillyard.launch.checks import require_launchable
from drillyard.launch.hosts import plan as host_plan
from drillyard.launch.hosts.checks import HostAnswer, no_answer_reason
from drillyard.launch.hosts.config import SshConfig
from drillyard.launch.hosts.plan import HostLayout
from drillyard.launch.hosts.submit import HostSubmission, ask_all
from drillyard.launch.launcher import DirectoryLauncher, cancel_notice
from drillyard.launch.plan import Plan, PlanFile
from drillyard.launch.prepared_run import SENT_AGENT, ClusterPaths, agent_files, paths_on
from drillyard.launch.programs import Host, Programs, archive, require_success
from drillyard.launch.remote_files import Files, open_files, read_file
from drillyard.launch.request import Cancellation, LaunchRequest
from drillyard.launch.run_status import Handle, RunStatus, State, failure_of

_LIST_SECONDS = 120.0
_STOP = (
    'if [ -O "$1" ] && [ -O "$1/agent" ] && [ -O "$1/agent/__main__.py" ] && [ -e "$1/job.json" ]; then '
    'exec "$0" "$1/agent" stop --launch-directory "$1" --patience "$2"; fi; '
    f'set -- stop --launch-directory "$1" --patience "$2"; {SENT_AGENT}'
)
"""Stops a run with its own agent, which needs no free disk space, where this user owns it; with the agent that is sent
where the run's directory was deleted."""
_STOP_SECONDS = 180.0
"""Time limit of stopping, after the grace period: for a slow login, a file system that hangs."""
_AFTER_STOP_SECONDS = 15.0
"""After the job's `stop_seconds` agents kill what still runs, and then have this long to report it."""
_NOTHING_TO_SAVE_SECONDS = 10.0
"""The grace period of agents that were just started."""


@dataclass(frozen=True)
class HostRun:
    """A run in the index of the head host."""

    handle: Handle
    launch_directory: str
    status: RunStatus
    job_title: str = ""


class HostsLauncher(DirectoryLauncher[HostRun]):
    """Runs of a cluster whose config lists its hosts."""

    def __init__(self, cluster: ClusterConfig, programs: Programs) -> None:
        super().__init__(cluster, programs)
        layout = self.layout(None)
        self._hosts, self._python = layout.hosts, layout.paths.agent_python

    def layout(self, request: LaunchRequest | None) -> HostLayout:
        """The hosts and the paths on them; without a request, only what does not depend on one."""
        ssh = self.cluster.section
        return (
            _ssh_layout(self.cluster, ssh, request)
            if isinstance(ssh, SshConfig)
            else _local_layout(self.cluster, request)
        )

    def plan(self, request: LaunchRequest) -> Plan:
        """What launching `request` writes and calls. Pure."""
        # The layout needs a request without mistakes.
        require_launchable(request)
        return host_plan.plan_on(self.layout(request), request)

    # What the shared flow needs.

    def _runs(self) -> list[HostRun]:
        runs = []
        for seen in self._ask_head(["list", "--cluster", self.cluster.name]):
            entry = seen["entry"]
            if "launch_directory" in entry and entry.get("platform") == self.cluster.platform:
                handle = Handle(self.cluster.platform, self.cluster.name, entry["run"])
                runs.append(HostRun(handle, entry["launch_directory"], run_status(handle, seen)))
        return runs

    def _open_files(self) -> Files:
        return open_files(self._hosts[0], self.programs)

    def _free_names(self, handles: Sequence[Handle], replace: bool) -> list[HostRun]:
        try:
            return super()._free_names(handles, replace)
        except HeadFailed:
            # The check of all hosts reports that, together with every other problem.
            return []

    def _execute(self, plan: Plan, secrets: PlanFile, existing: Sequence[HostRun]) -> None:
        for run in existing:
            self._end_leftovers(run)

        def undo() -> None:
            self._stop_agents(plan.launch_directory, _NOTHING_TO_SAVE_SECONDS)
            self._ask_head(["forget", "--cluster", self.cluster.name, "--run", plan.handle.run])

        HostSubmission(plan, self._hosts, self.cluster, self.programs, undo).execute(secrets)

    def _resubmit(self, run: HostRun, secrets: PlanFile) -> None:
        job = self._job(run)
        if job.nodes != len(self._hosts):
            raise UserError(
                f"{run.handle}: was launched on {job.nodes} hosts, and the cluster config has {len(self._hosts)}; "
                "launch its run config again: it continues from its checkpoint"
            )
        self._execute(host_plan.plan_again(self.layout(None), job), secrets, [run])

    def _may_still_run(self, run: HostRun) -> bool:
        # Its leader died and reported nothing, perhaps on a host that does not answer now.
        return run.status.state is State.failed

    def cancel(self, run: str) -> Cancellation:
        """Stop a run on all hosts. Raises UserError where a host could not be reached."""
        try:
            return super().cancel(run)
        except HeadUnreachable as error:
            raise self._stop_without_head(run, error) from None

    def _stop(self, run: HostRun) -> RunStatus:
        seconds = self._stop_seconds(run)
        with cancel_notice(run.handle, seconds):
            problems = self._stop_agents(run.launch_directory, seconds + _AFTER_STOP_SECONDS)
        if problems:
            stopped = len(self._hosts) - len(problems)
            raise UserError(
                "\n".join([f"{run.handle}: is stopped on {stopped} of {len(self._hosts)} hosts;", *problems])
            )
        status = self.status(run.handle.run)
        if status.native["agent"] != "none":
            return status
        if status.state.over:
            # The run's directory was deleted, so no agent could record the end.
            return replace(status, state=State.cancelled, reason=f"{status.reason}; none of its processes is left")
        # The launch was killed before it started an agent.
        self._ask_head(["forget", "--cluster", self.cluster.name, "--run", run.handle.run])
        return replace(status, state=State.cancelled, reason="cancelled before anything was started")

    # The index of the head host.

    def _ask(self, hosts: Sequence[Host], words: Sequence[str], seconds: float) -> list[HostAnswer]:
        """What a command gives on each host, with the agent's source as its input."""
        argvs = [host.argv(["sh", "-c", *words]) for host in hosts]
        titles = [host.title for host in hosts]
        return ask_all(titles, argvs, self.programs, stdin=archive(agent_files()), seconds=seconds)

    def _ask_head(self, words: Sequence[str]) -> Any:
        """The answer of the agent on the head host."""
        (answer,) = self._ask(self._hosts[:1], [SENT_AGENT, self._python, *words], _LIST_SECONDS)
        if answer.result is None or answer.result.unreachable:
            raise HeadUnreachable(f"{answer.host}: {no_answer_reason(answer)}")
        try:
            output = require_success(answer.result, f"{answer.host}: its runs cannot be listed").stdout
        except UserError as error:
            raise HeadFailed(str(error)) from None
        # A login may print something first.
        return json.loads(output.strip().rpartition("\n")[2]) if output else None

    def _stop_seconds(self, run: HostRun) -> float:
        """The grace period that job.json gives the run; the file may be missing, incomplete or of another version."""
        try:
            text = read_file(self._files, posixpath.join(run.launch_directory, "job.json"), 0)
            return float(json.loads(text)["stop_seconds"])
        except (UserError, ValueError, KeyError, TypeError, RecursionError):
            return Job.stop_seconds

    def _job(self, run: HostRun) -> Job:
        text = read_file(self._files, posixpath.join(run.launch_directory, "job.json"), 0)
        if not text:
            raise UserError(f"{run.handle}: {run.launch_directory} was deleted; launch the run config again")
        return Job(**json.loads(text))

    # Stopping agents.

    def _end_leftovers(self, run: HostRun) -> None:
        """End agents whose leader died: they wait for it for up to `join_seconds`.

        The check of all hosts that follows reports agents that could not be ended and hosts that do not answer.
        """
        if run.status.state is not State.failed or run.status.ended_at is not None:
            # A leader that recorded the run's end has stopped the other agents.
            return
        words = ["stop", "--launch-directory", run.launch_directory]
        words += ["--patience", f"{_NOTHING_TO_SAVE_SECONDS:g}", "--keep-state"]
        self._ask(self._hosts, [SENT_AGENT, self._python, *words], _NOTHING_TO_SAVE_SECONDS + _STOP_SECONDS)

    def _stop_agents(self, launch_directory: str, grace_seconds: float) -> list[str]:
        """Stop a run's agents on all hosts; returns the problems, host by host."""
        problems = []
        for answer in self._ask_to_stop(self._hosts, launch_directory, grace_seconds):
            if answer.parsed() is None:
                unreached = answer.result is None or answer.result.unreachable
                advice = f"\n  {self._unreached_advice}" if unreached else ""
                problems.append(f"{answer.host}: {no_answer_reason(answer)}{advice}")
        return problems

    def _ask_to_stop(self, hosts: Sequence[Host], launch_directory: str, grace_seconds: float) -> list[HostAnswer]:
        words = [_STOP, self._python, launch_directory, f"{grace_seconds:g}"]
        return self._ask(hosts, words, grace_seconds + _STOP_SECONDS)

    def _stop_without_head(self, run: str, error: UserError) -> UserError:
        """The head host does not answer: stop the run on the other hosts; returns the error that reports both."""
        others = self._hosts[1:]
        launches: dict[str, list[Host]] = {}
        for host, answer in zip(
            others, self._ask(others, [SENT_AGENT, self._python, "check", "--runs"], _LIST_SECONDS), strict=True
        ):
            for each in (answer.parsed() or {}).get("runs", []):
                if (each["cluster"], each["run"]) == (self.cluster.name, run):
                    launches.setdefault(each["launch_directory"], []).append(host)
        seconds = Job.stop_seconds + _AFTER_STOP_SECONDS
        ended = [answer for launch, hosts in launches.items() for answer in self._ask_to_stop(hosts, launch, seconds)]
        stopped = [answer.host for answer in ended if answer.parsed() is not None]
        result = f"{run} is stopped on {', '.join(stopped)}" if stopped else f"{run} runs on no other host"
        return UserError(f"{error}\n{result}; {self._unreached_advice}")

    @property
    def _unreached_advice(self) -> str:
        several = "its part of the run cannot continue without the others and ends by itself"
        state = several if len(self._hosts) > 1 else "the run continues there"
        return f"{state}; repeat the command when it is back"


class HeadFailed(UserError):
    """The head host cannot list its runs."""


class HeadUnreachable(HeadFailed, UnreachableError):
    """ssh cannot reach the head host."""


def _ssh_layout(cluster: ClusterConfig, ssh: SshConfig, request: LaunchRequest | None) -> HostLayout:
    """Hosts that OpenSSH reaches. The first of `ssh.hosts` is node 0 and the head host."""
    hosts = tuple(Host(name, ssh.user, ssh.port, ssh.identity_file, ssh.config_file) for name in ssh.hosts)
    leader = ssh.rendezvous_host or ssh.hosts[0].rpartition("@")[2]
    if request is None:
        return HostLayout(hosts, leader, ClusterPaths("", "", ""), False, "")
    paths, storage = paths_on(request), cluster.storage.directory
    project = PurePosixPath(paths.project)
    shared = len(hosts) == 1 or storage is None or project.is_relative_to(storage)
    shared = shared or PurePosixPath(paths.output).is_relative_to(project)
    return HostLayout(hosts, leader, paths, shared, f"there already: {paths.project} on every host")


def _local_layout(cluster: ClusterConfig, request: LaunchRequest | None) -> HostLayout:
    """This machine. The interpreter that launches starts the agent and, by default, the ranks."""
    hosts, leader = (Host(),), "127.0.0.1"
    if request is None:
        return HostLayout(hosts, leader, ClusterPaths("", "", "", sys.executable), True, "")
    root = os.path.expanduser(cluster.storage.directory or request.here)
    output = posixpath.normpath(posixpath.join(request.here, root, request.run.output))
    paths = ClusterPaths(request.here, output, cluster.python or request.python, request.python)
    return HostLayout(hosts, leader, paths, True, f"there already: {request.here} on this machine")


def run_status(handle: Handle, seen: dict[str, Any]) -> RunStatus:
    """The status of a run from an agent's `list`: {entry, state, agent, problem}."""
    entry, state, problem = seen.get("entry") or {}, seen.get("state") or {}, seen.get("problem")
    submitted_at = entry.get("submitted_at")
    unreported = State.failed if problem else State.starting
    return RunStatus(
        handle=handle,
        state=State(state["state"]) if state else unreported,
        nodes=state["nodes"] if state else entry.get("nodes", 1),
        reason=state.get("reason") if state else problem or "no agent has reported yet",
        since=state.get("since") if state else submitted_at,
        submitted_at=submitted_at,
        started_at=state.get("started_at"),
        ended_at=state.get("ended_at"),
        round=state.get("round"),
        failures=state.get("failures", 0),
        failure=failure_of(state),
        run_directory=state.get("run_directory") or entry.get("run_directory"),
        hosts=tuple(state.get("hosts") or ()),
        native={"agent": seen.get("agent"), "launch_directory": entry.get("launch_directory")},
    )
