"""Platform `slurm`: runs as jobs of a Slurm cluster, from its login node or from a machine that
reaches one by ssh.

A plan copies the code with --sync, then writes the launch directory and submits. One program on the
head host does the latter under a lock and enters the run into the index, so that of several
launches of one name only one submits: agent/submit.py. Only Slurm knows job ids, so a run that
waits for another names it by handle, and that program finds the job. Nothing is stored on this
machine: the queue has the jobs, the head host an index of all submissions, and each run's files the
rest (commands.py reads them).
"""

from __future__ import annotations

import json
import math
import posixpath
import shlex
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from drillyard.config.cluster import ClusterConfig
from drillyard.errors import ConfigError, UserError
from drillyard.launch.agent.job import Job
from drillyard.launch.agent.submit import ENTRIES, POINTS, TAKEN
from drillyard.launch.launcher import AFTER_STOP_SECONDS, Launcher, cancel_notice
from drillyard.launch.plan import Plan, Program, new_secret
from drillyard.launch.prepared_run import (
    JobSettings,
    accelerators_of,
    agent_files,
    paths_on,
    prepare,
)
from drillyard.launch.remote_files import Files, open_files, print_notices
from drillyard.launch.request import LaunchRequest
from drillyard.launch.run_status import Handle, RunStatus, State, parse_handle
from drillyard.launch.slurm.commands import Slurm
from drillyard.launch.slurm.config import SlurmConfig
from drillyard.launch.slurm.job_script import SCRIPT, array_script, job_script
from drillyard.launch.slurm.nodes import (
    SlurmNode,
    short_of_gpus,
    undrain_command,
    usable_nodes,
)
from drillyard.launch.slurm.rules import findings
from drillyard.launch.slurm.run_status import ENDED, SlurmRun, is_over
from drillyard.launch.submit_lock import being_launched_error
from drillyard.launch.sync_archive import archive_of_directory, sync_step
from drillyard.plan_files import ExplainedField, PlanFile
from drillyard.programs import (
    TEMPORARY,
    Host,
    Programs,
    archive,
    defer_interrupt,
    require_success,
)

ARRAY = "array.sbatch"
_SUBMIT = f"""\
{TEMPORARY} && (umask go-w && tar -x -C "$d" -f -) &&
python3 "$d/agent" "$@" --sent "$d\""""
_SAVE_SHARE = 0.9
"""The share of the time between the signal and the time limit after which agents kill ranks that
have not saved."""
_START_SECONDS = 45.0
"""srun starts a task on a thousand nodes within seconds; storage that does not answer takes for
ever."""
_SUBMIT_SECONDS = 450.0
"""sbatch itself retries for a while where the controller is away, and another launch may have the
lock first."""
_POLL_SECONDS = 10.0
"""Between two squeue calls of one follower: each takes a lock of the controller."""
_CANCEL_SECONDS = 300.0
_POINT = ("run", "launch_directory", "nodes")
"""Fields of the job that an entry of the index has."""
_LACKS_NODES = (
    *("ReqNodeNotAvail", "Resources", "BadConstraints", "NodeDown"),
    *("BeginTime", "launch failed requeued held"),
)
"""Slurm's reasons why a job waits for nodes; the last two are those after a prolog that failed."""
_PAUSES = (0.3, 5.0)
"""Seconds between two reads of a run that is stopping: the first, and the longest."""


def _job_settings(request: LaunchRequest) -> JobSettings:
    """The job's times: a lost node does not come back, and saving must end before the time
    limit."""
    start = Job.start_seconds if request.image else _START_SECONDS
    stop = request.cluster.section_as(SlurmConfig).signal_seconds * _SAVE_SHARE
    late = "a node that does not join so long after the one before is left out"
    late += ": images take time" if request.image else ""
    saving = f"of the time between the signal and the limit, {_SAVE_SHARE:.0%} are for saving"
    return {
        "join_seconds": (
            0.0,
            "a lost node does not come back; Slurm finds another one",
            "drillyard",
        ),
        "start_seconds": (start, late, "drillyard"),
        "stop_seconds": (stop, saving, "cluster.yaml: slurm.signal_seconds"),
    }


