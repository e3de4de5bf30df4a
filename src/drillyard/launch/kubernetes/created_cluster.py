"""The names on a cluster that `drillyard cluster up` has made, which are a run's defaults there,
and the pool that a run is for.

A cluster config of platform gke that has a section `cluster:`, or no settings of `kubernetes:`, is
that of such a cluster: its runs need no queue, namespace or service account in the file. The chart
`drillyard-cluster` gets the same names (`provision/cluster_chart.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drillyard.config.cluster import ClusterConfig
from drillyard.config.creation import CreationConfig, FurtherPool, default_pool_name
from drillyard.config.problems import Problem, SourceLocations, closest_name, raise_all
from drillyard.config.strict_model import ConfigOrigin
from drillyard.errors import ConfigError, UserError
from drillyard.hardware import load_catalog
from drillyard.hardware.catalog import Catalog
from drillyard.launch.kubernetes import pod_network
from drillyard.launch.kubernetes.config import KubernetesConfig

SERVICE_ACCOUNT = "trainer"
RESTRICTED, PRIVILEGED = "runs", "runs-privileged"
"""Namespaces, by the level of Pod Security that their pods pass."""
NODE_POOL = "cloud.google.com/gke-nodepool"
"""The label with the name of a node's pool."""
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


def on_pool(cluster: ClusterConfig, name: str | None, nodes: int | None) -> ClusterConfig:
    """A completed config as a run on one of its pools needs it (`config/cluster.py`). Where there
    are several, a run selects the nodes of its own.

    Raises ConfigError for a pool that the config does not have, or that lacks its reservation.
    """
    creation = cluster.cluster
    if creation is None or cluster.consumption is None:
        if name is not None:
            raise ConfigError(
                f"--pool {name}: {cluster.name} is not a cluster of `drillyard cluster`: its config"
                " has no section `cluster:`"
            )
        return cluster
    first = default_pool_name(cluster.name, cluster.consumption)
    names = [
        each.name or default_pool_name(cluster.name, each.consumption) for each in creation.pools
    ]
    queue = cluster.section_as(KubernetesConfig).queue
    chosen = name
    if chosen is None:
        chosen = queue if queue in names else first
    if chosen == first:
        # Without further pools all nodes are its own.
        return _in_queue(cluster, first if queue in names else queue, first) if names else cluster
    if chosen not in names:
        meant = closest_name(chosen, [first, *names])
        hint = f"did you mean {meant}?" if meant else f"it has {', '.join([first, *names])}"
        raise ConfigError(
            f"--pool {chosen or '(empty)'}: cluster {cluster.name} has no such pool; {hint}"
        )
    number = names.index(chosen)
    return _moved(cluster, creation.pools[number], number, chosen, nodes)


def _moved(
    cluster: ClusterConfig, pool: FurtherPool, number: int, name: str, nodes: int | None
) -> ClusterConfig:
    """The config with the settings of one of `cluster.pools` as the file's own, and that pool
    alone."""
    assert cluster.cluster is not None and cluster.location is not None
    at, places = ("cluster", "pools", number), cluster._origin.places
    if pool.consumption in ("reservation", "calendar") and len(pool.reservations) != 1:
        message = f"a pool of {pool.consumption} is made from exactly one: reservations: [NAME]"
        raise_all([Problem((*at, "reservations"), message)], places)
    changes: dict[str, Any] = {
        "nodes": nodes or pool.nodes,
        "consumption": pool.consumption,
        "reservation": next(iter(pool.reservations), None),
        "location": cluster.location.model_copy(
            update={"zone": pool.zone or cluster.location.zone}
        ),
        "cluster": cluster.cluster.model_copy(update={"pools": []}),
    }
    if pool.machine is not None:
        cluster = _with_machine(cluster, pool.machine, _facts(cluster))
    made = _in_queue(cluster.model_copy(update=changes), name, name)
    made._origin = ConfigOrigin(_places_of_pool(places, at))
    return made


def _in_queue(cluster: ClusterConfig, queue: str | None, pool: str) -> ClusterConfig:
    """The config with this queue and the nodes of one pool: its queue alone does not keep nodes of
    other pools from being counted."""
    section = cluster.section_as(KubernetesConfig)
    selector = {**section.node_selector, NODE_POOL: pool}
    changed = section.model_copy(update={"queue": queue, "node_selector": selector})
    return cluster.model_copy(update={"kubernetes": changed})


def _with_machine(cluster: ClusterConfig, name: str, facts: Catalog) -> ClusterConfig:
    """The config with another machine, which has its own network stack, and without the settings
    of `kubernetes:` that are of a stack which it does not have."""
    if name == cluster.machine:
        return cluster
    machine, default = facts.find_machine(name), KubernetesConfig()
    stack = None if machine is None else facts.network_stacks.get(machine.network_stack)
    keys = []
    if stack is not None:  # a machine that is not known is refused when the run is planned
        keys += ["pod_network"] if stack.device_class is None else []
        keys += ["nccl_plugin"] if not stack.coupled_versions else []
        keys += ["daemon_resources"] if stack.sidecar is None else ["network_libraries"]
    section: KubernetesConfig = getattr(cluster, "kubernetes", None) or default
    changes = {"machine": name, "network_stack": None, "processes_per_node": None}
    kept = section.model_copy(update={key: getattr(default, key) for key in keys})
    return cluster.model_copy(update={**changes, "kubernetes": kept})


def _places_of_pool(
    places: SourceLocations | None, at: tuple[str | int, ...]
) -> SourceLocations | None:
    """The places of a config whose own settings are those of a pool."""
    if places is None:
        return None
    own = {"reservations": ("reservation",), "zone": ("location", "zone")}
    found = dict(places)
    for path, place in places.items():
        if path[: len(at)] == at and len(path) == len(at) + 1:
            found[own.get(str(path[-1]), (path[-1],))] = place
    return found


def _facts(cluster: ClusterConfig) -> Catalog:
    try:
        return load_catalog(cluster.hardware)
    except UserError:  # reported where the machine's facts are needed
        return load_catalog(None)


def namespace_for(cluster: ClusterConfig) -> str:
    """The namespace whose level of Pod Security allows what runs on several nodes of any pool need:
    one for all runs of a cluster, as `drillyard runs` looks in one."""
    facts = _facts(cluster)
    further = cluster.cluster.pools if cluster.cluster else ()
    names = dict.fromkeys([cluster.machine, *(each.machine for each in further)])
    given = [_with_machine(cluster, name, facts) for name in names if name] or [cluster]
    return PRIVILEGED if any(_needs_privilege(each, facts) for each in given) else RESTRICTED


def _needs_privilege(cluster: ClusterConfig, facts: Catalog) -> bool:
    section: KubernetesConfig = getattr(cluster, "kubernetes", None) or KubernetesConfig()
    # A plugin without a known daemon is refused when the run is planned.
    plain = section.model_copy(update={"nccl_plugin": None})
    changes = {"kubernetes": plain, "nodes": max(cluster.nodes, 2)}
    on = _OnCluster(cluster.model_copy(update=changes), facts)
    machine = on.facts.find_machine(cluster.machine) if cluster.machine else None
    return bool(pod_network.privileges(pod_network.network_values(on, machine)))
