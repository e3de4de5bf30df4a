"""Network stacks: the settings, images, volumes and interfaces with which NCCL uses a machine's
data NICs.

The facts are in network_stacks.yaml; launchers make pods and scripts from them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from drillyard.hardware.facts import CatalogRow, Record
from drillyard.hardware.machines import GkeVersion, Machine


class Volume(Record):
    """Mount of a container: a path of the host, or memory of at most `size_limit_gib` GiB."""

    name: str
    mount_path: str
    host_path: str | None = None
    medium: Literal["Memory"] | None = None
    size_limit_gib: PositiveFloat | None = None


class Sidecar(Record):
    """A container that must run next to the ranks; `devices` are those of its device annotation.

    `arguments` stand for `{arguments}` in the command, where a row of `coupled_versions` has no
    others.
    """

    name: str
    command: tuple[str, ...]
    arguments: str = ""
    capabilities: tuple[str, ...] = ()
    environment: dict[str, str] = Field(default={})
    devices: tuple[str, ...] = ()
    volumes: tuple[Volume, ...] = ()


class Interfaces(Record):
    """Numbering of a pod's interfaces: `eth{first_data}` is on the network
    `network.format(first_network)`, and so on. Without `first_data` a pod has its primary interface
    only."""

    primary: str
    first_data: PositiveInt | None = None
    network: str | None = None
    first_network: NonNegativeInt = 0


class Networks(Record):
    """Additional VPCs of a cluster: one per data NIC, or one for all, and one for a second host
    NIC."""

    vpcs_per_data_nic: NonNegativeInt = 0
    shared_vpcs: NonNegativeInt = 0
    host_vpcs: NonNegativeInt = 0
    mtu: PositiveInt | None = None
    host_mtu: PositiveInt | None = None
    profile: str | None = None
    firewall: bool = True
    device_mode: Literal["NetDevice", "RDMA"] | None = None


class AdditionalNetwork(NamedTuple):
    """A subnet of a cluster for one NIC of each node. `label`: of its Network object; `vpc`: the
    last part of its VPC's name; `firewall`: whether rules must let the nodes through."""

    label: str
    vpc: str
    firewall: bool
    of_host: bool


class GkeRequirements(Record):
    """What GKE must have for a stack. `versions`: the first version of each minor version that
    works, by machine or for `any`; `dranet_versions`: the same where pods get the NICs by DRANET;
    `driver`: which of GKE's drivers, its default or its latest one."""

    versions: dict[str, tuple[GkeVersion, ...]] = Field(default={})
    dranet_versions: tuple[GkeVersion, ...] = ()
    driver: Literal["DEFAULT", "LATEST"] | None = None


class NetworkStack(CatalogRow):
    """One stack. `environment` is complete where `profile_script` is None; else sourcing the script
    sets the rest.

    `machine_environment` adds settings by machine. Fields that begin with `host_` apply to virtual
    machines and bare metal: `host_environment` is laid over `environment`, and `host_library_path`
    finds libraries. Variables in `forbidden` must not be set; for those in `enforced` the stack
    aborts a job with another value; those in `superseded` belong to an earlier set. `versions` are
    those of `images`; each row of `coupled_versions` is a plugin and the daemon (`rxdm`) that works
    with it, with its `arguments` where they differ. `device_class` gives pods the data NICs as
    devices (DRANET). `gke`: versions and driver of GKE; `requires`: what else must be there.
    """

    name: str
    title: str
    environment: dict[str, str] = Field(default={})
    profile_script: str | None = None
    profile_environment: dict[str, str] = Field(default={})
    machine_environment: dict[str, dict[str, str]] = Field(default={})
    host_environment: dict[str, str] = Field(default={})
    host_profile_script: str | None = None
    host_library_path: str | None = None
    host_volumes: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()
    enforced: tuple[str, ...] = ()
    superseded: tuple[str, ...] = ()
    images: dict[str, str] = Field(default={})
    versions: dict[str, str] = Field(default={})
    coupled_versions: tuple[dict[str, str], ...] = ()
    sidecar: Sidecar | None = None
    volumes: tuple[Volume, ...] = ()
    devices: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    interfaces: Interfaces | None = None
    networks: Networks | None = None
    kubernetes_resource: str | None = None
    device_class: str | None = None
    gke: GkeRequirements = GkeRequirements()
    requires: dict[str, str] = Field(default={})
    notes: tuple[str, ...] = ()

    def gke_versions(self, machine: Machine, *, dranet: bool) -> tuple[tuple[str, ...], str]:
        """The first GKE versions for pods on `machine`, one of each minor version, and the path of
        the fact; empty: no minimum is known."""
        if dranet:
            return self.gke.dranet_versions, "gke.dranet_versions"
        name = machine.name if machine.name in self.gke.versions else "any"
        return self.gke.versions.get(name, ()), f"gke.versions.{name}"

    def environment_on(self, machine: str) -> dict[str, str]:
        """The settings for a container on `machine`."""
        return {**self.environment, **self.machine_environment.get(machine, {})}

    def host_environment_on(self, machine: str) -> dict[str, str]:
        """The settings on a virtual machine or bare metal; the paths to libraries are
        `host_library_path`."""
        settings = {**self.environment_on(machine), **self.host_environment}
        settings.pop("LD_LIBRARY_PATH", None)
        return settings

    def daemon_of(self, plugin: str) -> dict[str, str] | None:
        """The daemon's version and arguments (`rxdm`, `arguments`) that work with a version of the
        plugin; None: none is known."""
        return next((each for each in self.coupled_versions if each["plugin"] == plugin), None)

    def installer_image(self, architecture: str, plugin: str | None = None) -> str | None:
        """The image that installs the stack's libraries on nodes: of a version of its plugin, where
        one is given. None: there is nothing to install."""
        key = "installer" if architecture == "x86_64" else f"installer_{architecture}"
        image = self.images.get(key)
        if image is None or plugin is None:
            return image
        return f"{image.rpartition(':')[0]}:v{plugin}"

    def pod_interfaces(self, machine: Machine) -> dict[str, str]:
        """The network of each interface of a pod on `machine`; empty where a pod has its primary
        one alone."""
        found = self.interfaces
        if found is None or found.first_data is None or found.network is None:
            return {}
        data = range(machine.data_nics.count)
        numbered = {
            f"eth{found.first_data + i}": found.network.format(found.first_network + i)
            for i in data
        }
        return {found.primary: "default", **numbered}

    def additional_networks(self, machine: Machine) -> tuple[AdditionalNetwork, ...]:
        """The networks of a node of `machine` beside the cluster's own, in the order of its NICs:
        of second host NICs, then of the data NICs."""
        networks, named = self.networks, self.interfaces
        if networks is None or named is None or named.network is None:
            return ()
        host = [f"gvnic-{number}" for number in range(1, networks.host_vpcs + 1)]
        data = [
            named.network.format(named.first_network + number)
            for number in range(machine.data_nics.count)
        ]
        return (
            *(AdditionalNetwork(label, label, firewall=True, of_host=True) for label in host),
            *(
                AdditionalNetwork(
                    label, "rdma" if networks.shared_vpcs else label, networks.firewall, False
                )
                for label in data
            ),
        )