class SlurmLauncher(Launcher[SlurmRun]):
    """Runs of one Slurm cluster."""

    def __init__(self, cluster: ClusterConfig, programs: Programs) -> None:
        super().__init__(cluster, programs)
        slurm = cluster.section_as(SlurmConfig)
        self._host = Host(slurm.login_host, config_file=slurm.config_file)
        self._slurm = Slurm(cluster.name, self._host, programs)
        # One connection for the list of runs and their files.
        self._files = self._slurm.files

    def plan(self, request: LaunchRequest) -> Plan:
        prepared = prepare(request, checks=[findings], settings=_job_settings(request))
        script, script_fields = job_script(request, prepared)
        files = (PlanFile(SCRIPT, script, 0o755), *prepared.files)
        fields = (*prepared.fields, *script_fields)
        project = paths_on(request).project
        code = (
            f"there already: {project}"
            if request.image is None
            else f"in the image {request.image}"
        )
        sync = []
        if request.sync:
            if self._host.name is None and project == posixpath.normpath(request.here):
                raise ConfigError(
                    f"--sync: {project} is this directory itself; name another in slurm.directory,"
                    " or leave --sync out"
                )
            sync = [sync_step(self._host, request.here, project)]
            code = f"carried (--sync): {request.here}, what git does not ignore, to {project}"
        submit = self._submit_step(prepared.launch_directory, SCRIPT, files, request.dependency)
        return replace(
            prepared, code=code, steps=(*sync, submit), files=files, fields=fields, script=SCRIPT
        )

    def plan_sweep(self, requests: Sequence[LaunchRequest]) -> list[Plan]:
        """The first plan writes the files of all runs and submits them as one array job."""
        plans = [self.plan(request) for request in requests]
        first = plans[0]
        files = (
            PlanFile(
                ARRAY, array_script(requests[0], [plan.launch_directory for plan in plans]), 0o755
            ),
            *first.files,
            *(
                replace(file, path=f"{POINTS}/{plan.handle.run}/{file.path}")
                for plan in plans[1:]
                for file in plan.files
                if not file.path.startswith("agent/")
            ),
        )
        why = "one task per point: Slurm runs as many at a time as it has nodes for"
        tasks = ExplainedField(f"{ARRAY}: --array", f"0-{len(plans) - 1}", why, "--sweep")
        submit = self._submit_step(first.launch_directory, ARRAY, files, requests[0].dependency)
        steps = (*first.steps[:-1], submit)
        sweep = tuple(plan.job for plan in plans)
        array = replace(
            first,
            files=files,
            fields=(*first.fields, tasks),
            steps=steps,
            script=ARRAY,
            sweep=sweep,
        )
        return [array, *(replace(plan, steps=()) for plan in plans[1:])]

    def _submit_step(
        self, launch_directory: str, script: str, files: Sequence[PlanFile], dependency: str | None
    ) -> Program:
        after = [] if dependency is None else ["--after", str(parse_handle(dependency))]
        purpose = f"write the launch directory on {self._host.title} and submit the job"
        if after:
            purpose += f", to begin when {after[-1]} has succeeded"
        # The last two are in no plan.
        sends = (*(file.path for file in files), "secret", "secrets.json")
        return Program(
            purpose,
            self._submit_argv(launch_directory, script, *after),
            sends=sends,
            stage="submit",
        )

    def _submit_argv(self, launch_directory: str, script: str, *options: str) -> tuple[str, ...]:
        words = [
            "submit",
            "--cluster",
            self.cluster.name,
            "--launch-directory",
            launch_directory,
            "--script",
            script,
        ]
        return self._host.argv(["sh", "-c", _SUBMIT, "sh", *words, *options])

    def status(self, run: str) -> RunStatus:
        # Where it waits for nodes, with those that are down.
        found = self.find_one(run)
        status = found.status
        lost = status.state is State.failed and "capacity" in (status.reason or "")
        if found.job is None or not (lost or found.job.reason.startswith(_LACKS_NODES)):
            return status
        down = self._slurm.unusable_nodes(found.job.partition)
        return (
            replace(status, reason=f"{status.reason}; down: {', '.join(down)}") if down else status
        )

    def idle_nodes(self, request: LaunchRequest) -> list[str] | None:
        nodes = self._usable_nodes(request)
        return None if nodes is None else [each.name for each in nodes if each.state == "idle"]

    def nodes_short_of_gpus(self, request: LaunchRequest) -> dict[str, str]:
        needed = accelerators_of(request)
        if not needed:
            return {}
        return short_of_gpus(self._usable_nodes(request) or [], needed, request.cluster.nodes)

    def _usable_nodes(self, request: LaunchRequest) -> list[SlurmNode] | None:
        slurm = request.cluster.section_as(SlurmConfig)
        excluded = self._slurm.host_names([*slurm.exclude, *request.exclude])
        return usable_nodes(self._slurm.nodes(slurm.partition), slurm, excluded)

    def drain(self, node: str, reason: str) -> str | None:
        partition = self.cluster.section_as(SlurmConfig).partition
        if any(each.name == node and each.is_drained for each in self._slurm.nodes(partition)):
            return None
        self._slurm.drain(node, reason)
        undo = shlex.join(undrain_command(node))
        return undo if self._host.name is None else f"{undo}   # on {self._host.name}"

    def find(self, names: Collection[str] | None = None) -> list[SlurmRun]:
        return self._slurm.runs()

    def files(self) -> Files:
        return open_files(self._host, self.programs)

    def execute(self, plan: Plan, secrets_json: PlanFile, existing: Sequence[SlurmRun]) -> None:
        *carry, submit = [step for step in plan.steps if isinstance(step, Program)]
        for step in carry:
            assert step.sends_directory is not None
            stdin = archive_of_directory(Path(step.sends_directory), self.programs)
            what = f"{plan.handle}: nothing was submitted: could not {step.purpose}"
            print_notices(require_success(self.programs.run(step.argv, stdin=stdin), what).stderr)
        sent = [*plan.files, new_secret(), secrets_json]
        points = [{name: getattr(job, name) for name in _POINT} for job in plan.jobs]
        self._submit(plan.handle, submit.argv, sent, points, existing)

    def resubmit(self, run: SlurmRun, secrets_json: PlanFile) -> None:
        point = {key: run.entry[key] for key in _POINT if key in run.entry}
        # Without a new secret: the launch directory keeps its own.
        argv = self._submit_argv(run.launch_directory, SCRIPT)
        self._submit(run.handle, argv, [*agent_files(), secrets_json], [point], [run])

    def _submit(
        self,
        handle: Handle,
        argv: Sequence[str],
        files: Sequence[PlanFile],
        points: Sequence[Mapping[str, Any]],
        existing: Sequence[SlurmRun],
    ) -> None:
        """Submit, and enter the runs into the index, so that they are found once Slurm has
        forgotten the job.

        `existing`: the runs that were there. Raises UserError where the index has another job of
        one now: another launch has submitted it since.
        """
        jobs = {run.handle.run: run.entry.get("job_id") for run in existing}
        entries = []
        for number, point in enumerate(points):
            entry = {
                "cluster": self.cluster.name,
                "platform": "slurm",
                "nodes": self.cluster.nodes,
                **point,
                "comment": str(handle),
                "run_directory": posixpath.dirname(point["launch_directory"]),
                "submitted_at": time.time(),
                "replaces": jobs.get(point["run"]),
                **({"task": number} if len(points) > 1 else {}),
            }
            entries.append(PlanFile(f"{ENTRIES}/{point['run']}.json", json.dumps(entry) + "\n"))
        with defer_interrupt(str(handle)):
            result = self.programs.run(
                argv, stdin=archive([*files, *entries]), timeout=_SUBMIT_SECONDS
            )
            if result.returncode == TAKEN:
                raise being_launched_error(handle, result.stderr.strip())
            self._slurm.require_submitted(result)
        print_notices(result.stderr)

    def may_still_run(self, run: SlurmRun) -> bool:
        # An interrupted cancel has marked the run and not ended the job.
        return run.status.state is State.cancelled and not run.is_gone

    def stop(self, run: SlurmRun) -> RunStatus:
        # Without a launch directory there is nothing to mark; Slurm ends the job all the same.
        self._slurm.run_agent(["stop", "--mark-only", "--launch-directory", run.launch_directory])
        if run.job is not None:
            run = self._let_agents_save(run)
        if run.job is not None and not run.is_gone:
            self._slurm.cancel(run.job.job_id)
        run = self._wait_until_gone(run, _CANCEL_SECONDS)
        if not run.is_gone:
            raise UserError(
                f"{run.handle}: is cancelled, but Slurm has not ended its job {run.job_id} after"
                f" {_CANCEL_SECONDS:.0f} s\nscontrol show job {run.job_id} lists the nodes on which"
                " it still runs"
            )
        if not run.own_state:
            self._record_cancelled(run)
        return run.status

    def _let_agents_save(self, run: SlurmRun) -> SlurmRun:
        """Signal running agents and wait for them: scancel gives a job only the cluster's
        KillWait."""
        (job,) = self._slurm.records([posixpath.join(run.launch_directory, "job.json")])
        if not job or run.job is None or run.job.state != "RUNNING" or not run.own_state:
            return run
        try:
            seconds = float(job.get("stop_seconds", 0.0))
        except (ValueError, TypeError, OverflowError):
            seconds = Job.stop_seconds
        self._slurm.signal_agents(run.job.job_id)
        with cancel_notice(run.handle, seconds):
            return self._wait_until_gone(run, seconds + AFTER_STOP_SECONDS)

    def _wait_until_gone(self, run: SlurmRun, seconds: float) -> SlurmRun:
        """The run once nothing of it can be running, or as it is after so long."""
        deadline = time.monotonic() + seconds
        pause, longest = _PAUSES
        while not (run := self.find_one(run.handle.run)).is_gone and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(1.5 * pause, longest)
        return run

    def _record_cancelled(self, run: SlurmRun) -> None:
        """Write ended.json of a run that never began: Slurm forgets its job."""
        end = {"submission": run.job_id, "attempt": "0", "code": 130, "state": "cancelled"}
        text = (
            json.dumps(end | {"reason": "cancelled in the queue", "at": round(time.time())}) + "\n"
        )
        argv = self._host.argv(["sh", "-c", 'exec tar -x -C "$0" -f -', run.launch_directory])
        self.programs.run(argv, stdin=archive([PlanFile(ENDED, text)]))

    def is_over(self, run: SlurmRun) -> Callable[[], bool]:
        """Read state.json at every call, and ask Slurm every few seconds."""
        path = posixpath.join(run.launch_directory, "state.json")
        asked_at = -math.inf

        def over() -> bool:
            nonlocal asked_at
            (state,) = self._slurm.states([path])
            own = replace(run, state=state).own_state
            # Of a start that was stopped from outside, Slurm knows whether another one follows.
            if is_over(own) and not own.get("asked"):
                return True
            if time.monotonic() - asked_at < _POLL_SECONDS:
                return False
            answer = self.status(run.handle.run).state.over
            asked_at = time.monotonic()
            return answer

        return over
