"""`drillyard cluster down`: from a cluster to nothing, with a proof that nothing is left.

Order: no run may go on; workloads and volumes go first, since their disks and load balancers belong
to no Terraform; then what Terraform made, in the order of dependence, with repetitions for what is
still in use; then the bucket of the state; then the check for leaks, whose exit code is ours. A
bucket or file system with data stays, unless `delete_data`. Each step is a search for what is left
of it, so it goes on from wherever an earlier `down`, or `up`, ended.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from drillyard.errors import UnreachableError, UserError
from drillyard.formatting import plural
from drillyard.provision.adoption import adopt_interrupted
from drillyard.provision.clouds import cloud_of
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.cluster_session import Request, Session, Stages, session, terraform_program
from drillyard.provision.data_stores import DataStore, DataStores
from drillyard.provision.kubeconfig_context import control_plane_of
from drillyard.provision.node_request import hosts_of
from drillyard.provision.provider_errors import kind_of
from drillyard.provision.provisioner import require_created, require_driven
from drillyard.provision.terraform_engine import remove_working_directory, status_directory
from drillyard.provision.terraform_output import StateResource
from drillyard.provision.toolkit.toolkit_cluster import take_down_deployment

_PROTECTED = ("google_container_cluster", "google_compute_instance")
"""Kinds that Google and Terraform can keep from being deleted."""
_ATTEMPTS = 4
_PAUSE_SECONDS = 15.0
"""Before the second attempt, then twice as long each time: what uses a thing ends a little
later."""


@dataclass(frozen=True)
class DownOptions:
    """`ignore_runs`: do not ask the cluster what runs on it. `pause_seconds`: before the second
    attempt to destroy."""

    delete_data: bool = False
    ignore_runs: bool = False
    pause_seconds: float = _PAUSE_SECONDS


def take_down(request: Request, stages: Stages, options: DownOptions) -> int:
    """Remove the cluster; the exit code of the check for leaks: 0 nothing is left, 1 something, 3
    unknown. Raises UserError."""
    plan = request.plan
    require_created(plan)
    require_driven(plan, "down")
    _require_unprotected(plan)
    if plan.toolkit is not None:
        take_down_deployment(
            request, stages, ignore_runs=options.ignore_runs, pause_seconds=options.pause_seconds
        )
        stages.remove_login(plan)
        return _check_leaks(request, stages, frozenset())
    if options.delete_data:
        plan = replace(plan, terraform=without_protection(plan.terraform))
        request = replace(request, plan=plan)
    program = terraform_program(plan)
    cloud = cloud_of(plan)
    bucket, stores = cloud.state_bucket(plan), cloud.data_stores(plan)
    if plan.job_service is not None:
        # Also before data is deleted of which there is no state.
        _require_no_jobs(request, stages, options)
    if bucket.find() is None:
        request.report(f"{bucket.title}: does not exist, so the cluster has no state")
        kept = _remove_data(request, stores, options, _own_data(plan, stores, []))
    else:
        with session(request, program) as opened:
            adopt_interrupted(plan, opened.terraform, bucket, request.report, recreate=False)
            kept = _remove(opened, stages, stores, options)
            opened.require_lock()
            remove_working_directory(opened.terraform.directory)
            if (why := bucket.remove()) is not None:
                request.report(f"{bucket.title} stays: {why}")
    remove_working_directory(status_directory(plan.project, plan.name))
    if plan.has_kubernetes:
        stages.remove_context(plan)
    elif plan.login is not None:
        stages.remove_login(plan)
    owned = frozenset(f"{stores.kind}/{each.location}/{each.name}" for each in kept)
    return _check_leaks(request, stages, owned)


def without_protection(document: Mapping[str, Any]) -> dict[str, Any]:
    """A Terraform document whose resources Terraform may destroy, also those with data."""
    resources = {
        kind: {
            label: {key: value for key, value in body.items() if key != "lifecycle"}
            for label, body in bodies.items()
        }
        for kind, bodies in document["resource"].items()
    }
    return {**document, "resource": resources}


def _remove(
    opened: Session, stages: Stages, stores: DataStores, options: DownOptions
) -> list[DataStore]:
    """Remove what the state has; what stays, as it has data."""
    request, terraform = opened.request, opened.terraform
    state = list(opened.bucket.resources().values())
    _require_unprotected_cluster(state)
    context = None
    if request.plan.login is not None:
        _require_idle_hosts(opened, stages, options, state)
    elif request.plan.has_kubernetes:
        context = _idle_context(opened, stages, options, state)
    found = _own_data(request.plan, stores, state)
    kept = [each.name for each in found if each.has_data and not options.delete_data]
    in_state = {each.attributes["name"]: each.address for each in state if each.kind == stores.kind}
    staying = [address for name, address in in_state.items() if name in kept]
    if num := len(state) - len(staying):
        request.confirm(
            f"Delete {plural(num, 'resource')} of cluster {request.plan.name} in project"
            f" {request.plan.project}?"
        )
    if context is not None:
        _delete_workloads(request, stages, options, context)
    for address in staying:
        terraform.forget(address)
    left = _remove_data(request, stores, options, found, by_terraform=in_state.keys())
    _destroy(opened, options.pause_seconds)
    return left


def _own_data(
    plan: ClusterPlan, stores: DataStores, state: Sequence[StateResource]
) -> list[DataStore]:
    """What of the cluster holds data, and exists: of the state, of the plan, by its label."""
    planned = plan.terraform.get("resource", {}).get(stores.kind, {}).values()
    names = [each["name"] for each in planned]
    names += [each.attributes["name"] for each in state if each.kind == stores.kind]
    found = [stores.find(name) for name in dict.fromkeys(names)]
    return [each for each in found if each is not None]


def _remove_data(
    request: Request,
    stores: DataStores,
    options: DownOptions,
    found: Sequence[DataStore],
    by_terraform: Collection[str] = (),
) -> list[DataStore]:
    """Empty those whose data may go, and delete those that Terraform does not; those that stay."""
    staying = []
    for each in found:
        if each.has_data and not options.delete_data:
            request.report(f"{each.title} has data and stays; --delete-data deletes it")
            staying.append(each)
            continue
        if each.has_data:
            request.confirm(f"Delete all data in {each.title}?")
        for line in stores.empty(each):
            request.report(line)
        if each.name not in by_terraform:
            stores.delete(each)
            request.report(f"deleted {each.title}")
    return staying


def _require_unprotected(plan: ClusterPlan) -> None:
    resources = plan.terraform.get("resource", {})
    bodies = [body for kind in _PROTECTED for body in resources.get(kind, {}).values()]
    if any(body.get("deletion_protection") for body in bodies):
        raise UserError(
            "cluster.deletion_protection: is true\nSet it to false, run drillyard cluster up,"
            " then this again. Nothing was changed."
        )


def _require_unprotected_cluster(state: Sequence[StateResource]) -> None:
    for each in state:
        if each.kind in _PROTECTED and each.attributes.get("deletion_protection"):
            raise UserError(
                f"{each.address}: is protected from deletion, as the last up made it\nRun drillyard"
                " cluster up with cluster.deletion_protection: false, then this again. Nothing was"
                " changed."
            )


def _idle_context(
    opened: Session, stages: Stages, options: DownOptions, state: Sequence[StateResource]
) -> str | None:
    """The kubeconfig context of a cluster on which nothing runs; None: there is no cluster, or it
    does not answer and that is ignored. Raises UserError where runs go on, or where that is
    unknown."""
    plan, request = opened.request.plan, opened.request
    cluster = next((each for each in state if each.address == plan.control_plane), None)
    if cluster is None or control_plane_of(cluster.attributes) is None:
        return None
    try:
        context = stages.write_context(plan, cluster.attributes)
    except UserError as error:
        if not options.ignore_runs:
            raise
        request.report(f"warning: workloads and volumes are not deleted: {error}")
        return None
    if options.ignore_runs:
        return context
    try:
        runs = list(stages.running_workloads(context))
    except UnreachableError as error:
        if _is_gone(opened):
            request.report("the cluster is gone already")
            return None
        raise UserError(
            f"the cluster does not say whether runs go on: {error}\nWhere none does:"
            f" {request.command} --ignore-runs"
        ) from None
    if runs:
        raise UserError(
            f"{plural(len(runs), 'run')} on the cluster: {', '.join(map(str, runs[:5]))}\nWait for"
            " them, or cancel them: drillyard runs cancel RUN. Nothing was changed."
        )
    return context


def _require_idle_hosts(
    opened: Session, stages: Stages, options: DownOptions, state: Sequence[StateResource]
) -> None:
    """Raise UserError where runs go on on the hosts, or where that is unknown. Hosts that somebody
    has deleted are not asked."""
    request = opened.request
    if options.ignore_runs:
        return
    unknown = f"Where none does: {request.command} --ignore-runs"
    try:
        hosts = hosts_of(request.plan, {each.address: each for each in state}, stages.node_request)
    except UserError as error:
        raise UserError(f"whether runs go on is not known: {error}\n{unknown}") from None
    if not hosts:
        return
    try:
        runs = list(stages.running_on_hosts(request.plan, hosts))
    except UnreachableError as error:
        drift = opened.terraform.plan().drift
        left = [each for each in hosts if drift.get(each.key) != "delete"]
        if not left:
            request.report("the hosts are gone already")
            return
        raise UserError(f"whether runs go on is not known: {error}\n{unknown}") from None
    if runs:
        raise UserError(
            f"{plural(len(runs), 'run')} on the hosts: {', '.join(runs[:5])}\nWait for them, or"
            " cancel them: drillyard runs cancel RUN. Nothing was changed."
        )


def _require_no_jobs(request: Request, stages: Stages, options: DownOptions) -> None:
    """Raise UserError where jobs of the service go on, or where that is unknown."""
    if options.ignore_runs:
        return
    try:
        jobs = list(stages.running_jobs(request.plan))
    except UserError as error:
        raise UserError(
            f"whether runs go on is not known: {error}\nWhere none does: {request.command}"
            " --ignore-runs"
        ) from None
    if jobs:
        raise UserError(
            f"{plural(len(jobs), 'run')} on the service: {', '.join(jobs[:5])}\nWait for them, or"
            " cancel them: drillyard runs cancel RUN. Nothing was changed."
        )


def _is_gone(opened: Session) -> bool:
    """Whether the cloud no longer has the cluster of the state."""
    return opened.terraform.plan().drift.get(opened.request.plan.control_plane) == "delete"


def _delete_workloads(request: Request, stages: Stages, options: DownOptions, context: str) -> None:
    try:
        for disk in stages.delete_workloads(context) or ():
            request.report(f"a volume is to be kept, with its disk: {disk}")
    except UnreachableError as error:
        if not options.ignore_runs:
            raise
        request.report(f"warning: workloads and volumes were not deleted: {error}")


def _destroy(opened: Session, pause_seconds: float) -> None:
    """Destroy what the state has. What is still in use is tried again, each time by a new plan."""
    request = opened.request
    for attempt in range(_ATTEMPTS):
        changes = opened.terraform.plan(destroy=True)
        if changes.is_empty:
            return
        opened.require_lock()
        try:
            opened.terraform.apply(changes)
        except UserError as error:
            kind = kind_of(str(error), opened.terraform.kinds)
            if attempt == _ATTEMPTS - 1 or kind is None or not kind.can_pass:
                raise
            pause = pause_seconds * 2**attempt
            request.report(f"{error}\ntrying again in {pause:.0f} s")
            time.sleep(pause)
            continue
        return


def _check_leaks(request: Request, stages: Stages, owned: frozenset[str]) -> int:
    """Show what is left in the cloud; the exit code. `owned`: what was kept on purpose,
    which is not reported."""
    report: Any = stages.find_leaks(request.plan, owned)
    request.report(report.text)
    code: int = report.exit_code
    return code
