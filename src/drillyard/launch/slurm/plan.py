"""The plan of a run on Slurm: copy the code with --sync, then write the launch directory and submit. Pure.

One program on the head host writes the launch directory, submits the job and enters it into the index, so that of
several launches of one name only one submits: agent/submit.py. Only Slurm knows job ids, so a run that waits for
another names it by handle, and that program finds the job.
"""

from __future__ import annotations

import dataclasses
import json
import posixpath
from collections.abc import Sequence

from drillyard.config.cluster import ClusterConfig
from drillyard.errors import UserError
from drillyard.launch.agent.job import Job
from drillyard.launch.agent.submit import POINTS
from drillyard.launch.plan import ExplainedField, Plan, PlanFile, Program
from drillyard.launch.prepared_run import ClusterPaths, PreparedRun, agent_files, paths_on, prepare
from drillyard.launch.programs import Host
from drillyard.launch.request import LaunchRequest
from drillyard.launch.run_status import parse_handle
from drillyard.launch.slurm.config import slurm_of
from drillyard.launch.slurm.job_script import SCRIPT, array_script, job_script
from drillyard.launch.sync_archive import sync_step

CARRY, SUBMIT = "carry", "submit"
ARRAY = "array.sbatch"
TASKS = "points.json"
"""Beside array.sbatch: the runs of a sweep in the order of the array's tasks."""
SECRETS = ("secret", "secrets.json")
"""Files of the launch directory that are made at submission and are in no plan."""
_SUBMIT = """\
d=$(mktemp -d) && trap 'rm -rf "$d"' EXIT && (umask go-w && tar -x -C "$d" -f -) &&
python3 "$d/agent" "$@" --sent "$d\""""
_SAVE_SHARE = 0.9
"""The share of the time between the signal and the time limit after which agents kill ranks that have not saved."""
_START_SECONDS = 45.0
"""srun starts a task on a thousand nodes within seconds; storage that does not answer takes for ever."""


def host_of(cluster: ClusterConfig) -> Host:
    """The host on which Slurm's commands run."""
    slurm = slurm_of(cluster)
    return Host() if slurm.login_host is None else Host(slurm.login_host, config_file=slurm.config_file)


def plan_of(request: LaunchRequest) -> Plan:
    """The plan of one run. Raises UserError for every mistake that can be seen without asking Slurm."""
    paths, host = paths_on(request), host_of(request.cluster)
    prepared = _with_times(prepare(request, paths), request)
    script, script_fields = job_script(request, prepared, paths.agent_python)
    files = (PlanFile(SCRIPT, script, 0o755), *prepared.files)
    submit = _submit(host, prepared.handle.cluster, prepared.job.launch_directory, SCRIPT, files, request.dependency)
    return prepared.plan(
        _code(request, paths),
        [*_sync(host, request, paths), submit],
        files=files,
        fields=script_fields,
        script=SCRIPT,
    )


def plan_array(requests: list[LaunchRequest]) -> list[Plan]:
    """The plans of a sweep. The first one writes the files of all runs and submits them as one array job."""
    plans = [plan_of(request) for request in requests]
    if len(plans) == 1:
        return plans
    first, host = plans[0], host_of(requests[0].cluster)
    points = [{"run": plan.handle.run, "launch_directory": plan.launch_directory} for plan in plans]
    files = (
        PlanFile(ARRAY, array_script(requests[0], [plan.launch_directory for plan in plans]), 0o755),
        *first.files,
        PlanFile(TASKS, json.dumps(points, indent=2) + "\n"),
        *(
            dataclasses.replace(file, path=f"{POINTS}/{plan.handle.run}/{file.path}")
            for plan in plans[1:]
            for file in plan.files
            if not file.path.startswith("agent/")
        ),
    )
    tasks = ExplainedField(
        f"{ARRAY}: --array",
        f"0-{len(plans) - 1}",
        "one task per point: Slurm runs as many at a time as it has nodes for",
        "--sweep",
    )
    submit = _submit(host, first.handle.cluster, first.launch_directory, ARRAY, files, requests[0].dependency)
    array = dataclasses.replace(
        first,
        files=files,
        fields=(*first.fields, tasks),
        steps=(*first.stage(CARRY), submit),
        script=ARRAY,
    )
    return [array, *(dataclasses.replace(plan, steps=()) for plan in plans[1:])]


def resubmit_step(host: Host, cluster: str, launch_directory: str) -> Program:
    """The step that submits the job of an existing launch directory again."""
    return _submit(host, cluster, launch_directory, SCRIPT, agent_files(), None, "submit the job")


def _with_times(prepared: PreparedRun, request: LaunchRequest) -> PreparedRun:
    """The job with Slurm's times: a lost node does not come back, and saving must end before the time limit."""
    stop_seconds = slurm_of(request.cluster).signal_seconds * _SAVE_SHARE
    start_seconds = Job.start_seconds if prepared.image else _START_SECONDS
    job = dataclasses.replace(prepared.job, join_seconds=0.0, start_seconds=start_seconds, stop_seconds=stop_seconds)
    fields = (
        ExplainedField(
            "job.json: join_seconds", "0", "a lost node does not come back; Slurm finds another one", "drillyard"
        ),
        ExplainedField(
            "job.json: start_seconds",
            f"{start_seconds:g}",
            "a node that does not join so long after the one before is left out"
            + (": images take time" if prepared.image else ""),
            "drillyard",
        ),
        ExplainedField(
            "job.json: stop_seconds",
            f"{stop_seconds:g}",
            f"of the time between the signal and the limit, {_SAVE_SHARE:.0%} are for saving",
            "cluster.yaml: slurm.signal_seconds",
        ),
    )
    return prepared.with_job(job, fields)


def _sync(host: Host, request: LaunchRequest, paths: ClusterPaths) -> list[Program]:
    if not request.sync:
        return []
    if host.name is None and paths.project == posixpath.normpath(request.here):
        raise UserError(
            f"--sync: {paths.project} is this directory itself; name another in slurm.directory, or leave --sync out"
        )
    return [sync_step(host, request.here, paths.project, CARRY)]


def _submit(
    host: Host,
    cluster: str,
    launch_directory: str,
    script: str,
    files: Sequence[PlanFile],
    dependency: str | None,
    purpose: str = "",
) -> Program:
    words = ["submit", "--cluster", cluster, "--launch-directory", launch_directory, "--script", script]
    purpose = purpose or f"write the launch directory on {host.title} and submit the job"
    if dependency is not None:
        words += ["--after", str(parse_handle(dependency))]
        purpose += f", to begin when {words[-1]} has succeeded"
    sends = tuple(file.path for file in files)
    argv = host.argv(["sh", "-c", _SUBMIT, "sh", *words])
    # An existing launch directory keeps its secret.
    sends += SECRETS if script in sends else ("secrets.json",)
    return Program(purpose, argv, sends=sends, stage=SUBMIT)


def _code(request: LaunchRequest, paths: ClusterPaths) -> str:
    if request.sync:
        return f"carried (--sync): {request.here}, what git does not ignore, to {paths.project}"
    if request.image is not None:
        return f"in the image {request.image}"
    return f"there already: {paths.project}"
