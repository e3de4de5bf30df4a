"""What GKE adds to a run: the nodes that its way of buying selects, and the taints that they have.

Labels and taints are those of
https://cloud.google.com/kubernetes-engine/docs/how-to/provisioningrequest, .../concepts/spot-vms,
.../how-to/consuming-reservations and .../how-to/gpus.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from drillyard.config.reservation_name import RESERVATION_FORMS, read_reservation
from drillyard.hardware.cloud_limits import way_of_buying
from drillyard.hardware.machines import Machine
from drillyard.launch.kubernetes import pod_network
from drillyard.launch.kubernetes.config import KubernetesConfig
from drillyard.launch.request import LaunchFinding, LaunchRequest, error

_LABEL = "cloud.google.com/"


def findings(request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
    """What a way of buying needs, of which the cluster config says nothing or something else."""
    cluster, section = request.cluster, request.cluster.section_as(KubernetesConfig)
    if cluster.consumption == "flex-start-queued" and section.queue is None:
        message = (
            "missing: flex-start-queued needs a LocalQueue whose ClusterQueue has an admission"
            " check of class queued-provisioning.gke.io, which makes the nodes: kubectl get"
            " localqueues, or set consumption: flex-start"
        )
        yield error("cluster", "kubernetes.queue", message)
    longest = way_of_buying(cluster.consumption).longest_hours if cluster.consumption else None
    if longest is not None and (section.max_run_hours or 0) > longest:
        message = (
            f"{section.max_run_hours:g}: nodes of {cluster.consumption} exist for at most {longest}"
            " hours"
        )
        yield error("cluster", "kubernetes.max_run_hours", message)
    if cluster.reservation is not None and read_reservation(cluster.reservation) is None:
        yield error("cluster", "reservation", f"'{cluster.reservation}': write {RESERVATION_FORMS}")


def node_selector(request: LaunchRequest, machine: Machine | None) -> dict[str, str]:
    """Labels of the nodes that the run's way of buying means."""
    cluster = request.cluster
    found = {}
    if machine is not None and machine.accelerator_type is not None:
        found[f"{_LABEL}gke-accelerator"] = machine.accelerator_type
    if pod_network.network_mode(request, machine) == "dranet":
        found[f"{_LABEL}gke-networking-dra-driver"] = "true"
        found |= machine.pods.node_selector if machine is not None and machine.pods else {}
    if cluster.consumption in ("spot", "flex-start"):
        found[f"{_LABEL}gke-{cluster.consumption}"] = "true"
    if cluster.reservation is not None and (named := read_reservation(cluster.reservation)):
        found |= {
            f"{_LABEL}reservation-name": named.name,
            f"{_LABEL}reservation-affinity": "specific",
        }
        if named.project:
            found[f"{_LABEL}reservation-project"] = named.project
    return found


def tolerations(consumption: str | None, machine: Machine | None) -> list[dict[str, Any]]:
    """The taints of such nodes. That of a node about to end is not among them: a restarted run
    would return to it."""
    taints = {"spot": "gke-spot", "flex-start-queued": "gke-queued"}
    found = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    if (taint := taints.get(consumption or "")) is not None:
        found.append(
            {
                "key": f"{_LABEL}{taint}",
                "operator": "Equal",
                "value": "true",
                "effect": "NoSchedule",
            }
        )
    if machine is not None and machine.architecture != "x86_64":
        arch = {"key": "kubernetes.io/arch", "operator": "Equal", "value": machine.architecture}
        found.append({**arch, "effect": "NoSchedule"})
    return found
