"""Simulated GPU nodes on the test cluster, by kwok: scheduler, Kueue and JobSet are real, the
nodes' kubelet is not.

A simulated pod runs until its annotation `test/exit-code` says how it ends (fake_pods.yaml).
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.integration.kubernetes.cluster import Cluster, objects, tool
from tests.integration.kubernetes.team import until

GPUS_PER_NODE = 8
BLOCK = "cloud.google.com/gce-topology-block"
HOSTNAME = "kubernetes.io/hostname"
POOL = "cloud.google.com/gke-nodepool"
TOLERATION = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
_AT_ONCE = 4


def start_kwok(cluster: Cluster) -> None:
    """Start kwok, for the nodes that `node` describes. It ends with the cluster, in whose process
    namespace it runs."""
    stages = f"{objects('kwok-stages')},{Path(__file__).with_name('fake_pods.yaml')}"
    argv = [
        *(
            tool("kwok"),
            "--kubeconfig",
            str(cluster.kubeconfig),
            "--config",
            stages,
            "--node-ip",
            "127.0.0.1",
        ),
        *(
            "--manage-nodes-with-annotation-selector",
            "kwok.x-k8s.io/node=fake",
            "--node-lease-duration-seconds",
            "120",
        ),
    ]
    with (cluster.directory / "logs/kwok").open("wb") as log:
        subprocess.Popen(cluster.enter(*argv, into=("net", "pid")), stdout=log, stderr=log)


def node(name: str, pool: str, block: str, **labels: str) -> dict[str, Any]:
    """A node with 8 GPUs, as GKE labels them."""
    size = {"cpu": "224", "memory": "3968Gi", "nvidia.com/gpu": str(GPUS_PER_NODE), "pods": "110"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {"kwok.x-k8s.io/node": "fake"},
            "labels": {HOSTNAME: name, POOL: pool, BLOCK: block, **labels},
        },
        "spec": {"taints": [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]},
        "status": {"allocatable": size, "capacity": size},
    }


def add_nodes(cluster: Cluster, nodes: Sequence[dict[str, Any]]) -> None:
    """Create nodes, and wait until all are ready."""
    parts = [nodes[start::_AT_ONCE] for start in range(min(_AT_ONCE, len(nodes)))]
    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(lambda part: cluster.apply(*part), parts))
    names = {each["metadata"]["name"] for each in nodes}
    # `kubectl wait` asks for five nodes a second.
    until(
        lambda: (
            names
            <= {
                each["metadata"]["name"]
                for each in cluster.get("nodes")["items"]
                if _is_ready(each)
            }
        )
    )


def _is_ready(found: dict[str, Any]) -> bool:
    conditions = found["status"].get("conditions", ())
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def queue(name: str, namespace: str, pool: str, gpus: int, **spec: Any) -> list[dict[str, Any]]:
    """A LocalQueue over a pool's nodes, which places by blocks, and what it needs."""
    kueue = "kueue.x-k8s.io/v1beta1"

    def made(kind: str, **fields: Any) -> dict[str, Any]:
        return {"apiVersion": kueue, "kind": kind, "metadata": {"name": name}, **fields}

    quota = {"name": name, "resources": [{"name": "nvidia.com/gpu", "nominalQuota": gpus}]}
    groups = [{"coveredResources": ["nvidia.com/gpu"], "flavors": [quota]}]
    local = made("LocalQueue", spec={"clusterQueue": name})
    local["metadata"]["namespace"] = namespace
    return [
        made("Topology", spec={"levels": [{"nodeLabel": BLOCK}, {"nodeLabel": HOSTNAME}]}),
        made(
            "ResourceFlavor",
            spec={"nodeLabels": {POOL: pool}, "topologyName": name, "tolerations": [TOLERATION]},
        ),
        made("ClusterQueue", spec={"namespaceSelector": {}, "resourceGroups": groups, **spec}),
        local,
    ]


def provisioning_check(name: str) -> list[dict[str, Any]]:
    """The AdmissionCheck by which GKE's flex-start with queued provisioning makes nodes for a
    workload."""
    parameters = {"apiGroup": "kueue.x-k8s.io", "kind": "ProvisioningRequestConfig", "name": name}
    selector = {
        "key": "autoscaling.gke.io/provisioning-request",
        "valueFromProvisioningClassDetail": "ResizeRequestName",
    }
    config = {
        "provisioningClassName": "queued-provisioning.gke.io",
        "managedResources": ["nvidia.com/gpu"],
        "podSetUpdates": {"nodeSelector": [selector]},
    }
    check = {"controllerName": "kueue.x-k8s.io/provisioning-request", "parameters": parameters}
    return [
        {
            "apiVersion": "kueue.x-k8s.io/v1beta1",
            "kind": kind,
            "metadata": {"name": name},
            "spec": spec,
        }
        for kind, spec in (("ProvisioningRequestConfig", config), ("AdmissionCheck", check))
    ]


def set_conditions(cluster: Cluster, request: dict[str, Any], **conditions: str) -> None:
    """Do the autoscaler's part: set conditions (name=reason) of a ProvisioningRequest to True."""
    place = request["metadata"]
    now = place["creationTimestamp"]
    kept = [
        each
        for each in request.get("status", {}).get("conditions", ())
        if each["type"] not in conditions
    ]
    made = [
        {
            "type": kind,
            "status": "True",
            "reason": reason,
            "message": reason,
            "lastTransitionTime": now,
        }
        for kind, reason in conditions.items()
    ]
    status = {
        "conditions": kept + made,
        "provisioningClassDetails": {"ResizeRequestName": place["name"]},
    }
    cluster.kubectl(
        *("--namespace", place["namespace"], "patch", "provisioningrequest", place["name"]),
        *("--subresource=status", "--type=merge", "--patch", json.dumps({"status": status})),
    )
