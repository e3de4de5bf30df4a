"""The plan of a cluster: everything that `drillyard cluster up` makes, computed first.

A plan is a value: the same config and the same facts give the same plan, byte for byte. It calls no
cloud and contains no secret.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drillyard.hardware.capacity import Quota
from drillyard.hardware.facts import Fact
from drillyard.hardware.machines import Consumption, Machine
from drillyard.plan_files import ExplainedField

MADE_BY = "Made by `drillyard cluster plan --output`."
"""The mark of a plan's directory."""
CLUSTER_LABEL = "drillyard-cluster"
"""Key of the label that everything of a cluster carries, with the cluster's name."""


@dataclass(frozen=True)
class Pool:
    """A pool of GPU nodes: all of one machine, bought in one way, in one zone. Where a service
    chooses the zone for each run, `zone` is the region."""

    name: str
    machine: Machine
    consumption: Consumption
    nodes: int
    zone: str
    reservations: tuple[str, ...] = ()
    key: str = ""
    """The key of the config that describes it: empty for the first, else `cluster.pools.0`, as
    after `--set`."""
    per_run: bool = False
    """Whether a service makes its nodes for each run, and none stand."""
    kept: bool = False
    """Whether nodes that came stay, used or not, also those of flex-start."""

    @property
    def region(self) -> str:
        """The region of the pool's zone: us-central1 of us-central1-b."""
        return self.zone if self.zone.count("-") < 2 else self.zone.rpartition("-")[0]

    @property
    def is_queued(self) -> bool:
        """Whether nodes come all together, on request of Kueue (DWS)."""
        return self.consumption == "flex-start-queued"

    @property
    def scales_from_zero(self) -> bool:
        """Whether the pool has no nodes until a run asks for them."""
        on_request = self.consumption in ("flex-start", "flex-start-queued")
        return self.per_run or (on_request and not self.kept)


@dataclass(frozen=True)
class NodeInterface:
    """One additional interface of GPU nodes: the Network object of the cluster by which pods name
    it, its VPC and subnet, and how pods get it (NetDevice or RDMA)."""

    network_object: str
    vpc: str
    subnet: str
    device_mode: str


@dataclass(frozen=True)
class ExistingNetwork:
    """A VPC of the user's with the subnet of the nodes, and what the cluster needs of both. It is
    neither made nor changed nor removed.

    `addresses`: those that the nodes take of the subnet; `ranges`: its secondary ranges by name,
    each with the addresses that it must have; `mtu`: the largest frames of host NICs.
    """

    project: str
    name: str
    subnet: str
    region: str
    addresses: int
    mtu: int
    ranges: Mapping[str, int]
    private_nodes: bool
    own_firewall: bool
    """Whether rules of the VPC itself must let the nodes reach each other, and ssh reach them; GKE
    makes its own."""
    ssh_from: tuple[str, ...] = ()
    """From where ssh reaches the nodes."""
    needs_peering: bool = False
    """Whether storage of Google's is reached by private services access."""
    users: tuple[str, ...] = ()
    """Who uses the subnet beside the person that runs `up`, as IAM writes them, with {number} for
    the number of the cluster's project."""
    agents: tuple[str, ...] = ()
    """Who needs roles/container.hostServiceAgentUser on the host project."""

    @property
    def path(self) -> str:
        return f"projects/{self.project}/global/networks/{self.name}"

    @property
    def subnet_path(self) -> str:
        return f"projects/{self.project}/regions/{self.region}/subnetworks/{self.subnet}"


@dataclass(frozen=True)
class PlannedResource:
    """One thing that will exist in the cloud.

    `address` is Terraform's (`google_compute_network.data_0`); `name` is the cloud's own. `project`
    things have no location.
    """

    address: str
    kind: str
    name: str
    location: str | None = None
    labelled: bool = False
    """Whether it carries the cluster's label; others are recognised by their names."""
    made_by: str = "terraform"
    """`terraform`, `gcluster` (then `address` is the blueprint's module), or `drillyard` for the
    bucket of the state."""


@dataclass(frozen=True)
class PriceLine:
    """The price of one part in US dollars per hour. `usd_per_hour` None: no price is known, and
    `missing` says which option gives it."""

    what: str
    count: int
    usd_per_hour: Fact[float] | None
    """Of all `count` together."""
    missing: str = ""
    running: bool = True
    """False: the part exists only while a run uses it (a pool that scales from zero)."""
    pool: str = ""
    """Name of the GPU pool whose nodes it is; empty for all else."""
    price_option: str = ""
    """The option that gives the price, for nodes: `--price spare=USD`."""


@dataclass(frozen=True)
class ChartRelease:
    """One Helm release that `up` installs, in the order of the plan."""

    name: str
    namespace: str
    chart: str
    """An OCI address, or the name of a chart of ours (`drillyard-cluster`)."""
    version: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class NodeGroup:
    """Terraform's addresses of a managed group of hosts, and of the request for all of them."""

    group: str
    request: str


