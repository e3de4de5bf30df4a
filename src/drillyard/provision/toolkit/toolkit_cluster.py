"""What `up` and `down` do with a cluster that Cluster Toolkit makes.

Each group of the deployment has a state in the cluster's bucket, and a lock of Terraform's own. One
that a killed command has left is released together with that command's lock of the cluster; any
other one is named, with what releases it. The image is built once for each content: a second `up`
leaves it out. `down` removes groups of flex-start nodes before it destroys, since the template that
they use could not be deleted, and what no state has afterwards.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drillyard.errors import UnreachableError, UserError
from drillyard.formatting import plural
from drillyard.launch.agent.state_file import json_object
from drillyard.provision.clouds import state_bucket
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.cluster_session import Request, Stages, held_state
from drillyard.provision.provider_errors import kind_of
from drillyard.provision.state_bucket import DEPLOYED, StateBucket
from drillyard.provision.state_lock import HeldLock, read_lock
from drillyard.provision.terraform_engine import remove_empty_directories, working_directory
from drillyard.provision.terraform_output import StateResource
from drillyard.provision.toolkit.blueprint import BASE, IMAGE
from drillyard.provision.toolkit.gcluster import Gcluster, GclusterProgram, find_gcluster

_ATTEMPTS = 4
GROUPS = ("google_compute_instance_group_manager",)
LEFT = (*GROUPS, "google_compute_instance", "google_compute_resource_policy")
LEFT_AT_LAST = (*LEFT, "google_compute_image", "google_compute_disk")


def deploy(request: Request, stages: Stages, program: GclusterProgram) -> Mapping[str, Any]:
    """Make the cluster, or what it lacks; what `launch` needs of it. The state's bucket is there.
    Raises UserError."""
    plan = request.plan
    settings = stages.login_settings(plan)
    bucket = state_bucket(plan)
    with held_state(request, bucket) as (require_lock, released):
        _release_locks(request, bucket, released)
        _guard_jobs(request, stages, bucket)
        gcluster = _gcluster(request, program)
        gcluster.create()
        has_image = stages.has_image(plan)
        if has_image:
            request.report("the image of the nodes is there already")
        require_lock()
        gcluster.deploy([IMAGE] if has_image else [])
        bucket.write(DEPLOYED, f'{{"files": "{_files_hash(plan)}"}}\n'.encode())
    return settings


def take_down_deployment(
    request: Request, stages: Stages, *, ignore_runs: bool, pause_seconds: float
) -> None:
    """Destroy the cluster with what no state has, and remove its state's bucket. Raises
    UserError."""
    plan = request.plan
    program = find_gcluster()
    stages.require_programs(plan)
    bucket = state_bucket(plan)
    if bucket.find() is None:
        request.report(f"{bucket.title}: does not exist, so the cluster has no state")
        _remove_left(request, stages, LEFT_AT_LAST)
        return
    with held_state(request, bucket) as (require_lock, released):
        _release_locks(request, bucket, released)
        states = _states(plan, bucket)
        _require_unprotected(states)
        if _has_controller(plan, states) and not ignore_runs:
            _require_no_jobs(request, stages)
        if num := sum(map(len, states.values())):
            request.confirm(
                f"Delete {plural(num, 'resource')} of cluster {plan.name} in project"
                f" {plan.project}, with all data on /home?"
            )
            require_lock()
            _destroy(request, stages, bucket, program, pause_seconds)
        _remove_left(request, stages, LEFT_AT_LAST)
        require_lock()
        if (why := bucket.remove()) is not None:
            request.report(f"{bucket.title} stays: {why}")


def _gcluster(request: Request, program: GclusterProgram) -> Gcluster:
    return Gcluster(
        program,
        request.plan,
        _directory(request.plan),
        command=request.command,
        report=request.report,
        limits=request.limits,
    )


def _directory(plan: ClusterPlan) -> Path:
    return working_directory(plan.project, f"{plan.name}.toolkit")


def _destroy(
    request: Request,
    stages: Stages,
    bucket: StateBucket,
    program: GclusterProgram,
    pause_seconds: float,
) -> None:
    """Destroy what the states have; what is still in use is tried again."""
    plan = request.plan
    gcluster = _gcluster(request, program)
    gcluster.create()
    for attempt in range(_ATTEMPTS):
        states = _states(plan, bucket)
        if not any(states.values()):
            break
        if states[BASE]:
            gcluster.export(BASE)
        _remove_left(request, stages, GROUPS)
        try:
            gcluster.destroy([IMAGE, *(group for group, found in states.items() if not found)])
        except UserError as error:
            kind = kind_of(str(error))
            if attempt == _ATTEMPTS - 1 or kind is None or not kind.can_pass:
                raise
            pause = pause_seconds * 2**attempt
            request.report(f"{error}\ntrying again in {pause:.0f} s")
            time.sleep(pause)
    if left := [key for found in _states(plan, bucket).values() for key in found]:
        raise UserError(
            f"{plural(len(left), 'resource')} left in the state: {', '.join(left[:5])}\nRepeat"
            f" {request.command}"
        )
    gcluster.remove()
    remove_empty_directories(gcluster.directory)


def _states(plan: ClusterPlan, bucket: StateBucket) -> dict[str, dict[str, StateResource]]:
    """What the state of each group has."""
    assert plan.toolkit is not None
    return {
        group: bucket.resources(f"{_place(plan, group)}/")
        for group in reversed(plan.toolkit.groups)
    }


def _place(plan: ClusterPlan, group: str) -> str:
    """Where the state of a group is, below the cluster's name."""
    assert plan.toolkit is not None
    return plan.toolkit.state_prefix(plan.name, group).removeprefix(f"{plan.name}/")


