"""The names on a cluster that `drillyard cluster up` has made, which are a run's defaults there.

A cluster config of platform gke that has a section `cluster:`, or no settings of `kubernetes:`, is
that of such a cluster: its runs need no queue, namespace or service account in the file. The chart
`drillyard-cluster` gets the same names (`provision/cluster_chart.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drillyard.config.cluster import ClusterConfig
from drillyard.config.creation import CreationConfig, default_pool_name
from drillyard.errors import UserError
from drillyard.hardware import load_catalog
from drillyard.hardware.catalog import Catalog
from drillyard.launch.kubernetes import pod_network
from drillyard.launch.kubernetes.config import KubernetesConfig

SERVICE_ACCOUNT = "trainer"
RESTRICTED, PRIVILEGED = "runs", "runs-privileged"
"""Namespaces, by the level of Pod Security that their pods pass."""
IMAGE_USER = 10001
"""Of the image of docker/Dockerfile. Namespaces of the level restricted take no pods of root, and
the files of a bucket belong to the pods' user."""


@dataclass(frozen=True)
class _OnCluster:
    cluster: ClusterConfig
    facts: Catalog


def is_created(cluster: ClusterConfig) -> bool:
    """Whether a completed config is that of a cluster that `drillyard cluster up` makes."""
    return cluster.platform == "gke" and cluster.cluster is not None


def completed(cluster: ClusterConfig) -> ClusterConfig:
    """The config of such a cluster with its section `cluster:` and, of its section `kubernetes:`,
    every default that the file does not replace; any other config as it is."""
    section: KubernetesConfig | None = getattr(cluster, "kubernetes", None)
    given = frozenset() if section is None else section.model_fields_set
    if cluster.cluster is None and not given:
        cluster = cluster.model_copy(update={"cluster": CreationConfig()})
    missing = {key: value for key, value in section_defaults(cluster).items() if key not in given}
    if not missing:
        return cluster
    full = (section or KubernetesConfig()).model_copy(update=missing)
    return cluster.model_copy(update={"kubernetes": full})


def as_created(cluster: ClusterConfig) -> ClusterConfig:
    """The config as that of a cluster which is to be made: `completed`, also where its file has
    settings of `kubernetes:` and no section `cluster:`."""
    if cluster.platform == "gke" and cluster.cluster is None:
        cluster = cluster.model_copy(update={"cluster": CreationConfig()})
    return completed(cluster)


def context_name(cluster: ClusterConfig) -> str:
    """The kubeconfig context of a GKE cluster, as gcloud names it too."""
    place = cluster.location
    assert place is not None
    region = place.region or (place.zone or "").rpartition("-")[0]
    return f"gke_{place.project}_{region}_{cluster.name}"


def section_defaults(cluster: ClusterConfig) -> dict[str, Any]:
    """The settings of `kubernetes:` that such a cluster's names give; none for another cluster."""
    if not is_created(cluster) or cluster.location is None or cluster.consumption is None:
        return {}
    return {
        "context": context_name(cluster),
        "namespace": namespace_for(cluster),
        "queue": default_pool_name(cluster.name, cluster.consumption),
        "service_account": SERVICE_ACCOUNT,
        "run_as_user": IMAGE_USER,
    }


def namespace_for(cluster: ClusterConfig) -> str:
    """The namespace whose level of Pod Security allows what a run on these machines needs."""
    section: KubernetesConfig = getattr(cluster, "kubernetes", None) or KubernetesConfig()
    # A plugin without a known daemon is refused when the run is planned.
    plain = section.model_copy(update={"nccl_plugin": None})
    try:
        facts = load_catalog(cluster.hardware)
    except UserError:  # reported where the machine's facts are needed
        facts = load_catalog(None)
    on = _OnCluster(cluster.model_copy(update={"kubernetes": plain}), facts)
    machine = on.facts.find_machine(cluster.machine) if cluster.machine else None
    needed = pod_network.privileges(pod_network.network_values(on, machine))
    return PRIVILEGED if needed else RESTRICTED
