"""Runs on hosts that no scheduler has: by ssh, or on this machine. One launcher for both; they differ in their layout.

What a run is doing stands in its launch directory, written by its agents (`agent/`), and which runs there are in an
index on the head host. So every machine that reaches the head host sees the same, and nothing is kept here. A look at
all runs is one command there; the agent's code comes with it, so that it needs no run that has left some.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from drillyard.config.cluster import ClusterConfig
from drillyard.errors import NotFoundError, UnreachableError, UserError
from drillyard.launch.agent.job import Job
from drillyard.launch.checks.request import require_launchable
from drillyard.launch.handles import Handle
from drillyard.launch.hosts import plan as host_plan
from drillyard.launch.hosts.checks import why_no_answer
from drillyard.launch.hosts.plan import HostLayout
from drillyard.launch.hosts.submit import HostSubmission, ask_all
from drillyard.launch.launcher import Cancellation, Capabilities, LaunchRequest, LogSelection
from drillyard.launch.logs.reader import run_logs
from drillyard.launch.plan import Plan, PlanFile
from drillyard.launch.prepared_run import agent_files
from drillyard.launch.programs import Host, Programs, archive, require_success
from drillyard.launch.registry import require
from drillyard.launch.remote_files import Files, artifacts_of, copy_files, open_files, read_file
from drillyard.launch.run_status import RunStatus, State, failure_of
from drillyard.launch.stopping import cancel_notice
from drillyard.launch.submit_secrets import names_in, secret_names, secrets_file

_LOOK_SECONDS = 120.0
_AGENT = 'd=$(mktemp -d) && trap \'rm -rf "$d"\' EXIT && tar -x -C "$d" -f - && "$0" "$d/agent" "$@"'
_STOP = (
    'if [ -O "$1" ] && [ -O "$1/agent" ] && [ -O "$1/agent/__main__.py" ] && [ -e "$1/job.json" ]; then '
    'exec "$0" "$1/agent" stop --job "$1/job.json" --patience "$2"; fi; '
    f'set -- stop --launch-directory "$1" --patience "$2"; {_AGENT}'
)
"""By the run's own agent, as that needs no room, where it is this user's; the one that is sent stops a run whose
directory is gone."""
_STOP_SECONDS = 180.0
"""What stopping may take beyond the patience with what runs: a slow login, a file system that hangs."""
_AFTER_STOP_SECONDS = 15.0
"""When the agents have killed what did not end within the job's `stop_seconds`, they have this long to say so."""
_AT_ONCE_SECONDS = 10.0
"""The patience with agents that have just been started: nothing is to be saved."""
_CONFIGS = ("run.yaml", "cluster.yaml", "job.json")


@dataclass(frozen=True)
class HostRun:
    """A run as the head host's index has it."""

    run: str
    launch_directory: str
    status: RunStatus


