"""Platforms `ssh` and `local`: runs on hosts without a scheduler; local is this machine alone,
without ssh.

Agents write a run's state into its launch directory, and the head host (the first of `ssh.hosts`,
node 0) has an index of its runs, so every machine that reaches the head host sees the same runs.
"""

from __future__ import annotations

import posixpath
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from drillyard.config.cluster import ClusterConfig
from drillyard.errors import UnreachableError, UserError
from drillyard.launch.agent.job import Job, job_of
from drillyard.launch.hosts.config import SshConfig
from drillyard.launch.hosts.host_agents import HeadUnreachable, HostAgents
from drillyard.launch.hosts.host_facts import HostAnswer
from drillyard.launch.hosts.plan import layout_of, plan_again, plan_of
from drillyard.launch.hosts.start import start_run
from drillyard.launch.launched_from import NameGiven, recorded, require_launched_here
from drillyard.launch.launcher import (
    AFTER_STOP_SECONDS,
    Launcher,
    NotListedError,
    cancel_notice,
)
from drillyard.launch.plan import Plan
from drillyard.launch.prepared_run import accelerators_of
from drillyard.launch.remote_files import Files, open_files, read_file
from drillyard.launch.request import LaunchRequest
from drillyard.launch.run_status import Handle, RunStatus, State, reported_status
from drillyard.plan_files import PlanFile
from drillyard.programs import Host, Programs


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
        layout = layout_of(cluster, sys.executable)
        self._agents = HostAgents(cluster.name, layout, programs)
        self._hosts = layout.hosts

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
        return self._agents.ask(self._hosts, ["check", *words])

    def node_names(self, status: RunStatus) -> tuple[str, ...]:
        ssh = self.cluster.section
        return tuple(ssh.hosts) if isinstance(ssh, SshConfig) else status.hosts

    def find(self, names: Collection[str] | None = None) -> list[HostRun]:
        runs = []
        listed = self._agents.ask_head(["list", "--cluster", self.cluster.name])
        for seen in listed.printed_json():
            entry = seen["entry"]
            if "launch_directory" in entry and entry.get("platform") == self.cluster.platform:
                handle = Handle(self.cluster.platform, self.cluster.name, entry["run"])
                runs.append(HostRun(entry["launch_directory"], run_status(handle, seen)))
        return runs

    def files(self) -> Files:
        return open_files(self._hosts[0], self.programs)

    def execute(self, plan: Plan, secrets_json: PlanFile, existing: Sequence[HostRun]) -> None:
        for run in existing:
            # A leader that recorded the run's end has stopped the other agents.
            if run.status.state is State.failed and run.status.ended_at is None:
                self._agents.end_leftovers(run.launch_directory)
        start_run(plan, secrets_json, self._agents, self.cluster)

    def resubmit(self, run: HostRun, secrets_json: PlanFile) -> None:
        try:
            job = job_of(self._job_json(run))
        except ValueError as error:
            raise UserError(
                f"{run.status.handle}: {run.launch_directory}/job.json: {error}; launch the run"
                " config again"
            ) from None
        if job.nodes != len(self._hosts):
            raise UserError(
                f"{run.status.handle}: was launched on {job.nodes} hosts, and the cluster config"
                f" has {len(self._hosts)}; launch its run config again: it continues from its"
                " checkpoint"
            )
        self.execute(plan_again(self._agents.layout, job), secrets_json, [run])

    def may_still_run(self, run: HostRun) -> bool:
        # Its leader died and reported nothing, perhaps on a host that does not answer now.
        return run.status.state is State.failed

    def stop(self, run: HostRun) -> RunStatus:
        seconds = self._stop_seconds(run)
        handle = run.status.handle
        with cancel_notice(handle, seconds):
            problems = self._agents.stop_all(run.launch_directory, seconds + AFTER_STOP_SECONDS)
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
        self._agents.forget(handle.run)
        return replace(
            status, state=State.cancelled, reason="cancelled before anything was started"
        )

    def _stop_seconds(self, run: HostRun) -> float:
        """The grace period that job.json gives the run; the file may be missing, incomplete or of
        another version."""
        try:
            return job_of(self._job_json(run)).stop_seconds
        except (UserError, ValueError):
            return Job.stop_seconds

    def _job_json(self, run: HostRun) -> bytes:
        text = read_file(self._files, posixpath.join(run.launch_directory, "job.json"), 0)
        if not text:
            raise UserError(
                f"{run.status.handle}: {run.launch_directory} was deleted; launch the run config"
                " again"
            )
        return text

    def stop_unlisted(self, run: str, given: NameGiven | None, error: NotListedError) -> UserError:
        """Where the head host cannot be reached: stop the run on the other hosts; returns the error
        that reports both. Only agents of this user are stopped."""
        if not isinstance(error, HeadUnreachable):
            return error
        others = self._hosts[1:]
        handle = Handle(self.cluster.platform, self.cluster.name, run)
        launches: dict[str, list[Host]] = {}
        for host, answer in zip(others, self._agents.ask(others, ["check", "--runs"]), strict=True):
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
            for answer in self._agents.stop(hosts, launch, seconds)
        ]
        stopped = [answer.host for answer in ended if answer.parsed() is not None]
        result = (
            f"{run} is stopped on {', '.join(stopped)}"
            if stopped
            else f"{run} runs on no other host"
        )
        return UnreachableError(f"{error}\n{result}; {self._agents.unreached_advice}")


def run_status(handle: Handle, seen: dict[str, Any]) -> RunStatus:
    """The status of a run from an agent's `list`: {entry, state, agent, problem}."""
    entry, problem = seen.get("entry") or {}, seen.get("problem")
    submitted_at = entry.get("submitted_at")
    unread = "running" if seen.get("agent") == "alive" else "failed"
    unreported = {
        "state": unread if problem else "starting",
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
