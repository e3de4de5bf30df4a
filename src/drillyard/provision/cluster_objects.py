"""The state of a cluster's pools, queues and programs, compared with what a plan has made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drillyard.programs import Programs
from drillyard.provision.cluster_plan import ChartRelease, ClusterPlan
from drillyard.provision.existing_objects import compare_existing
from drillyard.provision.helm_releases import (
    Helm,
    InstalledRelease,
    age_problem,
    is_foreign,
    not_ready_reasons,
    own_release,
    programs_of,
)

if TYPE_CHECKING:
    from drillyard.launch.kubernetes.cluster_api import ApiServer


@dataclass(frozen=True)
class PoolStatus:
    """Nodes of a pool: those that exist, those of them that are ready, and the most that it may
    have (None: not known, of a cluster that was not made here)."""

    name: str
    present: int
    ready: int
    wanted: int | None
    starts_at_zero: bool
    nodes_made: tuple[str, ...] = ()
    """When each of its nodes was made, as the API server writes times."""


@dataclass(frozen=True)
class QueueStatus:
    """A queue, with the runs that have nodes and those that wait."""

    name: str
    pool: str
    active: bool
    reason: str
    """Why it is not active."""
    admitted: int = 0
    pending: int = 0


@dataclass(frozen=True)
class ReleaseStatus:
    """A Helm release: `deployed`, `missing`, `foreign` (installed by somebody else), or Helm's own
    word for what it is."""

    name: str
    wanted: str
    found: str
    state: str


@dataclass(frozen=True)
class ClusterObjects:
    """All of it. `missing`: what a run would miss, one line each."""

    created: str
    """When the cluster was made, as the API server writes times."""
    pools: tuple[PoolStatus, ...]
    queues: tuple[QueueStatus, ...]
    releases: tuple[ReleaseStatus, ...]
    missing: tuple[str, ...]


def cluster_objects_status(
    plan: ClusterPlan, context: str | None, *, programs: Programs | None = None
) -> ClusterObjects:
    """The state of the cluster that a context reaches. Raises UserError where it cannot be
    reached."""
    from drillyard.launch.kubernetes.cluster_api import CORE, ApiServer

    api = ApiServer(context)
    programs = programs or Programs()
    helm, conflicts = Helm(context, programs), list[str]()
    if not plan.terraform:
        compared = compare_existing(plan, context, programs=programs)
        plan = compared.plan
        conflicts = [each.text for each in compared.states if each.state == "conflict"]
    values = own_release(plan.releases).values
    namespace = api.one(f"{CORE}/namespaces/kube-system") or {}
    nodes = api.items(f"{CORE}/nodes")
    pools = tuple(_pool(plan, each, nodes) for each in values.get("pools", ()))
    installed = {(each.name, each.namespace): each for each in helm.releases()}
    releases = tuple(_release(api, each, installed) for each in plan.releases)
    queues = tuple(_queue(api, each) for each in values.get("pools", ()))
    missing = (
        *conflicts,
        *_missing_releases(api, plan, releases),
        *_missing_programs(api, helm, plan, releases),
        *_missing_in_namespaces(api, values),
        *(f"queue {each.name}: {each.reason}" for each in queues if not each.active),
        *_missing_nodes(pools, values),
        *_missing_labels(values, nodes),
    )
    created = str(namespace.get("metadata", {}).get("creationTimestamp", ""))
    return ClusterObjects(created, pools, queues, releases, missing)


def _pool(plan: ClusterPlan, values: Mapping[str, Any], nodes: list[dict[str, Any]]) -> PoolStatus:
    own = [each for each in nodes if _has_labels(each, values.get("nodeLabels", {}))]
    planned = next((each for each in plan.pools if each.name == values["name"]), None)
    return PoolStatus(
        values["name"],
        len(own),
        sum(_is_ready(each) for each in own),
        None if planned is None else planned.nodes,
        planned is not None and planned.scales_from_zero,
        tuple(str(each["metadata"].get("creationTimestamp", "")) for each in own),
    )


def _has_labels(node: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    return labels.items() <= (node["metadata"].get("labels") or {}).items()


def _is_ready(node: Mapping[str, Any]) -> bool:
    conditions = node.get("status", {}).get("conditions") or ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _release(
    api: ApiServer,
    release: ChartRelease,
    installed: Mapping[tuple[str, str], InstalledRelease],
) -> ReleaseStatus:
    found = installed.get((release.name, release.namespace))
    if found is None:
        state = "foreign" if is_foreign(api, release) else "missing"
        return ReleaseStatus(release.name, release.version, "", state)
    version = found.chart.rpartition("-")[2].removeprefix("v")
    return ReleaseStatus(release.name, release.version, version, found.status)


def _queue(api: ApiServer, pool: Mapping[str, Any]) -> QueueStatus:
    name = pool.get("clusterQueue") or pool["queue"]
    found = api.one(f"{api.kueue}/clusterqueues/{name}")
    if found is None:
        return QueueStatus(name, pool["name"], False, "is not there")
    status = found.get("status", {})
    conditions: list[dict[str, Any]] = status.get("conditions") or []
    active = next((each for each in conditions if each["type"] == "Active"), {})
    is_active = active.get("status") == "True"
    return QueueStatus(
        name,
        pool["name"],
        is_active,
        "" if is_active else str(active.get("message", "Kueue has not looked at it yet")),
        int(status.get("admittedWorkloads") or 0),
        int(status.get("pendingWorkloads") or 0),
    )


def _missing_releases(
    api: ApiServer, plan: ClusterPlan, releases: tuple[ReleaseStatus, ...]
) -> Iterator[str]:
    for each in releases:
        if each.state == "missing":
            yield f"{each.name} {each.wanted}: is not installed"
        elif each.state == "foreign":
            if (problem := age_problem(api, each.name)) is not None:
                yield problem
        elif each.state != "deployed":
            yield f"{each.name}: its Helm release is {each.state}"
        elif each.found != each.wanted:
            yield f"{each.name}: {each.found} is installed, and {each.wanted} is planned"


def _missing_programs(
    api: ApiServer, helm: Helm, plan: ClusterPlan, releases: tuple[ReleaseStatus, ...]
) -> Iterator[str]:
    """Programs of the installed releases that do not run, with the reason."""
    from drillyard.provision.helm_releases import is_ready

    there = {each.name for each in releases if each.state not in ("missing", "foreign")}
    for release in plan.releases:
        if release.name in there:
            for kind, namespace, name in programs_of(helm, release):
                if not is_ready(api, kind, namespace, name):
                    for reason in not_ready_reasons(api, kind, namespace, name):
                        yield f"{kind} {namespace}/{name}: {reason}"


def _missing_in_namespaces(api: ApiServer, values: Mapping[str, Any]) -> Iterator[str]:
    from drillyard.launch.kubernetes.cluster_api import CORE

    account = values["serviceAccount"]["name"]
    for each in values["namespaces"]:
        path = f"{CORE}/namespaces/{each['name']}"
        found = api.one(path)
        if found is None:
            yield f"namespace {each['name']}: is not there"
            continue
        level = (found["metadata"].get("labels") or {}).get("pod-security.kubernetes.io/enforce")
        is_own = f"Namespace/{each['name']}" not in values.get("existing", ())
        if is_own and each["create"] and level != each["level"]:
            yield f"namespace {each['name']}: its level of Pod Security is {level or 'not set'}"
        if api.one(f"{path}/serviceaccounts/{account}") is None:
            yield f"service account {account} in namespace {each['name']}: is not there"
        for pool in values.get("pools", ()):
            queue = f"{api.kueue}/namespaces/{each['name']}/localqueues/{pool['queue']}"
            if api.one(queue) is None:
                yield f"queue {pool['queue']} in namespace {each['name']}: is not there"


def _missing_nodes(pools: tuple[PoolStatus, ...], values: Mapping[str, Any]) -> Iterator[str]:
    labels = {each["name"]: each.get("nodeLabels", {}) for each in values.get("pools", ())}
    for each in pools:
        wanted = each.wanted if each.wanted is not None and not each.starts_at_zero else None
        if each.ready < (most := each.present if wanted is None else wanted):
            selector = ",".join(f"{key}={value}" for key, value in labels[each.name].items())
            command = f"kubectl get nodes{f' --selector {selector}' if selector else ''}"
            yield f"pool {each.name}: {each.ready} of {most} nodes are ready: {command}"


def _missing_labels(values: Mapping[str, Any], nodes: list[dict[str, Any]]) -> Iterator[str]:
    """Nodes on which placement by topology puts nothing."""
    for pool in values.get("pools", ()):
        own = [each for each in nodes if _has_labels(each, pool.get("nodeLabels", {}))]
        for label in pool.get("topologyLevels", ()):
            count = sum(label not in (each["metadata"].get("labels") or {}) for each in own)
            if count:
                yield f"pool {pool['name']}: {count} nodes have no label {label}: no run gets them"
