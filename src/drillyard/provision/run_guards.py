"""What `up` refuses to change while runs use it: nodes of Kubernetes, hosts, and what jobs of a
service need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drillyard.errors import UnreachableError, UserError
from drillyard.provision.cluster_session import Session, Stages
from drillyard.provision.made_hosts import HOST_KINDS, MadeHost
from drillyard.provision.node_request import GROUP_KIND, hosts_of
from drillyard.provision.terraform_output import Action, Change, PlannedChanges

_OF_NEBIUS = "nebius_mk8s_v1_node_group"
_POOLS = (
    *("google_container_node_pool", "google_container_cluster"),
    *(_OF_NEBIUS, "nebius_mk8s_v1_cluster"),
)
_NODES = {"template", "version"}
"""What of a node group of Nebius a change of replaces its nodes."""
_IN_PLACE = {
    *("labels", "effective_labels", "terraform_labels"),
    *("metadata", "desired_status", "deletion_protection"),
    *("stopped", "labels_all", "resource_version", "updated_at", "status"),
}
"""What of a host changes while it runs, or starts it."""
DESTROYING: tuple[Action, ...] = ("replace", "delete")


def guard_runs(opened: Session, stages: Stages, changes: PlannedChanges) -> None:
    """Raise UserError where runs would lose their nodes, or jobs of a service what they use."""
    if opened.request.plan.job_service is not None:
        _guard_jobs(opened, stages, changes.addresses(*DESTROYING))
        return
    endangered = [each for each in changes.wanted if _takes_nodes(each)]
    state = opened.bucket.resources()
    # One that an interrupted command left half-made never took runs.
    endangered = [each for each in endangered if not _is_tainted(state, each.address)]
    if endangered and opened.request.plan.login is not None:
        hosts = hosts_of(opened.request.plan, state, stages.node_request)
        # A request that was never granted, or whose nodes are gone, is nobody's.
        if hosts:
            _guard_hosts(opened, stages, endangered, hosts)
        return
    cluster = opened.request.plan.control_plane
    if not endangered or cluster not in state or _is_tainted(state, cluster):
        return
    if any(each.address == cluster for each in endangered):
        raise UserError(
            f"{cluster}: cannot be changed in place, and a new one would leave the volumes and load"
            f" balancers of the old one behind\nUndo the change, or remove the cluster first:"
            f" {opened.request.down_command}\nNothing was changed."
        )
    context = stages.write_context(opened.request.plan, state[cluster].attributes)
    if runs := list(stages.running_workloads(context)):
        pools = ", ".join(each.address.partition(".")[2] for each in endangered)
        raise UserError(
            f"{pools}: would be replaced or get fewer nodes, while {len(runs)} runs use the"
            f" cluster: {', '.join(map(str, runs[:5]))}\nWait for them, or cancel them: drillyard"
            " runs cancel RUN. Nothing was changed."
        )


def _guard_jobs(opened: Session, stages: Stages, destroyed: Sequence[str]) -> None:
    """Raise UserError where jobs go on, or may, while something of theirs is destroyed."""
    if not destroyed:
        return
    names = ", ".join(destroyed[:5])
    try:
        jobs = list(stages.running_jobs(opened.request.plan))
    except UserError as error:
        raise UserError(
            f"{names}: would be replaced or removed, and whether runs go on is not known:"
            f" {error}\nNothing was changed."
        ) from None
    if jobs:
        raise UserError(
            f"{names}: would be replaced or removed, while runs go on: {', '.join(jobs[:5])}\nWait"
            " for them, or cancel them: drillyard runs cancel RUN. Nothing was changed."
        )


def _takes_nodes(change: Change) -> bool:
    """Whether runs on the nodes of a pool, or on a host, would end."""
    if change.kind in HOST_KINDS:
        stops = change.action == "update" and not _IN_PLACE.issuperset(change.because)
        return change.action in DESTROYING or stops
    if change.kind == GROUP_KIND:
        return change.action in DESTROYING
    if (
        change.kind == _OF_NEBIUS
        and change.action == "update"
        and not _NODES.isdisjoint(change.because)
    ):
        return True
    return change.kind in _POOLS and (change.action in DESTROYING or change.shrinks)


def _guard_hosts(
    opened: Session, stages: Stages, endangered: Sequence[Change], hosts: Sequence[MadeHost]
) -> None:
    names = ", ".join(each.address.partition(".")[2] for each in endangered[:5])
    try:
        runs = list(stages.running_on_hosts(opened.request.plan, hosts))
    except UnreachableError as error:
        raise UserError(
            f"{names}: would be stopped, replaced or removed, and whether runs go on is not known:"
            f" {error}\nUndo the edit, with which `up` starts what is stopped, then edit again; or"
            f" remove the cluster first: {opened.request.down_command}\nNothing was changed."
        ) from None
    if runs:
        raise UserError(
            f"{names}: would be stopped, replaced or removed, while runs use the hosts:"
            f" {', '.join(runs[:5])}\nWait for them, or cancel them: drillyard runs cancel RUN."
            " Nothing was changed."
        )


def _is_tainted(state: dict[str, Any], address: str) -> bool:
    found = state.get(address)
    return bool(found and found.tainted)
