"""Platform `slurm`: runs as jobs of a Slurm cluster, from its login node or from a machine that reaches one by ssh.

`plan.py` plans, `job_script.py` writes the script, `commands.py` runs Slurm's commands, `run_status.py` derives a run's
status. Nothing is stored on this machine: the queue has the jobs, the head host an index of all submissions, and each
run's files the rest.
"""

from __future__ import annotations

import json
import math
import posixpath
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from drillyard.config.cluster import ClusterConfig
from drillyard.errors import UserError
from drillyard.hardware.machines import Machine
from drillyard.launch.agent.submit import ENTRIES, SAYS, TAKEN
from drillyard.launch.launcher import DirectoryLauncher, cancel_notice
from drillyard.launch.plan import Plan, PlanFile
from drillyard.launch.prepared_run import agent_files
from drillyard.launch.programs import Host, Programs, archive, defer_interrupt, require_success
from drillyard.launch.remote_files import Files, ReadRequest, ReadResult, UnreadableFile, open_files, print_notice
from drillyard.launch.request import LaunchFinding, LaunchRequest
from drillyard.launch.run_status import Handle, RunStatus, State, parse_handle
from drillyard.launch.slurm import checks
from drillyard.launch.slurm.commands import ControllerUnreachable, Slurm, SlurmJob
from drillyard.launch.slurm.job_script import ENDED
from drillyard.launch.slurm.plan import CARRY, SUBMIT, TASKS, host_of, plan_array, plan_of, resubmit_step
from drillyard.launch.slurm.run_status import SlurmRun, is_over, needs_accounts, status_of
from drillyard.launch.submit_lock import being_launched_error
from drillyard.launch.sync_archive import archive_of_directory, print_edited_notice

_SECONDS = 120.0
_RECORD_BYTES = 1 << 20
AGENT = 'd=$(mktemp -d) && trap \'rm -rf "$d"\' EXIT && tar -x -C "$d" -f - && python3 "$d/agent" "$@"'


