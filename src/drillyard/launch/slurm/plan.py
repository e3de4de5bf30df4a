"""The plan of a run on Slurm: carry the code where that is asked for, write the launch directory, submit. Pure.

Writing and submitting are done under a claim of the run's name beside its entry in the index of the head host, so that
no two launches write one launch directory. The claim is renewed before each of the steps under it.

Job ids are Slurm's answer, so a run that waits for another names it by handle, and the submitting step asks Slurm for
that one's job.
"""

from __future__ import annotations

import dataclasses
import json
import posixpath
from collections.abc import Sequence

from drillyard.config.cluster import ClusterConfig
from drillyard.errors import UserError
from drillyard.launch.claiming import CLAIM, CLAIM_ALL, RELEASE, RELEASE_ALL, RENEW, RENEW_ALL
from drillyard.launch.handles import parse_handle
from drillyard.launch.hosts.plan import CARRIED_LIST, UNPACK_OVER, absolute
from drillyard.launch.job import Place, Prepared, image_of, prepare
from drillyard.launch.launcher import Request
from drillyard.launch.plan import Field, File, Plan, Program
from drillyard.launch.programs import Host
from drillyard.launch.slurm.script import ENDED, SCRIPT, array_script, job_script, slurm_of

WRITE, CARRY, SUBMIT = "write", "carry", "submit"
ARRAY = "array.sbatch"
POINTS = "points.json"
"""Beside array.sbatch: the runs of a sweep in the order of the array's tasks."""
SECRETS = ("secret", "secrets.json")
"""Files of the launch directory that are made at submission and are in no plan."""
INDEX = "${XDG_STATE_HOME:-$HOME/.local/state}/drillyard/$0"
"""Of the head host, as its shell reads it; `$0` is the cluster's name."""
_CLAIMS = f'''\
index="{INDEX}"
for run; do shift && set -- "$@" "$index/$run.claim"; done
'''
_CLAIM = _CLAIMS + CLAIM_ALL
_RENEW = _CLAIMS + RENEW_ALL
_RELEASE = _CLAIMS + RELEASE_ALL
_UNPACK = f'umask 022 && mkdir -p "$0" && cd "$0" && rm -f state.json {ENDED} && exec tar -x -p --no-same-owner -f -'
_SPREAD = f"""\
umask 022 && cd "$0/points" && for run in *; do
    launch=../../../$run/launch && mkdir -p "$launch" && rm -f "$launch/state.json" "$launch/{ENDED}" &&
    cp -pR "$run/." ../agent ../secret ../secrets.json "$launch/" || exit 1
done && cd .. && rm -rf points
"""
"""Launch directories are siblings: OUTPUT/RUN/launch."""
_SUBMIT_AFTER = """\
ids=$(squeue --noheader --all --states=all --me --format='%i %k' | sed -n "s|^\\([0-9_]*\\) $1\\$|\\1|p")
id=$(echo "$ids" | sort -n | tail -n 1)
[ -n "$id" ] || { echo "Slurm knows no job of $1; if it has succeeded, launch without --after" >&2; exit 1; }
exec sbatch --parsable --dependency="afterok:$id" --kill-on-invalid-dep=no "$0"
"""
_SAVE_SHARE = 0.9
"""Of the time between the signal and the time limit, what the ranks have before the agents kill them."""


def host_of(cluster: ClusterConfig) -> Host:
    """Where Slurm's commands are given."""
    slurm = cluster.slurm
    if slurm is None or slurm.login_host is None:
        return Host()
    return Host(slurm.login_host, config_file=slurm.config_file)


def place_of(request: Request) -> Place:
    """Where things are on the cluster. Raises UserError for a path that depends on who logs in."""
    slurm, storage = slurm_of(request), request.cluster.storage.directory
    project = absolute(slurm.directory or request.here, "slurm.directory")
    root = absolute(storage, "storage.directory") if storage else project
    output = posixpath.normpath(posixpath.join(root, request.run.output))
    image = image_of(request.run, request.cluster)
    python = request.cluster.python or ("python3" if image else posixpath.join(project, ".venv/bin/python"))
    return Place(project, output, python)


def plan_of(request: Request) -> Plan:
    """The plan of one run. Raises UserError for every mistake that can be seen without asking Slurm."""
    place, host = place_of(request), host_of(request.cluster)
    prepared = _timed(prepare(request, place), request)
    script, script_fields = job_script(request, prepared, place.agent_python)
    files = (*prepared.files, File(SCRIPT, script, 0o755))
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
            claiming_step(host, prepared.handle.cluster, [prepared.handle.run]),
            renewing_step(host, prepared.handle.cluster, [prepared.handle.run]),
            _write(host, job.launch_directory, files),
            _submit(host, posixpath.join(job.launch_directory, SCRIPT), request.dependency),
            releasing_step(host, prepared.handle.cluster, [prepared.handle.run]),
        ),
        fields=(*prepared.fields, *script_fields),
        warnings=prepared.warnings,
    )


