"""The plan of a run on Slurm: carry the code where that is asked for, then write and submit. Pure.

One program on the head host writes the launch directory, submits the job and enters it into the index, so that of
several launches of a name one submits: see agent/submit.py. Job ids are Slurm's answer, so a run that waits for another
names it by handle, and that program asks Slurm for the job.
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
from drillyard.launch.handles import parse_handle
from drillyard.launch.hosts.plan import absolute
from drillyard.launch.launcher import LaunchRequest
from drillyard.launch.plan import ExplainedField, Plan, PlanFile, Program
from drillyard.launch.prepared_run import ClusterPaths, PreparedRun, agent_files, image_of, prepare
from drillyard.launch.programs import Host
from drillyard.launch.slurm.job_script import SCRIPT, array_script, job_script, slurm_of
from drillyard.launch.sync_archive import CARRIED_LIST, UNPACK_OVER

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
"""Of the time between the signal and the time limit, what the ranks have before the agents kill them."""
_START_SECONDS = 45.0
"""srun starts a task on a thousand nodes within seconds; storage that does not answer takes for ever."""


def host_of(cluster: ClusterConfig) -> Host:
    """Where Slurm's commands are given."""
    slurm = cluster.slurm
    if slurm is None or slurm.login_host is None:
        return Host()
    return Host(slurm.login_host, config_file=slurm.config_file)


def place_of(request: LaunchRequest) -> ClusterPaths:
    """Where things are on the cluster. Raises UserError for a path that depends on who logs in."""
    slurm, storage = slurm_of(request), request.cluster.storage.directory
    project = absolute(slurm.directory or request.here, "slurm.directory")
    root = absolute(storage, "storage.directory") if storage else project
    output = posixpath.normpath(posixpath.join(root, request.run.output))
    image = image_of(request.run, request.cluster)
    python = request.cluster.python or ("python3" if image else posixpath.join(project, ".venv/bin/python"))
    return ClusterPaths(project, output, python)


def plan_of(request: LaunchRequest) -> Plan:
    """The plan of one run. Raises UserError for every mistake that can be seen without asking Slurm."""
    place, host = place_of(request), host_of(request.cluster)
    prepared = _timed(prepare(request, place), request)
    script, script_fields = job_script(request, prepared, place.agent_python)
    files = (PlanFile(SCRIPT, script, 0o755), *prepared.files)
    job = prepared.job
    return Plan(
        handle=prepared.handle,
        nodes=job.nodes,
        processes_per_node=job.processes_per_node,
        run_directory=job.run_directory,
        launch_directory=job.launch_directory,
        code=_code(request, place, prepared),
        files=files,
        steps=(
            *_carry(host, request, place),
            _submit(host, prepared.handle.cluster, job.launch_directory, SCRIPT, files, request.dependency),
        ),
        fields=(*prepared.fields, *script_fields),
        warnings=prepared.warnings,
    )


def plan_array(requests: list[LaunchRequest]) -> list[Plan]:
    """The plans of a sweep. The first one writes the files of all runs and submits them as one array job."""
    plans = [plan_of(request) for request in requests]
    if len(plans) == 1:
        return plans
    first, host = plans[0], host_of(requests[0].cluster)
    points = [{"run": plan.handle.run, "launch_directory": plan.launch_directory} for plan in plans]
    script = array_script(requests[0], [plan.launch_directory for plan in plans])
    files = (
        PlanFile(ARRAY, script, 0o755),
        *first.files,
        PlanFile(TASKS, json.dumps(points, indent=2) + "\n"),
        *(_of_point(plan, file) for plan in plans[1:] for file in plan.files if not file.path.startswith("agent/")),
    )
    tasks = ExplainedField(
        f"{ARRAY}: --array",
        f"0-{len(plans) - 1}",
        "one task per point: Slurm runs as many at a time as there are nodes for",
        "--sweep",
    )
    submits = dataclasses.replace(
        first,
        files=files,
        fields=(*first.fields, tasks),
        steps=(
            *(step for step in first.steps if isinstance(step, Program) and step.stage == CARRY),
            _submit(host, first.handle.cluster, first.launch_directory, ARRAY, files, requests[0].dependency),
        ),
    )
    return [submits, *(dataclasses.replace(plan, steps=()) for plan in plans[1:])]


def submitting_step(host: Host, cluster: str, launch_directory: str) -> Program:
    """The step that submits what lies in a launch directory again."""
    return _submit(host, cluster, launch_directory, SCRIPT, agent_files(), None, "submit the job")


def _timed(prepared: PreparedRun, request: LaunchRequest) -> PreparedRun:
    """The job with the times that Slurm gives: a lost node does not come back, and saving has until the limit."""
    stop_seconds = slurm_of(request).signal_seconds * _SAVE_SHARE
    start_seconds = Job.start_seconds if prepared.image else _START_SECONDS
    job = dataclasses.replace(prepared.job, join_seconds=0.0, start_seconds=start_seconds, stop_seconds=stop_seconds)
    files = tuple(
        dataclasses.replace(file, content=job.as_json()) if file.path == "job.json" else file for file in prepared.files
    )
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
    return dataclasses.replace(prepared, job=job, files=files, fields=(*prepared.fields, *fields))


def _carry(host: Host, request: LaunchRequest, place: ClusterPaths) -> list[Program]:
    if not request.sync:
        return []
    if host.name is None and place.project == posixpath.normpath(request.here):
        raise UserError(
            f"--sync: {place.project} is this directory itself; name another in slurm.directory, or leave --sync out"
        )
    return [
        Program(
            f"carry the working directory to {host.title}",
            host.argv(["sh", "-c", UNPACK_OVER, place.project, CARRIED_LIST]),
            sends_directory=request.here,
            stage=CARRY,
        )
    ]


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
    # What lies there is submitted again with the secret that it has.
    sends += SECRETS if script in sends else ("secrets.json",)
    return Program(purpose, argv, sends=sends, stage=SUBMIT)


def _of_point(plan: Plan, file: PlanFile) -> PlanFile:
    return dataclasses.replace(file, path=f"{POINTS}/{plan.handle.run}/{file.path}")


def _code(request: LaunchRequest, place: ClusterPaths, prepared: PreparedRun) -> str:
    if request.sync:
        return f"carried (--sync): {request.here}, what git does not ignore, to {place.project}"
    if prepared.image is not None:
        return f"in the image {prepared.image}"
    return f"there already: {place.project}"
