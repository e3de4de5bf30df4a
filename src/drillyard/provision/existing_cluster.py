"""The plan of a Kubernetes cluster that exists (platform `kubernetes`): the charts that runs need,
and nothing of a cloud. Pure.

What the cluster config names is taken as it is: its namespace must be there, and gets a queue and a
service account of the names in the file. Without a namespace in the file two are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from drillyard.config.cluster import ClusterConfig
from drillyard.config.problems import Problem
from drillyard.errors import UserError
from drillyard.hardware.catalog import Catalog
from drillyard.launch.kubernetes.config import KubernetesConfig
from drillyard.launch.kubernetes.created_cluster import PRIVILEGED, RESTRICTED, namespace_for
from drillyard.provision.cluster_chart import (
    GPU,
    OWN_CHART,
    OWN_NAMESPACE,
    OWN_VERSION,
    controllers,
    quota_of,
    service_account,
)
from drillyard.provision.cluster_plan import ChartRelease, ClusterPlan


def existing_cluster_plan(cluster: ClusterConfig, facts: Catalog) -> ClusterPlan:
    """The plan. Raises UserError for a machine that is not known."""
    section = cluster.section_as(KubernetesConfig)
    settings = _settings(cluster, section)
    pool = {
        "name": settings["queue"],
        "queue": settings["queue"],
        "nodeLabels": dict(section.node_selector),
        "tolerations": list(section.tolerations),
        "resources": _resources(cluster, facts),
    }
    names = [RESTRICTED, PRIVILEGED]
    levels = {RESTRICTED: "restricted", PRIVILEGED: "privileged"}
    if "namespace" in section.model_fields_set:
        names = [section.namespace]
    values = {
        "cluster": cluster.name,
        "pools": [pool],
        "namespaces": [
            # A namespace that the file names is the user's: its labels stay.
            {"name": name, "level": levels.get(name, "privileged"), "create": len(names) > 1}
            for name in names
        ],
        "serviceAccount": {
            "name": service_account(cluster),
            "create": "service_account" not in section.model_fields_set,
        },
    }
    own = ChartRelease(OWN_CHART, OWN_NAMESPACE, OWN_CHART, OWN_VERSION, values)
    return ClusterPlan(
        name=cluster.name,
        platform=cluster.platform,
        project="",
        region="",
        zone="",
        pools=(),
        terraform={},
        state_bucket="",
        resources=(),
        releases=(*(controllers() if section.controller == "jobset" else controllers()[1:]), own),
        launch_settings={"kubernetes": settings},
    )


def existing_cluster_problems(cluster: ClusterConfig, facts: Catalog) -> Iterator[Problem]:
    """A machine that is not known."""
    try:
        if cluster.machine is not None:
            facts.machine(cluster.machine)
    except UserError as error:
        yield Problem(("machine",), str(error).replace("\n", " "))


def _settings(cluster: ClusterConfig, section: KubernetesConfig) -> dict[str, Any]:
    given = section.model_fields_set
    return {
        **({"context": section.context} if section.context else {}),
        "namespace": section.namespace if "namespace" in given else namespace_for(cluster),
        "queue": section.queue or cluster.name,
        "service_account": service_account(cluster),
    }


def _resources(cluster: ClusterConfig, facts: Catalog) -> dict[str, str]:
    """The queue's quota: all of the nodes."""
    if cluster.machine is None:
        gpus = cluster.nodes * (cluster.processes_per_node or 0)
        return {GPU: str(gpus), "cpu": "1000000", "memory": "1000000Gi"}
    machine = facts.machine(cluster.machine)
    found = quota_of(machine, cluster.nodes)
    stack = facts.network_stack(cluster.network_stack or machine.network_stack)
    if stack.kubernetes_resource is not None:
        found[stack.kubernetes_resource] = str(cluster.nodes * machine.data_nics.count)
    return found