def plan_array(requests: list[Request]) -> list[Plan]:
    """The plans of a sweep. The first one writes the files of all runs and submits them as one array job."""
    plans = [plan_of(request) for request in requests]
    if len(plans) == 1:
        return plans
    first, host = plans[0], host_of(requests[0].cluster)
    points = [{"run": plan.handle.run, "launch_directory": plan.launch_directory} for plan in plans]
    script = array_script(requests[0], [plan.launch_directory for plan in plans])
    files = (
        *first.files,
        File(ARRAY, script, 0o755),
        File(POINTS, json.dumps(points, indent=2) + "\n"),
        *(_of_point(plan, file) for plan in plans[1:] for file in plan.files if not file.path.startswith("agent/")),
    )
    names = [plan.handle.run for plan in plans]
    spread = Program(
        f"hand the files of the other {len(plans) - 1} runs to their launch directories",
        host.argv(["sh", "-c", _SPREAD, first.launch_directory]),
        stage=WRITE,
    )
    tasks = Field(
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
            claiming_step(host, first.handle.cluster, names),
            renewing_step(host, first.handle.cluster, names),
            _write(host, first.launch_directory, files),
            spread,
            _submit(host, posixpath.join(first.launch_directory, ARRAY), requests[0].dependency),
            releasing_step(host, first.handle.cluster, names),
        ),
    )
    return [submits, *(dataclasses.replace(plan, steps=()) for plan in plans[1:])]


def submitting_step(host: Host, launch_directory: str) -> Program:
    """The step that submits what lies in a launch directory again."""
    return _submit(host, posixpath.join(launch_directory, SCRIPT), None)


def claiming_step(host: Host, cluster: str, runs: Sequence[str]) -> Program:
    """The step that keeps other launches of `runs` out; it is sent the submission's secret, and who launches."""
    argv = host.argv(["sh", "-c", _CLAIM, cluster, *runs])
    return Program(f"claim {_named(runs)} on {host.title}", argv, sends=("secret",), stage=CLAIM)


def renewing_step(host: Host, cluster: str, runs: Sequence[str]) -> Program:
    """The step before each one that is done under a claim: nobody else has had it, and the time it has begins anew."""
    argv = host.argv(["sh", "-c", _RENEW, cluster, *runs])
    return Program(
        f"keep the claim on {host.title}: renewed before each step under it", argv, sends=("secret",), stage=RENEW
    )


def releasing_step(host: Host, cluster: str, runs: Sequence[str]) -> Program:
    """The step that lets others launch `runs` again."""
    argv = host.argv(["sh", "-c", _RELEASE, cluster, *runs])
    return Program(f"release the claim on {host.title}", argv, sends=("secret",), stage=RELEASE)


def _named(runs: Sequence[str]) -> str:
    several = f"the names of {len(runs)} runs, which no other launch may have"
    return several if len(runs) > 1 else f"the name {runs[0]}, which no other launch may have,"


def _timed(prepared: Prepared, request: Request) -> Prepared:
    """The job with the times that Slurm gives: a lost node does not come back, and saving has until the limit."""
    stop_seconds = slurm_of(request).signal_seconds * _SAVE_SHARE
    job = dataclasses.replace(prepared.job, join_seconds=0.0, stop_seconds=stop_seconds)
    files = tuple(
        dataclasses.replace(file, content=job.as_json()) if file.path == "job.json" else file for file in prepared.files
    )
    fields = (
        Field("job.json: join_seconds", "0", "a lost node does not come back; Slurm finds another one", "drillyard"),
        Field(
            "job.json: stop_seconds",
            f"{stop_seconds:g}",
            f"of the time between the signal and the limit, {_SAVE_SHARE:.0%} are for saving",
            "cluster.yaml: slurm.signal_seconds",
        ),
    )
    return dataclasses.replace(prepared, job=job, files=files, fields=(*prepared.fields, *fields))


def _write(host: Host, launch_directory: str, files: tuple[File, ...]) -> Program:
    return Program(
        f"write the launch directory on {host.title}",
        host.argv(["sh", "-c", _UNPACK, launch_directory]),
        sends=(*(file.path for file in files), *SECRETS),
        stage=WRITE,
    )


def _carry(host: Host, request: Request, place: Place) -> list[Program]:
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


def _submit(host: Host, script: str, dependency: str | None) -> Program:
    if dependency is None:
        return Program("submit the job", host.argv(["sbatch", "--parsable", script]), stage=SUBMIT)
    handle = parse_handle(dependency)
    words = ["sh", "-c", _SUBMIT_AFTER, script, str(handle)]
    return Program(f"submit the job, to begin when {handle} has succeeded", host.argv(words), stage=SUBMIT)


def _of_point(plan: Plan, file: File) -> File:
    return dataclasses.replace(file, path=f"points/{plan.handle.run}/{file.path}")


def _code(request: Request, place: Place, prepared: Prepared) -> str:
    if request.sync:
        return f"carried (--sync): {request.here}, what git does not ignore, to {place.project}"
    if prepared.image is not None:
        return f"in the image {prepared.image}"
    return f"there already: {place.project}"
