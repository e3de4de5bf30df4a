"""The VPC that the nodes are in: the cluster's own, or one of the user's (`cluster.network`).

A shared VPC is in another project, its host
(https://cloud.google.com/vpc/docs/shared-vpc). What is the user's stays as it is: no subnet,
router, NAT or firewall rule of it is made or removed; `--check` looks whether they are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drillyard.config.creation import AddressRanges, NetworkConfig
from drillyard.config.problems import Problem
from drillyard.hardware.catalog import Catalog
from drillyard.hardware.facts import cited
from drillyard.provision.cluster_plan import ExistingNetwork
from drillyard.provision.gcp.names import PROJECT_ID
from drillyard.provision.gcp.settings import GoogleSettings

IAP_RANGE = "35.235.240.0/20"
"""Addresses from which the connections of Google's tunnel come
(https://cloud.google.com/iap/docs/using-tcp-forwarding)."""
PEERING = "servicenetworking-googleapis-com"
"""The peering of a VPC with Google's services (private services access): each VPC has one
(https://cloud.google.com/vpc/docs/configure-private-services-access)."""
GOOGLE_ACCOUNT = "serviceAccount:{number}@cloudservices.gserviceaccount.com"
"""Who makes the machines of a managed group, also those of GKE
(https://cloud.google.com/compute/docs/access/service-accounts#google_apis_service_agent)."""
GKE_AGENT = "serviceAccount:service-{number}@container-engine-robot.iam.gserviceaccount.com"
"""https://cloud.google.com/kubernetes-engine/docs/how-to/cluster-shared-vpc"""


@dataclass(frozen=True)
class NodeNetwork:
    """The network of the nodes as resources refer to it: expressions, or the paths of what exists.
    `pods`, `services`: names of the subnet's secondary ranges; `after`: what must be there before
    a node, as its way to the internet."""

    network: str
    subnet: str
    pods: str = "pods"
    services: str = "services"
    after: tuple[str, ...] = ()
    source: str = "drillyard"


def given_network(settings: GoogleSettings) -> NodeNetwork | None:
    """The user's network; None where the cluster makes its own."""
    given = settings.creation.network
    if given is None:
        return None
    host = given.project or settings.project
    return NodeNetwork(
        f"projects/{host}/global/networks/{given.name}",
        f"projects/{host}/regions/{settings.region}/subnetworks/{given.subnet}",
        given.pods or "pods",
        given.services or "services",
        source="cluster.yaml: cluster.network",
    )


def host_mtu(facts: Catalog) -> tuple[int, str, str]:
    """The largest frames of the host NICs of any network stack, with the reason and source."""
    stacks = [each for each in facts.network_stacks.values() if each.networks is not None]
    mtu, name = max((each.networks.host_mtu or 0, each.name) for each in stacks if each.networks)
    why = "the frame size of host NICs, as in the VPC of a second one"
    return mtu, why, cited(facts.network_stack(name), "networks")


def existing_network(
    settings: GoogleSettings,
    addresses: int,
    *,
    ranges: Mapping[str, int] | None = None,
    users: Sequence[str] = (),
    agents: Sequence[str] = (),
    own_firewall: bool = True,
    needs_peering: bool = False,
) -> ExistingNetwork | None:
    """What the plan says of the user's network, with what the nodes need of it; None where the
    cluster makes its own. The parameters are those of `ExistingNetwork`."""
    given, creation = settings.creation.network, settings.creation
    if given is None:
        return None
    ssh = (IAP_RANGE,) if creation.private_nodes else tuple(creation.authorized_networks)
    shared = is_shared(given, settings.project)
    return ExistingNetwork(
        project=given.project or settings.project,
        name=given.name,
        subnet=given.subnet,
        region=settings.region,
        addresses=addresses,
        mtu=host_mtu(settings.facts)[0],
        ranges=dict(ranges or {}),
        private_nodes=creation.private_nodes,
        own_firewall=own_firewall,
        ssh_from=ssh if own_firewall else (),
        needs_peering=needs_peering,
        users=tuple(users) if shared else (),
        agents=tuple(agents) if shared else (),
    )


def is_shared(network: NetworkConfig, project: str) -> bool:
    """Whether it is in another project than the cluster."""
    return network.project not in (None, project)


def network_setting_problems(
    network: NetworkConfig | None, ranges: AddressRanges, *, kubernetes: bool
) -> Iterator[Problem]:
    """What is wrong with `cluster.network`. `kubernetes`: whether pods and services have addresses
    of the subnet."""
    if network is None:
        return
    path = ("cluster", "network")
    if network.project is not None and PROJECT_ID.fullmatch(network.project) is None:
        message = (
            f"'{network.project}' is not the id of a project: at most 30 lower-case letters, digits"
            " and '-': gcloud compute shared-vpc get-host-project PROJECT"
        )
        yield Problem((*path, "project"), message)
    for key in ("pods", "services"):
        given: Any = getattr(network, key)
        if kubernetes and given is None:
            message = (
                f"missing: the name of the secondary range of {network.subnet} for {key}: gcloud"
                f" compute networks subnets describe {network.subnet} --region=REGION"
                f" --format='value(secondaryIpRanges[].rangeName)'"
            )
            yield Problem((*path, key), message)
        if not kubernetes and given is not None:
            message = "only a cluster of Kubernetes has such addresses: remove it"
            yield Problem((*path, key), message)
    if kubernetes and network.pods is not None and network.pods == network.services:
        message = f"found '{network.services}', the range of the pods: name another one"
        yield Problem((*path, "services"), message)
    for key in ("nodes", *(("pods", "services") if kubernetes else ())):
        if getattr(ranges, key) is not None:
            message = f"the addresses are those of {network.subnet} (cluster.network): remove it"
            yield Problem(("cluster", "ranges", key), message)


def network_warning(settings: GoogleSettings) -> Iterator[str]:
    """What the plan cannot check of the user's network."""
    given = settings.creation.network
    if given is None:
        return
    where = given.project or settings.project
    shared = f" It is shared by {where}." if is_shared(given, settings.project) else ""
    yield (
        f"cluster.network: {given.name} with its subnet {given.subnet}, its way to the internet and"
        f" its firewall rules must exist in {where}, and stay as they are; --check looks for"
        f" them.{shared}"
    )