class RunIndex:
    """Finds the runs of a cluster: one command reads the index and each state.json, then one squeue.

    In this order: a job is submitted before it is entered into the index, so the queue has every job of the index. In
    the other order, a run entered between the two would look like one whose job Slurm has forgotten. Only for runs that
    failed or that Slurm has forgotten it reads more: state.json again (the job may have ended since), ended.json and
    the accounts.
    """

    def __init__(self, cluster: str, host: Host, slurm: Slurm, programs: Programs) -> None:
        self._cluster = cluster
        self._host = host
        self._slurm = slurm
        self._programs = programs
        self._opened: Files | None = None

    @property
    def files(self) -> Files:
        """The files of the host, over one connection."""
        if self._opened is None:
            self._opened = open_files(self._host, self._programs)
        return self._opened

    def all(self) -> list[SlurmRun]:
        """All runs of this cluster."""
        indexed = self._indexed()
        jobs = self._slurm.jobs()
        by_id = {job.job_id: job for job in jobs}
        newest = self._newest_by_run(jobs)
        runs = []
        for seen in indexed:
            entry = seen["entry"]
            run = str(entry["run"])
            own, other = by_id.get(str(entry.get("job_id"))), newest.pop(run, None)
            # A job that was submitted by hand, from the same script, is newer than the index.
            job = other if other is not None and (own is None or other.number > own.number) else own
            runs.append(SlurmRun(Handle("slurm", self._cluster, run), entry, job, seen["state"]))
        runs += [self._submitted_by_hand(run, job) for run, job in newest.items()]
        return self._with_ends(runs)

    def _newest_by_run(self, jobs: Sequence[SlurmJob]) -> dict[str, SlurmJob]:
        """The newest job of each run named in a job's comment; tasks of arrays are found by the index."""
        newest: dict[str, SlurmJob] = {}
        prefix = f"slurm://{self._cluster}/"
        for job in sorted(jobs, key=lambda each: each.number):
            if job.comment.startswith(prefix) and "_" not in job.job_id:
                newest[parse_handle(job.comment).run] = job
        return newest

    def _indexed(self) -> list[dict[str, Any]]:
        """The index of the head host, with each run's state.json."""
        argv = self._host.argv(["sh", "-c", AGENT, "sh", "list", "--cluster", self._cluster])
        result = self._programs.run(argv, stdin=archive(agent_files()), timeout=_SECONDS)
        listed = json.loads(require_success(result, f"{self._host.title}: its runs cannot be listed").stdout)
        return [seen for seen in listed if seen["entry"].get("platform") == "slurm" and seen["entry"].get("job_id")]

    def _submitted_by_hand(self, run: str, job: SlurmJob) -> SlurmRun:
        """A run that is in the queue and not in the index."""
        launch = posixpath.dirname(job.script)
        entry = {"run": run, "launch_directory": launch, "run_directory": posixpath.dirname(launch)}
        (state,) = self.records([posixpath.join(launch, "state.json")])
        return SlurmRun(Handle("slurm", self._cluster, run), entry, job, state)

    def _with_ends(self, runs: list[SlurmRun]) -> list[SlurmRun]:
        """The same with ended.json, a newer state.json and the accounts, read for all runs at once."""
        failed = [each for each in runs if status_of(each).state is State.failed]
        launches = [each.entry["launch_directory"] for each in failed]
        found = self.records([posixpath.join(launch, name) for name in (ENDED, "state.json") for launch in launches])
        ends, states = found[: len(failed)], found[len(failed) :]
        ended = {
            # A state that is not final stays as `list` reported it, which checks whether the leader is alive.
            each.handle: replace(each, ended=end, state=state if state and is_over(state) else each.state)
            for each, end, state in zip(failed, ends, states, strict=True)
        }
        forgotten = [each for each in ended.values() if needs_accounts(each)]
        accounts = self._slurm.accounts(each.job_id for each in forgotten if each.job_id)
        for each in forgotten:
            ended[each.handle] = replace(each, job=accounts.get(each.job_id))
        return [ended.get(each.handle, each) for each in runs]

    def records(self, paths: Sequence[str]) -> list[dict[str, Any] | None]:
        """JSON objects of files; None for one that is missing, incomplete or unreadable."""
        found: list[dict[str, Any] | None] = []
        for piece in self._pieces([ReadRequest(path, 0, _RECORD_BYTES) for path in paths]):
            try:
                content = json.loads(piece.data) if piece is not None else None
            except (ValueError, RecursionError):
                content = None
            found.append(content if isinstance(content, dict) else None)
        return found

    def _pieces(self, requests: Sequence[ReadRequest]) -> list[ReadResult | None]:
        """The files' contents. A failing disk under one run hides no other run, nor that run's job."""
        try:
            return self.files.read(requests)
        except UnreadableFile:
            if len(requests) == 1:
                return [None]
        return [piece for request in requests for piece in self._pieces([request])]


_SECONDS = 120.0
_SUBMIT_SECONDS = 450.0
"""sbatch itself retries for a while where the controller is away, and another launch may have the lock first."""
_POLL_SECONDS = 10.0
"""Between two squeue calls of one follower: each takes a lock of the controller."""
_CANCEL_SECONDS = 300.0
_AFTER_STOP_SECONDS = 15.0
"""After the job's `stop_seconds` agents kill what still runs, and then have this long to report it."""
_PAUSES = (0.3, 5.0)
"""Seconds between two reads of a run that is stopping: the first, and the longest."""


