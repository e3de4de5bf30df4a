"""Machines: a cloud's machine types and users' own nodes, with accelerators, NICs, host, disks,
storage and prices.

The facts are in machines.yaml and prices.yaml. Data NICs carry the traffic between GPUs of
different nodes, host NICs everything else. A price is a snapshot, shown with its date; one of
another region never replaces a missing one.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from drillyard.allowed_values import Allowed
from drillyard.hardware.facts import CatalogRow, Fact, Record, combine

Consumption = Literal[
    "on-demand", "reservation", "spot", "flex-start", "flex-start-queued", "calendar"
]
GkeVersion = Annotated[
    str,
    Field(pattern=r"^[0-9]+\.[0-9]+\.[0-9]+-gke\.[0-9]+$"),
    Allowed("a whole version of GKE, such as 1.34.1-gke.1829001"),
]
BITS_PER_BYTE = 8
BILLED_AS = {"flex-start-queued": "flex-start"}
"""Ways of buying that a cloud bills as another one."""


class Nics(Record):
    """`count` NICs of `gbps` Gb/s each, one direction."""

    count: NonNegativeInt
    gbps: NonNegativeFloat


class Disks(Record):
    """`count` local SSDs of `gib` GiB each."""

    count: PositiveInt
    gib: PositiveFloat


class MachineStorage(Record):
    """Storage for checkpoints, its speed in GB/s: of one node, and of all nodes together; None: not
    published."""

    kind: str
    per_node_gb_per_s: PositiveFloat | None = None
    aggregate_gb_per_s: PositiveFloat | None = None


class PodNeeds(Record):
    """What pods on a machine need where the ways of its network stack are not all open to them.

    `network`: the only way to the data NICs; `volumes`: names of the stack's volumes that nodes
    have (all other libraries are in the image); `node_selector`: labels of the nodes;
    `gke_versions` (the first of each minor version) and `requires`: take precedence over the
    stack's.
    """

    network: Literal["dranet"]
    volumes: tuple[str, ...] = ()
    node_selector: dict[str, str] = Field(default={})
    gke_versions: tuple[GkeVersion, ...] = ()
    requires: dict[str, str] = Field(default={})


class Machine(CatalogRow):
    """One machine type. What is not known is None.

    `infiniband_fabrics`: the networks by region, one of which joins a GPU cluster (Nebius).
    `link_domain_accelerators`: GPUs, over several machines, that one NVLink domain joins.
    `accelerator_type`: the GPU in Google Cloud's calls and in GKE's node label. `gpu_quota`: the
    GPU in the cloud's quota names; `gpu_quota_form`: whether Google Cloud counts it under a metric
    of its own or as a family of one metric. `local_disks`: those that every one has.
    `consumption`: how it can be bought. `compact_flex_start`: whether GKE places its flex-start
    nodes near each other. `pods`: where Kubernetes offers fewer ways than the network stack has.
    """

    name: str
    accelerator: str
    num_accelerators: PositiveInt
    network_stack: str
    infiniband_fabrics: dict[str, tuple[str, ...]] = Field(default={})
    data_nics: Nics = Nics(count=0, gbps=0)
    host_nics: Nics = Nics(count=0, gbps=0)
    network_gbps: PositiveFloat | None = None
    cloud: Literal["gcp", "aws", "nebius"] | None = None
    aliases: tuple[str, ...] = ()
    preset: str | None = None
    link_domain_accelerators: PositiveInt | None = None
    architecture: Literal["x86_64", "arm64"] = "x86_64"
    vcpus: PositiveInt | None = None
    cores: PositiveInt | None = None
    host_memory_gib: PositiveFloat | None = None
    local_disks: Disks | None = None
    storage: MachineStorage | None = None
    accelerator_type: str | None = None
    vertex_accelerator_type: str | None = None
    gpu_quota: str | None = None
    gpu_quota_form: Literal["metric", "family"] | None = None
    cpu_quota: str | None = None
    boot_disk: Literal["hyperdisk-balanced", "pd-balanced", "pd-ssd", "network-ssd"] | None = None
    consumption: tuple[Consumption, ...] = ()
    compact_flex_start: bool = False
    pods: PodNeeds | None = None

    @property
    def local_ssd_gib(self) -> float:
        """All local SSDs of one machine together."""
        return 0.0 if self.local_disks is None else self.local_disks.count * self.local_disks.gib

    def nic_gb_per_s_per_accelerator(self) -> Fact[float] | None:
        """Each GPU's share of the line rate between nodes, one direction; None where no NIC is
        known.

        Without data NICs the host NICs carry everything.
        """
        kind, nics = (
            ("data_nics", self.data_nics) if self.data_nics.count else ("host_nics", self.host_nics)
        )
        if not nics.count:
            return None
        gb_per_s = nics.count * nics.gbps / BITS_PER_BYTE / self.num_accelerators
        return combine(gb_per_s, self.fact(kind), self.fact("num_accelerators"))

    def storage_gb_per_s(self, num_nodes: int) -> Fact[float] | None:
        """The most that `num_nodes` machines can write to their storage together; None where
        nothing is known.

        A node without a published rate is bounded by its host NICs.
        """
        assert num_nodes > 0
        bounds: list[Fact[float]] = []
        if self.storage is not None and self.storage.per_node_gb_per_s is not None:
            bounds.append(self.fact("storage.per_node_gb_per_s") * num_nodes)
        elif self.host_nics.count:
            line_rate = self.host_nics.count * self.host_nics.gbps / BITS_PER_BYTE
            bounds.append(combine(line_rate * num_nodes, self.fact("host_nics")))
        if self.storage is not None and self.storage.aggregate_gb_per_s is not None:
            bounds.append(self.fact("storage.aggregate_gb_per_s"))
        return combine(min(bound.value for bound in bounds), *bounds) if bounds else None


class Price(CatalogRow):
    """Price of one hour, in US dollars: of a node or of a GPU, whichever is quoted."""

    machine: str
    consumption: Consumption
    region: str | None = None
    usd_per_node_hour: PositiveFloat | None = None
    usd_per_gpu_hour: PositiveFloat | None = None

    def node_hour(self, machine: Machine) -> Fact[float]:
        """Dollars for one hour of one `machine`, host included."""
        if self.usd_per_node_hour is not None:
            return combine(self.usd_per_node_hour, self.fact("usd_per_node_hour"))
        return self.fact("usd_per_gpu_hour") * machine.num_accelerators

    def gpu_hour(self, machine: Machine) -> Fact[float]:
        """Dollars for one hour of one of its GPUs, the host's share included."""
        return self.node_hour(machine) / machine.num_accelerators
