"""Nodes of a Kubernetes cluster as a run sees them: which are free, which offer fewer GPUs than
their machine has, and taking one out.

Nodes are in no namespace, so this needs rights beyond the Role of a run; without them nothing is
known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drillyard.launch.kubernetes.release import node_labels
from drillyard.launch.prepared_run import accelerators_of, processes_per_node
from drillyard.launch.remote_files import print_notice
from drillyard.launch.request import LaunchRequest

if TYPE_CHECKING:
    from drillyard.launch.kubernetes.cluster_api import ClusterApi

NODES, PODS = "/api/v1/nodes", "/api/v1/pods"
GPU = "nvidia.com/gpu"
DRAIN_REASON = "drillyard/drained-because"
"""Annotation of a node that was cordoned here."""
Object = Mapping[str, Any]


def idle_nodes(api: ClusterApi, request: LaunchRequest) -> list[str] | None:
    """The nodes whose GPUs no pod has; None where the request needs none, or nodes and pods may not
    be listed."""
    if not accelerators_of(request) or not all(
        api.may("list", "", kind, cluster_wide=True) for kind in ("nodes", "pods")
    ):
        return None
    usable = usable_nodes(api.items(NODES), node_labels(request), request.exclude)
    return nodes_with_free_gpus(usable, api.items(PODS), processes_per_node(request))


def nodes_short_of_gpus(api: ClusterApi, request: LaunchRequest) -> dict[str, str]:
    """As `Launcher.nodes_short_of_gpus`; prints a warning where nodes may not be listed."""
    needed = accelerators_of(request)
    if not needed:
        return {}
    if not api.may("list", "", "nodes", cluster_wide=True):
        print_notice("warning: not checked: whether nodes offer all GPUs: you may not list nodes")
        return {}
    usable = usable_nodes(api.items(NODES), node_labels(request), request.exclude)
    return short_of_gpus(usable, needed, request.cluster.nodes)


def cordon(api: ClusterApi, node: str, reason: str) -> bool:
    """Have no new pod start on a node; False where that was so. Raises UserError."""
    path = f"{NODES}/{node}"
    if ((api.one(path) or {}).get("spec") or {}).get("unschedulable"):
        return False
    why = {"metadata": {"annotations": {DRAIN_REASON: reason}}}
    api.merge_at(path, {"spec": {"unschedulable": True}, **why})
    return True


def usable_nodes(
    nodes: Iterable[Object], labels: Mapping[str, str], excluded: Sequence[str]
) -> list[Object]:
    """Nodes that are ready, not cordoned, not excluded, and have these labels."""
    return [
        each
        for each in nodes
        if each["metadata"]["name"] not in excluded
        and not each.get("spec", {}).get("unschedulable")
        and labels.items() <= each["metadata"].get("labels", {}).items()
        and any(
            condition.get("type") == "Ready" and condition.get("status") == "True"
            for condition in each.get("status", {}).get("conditions", ())
        )
    ]


def nodes_with_free_gpus(nodes: Iterable[Object], pods: Iterable[Object], needed: int) -> list[str]:
    """Names of the nodes with `needed` GPUs that no pod has asked for."""
    taken: dict[str, int] = {}
    for pod in pods:
        if pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
            continue
        node = str(pod.get("spec", {}).get("nodeName"))
        taken[node] = taken.get(node, 0) + _gpus_of_pod(pod)
    free = {each["metadata"]["name"]: gpus_of(each) for each in nodes}
    return sorted(name for name, gpus in free.items() if gpus - taken.get(name, 0) >= needed)


def short_of_gpus(nodes: Sequence[Object], needed: int, wanted: int) -> dict[str, str]:
    """Nodes that offer fewer than `needed` GPUs, and what each offers. Nodes without any are
    another kind and left out, while `wanted` others have enough."""
    enough = sum(gpus_of(each) >= needed for each in nodes)
    return {
        each["metadata"]["name"]: f"offers {gpus} of {needed} GPUs (allocatable {GPU})"
        for each in nodes
        if (gpus := gpus_of(each)) < needed and (gpus > 0 or enough < wanted)
    }


def gpus_of(node: Object) -> int:
    """GPUs that a node's device plugin offers."""
    return _number(node.get("status", {}).get("allocatable", {}).get(GPU))


def _gpus_of_pod(pod: Object) -> int:
    containers = pod.get("spec", {}).get("containers", ())
    return sum(_number(each.get("resources", {}).get("limits", {}).get(GPU)) for each in containers)


def _number(quantity: object) -> int:
    return int(quantity) if isinstance(quantity, str | int) and str(quantity).isdecimal() else 0