class SlurmLauncher(DirectoryLauncher[SlurmRun]):
    """Runs of one Slurm cluster."""

    def __init__(self, cluster: ClusterConfig, programs: Programs) -> None:
        super().__init__(cluster, programs)
        self._host = host_of(cluster)
        self._slurm = Slurm(self._host, programs)
        self._index = RunIndex(cluster.name, self._host, self._slurm, programs)

    @classmethod
    def checks(cls, request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
        """Slurm's own checks. Pure."""
        for check in checks.CHECKS:
            yield from check(request, machine)

    def plan(self, request: LaunchRequest) -> Plan:
        """What launching `request` writes and calls. Pure."""
        return plan_of(request)

    def plan_sweep(self, requests: list[LaunchRequest]) -> list[Plan]:
        """One plan per point; the first one submits all of them as an array job."""
        return plan_array(requests)

    def status(self, run: str) -> RunStatus:
        """The status of one run; where it waits for nodes, with those that are down."""
        found = self._find(run)
        status = found.status
        if found.job is None or not _lacks_nodes(found.job, status):
            return status
        down = self._slurm.unusable_nodes(found.job.partition)
        return replace(status, reason=f"{status.reason}; down: {', '.join(down)}") if down else status

    # What the shared flow needs.

    def _runs(self) -> list[SlurmRun]:
        return self._index.all()

    def _open_files(self) -> Files:
        return open_files(self._host, self.programs)

    def _handles(self, plan: Plan) -> list[Handle]:
        return [Handle("slurm", self.cluster.name, point["run"]) for point in _points(plan)]

    def _execute(self, plan: Plan, secrets_json: PlanFile, existing: Sequence[SlurmRun]) -> None:
        for step in plan.stage(CARRY):
            assert step.sends_directory is not None
            stdin = archive_of_directory(Path(step.sends_directory), self.programs)
            what = f"{plan.handle}: nothing was submitted: could not {step.purpose}"
            print_edited_notice(require_success(self.programs.run(step.argv, stdin=stdin), what).stderr)
        (step,) = plan.stage(SUBMIT)
        sent = [*plan.files, PlanFile("secret", secrets.token_hex(32) + "\n", 0o600), secrets_json]
        jobs = {run.handle.run: run.entry.get("job_id") for run in existing}
        self._submit(plan.handle, step.argv, sent, _points(plan), jobs)

    def _resubmit(self, run: SlurmRun, secrets_json: PlanFile) -> None:
        point = {key: run.entry[key] for key in ("run", "launch_directory", "nodes") if key in run.entry}
        argv = resubmit_step(self._host, self.cluster.name, run.launch_directory).argv
        jobs = {run.handle.run: run.entry.get("job_id")}
        self._submit(run.handle, argv, [*agent_files(), secrets_json], [point], jobs)

    def _submit(
        self,
        handle: Handle,
        argv: Sequence[str],
        files: Sequence[PlanFile],
        points: Sequence[Mapping[str, Any]],
        jobs: Mapping[str, str | None],
    ) -> None:
        """Submit, and enter the runs into the index, so that they are found once Slurm has forgotten the job.

        `jobs`: the job that the index has of each run. Raises UserError where it has another one now: another launch
        has submitted the run since.
        """
        entries = []
        for number, point in enumerate(points):
            entry = {
                "run": point["run"],
                "cluster": self.cluster.name,
                "platform": "slurm",
                "launch_directory": point["launch_directory"],
                "run_directory": posixpath.dirname(point["launch_directory"]),
                "nodes": self.cluster.nodes,
                "submitted_at": time.time(),
                "replaces": jobs.get(point["run"]),
                **({"task": number} if len(points) > 1 else {}),
            }
            entries.append(PlanFile(f"{ENTRIES}/{point['run']}.json", json.dumps(entry | dict(point)) + "\n"))
        with defer_interrupt(str(handle)):
            result = self.programs.run(argv, stdin=archive([*files, *entries]), timeout=_SUBMIT_SECONDS)
            if result.returncode == TAKEN:
                raise being_launched_error(handle, result.stderr.strip())
            self._slurm.require_submitted(result)
        for line in result.stderr.splitlines():
            if line.startswith(SAYS):
                print_notice(line.removeprefix(SAYS))

    def _may_still_run(self, run: SlurmRun) -> bool:
        # An interrupted cancel has marked the run and not ended the job.
        return run.status.state is State.cancelled and not run.is_gone

    def _stop(self, run: SlurmRun) -> RunStatus:
        # Without a launch directory there is nothing to mark; Slurm ends the job all the same.
        words = ["sh", "-c", AGENT, "sh", "stop", "--mark-only", "--launch-directory", run.launch_directory]
        self.programs.run(self._host.argv(words), stdin=archive(agent_files()), timeout=_SECONDS)
        if run.job is not None:
            run = self._let_agents_save(run)
        if run.job is not None and not run.is_gone:
            self._slurm.cancel(run.job.job_id)
        run = self._wait_until_gone(run, _CANCEL_SECONDS)
        if not run.is_gone:
            raise UserError(
                f"{run.handle}: is cancelled, but Slurm has not ended its job {run.job_id} after "
                f"{_CANCEL_SECONDS:.0f} s\nscontrol show job {run.job_id} lists the nodes on which it still runs"
            )
        if not run.own_state:
            self._record_cancelled(run)
        return run.status

    def _let_agents_save(self, run: SlurmRun) -> SlurmRun:
        """Signal running agents and wait for them: scancel gives a job only the cluster's KillWait."""
        (job,) = self._index.records([posixpath.join(run.launch_directory, "job.json")])
        if job is None or run.job is None or run.job.state != "RUNNING" or not run.own_state:
            return run
        seconds = float(job.get("stop_seconds", 0.0))
        self._slurm.signal_agents(run.job.job_id)
        with cancel_notice(run.handle, seconds):
            return self._wait_until_gone(run, seconds + _AFTER_STOP_SECONDS)

    def _wait_until_gone(self, run: SlurmRun, seconds: float) -> SlurmRun:
        """The run once nothing of it can be running, or as it is after so long."""
        deadline = time.monotonic() + seconds
        pause, longest = _PAUSES
        while not (run := self._find(run.handle.run)).is_gone and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(1.5 * pause, longest)
        return run

    def _record_cancelled(self, run: SlurmRun) -> None:
        """Write ended.json of a run that never began: Slurm forgets its job."""
        end = {"submission": run.job_id, "attempt": "0", "code": 130, "state": "cancelled"}
        text = json.dumps(end | {"reason": "cancelled in the queue", "at": round(time.time())}) + "\n"
        argv = self._host.argv(["sh", "-c", 'exec tar -x -C "$0" -f -', run.launch_directory])
        self.programs.run(argv, stdin=archive([PlanFile(ENDED, text)]))

    def _is_over(self, run: SlurmRun) -> Callable[[], bool]:
        """Read state.json at every call, and ask Slurm every few seconds; waits for a controller that does not
        answer."""
        path = posixpath.join(run.launch_directory, "state.json")
        asked_at, away = -math.inf, False

        def over() -> bool:
            nonlocal asked_at, away
            try:
                (state,) = self._index.records([path])
                if is_over(replace(run, state=state).own_state):
                    return True
                if time.monotonic() - asked_at < _POLL_SECONDS:
                    return False
                asked_at = time.monotonic()
                answer = self.status(run.handle.run).state.over
            except ControllerUnreachable as error:
                if not away:
                    print_notice(f"{str(error).splitlines()[0]}; trying again until it is back")
                away = True
                return False
            if away:
                print_notice(f"{self._host.title}: Slurm answers again")
            away = False
            return answer

        return over


def _points(plan: Plan) -> list[Mapping[str, Any]]:
    """The runs that a plan submits, in the order of the array's tasks."""
    tasks = next((file.content for file in plan.files if file.path == TASKS), None)
    own = {"run": plan.handle.run, "launch_directory": plan.launch_directory, "nodes": plan.nodes}
    return [own] if tasks is None else list(json.loads(tasks))


def _lacks_nodes(job: SlurmJob, status: RunStatus) -> bool:
    lost = status.state is State.failed and "capacity" in (status.reason or "")
    return lost or job.reason.startswith(("ReqNodeNotAvail", "Resources", "BadConstraints", "NodeDown"))