def _has_controller(plan: ClusterPlan, states: Mapping[str, Mapping[str, StateResource]]) -> bool:
    assert plan.toolkit is not None
    return any(
        each.attributes.get("name") == plan.toolkit.controller
        for found in states.values()
        for each in found.values()
    )


def _release_locks(request: Request, bucket: StateBucket, released: Sequence[HeldLock]) -> None:
    """Release the locks of the groups that a dead command has left, or that the user names. Raises
    UserError for others."""
    plan = request.plan
    assert plan.toolkit is not None
    for group in plan.toolkit.groups:
        name = f"{_place(plan, group)}/{bucket.lock}"
        held = read_lock(bucket, name)
        if held is None:
            continue
        # To the second: the rest of a time has as many digits as its writer likes.
        ours = any(
            held.who == each.who and held.created[:19] >= each.created[:19] for each in released
        )
        if not ours and held.id != request.unlock:
            raise UserError(
                f"{bucket.title}/{bucket.prefix}/{name}: the state of {group} is locked by"
                f" {held.text}\nWhere that process is gone, release its lock: {request.command}"
                f" --unlock {held.id}"
            )
        bucket.delete(name, held.id)
        request.report(f"released the lock of {held.text} on the state of {group}")


def _files_hash(plan: ClusterPlan) -> str:
    assert plan.toolkit is not None
    digest = hashlib.sha256()
    for name in ("blueprint.yaml", "deployment.yaml"):
        digest.update(plan.toolkit.files[name][0].encode())
    return digest.hexdigest()


def _guard_jobs(request: Request, stages: Stages, bucket: StateBucket) -> None:
    """Raise UserError where what was deployed would change under jobs that go on, or may."""
    plan = request.plan
    found = bucket.read(DEPLOYED)
    deployed = {} if found is None else json_object(found[0])
    if not deployed or deployed.get("files") == _files_hash(plan):
        return
    try:
        jobs = list(stages.running_jobs(plan))
    except UserError as error:
        raise UserError(
            f"{plan.name}: would change, and whether jobs go on is not known: {error}\nUndo the"
            f" edit, or remove the cluster first: {request.down_command}\nNothing was changed."
        ) from None
    if jobs:
        raise UserError(
            f"{plan.name}: would change, while jobs go on: {', '.join(jobs[:5])}\nWait for them, or"
            " cancel them: drillyard runs cancel RUN. Nothing was changed."
        )


def _require_no_jobs(request: Request, stages: Stages) -> None:
    try:
        jobs = list(stages.running_jobs(request.plan))
    except UserError as error:
        raise UserError(
            f"whether jobs go on is not known: {error}\nWhere none does: {request.command}"
            " --ignore-runs"
        ) from None
    if jobs:
        raise UserError(
            f"{plural(len(jobs), 'job')} on the cluster: {', '.join(jobs[:5])}\nWait for them, or"
            " cancel them: drillyard runs cancel RUN. Nothing was changed."
        )


def _require_unprotected(states: Mapping[str, Mapping[str, StateResource]]) -> None:
    for found in states.values():
        for each in found.values():
            if each.attributes.get("deletion_protection_enabled"):
                raise UserError(
                    f"{each.address}: is protected from deletion, as the last up made it\nRun"
                    " drillyard cluster up with cluster.deletion_protection: false, then this"
                    " again. Nothing was changed."
                )


def _remove_left(request: Request, stages: Stages, kinds: Sequence[str]) -> None:
    try:
        for line in stages.remove_left(request.plan, kinds):
            request.report(f"removed {line}")
    except UnreachableError as error:
        raise UserError(f"{error}\nRepeat {request.command}") from None
