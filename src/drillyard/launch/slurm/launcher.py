"""Platform `slurm`: runs as jobs of a Slurm cluster, from its login node or from a machine that reaches one by ssh.

The plan is plan.py's, the script job_script.py's and Slurm's commands are commands.py's; what is known of runs is
run_index.py's,
and what they are doing is judged by run_status.py. Nothing is kept here: the queue has the jobs, the head host an
index of what was submitted (by whichever machine), and each run's files tell the rest.
"""

from __future__ import annotations

import json
import math
import posixpath
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

from drillyard.config.cluster import ClusterConfig
from drillyard.errors import UserError
from drillyard.launch.agent.submit import ENTRIES, SAYS, TAKEN
from drillyard.launch.handles import Handle
from drillyard.launch.launcher import Cancellation, LaunchRequest, LogSelection
from drillyard.launch.logs.reader import run_logs
from drillyard.launch.plan import Plan, PlanFile, Program
from drillyard.launch.prepared_run import agent_files
from drillyard.launch.programs import Programs, archive, require_success
from drillyard.launch.registry import LAUNCHERS
from drillyard.launch.remote_files import artifacts_of, copy_files, open_files, print_notice, read_file
from drillyard.launch.run_status import RunStatus, State
from drillyard.launch.slurm.commands import ControllerUnreachable, Slurm, SlurmJob
from drillyard.launch.slurm.job_script import ENDED
from drillyard.launch.slurm.plan import CARRY, SUBMIT, TASKS, host_of, plan_array, plan_of, submitting_step
from drillyard.launch.slurm.run_index import AGENT, RunIndex
from drillyard.launch.slurm.run_status import SlurmRun, is_over, status_of
from drillyard.launch.stopping import cancel_notice
from drillyard.launch.submit_lock import being_launched_error
from drillyard.launch.submit_secrets import defer_interrupt, names_in, secrets_file
from drillyard.launch.sync_archive import archive_of_directory, print_edited_notice

_SECONDS = 120.0
_SUBMIT_SECONDS = 450.0
"""sbatch itself tries again for a while where the controller is away, and another launch may have the lock first."""
_ASK_SECONDS = 10.0
"""Between two questions to Slurm by one who follows a run: every squeue takes a lock of the controller."""
_CANCEL_SECONDS = 300.0
_AFTER_STOP_SECONDS = 15.0
"""When the agents have killed what did not end within the job's `stop_seconds`, they have this long to say so."""
_PAUSES = (0.3, 5.0)
"""Seconds between two looks at a run that is to end: at first, and at most."""
_CONFIGS = ("run.yaml", "cluster.yaml", "job.json")


def launcher(cluster: ClusterConfig, programs: Programs) -> SlurmLauncher:
    """The launcher of a Slurm cluster."""
    return SlurmLauncher(cluster, programs)