class HostsLauncher:
    """Runs of a cluster whose hosts are given; `layout` says where things are on them for a request."""

    def __init__(
        self,
        cluster: ClusterConfig,
        programs: Programs,
        capabilities: Capabilities,
        hosts: Sequence[Host],
        layout: Callable[[LaunchRequest | None], HostLayout],
    ) -> None:
        self.capabilities = capabilities
        self._cluster = cluster
        self._programs = programs
        self._hosts = tuple(hosts)
        self._titles = [host.title for host in hosts]
        self._layout = layout
        self._files: Files | None = None
        self._directories: dict[str, str] = {}

    def plan(self, request: LaunchRequest) -> Plan:
        """What launching `request` would write and call. Pure."""
        # Before the layout, which needs what is required here; its warnings are the plan's.
        require_launchable(request)
        return host_plan.plan_on(self._layout(request), request)

    def plan_sweep(self, requests: list[LaunchRequest]) -> list[Plan]:
        """One plan where there is one point; more would run at the same time, on the same GPUs."""
        if len(requests) > 1:
            require(self._cluster.platform, "queue", "--sweep")
        return [self.plan(request) for request in requests]

    def submit(self, plan: Plan, *, replace: bool = False) -> Handle:
        """Look at all hosts, and start the run's agents on them."""
        found_secrets = secrets_file(secret_names(plan.files))
        self._make_way(plan.handle, replace)

        self._execute(plan, found_secrets)
        return plan.handle

    def runs(self) -> list[RunStatus]:
        """The runs of this cluster that the head host knows, newest first."""
        return [known.status for known in self._known()]

    def status(self, run: str) -> RunStatus:
        """One run."""
        return self._find(run).status

    def logs(self, run: str, wanted: LogSelection) -> Iterator[bytes]:
        """Lines in order of time, with their node before them."""
        known = self._find(run)
        files = open_files(self._hosts[0], self._programs)
        try:
            yield from run_logs(known.launch_directory, [files], wanted, over=lambda: self.status(run).state.over)
        finally:
            files.close()

    def cancel(self, run: str) -> Cancellation:
        """Stop a run on all hosts, and see that nothing is left. Raises UserError where a host could not be reached."""
        try:
            known = self._find(run)
        except HeadUnreachable as error:
            raise self._stopped_without_head(run, error) from None
        state = known.status.state
        if state.over and state is not State.failed:
            return Cancellation(known.status, state)
        status = self._cancelled(known)
        # Of one that was taken for failed something may still have been running.
        return Cancellation(status, state if state.over and status.state is state else None)

    def _cancelled(self, known: HostRun) -> RunStatus:
        """How a run is that has been stopped."""
        run, seconds = known.run, self._stop_seconds(known)
        with cancel_notice(known.status.handle, seconds):
            trouble = self._stop(known.launch_directory, seconds + _AFTER_STOP_SECONDS)
        if trouble:
            others = len(self._hosts) - len(trouble)
            raise UserError(
                "\n".join([f"{known.status.handle}: is stopped on {others} of {len(self._hosts)} hosts;", *trouble])
            )
        status = self.status(run)
        if status.native["agent"] == "none" and not status.state.over:
            # Whoever launched it was killed before any agent was started.
            self._ask_head(["forget", "--cluster", self._cluster.name, "--run", run])
            return replace(status, state=State.cancelled, reason="cancelled before anything was started")
        if status.native["agent"] == "none":
            # Its directory was deleted, so nobody can note that.
            return replace(status, state=State.cancelled, reason=f"{status.reason}; nothing of it is left running")
        return status

    def resume(self, run: str) -> Handle:
        """Start a run that is over again; its trainer goes on from the newest checkpoint."""
        known = self._find(run)
        if not known.status.state.over:
            raise UserError(f"{known.status.handle}: is {known.status.state} and needs no resume")
        self._end_leftovers(known)
        job = self._job(known)
        if job.nodes != len(self._hosts):
            raise UserError(
                f"{known.status.handle}: was launched on {job.nodes} hosts, and the cluster config has "
                f"{len(self._hosts)}; launch its run config again: it goes on from its checkpoint"
            )
        names = [read_file(self._open(), posixpath.join(known.launch_directory, name), 0).decode() for name in _CONFIGS]
        found_secrets = secrets_file(names_in(names))
        plan = host_plan.plan_again(self._layout(None), job)
        self._execute(plan, found_secrets)
        return plan.handle

    def artifacts(self, run: str) -> list[tuple[str, int]]:
        """Files of the run directory: path relative to it, size in bytes."""
        return artifacts_of(self._open(), self._run_directory(run))

    def fetch(self, run: str, paths: list[str], destination: str) -> None:
        """Copy files of the run directory to a directory here."""
        copy_files(self._open(), self._run_directory(run), paths, destination)

    def read(self, run: str, path: str, offset: int) -> bytes:
        """The bytes of a file of the run directory from `offset` on."""
        return read_file(self._open(), posixpath.join(self._run_directory(run), path), offset)

    def _execute(self, plan: Plan, found_secrets: PlanFile) -> None:
        def undo() -> None:
            self._stop(plan.launch_directory, _AT_ONCE_SECONDS)
            self._ask_head(["forget", "--cluster", self._cluster.name, "--run", plan.handle.run])

        HostSubmission(plan, self._hosts, self._cluster, self._programs, undo).execute(found_secrets)

    # What the head host knows.

    def _known(self) -> list[HostRun]:
        told = self._ask_head(["list", "--cluster", self._cluster.name])
        known = [known for seen in told if (known := self._from_seen(seen)) is not None]
        return sorted(known, key=lambda each: (-(each.status.submitted_at or 0.0), each.run))

    def _find(self, run: str) -> HostRun:
        known = self._known()
        found = next((each for each in known if each.run == run), None)
        if found is None:
            names = ", ".join(each.run for each in known[:8]) or "none yet"
            raise NotFoundError(f"there is no run '{run}'; {self._titles[0]} knows: {names}")
        return found

    def _from_seen(self, seen: dict[str, Any]) -> HostRun | None:
        entry = seen["entry"]
        if "launch_directory" not in entry or entry.get("platform") != self._cluster.platform:
            return None
        handle = Handle(self._cluster.platform, self._cluster.name, entry["run"])
        return HostRun(entry["run"], entry["launch_directory"], run_status(handle, seen))

    def _ask_head(self, words: Sequence[str]) -> Any:
        """What the agent on the head host answers."""
        files = agent_files()
        argv = self._hosts[0].argv(["sh", "-c", _AGENT, self._layout(None).place.agent_python, *words])
        (answer,) = ask_all(self._titles[:1], [argv], self._programs, stdin=archive(files), seconds=_LOOK_SECONDS)
        result = answer.result
        if result is None or result.unreachable:
            raise HeadUnreachable(f"{answer.host}: {why_no_answer(answer)}")
        said = require_success(result, f"{self._titles[0]}: its runs cannot be listed").stdout
        # A login may say something of its own first.
        return json.loads(said.strip().rpartition("\n")[2]) if said else None

    def _run_directory(self, run: str) -> str:
        # It stays where it is; who follows a run's files asks every second.
        if run not in self._directories:
            self._directories[run] = posixpath.dirname(self._find(run).launch_directory)
        return self._directories[run]

    def _open(self) -> Files:
        if self._files is None:
            self._files = open_files(self._hosts[0], self._programs)
        return self._files

    def _stop_seconds(self, known: HostRun) -> float:
        """How long what runs may take to save, by job.json, which may be gone, torn, or of another version."""
        try:
            text = read_file(self._open(), posixpath.join(known.launch_directory, "job.json"), 0)
            return float(json.loads(text)["stop_seconds"])
        except (UserError, ValueError, KeyError, TypeError, RecursionError):
            return Job.stop_seconds

    def _job(self, known: HostRun) -> Job:
        text = read_file(self._open(), posixpath.join(known.launch_directory, "job.json"), 0)
        if not text:
            raise UserError(f"{known.status.handle}: {known.launch_directory} is gone; launch the run config again")
        return Job(**json.loads(text))

    # Stopping.

    def _make_way(self, handle: Handle, replaces: bool) -> None:
        """Refuse a run that goes on already, or end it."""
        try:
            known = self._find(handle.run)
        except HeadUnreachable:
            # The look at all hosts tells that, together with what else is wrong.
            return
        except UserError:
            return
        if known.status.state.over:
            self._end_leftovers(known)
            return
        if not replaces:
            raise UserError(
                f"{handle}: is {known.status.state} already, and nothing was started\n"
                f"drillyard runs cancel {handle} ends it, launch --replace does so first; or give the run another name"
            )
        self.cancel(handle.run)

    def _end_leftovers(self, known: HostRun) -> None:
        """End the agents of a run whose leader died: on the other hosts they wait for it, for up to `join_seconds`.

        The look at all hosts that follows reports what could not be ended, and hosts that could not be reached.
        """
        if known.status.state is not State.failed or known.status.ended_at is not None:
            # A leader that wrote the run's end has dismissed the other agents.
            return
        python, launch = self._layout(None).place.agent_python, known.launch_directory
        words = ["stop", "--launch-directory", launch, "--patience", f"{_AT_ONCE_SECONDS:g}", "--keep-state"]
        self._end_on_all(["sh", "-c", _AGENT, python, *words], _AT_ONCE_SECONDS)

    def _stop(self, launch_directory: str, patience_seconds: float) -> list[str]:
        """Stop a run's agents on all hosts at once; what could not be done, host by host."""
        words = _stop_words(self._layout(None).place.agent_python, launch_directory, patience_seconds)
        return self._end_on_all(words, patience_seconds)

    def _end_on_all(self, words: Sequence[str], patience_seconds: float) -> list[str]:
        seconds = patience_seconds + _STOP_SECONDS
        argvs = [host.argv(words) for host in self._hosts]
        trouble = []
        sent = archive(agent_files())
        for answer in ask_all(self._titles, argvs, self._programs, stdin=sent, seconds=seconds):
            told = answer.told()
            if told is None:
                what = f"{answer.host}: {why_no_answer(answer)}"
                unreached = answer.result is None or answer.result.unreachable
                trouble.append(f"{what}\n  {self._what_goes_on}" if unreached else what)
        return trouble

    def _stopped_without_head(self, run: str, why: UserError) -> UserError:
        """The head host is gone: stop what the other hosts have of the run, and say so."""
        python = self._layout(None).place.agent_python
        argvs = [host.argv(["sh", "-c", _AGENT, python, "check", "--runs"]) for host in self._hosts[1:]]
        sent = archive(agent_files())
        answers = ask_all(self._titles[1:], argvs, self._programs, stdin=sent, seconds=_LOOK_SECONDS)
        places = {
            host: each["launch_directory"]
            for host, answer in zip(self._hosts[1:], answers, strict=True)
            for each in (answer.told() or {}).get("runs", [])
            if (each["cluster"], each["run"]) == (self._cluster.name, run)
        }
        patience = Job.stop_seconds + _AFTER_STOP_SECONDS
        stops = [host.argv(_stop_words(python, launch, patience)) for host, launch in places.items()]
        titles = [host.title for host in places]
        ended = ask_all(titles, stops, self._programs, stdin=sent, seconds=patience + _STOP_SECONDS)
        stopped = [answer.host for answer in ended if answer.told() is not None]
        done = f"{run} is stopped on {', '.join(stopped)}" if stopped else f"{run} runs on no other host"
        return UserError(f"{why}\n{done}; {self._what_goes_on}")

    @property
    def _what_goes_on(self) -> str:
        ends = len(self._hosts) > 1
        what = (
            "its part of the run cannot go on without the others and ends by itself"
            if ends
            else "the run goes on there"
        )
        return f"{what}; give the command again when it is back"