@dataclass(frozen=True)
class HostLogin:
    """How one logs in to the hosts of a cluster without Kubernetes. `through_iap`: by Google's
    tunnel, as they have no public addresses; `hosts`: Terraform's addresses of the virtual
    machines, the first one is rank 0's; or the `group` that they will be in, once its request is
    granted."""

    user: str
    identity_file: str | None
    through_iap: bool
    hosts: tuple[str, ...]
    group: NodeGroup | None = None


@dataclass(frozen=True)
class ToolkitDeployment:
    """A cluster that Cluster Toolkit makes from files: each by its name, with text and mode, and
    the address ranges of its subnets by their names."""

    files: Mapping[str, tuple[str, int]]
    ranges: Mapping[str, str]
    groups: tuple[str, ...]
    """The groups of the deployment that Terraform makes, in their order: each has a state."""
    controller: str
    """The name of the controller, which makes and deletes the nodes that jobs ask for."""

    further_kinds: tuple[str, ...]
    """Kinds of what its modules make beside the resources of the plan: who deploys needs rights for
    them."""
    network_profile: str | None
    """The profile of the RDMA network, us-central1-b-vpc-roce; None: there is no such network."""

    def state_prefix(self, cluster: str, group: str) -> str:
        """Where the state bucket has a group's state: blueprint, deployment and group, of which
        the first two have the cluster's name
        (https://github.com/GoogleCloudPlatform/cluster-toolkit, pkg/config/expand.go)."""
        return f"{cluster}/{cluster}/{group}"


@dataclass(frozen=True)
class ForeignRecipe:
    """The recipe of somebody else that makes a cluster, which `up` does not carry out: its name,
    and the files of a directory by which a person does, each with text and mode."""

    name: str
    files: Mapping[str, tuple[str, int]]


@dataclass(frozen=True)
class ClusterPlan:
    """A cluster before it exists."""

    name: str
    platform: str
    project: str
    region: str
    zone: str
    pools: tuple[Pool, ...]
    terraform: Mapping[str, Any]
    """main.tf.json: one JSON document, without the state's backend."""
    state_bucket: str
    resources: tuple[PlannedResource, ...]
    """All that exists after `up` of this plan, in the order of creation."""
    interfaces: tuple[NodeInterface, ...] = ()
    """The additional interfaces of all nodes, each Network object once."""
    releases: tuple[ChartRelease, ...] = ()
    prices: tuple[PriceLine, ...] = ()
    quotas: tuple[Quota, ...] = ()
    services: tuple[str, ...] = ()
    """APIs of the project that must be enabled: container.googleapis.com."""
    warnings: tuple[str, ...] = ()
    """What cannot be undone, and what the plan cannot check."""
    fields: tuple[ExplainedField, ...] = ()
    """Why every field is as it is (`--explain`)."""
    launch_settings: Mapping[str, Any] | None = None
    """What `launch` needs of the made cluster and the config leaves out: `kubernetes`, `image`;
    where it takes another file, all of that one, without hosts."""
    version_needs: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """What of the pools needs a version of GKE, and the first one of each minor version."""
    existing_bucket: str | None = None
    """A bucket that the config takes as it is: never the cluster's to delete."""
    network: ExistingNetwork | None = None
    """The VPC of the user's that the nodes are in; None: the cluster makes its own."""
    job_network: str = ""
    """The VPC of the user's that the jobs of a service use, projects/NUMBER/global/networks/NAME;
    empty: none, or one that is made."""
    labels: Mapping[str, str] | None = None
    """The labels that everything carries which can carry labels."""
    state_endpoint: str = ""
    """The address of the S3-compatible service of Nebius that has the state's bucket; empty: it is
    Cloud Storage."""
    login: HostLogin | None = None
    """How its hosts are reached; None: it has none that are made with it."""
    toolkit: ToolkitDeployment | None = None
    """None: the cluster is not one that Cluster Toolkit makes."""
    recipe: ForeignRecipe | None = None
    """None: `up` makes the cluster."""
    job_service: str | None = None
    """The address of the service that makes the machines for each run; None: runs are on nodes."""

    @property
    def is_made_in_a_cloud(self) -> bool:
        """Whether the plan makes a cluster; else it completes one that exists."""
        return bool(self.terraform or self.toolkit or self.recipe)

    @property
    def cloud(self) -> str:
        """The cloud that it is made in: the name of its package (`clouds.py`)."""
        return "nebius" if self.state_endpoint else "google"

    @property
    def has_kubernetes(self) -> bool:
        """Whether runs are pods of a cluster of Kubernetes."""
        others = (self.login, self.job_service, self.toolkit, self.recipe)
        return all(each is None for each in others)

    @property
    def control_plane(self) -> str:
        """Terraform's address of the cluster of Kubernetes that it makes."""
        kinds = {"nebius": "nebius_mk8s_v1_cluster", "google": "google_container_cluster"}
        return f"{kinds[self.cloud]}.cluster"

    @property
    def launch_platform(self) -> str:
        """The platform of the config that `up` writes for `launch`, beside the cluster's own;
        empty: it completes the latter."""
        return str((self.launch_settings or {}).get("platform", ""))

    @property
    def made_by_terraform(self) -> tuple[PlannedResource, ...]:
        """The resources without the bucket of the state, which Terraform itself needs."""
        return tuple(each for each in self.resources if each.made_by == "terraform")