class SlurmLauncher:
    """Runs of one Slurm cluster."""

    capabilities = LAUNCHERS["slurm"].capabilities

    def __init__(self, cluster: ClusterConfig, programs: Programs) -> None:
        self._cluster = cluster
        self._programs = programs
        self._host = host_of(cluster)
        self._slurm = Slurm(self._host, programs)
        self._look = RunIndex(cluster.name, self._host, self._slurm, programs)
        self._directories: dict[str, str] = {}

    def plan(self, request: LaunchRequest) -> Plan:
        """What launching `request` would write and call. Pure."""
        return plan_of(request)

    def plan_sweep(self, requests: list[LaunchRequest]) -> list[Plan]:
        """One plan per point; the first one submits all of them as an array job."""
        return plan_array(requests)

    def submit(self, plan: Plan, *, replace: bool = False) -> Handle:
        """Write the run's files and submit the job. Raises UserError, with nothing submitted.

        Of a sweep the first plan does that for all runs, and the others have nothing to do.
        """
        if not plan.steps:
            return plan.handle
        configs = [file.content for file in plan.files if posixpath.basename(file.path) in _CONFIGS]
        sent = [PlanFile("secret", secrets.token_hex(32) + "\n", 0o600), secrets_file(names_in(configs))]
        points = _points(plan)
        there = self._make_way([Handle("slurm", self._cluster.name, point["run"]) for point in points], replace)
        for step in _of_stage(plan, CARRY):
            assert step.sends_directory is not None
            stdin = archive_of_directory(Path(step.sends_directory), self._programs)
            what = f"{plan.handle}: nothing was submitted: could not {step.purpose}"
            print_edited_notice(require_success(self._programs.run(step.argv, stdin=stdin), what).stderr)
        (step,) = _of_stage(plan, SUBMIT)
        with defer_interrupt(str(plan.handle)):
            self._submit(plan.handle, step, [*plan.files, *sent], points, there)
        return plan.handle

    def runs(self) -> list[RunStatus]:
        """The runs of this cluster, newest first."""
        statuses = [status_of(known) for known in self._look.all()]
        return sorted(statuses, key=lambda each: (-(each.submitted_at or 0.0), each.handle))

    def status(self, run: str) -> RunStatus:
        """One run; where it waits for nodes, also those that are down."""
        known = self._look.find(run)
        status = status_of(known)
        if known.job is None or not _lacks_nodes(known.job, status):
            return status
        down = self._slurm.unusable_nodes(known.job.partition)
        return changed(status, reason=f"{status.reason}; down: {', '.join(down)}") if down else status

    def logs(self, run: str, wanted: LogSelection) -> Iterator[bytes]:
        """Lines in order of time, with their node before them."""
        known = self._look.find(run)
        files = open_files(self._host, self._programs)
        try:
            yield from run_logs(known.entry["launch_directory"], [files], wanted, over=self._over(known))
        finally:
            files.close()

    def cancel(self, run: str) -> Cancellation:
        """Stop a run and wait until nothing of it runs; nothing happens to one that is over."""
        known = self._look.find(run)
        before = status_of(known)
        # One that is only marked as cancelled may still run: whoever marked it was interrupted.
        if before.state.over and (before.state is not State.cancelled or _is_gone(known)):
            return Cancellation(before, before.state)
        launch = known.entry["launch_directory"]
        # Where the launch directory is gone there is nobody to tell either: Slurm ends the job all the same.
        words = ["sh", "-c", AGENT, "sh", "stop", "--mark-only", "--launch-directory", launch]
        self._programs.run(self._host.argv(words), stdin=archive(agent_files()), timeout=_SECONDS)
        if known.job is not None:
            known = self._with_time_to_save(known)
        if known.job is not None and not _is_gone(known):
            self._slurm.cancel(known.job.job_id)
        known = self._gone(run, _CANCEL_SECONDS)
        if not _is_gone(known):
            raise UserError(
                f"{known.handle}: is cancelled, but Slurm has not ended its job {known.job_id} after "
                f"{_CANCEL_SECONDS:.0f} s\nscontrol show job {known.job_id} tells on which nodes it still is"
            )
        if not known.own_state:
            self._note_cancelled(known)
        return Cancellation(status_of(known), None)

    def _with_time_to_save(self, known: SlurmRun) -> SlurmRun:
        """Have agents that run end by themselves: scancel gives a job only as long as the cluster's KillWait."""
        (job,) = self._look.records([posixpath.join(known.entry["launch_directory"], "job.json")])
        if job is None or known.job is None or known.job.state != "RUNNING" or not known.own_state:
            return known
        seconds = float(job.get("stop_seconds", 0.0))
        self._slurm.signal_agents(known.job.job_id)
        with cancel_notice(known.handle, seconds):
            return self._gone(known.handle.run, seconds + _AFTER_STOP_SECONDS)

    def _gone(self, run: str, seconds: float) -> SlurmRun:
        """The run once nothing of it runs, or as it is after so long."""
        deadline = time.monotonic() + seconds
        pause, longest = _PAUSES
        while not _is_gone(known := self._look.find(run)) and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(1.5 * pause, longest)
        return known

    def resume(self, run: str) -> Handle:
        """Submit a run that is over again; its trainer goes on from the newest checkpoint."""
        known = self._look.find(run)
        status = status_of(known)
        if not status.state.over:
            raise UserError(f"{known.handle}: is {status.state} and needs no resume")
        launch = known.entry["launch_directory"]
        entry = {key: known.entry[key] for key in ("run", "launch_directory", "nodes") if key in known.entry}
        step = submitting_step(self._host, self._cluster.name, launch)
        there = {known.handle.run: known.entry.get("job_id")}
        texts = [read_file(self._look.files, posixpath.join(launch, name), 0).decode() for name in _CONFIGS]
        sent = [*agent_files(), secrets_file(names_in(texts))]
        with defer_interrupt(str(known.handle)):
            self._submit(known.handle, step, sent, [entry], there)
        return known.handle

    def artifacts(self, run: str) -> list[tuple[str, int]]:
        """Files of the run directory: path relative to it, size in bytes."""
        return artifacts_of(self._look.files, self._run_directory(run))

    def fetch(self, run: str, paths: list[str], destination: str) -> None:
        """Copy files of the run directory to a directory here."""
        copy_files(self._look.files, self._run_directory(run), paths, destination)

    def read(self, run: str, path: str, offset: int) -> bytes:
        """The bytes of a file of the run directory from `offset` on."""
        return read_file(self._look.files, posixpath.join(self._run_directory(run), path), offset)

    # Submitting.

    def _make_way(self, handles: Sequence[Handle], replaces: bool) -> dict[str, str | None]:
        """Refuse runs that go on already, or end them. Returns the job of each run that the index has."""
        there: dict[str, str | None] = {}
        for known in self._look.all():
            if (handle := known.handle) not in handles:
                continue
            there[handle.run] = known.entry.get("job_id")
            state = status_of(known).state
            if state.over:
                continue
            if not replaces:
                raise UserError(
                    f"{handle}: is {state} already (job {known.job_id}), and nothing was submitted\n"
                    f"drillyard runs cancel {handle} ends it, launch --replace does so first; or give the run another "
                    "name"
                )
            self.cancel(handle.run)
        return there

    def _submit(
        self,
        handle: Handle,
        step: Program,
        files: Sequence[PlanFile],
        points: Sequence[Mapping[str, Any]],
        there: Mapping[str, str | None],
    ) -> None:
        """Submit, and enter the runs into the index, so that they are found when Slurm has forgotten the job.

        Raises UserError where the index has another job of a run than `there`: another launch has submitted it.
        """
        entries = []
        for number, point in enumerate(points):
            entry = {
                "run": point["run"],
                "cluster": self._cluster.name,
                "platform": "slurm",
                "launch_directory": point["launch_directory"],
                "run_directory": posixpath.dirname(point["launch_directory"]),
                "nodes": self._cluster.nodes,
                "submitted_at": time.time(),
                "replaces": there.get(point["run"]),
                **({"task": number} if len(points) > 1 else {}),
            }
            entries.append(PlanFile(f"{ENTRIES}/{point['run']}.json", json.dumps(entry | dict(point)) + "\n"))
        result = self._programs.run(step.argv, stdin=archive([*files, *entries]), timeout=_SUBMIT_SECONDS)
        if result.returncode == TAKEN:
            raise being_launched_error(handle, result.stderr.strip())
        self._slurm.submitted(result)
        for line in result.stderr.splitlines():
            if line.startswith(SAYS):
                print_notice(line.removeprefix(SAYS))

    def _run_directory(self, run: str) -> str:
        # It stays where it is; who follows a run's files asks every second, and need not ask the controller.
        if run not in self._directories:
            self._directories[run] = posixpath.dirname(str(self._look.find(run).entry["launch_directory"]))
        return self._directories[run]

    def _note_cancelled(self, known: SlurmRun) -> None:
        """Leave a word about a run that never began: Slurm forgets its job."""
        told = {"submission": known.job_id, "attempt": "0", "code": 130, "state": "cancelled"}
        text = json.dumps(told | {"reason": "cancelled in the queue", "at": round(time.time())}) + "\n"
        argv = self._host.argv(["sh", "-c", 'exec tar -x -C "$0" -f -', known.entry["launch_directory"]])
        self._programs.run(argv, stdin=archive([PlanFile(ENDED, text)]))

    def _over(self, known: SlurmRun) -> Callable[[], bool]:
        """Whether a run is over, for who follows it: its own word at once, Slurm's now and then.

        A controller or login node that does not answer is waited for.
        """
        path = posixpath.join(known.entry["launch_directory"], "state.json")
        asked_at = -math.inf
        away = False

        def over() -> bool:
            nonlocal asked_at, away
            try:
                (state,) = self._look.records([path])
                if is_over(changed(known, state=state).own_state):
                    return True
                if time.monotonic() - asked_at < _ASK_SECONDS:
                    return False
                asked_at = time.monotonic()
                answer = self.status(known.handle.run).state.over
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


def _of_stage(plan: Plan, stage: str) -> list[Program]:
    return [step for step in plan.steps if isinstance(step, Program) and step.stage == stage]


def _points(plan: Plan) -> list[Mapping[str, Any]]:
    """The runs that a plan submits, in the order of the array's tasks."""
    told = next((file.content for file in plan.files if file.path == TASKS), None)
    own = {"run": plan.handle.run, "launch_directory": plan.launch_directory, "nodes": plan.nodes}
    return [own] if told is None else list(json.loads(told))


def _lacks_nodes(job: SlurmJob, status: RunStatus) -> bool:
    lost = status.state is State.failed and "capacity" in (status.reason or "")
    return lost or job.reason.startswith(("ReqNodeNotAvail", "Resources", "BadConstraints", "NodeDown"))


def _is_gone(known: SlurmRun) -> bool:
    """Whether nothing of the run can be running: Slurm says of a job that ends that it is COMPLETING."""
    return known.job is None or (status_of(known).state.over and known.job.state not in ("RUNNING", "COMPLETING"))