class HeadUnreachable(UnreachableError):
    """ssh could not reach the head host."""


def _stop_words(python: str, launch_directory: str, patience_seconds: float) -> list[str]:
    return ["sh", "-c", _STOP, python, launch_directory, f"{patience_seconds:g}"]


def run_status(handle: Handle, seen: dict[str, Any]) -> RunStatus:
    """A run from what an agent's `list` or `status` shows of it: {entry, state, agent, problem}."""
    entry, state, problem = seen.get("entry") or {}, seen.get("state"), seen.get("problem")
    status = RunStatus(
        handle=handle,
        state=State.failed if problem else State.starting,
        nodes=entry.get("nodes", 1),
        reason=problem or "no agent has told anything yet",
        since=entry.get("submitted_at"),
        submitted_at=entry.get("submitted_at"),
        run_directory=entry.get("run_directory"),
        native={"agent": seen.get("agent"), "launch_directory": entry.get("launch_directory")},
    )
    return status if not state else _with_state(status, state)


def _with_state(status: RunStatus, state: dict[str, Any]) -> RunStatus:
    return replace(
        status,
        state=State(state["state"]),
        nodes=state["nodes"],
        reason=state.get("reason"),
        since=state.get("since"),
        started_at=state.get("started_at"),
        ended_at=state.get("ended_at"),
        round=state.get("round"),
        failures=state.get("failures", 0),
        failure=failure_of(state),
        run_directory=state.get("run_directory") or status.run_directory,
        hosts=tuple(state.get("hosts") or ()),
    )
