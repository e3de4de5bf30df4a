"""What every part of a blueprint needs to know: the config with its only nodeset, and networks."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Network

from drillyard.config.creation import HeadConfig
from drillyard.hardware.cluster_toolkit import HomeStorage, home_storage
from drillyard.launch.slurm.config import SlurmConfig
from drillyard.provision.cluster_plan import Pool
from drillyard.provision.gcp.address_ranges import (
    PLANNED_NODES,
    RangeSizes,
    cluster_ranges,
    subnet_prefix,
)
from drillyard.provision.gcp.names import state_bucket_name
from drillyard.provision.gcp.pool_networks import InterfaceNeed, PoolNetwork, pool_networks
from drillyard.provision.gcp.settings import GoogleSettings
from drillyard.provision.pools import read_pools

DEFAULT_PARTITION = "gpu"
HOME = "/home"
LOGIN = "login"
CONTROLLER_DISK = "pd-balanced"
"""Boot disk of controller and login node."""


@dataclass(frozen=True)
class SlurmCluster:
    """A config whose machine is known and for sale in its way."""

    settings: GoogleSettings
    network: PoolNetwork

    @property
    def pool(self) -> Pool:
        return self.network.pool

    @property
    def own(self) -> HeadConfig:
        return self.settings.creation.head

    @property
    def partition(self) -> str:
        return self.settings.cluster.section_as(SlurmConfig).partition or DEFAULT_PARTITION

    @property
    def home(self) -> HomeStorage:
        return home_storage(self.own.home)

    @property
    def home_gib(self) -> int:
        return self.own.home_gib or self.home.default

    @property
    def state_bucket(self) -> str:
        given = self.settings.creation.state_bucket
        return given or state_bucket_name(self.settings.project, self.settings.name)

    @property
    def login_node(self) -> str:
        """The name of the login node, as the toolkit's controller forms it."""
        return f"{self.settings.name}-{LOGIN}-001"

    @property
    def data(self) -> tuple[InterfaceNeed, ...]:
        """The interfaces to data networks."""
        return tuple(each for each in self.network.interfaces if not self._of_host(each))

    @property
    def host(self) -> tuple[InterfaceNeed, ...]:
        """Those of second host NICs."""
        return tuple(each for each in self.network.interfaces if self._of_host(each))

    @property
    def data_prefix(self) -> int:
        """The prefix of each data NIC's subnet."""
        return subnet_prefix(max(self.pool.nodes, PLANNED_NODES))

    @property
    def range_sizes(self) -> RangeSizes:
        """What the ranges must hold. The toolkit cuts one range into the subnets of all data NICs:
        it counts as one subnet with all their addresses."""
        kept = 4
        nodes, count = self.pool.nodes, len(self.data)
        data = count * 2 ** (32 - self.data_prefix) - kept if count else 0
        # Controller and login node have addresses beside the nodes.
        return RangeSizes(nodes + 2, nodes, None, (nodes if self.host else 0, data))

    def ranges(self) -> tuple[IPv4Network, IPv4Network | None, IPv4Network | None]:
        """The range of the nodes, of second host NICs, and of all data NICs; None where there are
        no such NICs."""
        found = cluster_ranges(self.settings.creation.ranges, self.range_sizes)
        left = list(found.data)
        host = left.pop(0) if self.host else None
        return found.nodes, host, left.pop(0) if self.data else None

    @staticmethod
    def _of_host(need: InterfaceNeed) -> bool:
        return need.vpc == need.network_object and need.vpc.startswith("gvnic")


def read_slurm_cluster(settings: GoogleSettings) -> SlurmCluster | None:
    """None where the machine is not known, or nothing says how it is bought."""
    found, _ = read_pools(settings.cluster, settings.facts)
    pools = [each for each in found if not each.key]
    if not pools:
        return None
    (network,) = pool_networks(settings.cluster, pools, settings.facts)
    return SlurmCluster(settings, network)
