"""Rules of the machines of a pool: Google Cloud's own, with networks that a VPC can have."""

from __future__ import annotations

from collections.abc import Iterator

from drillyard.config.cluster import ClusterConfig
from drillyard.config.problems import Problem
from drillyard.hardware.capacity import CLOUD_TITLES
from drillyard.hardware.catalog import Catalog
from drillyard.hardware.cloud_limits import limit
from drillyard.launch.network import stack_problem
from drillyard.provision.gcp.pool_networks import PoolNetwork
from drillyard.provision.pools import key_path


def machine_problems(
    cluster: ClusterConfig, network: PoolNetwork, facts: Catalog, title: str, *, by_type: bool
) -> Iterator[Problem]:
    """What is wrong with a pool's machine and network stack. `title`: what makes the nodes;
    `by_type`: whether it knows their GPUs by a type of its own."""
    machine = network.pool.machine
    path = key_path(network.pool, "machine")
    if machine.cloud != "gcp":
        whose = CLOUD_TITLES.get(machine.cloud or "", "no cloud")
        alike = [
            each.name
            for each in facts.machines.values()
            if each.cloud == "gcp"
            and each.accelerator == machine.accelerator
            and network.pool.consumption in each.consumption
        ]
        fix = " or ".join(alike) or "one that `drillyard hardware` lists with cloud gcp"
        message = f"{machine.name} is one of {whose}, and {title} has Google Cloud's: write {fix}"
        yield Problem(path, message)
    elif by_type and machine.accelerator_type is None:
        message = (
            f"{machine.name} has no accelerator_type, by which {title} knows its GPU: give it in"
            " the hardware file"
        )
        yield Problem(path, message)
    elif network.stack is None:
        wrong = stack_problem(cluster, machine) or f"{machine.network_stack} is not known"
        yield Problem(("network_stack",), wrong)
    else:
        for mtu in {each.mtu for each in network.interfaces if each.mtu is not None}:
            if not (allowed := limit("vpc-mtu")).allows(mtu):
                message = (
                    f"{network.stack.name} has networks of MTU {mtu}, and a VPC has"
                    f" {allowed.in_words}: change it in the hardware file"
                )
                yield Problem(path, message)
