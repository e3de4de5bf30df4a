"""What cannot be undone of a GKE cluster, and what its plan cannot check."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from drillyard.config.creation import CreationConfig
from drillyard.hardware.cloud_limits import limit, way_of_buying
from drillyard.launch.kubernetes.config import KubernetesConfig
from drillyard.launch.kubernetes.pod_network import first_versions
from drillyard.provision.cluster_plan import Pool
from drillyard.provision.gcp.node_network import network_warning
from drillyard.provision.gcp.pool_networks import PoolNetwork
from drillyard.provision.gcp.settings import GoogleSettings
from drillyard.provision.gke.pool_rules import version_needs
from drillyard.provision.gke.versions import version_numbers

HOURS_OF_A_DAY = 24


def gke_warnings(settings: GoogleSettings, networks: Sequence[PoolNetwork]) -> Iterator[str]:
    """The warnings, first those of the whole cluster."""
    cluster, creation, facts = settings.cluster, settings.creation, settings.facts
    region = settings.region
    yield (
        "name, location and cluster.ranges cannot be changed later: another value replaces the"
        " cluster"
    )
    yield from network_warning(settings)
    if creation.authorized_networks:
        yield "cluster.authorized_networks: must contain this machine, or `up` cannot go on"
    bucket = cluster.storage.bucket
    if bucket is not None and creation.existing_bucket:
        yield f"storage.bucket: gs://{bucket} must exist; runs may then write to it and delete"
    elif bucket is not None:
        yield (
            "cluster.bucket_keep_versions: a bucket gets its hierarchical namespace when it is"
            f" made, or never: gs://{bucket} {_namespace(creation)}"
        )
    if bucket is None and cluster.section_as(KubernetesConfig).volume_claim is None:
        yield "storage.bucket is not given: runs have no place for their directories"
    place = (creation.bucket_location or region).lower()
    if bucket is not None and place != region and place in facts.regions:
        yield (
            f"cluster.bucket_location: gs://{bucket} is in {place} and the nodes are in {region}:"
            " reading and writing is slower, and the traffic is billed"
        )
    nodes = sum(network.pool.nodes for network in networks)
    if not (allowed := limit("nodes-of-a-cluster-unasked")).allows(nodes):
        yield f"nodes: more than {allowed.in_words} in one cluster must be granted by Google"
    yield from _shared_reservations([network.pool for network in networks])
    needs = [need for network in networks for need in version_needs(network) if need[1]]
    if creation.version is None and needs:
        # The strictest is named; the others are then met, as their first versions are earlier.
        what, versions = max(needs, key=lambda need: max(map(version_numbers, need[1])))
        yield (
            f"cluster.version is not given, so channel {creation.release_channel} decides it, and"
            f" {what} needs {first_versions(versions)} or later: compare with gcloud container"
            f" get-server-config --location {region}"
        )
    for network in networks:
        yield from _of_pool(network.pool)
        if network.dranet:
            yield f"{network.pool.name}: GKE makes its data networks, and removes them with it"


def _of_pool(pool: Pool) -> Iterator[str]:
    way = way_of_buying(pool.consumption)
    if way.hours_ahead is not None:
        yield (
            f"{pool.name}: a reservation of calendar mode must be asked for {way.hours_ahead} hours"
            " ahead, and cannot be cancelled or changed"
        )
    if way.longest_hours is not None:
        days = way.longest_hours / HOURS_OF_A_DAY
        yield f"{pool.name}: its nodes end after {days:g} days, whatever runs on them"
    if pool.consumption in ("on-demand", "reservation", "calendar", "spot"):
        yield f"{pool.name}: its {pool.nodes} nodes are billed from `up` to `down`, used or not"
    if not (allowed := limit("nodes-of-a-pool-in-a-zone")).allows(pool.nodes):
        yield (
            f"{pool.name}: more than {allowed.in_words} in one zone of a pool must be granted by"
            " Google"
        )


def _shared_reservations(pools: Sequence[Pool]) -> Iterator[str]:
    """Reservations whose nodes several pools take: their number must be there for all together."""
    users: dict[str, list[Pool]] = {}
    for pool in pools:
        for text in pool.reservations:
            users.setdefault(text, []).append(pool)
    for text, sharing in users.items():
        if len(sharing) > 1:
            names = ", ".join(pool.name for pool in sharing)
            nodes = sum(pool.nodes for pool in sharing)
            yield f"reservation {text}: {names} take {nodes} nodes from it together"


def _namespace(creation: CreationConfig) -> str:
    return "gets none" if creation.bucket_keep_versions else "gets one"
