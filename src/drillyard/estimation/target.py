"""Target of an estimate: machines by the cluster config or by flags, or a number of accelerators
and nothing else.

Flags override the cluster config, so one file also answers "and on the other machine?". An
accelerator without a machine is enough for memory and speed within a node; what needs more
(networks, storage, prices, quotas) is reported as missing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from drillyard.config.cluster import ClusterConfig
from drillyard.errors import UserError
from drillyard.estimation.quantity import GIVEN, check_count
from drillyard.hardware import Accelerator, Catalog, Machine, region_of
from drillyard.hardware.capacity import consumption_problem, machine_of
from drillyard.hardware.facts import Provenance

USUAL_GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class Target:
    """GPUs of a number of machines. `made_up`: only the accelerator is known, the machine is a name
    for a node.

    `consumption` and `region` are None where not given. `cluster` is the config that quotas are
    counted for, with the machine and the nodes that flags changed.
    """

    machine: Machine
    accelerator: Accelerator
    num_nodes: int
    num_gpus: int
    consumption: str | None = None
    region: str | None = None
    cluster: ClusterConfig | None = None
    made_up: bool = False

    @property
    def gpus_per_node(self) -> int:
        return self.machine.num_accelerators

    @property
    def machine_type(self) -> str | None:
        """The machine's name; None where only the accelerator is known."""
        return None if self.made_up else self.machine.name

    @property
    def title(self) -> str:
        """`2 x a4-highgpu-8g (16 b200)`."""
        if self.made_up:
            return f"{self.num_gpus} x {self.accelerator.name}"
        return f"{self.num_nodes} x {self.machine.name} ({self.num_gpus} {self.accelerator.name})"

    def with_nodes(self, num_nodes: int) -> Target:
        """The same machines in another number. UserError below 1."""
        check_count("nodes", num_nodes)
        return replace(
            self,
            num_nodes=num_nodes,
            num_gpus=num_nodes * self.gpus_per_node,
            cluster=_changed(self.cluster, nodes=num_nodes),
        )

    def with_machine(self, name: str, facts: Catalog) -> Target:
        """Another machine in the same number. UserError for one that is not known or not sold in
        this way."""
        machine = facts.machine(name)
        if (unsold := consumption_problem(self.consumption, machine)) is not None:
            raise UserError(f"consumption: {unsold}\ngive one of them by --consumption")
        return replace(
            self,
            machine=machine,
            accelerator=facts.accelerator_of(machine),
            num_gpus=self.num_nodes * machine.num_accelerators,
            cluster=_changed(self.cluster, machine=machine.name),
            made_up=False,
        )


def cluster_target(cluster: ClusterConfig, facts: Catalog, *, machine: str | None = None) -> Target:
    """The target of a cluster config, or the same number of another `machine`. UserError as of
    `machine_of`."""
    row = machine_of(cluster, facts) if machine is None else facts.machine(machine)
    target = Target(
        row,
        facts.accelerator_of(row),
        cluster.nodes,
        cluster.nodes * row.num_accelerators,
        cluster.consumption,
        region_of(cluster),
        cluster,
    )
    return target if machine is None else target.with_machine(machine, facts)


def machine_target(
    machine: str,
    num_nodes: int,
    facts: Catalog,
    *,
    consumption: str | None = None,
    region: str | None = None,
) -> Target:
    """`num_nodes` of `machine`. UserError for one that is not known or not sold by
    `consumption`."""
    check_count("nodes", num_nodes)
    row = facts.machine(machine)
    target = Target(
        row,
        facts.accelerator_of(row),
        num_nodes,
        num_nodes * row.num_accelerators,
        consumption,
        region,
    )
    return target.with_machine(machine, facts)


def accelerator_target(
    accelerator: str, num_gpus: int, facts: Catalog, *, gpus_per_node: int | None = None
) -> Target:
    """`num_gpus` of `accelerator`, by default 8 in a node. Nothing is known of the nodes but
    that."""
    check_count("GPUs", num_gpus)
    row = facts.accelerator(accelerator)
    in_node = min(num_gpus, USUAL_GPUS_PER_NODE) if gpus_per_node is None else gpus_per_node
    check_count("GPUs per node", in_node)
    machine = Machine.create(
        Provenance(GIVEN),
        name=f"{in_node} x {row.name}",
        accelerator=row.name,
        num_accelerators=in_node,
        network_stack="ethernet",
    )
    return Target(machine, row, -(-num_gpus // in_node), num_gpus, made_up=True)


def _changed(cluster: ClusterConfig | None, **fields: object) -> ClusterConfig | None:
    return None if cluster is None else cluster.model_copy(update=fields)
