"""NICs of each node: as many as its machine has, up, with the rate and MTU of its network stack."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.node_results import (
    node_observations,
    node_result,
    why_not_observed,
)
from drillyard.acceptance.results import CheckResult, Status, Threshold
from drillyard.hardware.facts import cited
from drillyard.hardware.machines import Machine
from drillyard.hardware.network_stacks import NetworkStack

PROBE = "network_interfaces"
_VIRTUAL = re.compile(r"lo|docker\d*|veth|br-|virbr|cni|flannel|cali|tun|tap|ifb|dummy|bond")


def judge(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """Results per node."""
    for rank, seen in node_observations(evidence, PROBE):
        name = evidence.name_of(rank)
        if expected.machine is None:
            why = f"{name}: the cluster config names no machine"
            yield node_result(CHECK, rank, Status.skipped, why)
        elif seen is None or seen.values is None:
            why = f"{name}: {why_not_observed(seen, PROBE)}"
            yield node_result(CHECK, rank, Status.incomplete, why)
        else:
            yield from _judge_node(rank, name, seen.values, expected.machine, expected.stack)


def _judge_node(
    rank: int, name: str, values: Mapping[str, Any], machine: Machine, stack: NetworkStack | None
) -> Iterator[CheckResult]:
    interfaces, devices = values.get("interfaces"), values.get("rdma_devices")
    if not isinstance(interfaces, Mapping) or not isinstance(devices, Mapping):
        why = f"{name}: the probe gave no interfaces"
        yield node_result(CHECK, rank, Status.incomplete, why)
        return
    data = machine.data_nics
    if data.count and stack is not None and stack.rdma:
        yield from _rdma(rank, name, devices, machine)
        return
    nics = {
        nic: facts
        for nic, facts in interfaces.items()
        if isinstance(facts, Mapping) and not _VIRTUAL.match(nic)
    }
    up = {nic: facts for nic, facts in nics.items() if facts.get("operstate") == "up"}
    if not up:
        yield node_result(CHECK, rank, Status.fail, f"{name}: no NIC is up", observed=0)
        return
    if not data.count or stack is None or stack.networks is None or not stack.networks.mtu:
        reason = f"{name}: {len(up)} NICs are up: {', '.join(sorted(up)[:8])}"
        yield node_result(CHECK, rank, Status.passed, reason, observed=len(up), unit="NICs")
        return
    yield from _netdevs(rank, name, nics, up, machine, stack, stack.networks.mtu)


def _netdevs(
    rank: int,
    name: str,
    nics: Mapping[str, Mapping[str, Any]],
    up: Mapping[str, Mapping[str, Any]],
    machine: Machine,
    stack: NetworkStack,
    mtu: int,
) -> Iterator[CheckResult]:
    """Data NICs that are network interfaces: they have the MTU of the stack's networks."""
    needed, source = machine.data_nics.count, cited(machine, "data_nics")
    unread = [nic for nic, facts in up.items() if _number(facts.get("mtu")) is None]
    if unread:
        why = f"{name}: the MTU of {', '.join(unread)} cannot be read"
        yield node_result(CHECK, rank, Status.incomplete, why)
        return
    large = [nic for nic, facts in up.items() if (_number(facts["mtu"]) or 0) >= mtu]
    if len(large) >= needed:
        reason = f"{name}: {len(large)} data NICs are up with an MTU of {mtu}"
        yield node_result(CHECK, rank, Status.passed, reason, observed=len(large), unit="NICs")
        return
    down = sorted(set(nics) - set(up))
    small = sorted(f"{nic} (MTU {up[nic]['mtu']})" for nic in set(up) - set(large))
    said = [f"down: {', '.join(down)}"] if down else []
    said += [f"smaller: {', '.join(small)}"] if small else []
    reason = f"{name}: {len(large)} of {needed} data NICs are up with an MTU of {mtu}"
    yield node_result(
        CHECK, rank, Status.fail, reason + (f" ({'; '.join(said)})" if said else ""),
        observed=len(large), unit="NICs", threshold=Threshold(needed, "NICs", True, source),
        evidence=(cited(stack, "networks"),),
    )  # fmt: skip


def _rdma(
    rank: int, name: str, devices: Mapping[str, Any], machine: Machine
) -> Iterator[CheckResult]:
    """Data NICs that are RDMA devices: their ports are active, at the machine's rate."""
    needed, source = machine.data_nics.count, cited(machine, "data_nics")
    gbps = machine.data_nics.gbps
    active, problems, unread = [], [], []
    for device, port, state in _ports(devices):
        words = str(state.get("state") or "")
        rate = _number(str(state.get("rate") or "").split(" ")[0])
        # EFA's driver gives 100 Gb/s whatever it is, and no link layer.
        has_rate = state.get("link_layer") in ("InfiniBand", "Ethernet")
        if not words:
            unread.append(f"{device} port {port}")
        elif "ACTIVE" not in words:
            problems.append(f"{device} port {port} is {words.partition(': ')[2] or words}")
        elif has_rate and rate is not None and rate < gbps:
            # A host NIC of another rate may be an RDMA device too: it is not counted.
            problems.append(f"{device} port {port} runs at {rate:g} of {gbps:g} Gb/s")
        else:
            active.append(device)
    if len(active) >= needed:
        reason = f"{name}: {len(active)} RDMA devices are active at {gbps:g} Gb/s"
        yield node_result(CHECK, rank, Status.passed, reason, observed=len(active), unit="NICs")
        return
    if unread and len(active) + len(unread) >= needed:
        why = f"{name}: the state of {', '.join(unread)} cannot be read"
        yield node_result(CHECK, rank, Status.incomplete, why)
        return
    reason = f"{name}: {len(active)} of {needed} data NICs are active RDMA devices"
    yield node_result(
        CHECK, rank, Status.fail, reason + (f": {'; '.join(problems)}" if problems else ""),
        observed=len(active), unit="NICs", threshold=Threshold(needed, "NICs", True, source),
        evidence=tuple(problems),
    )  # fmt: skip


def _ports(devices: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for device, facts in sorted(devices.items()):
        ports = facts.get("ports") if isinstance(facts, Mapping) else None
        for port, state in (ports if isinstance(ports, Mapping) else {}).items():
            if isinstance(state, Mapping):
                yield device, str(port), state


def _number(text: object) -> float | None:
    try:
        number = float(str(text))
    except ValueError:
        return None
    return number if number > 0 else None


CHECK = Check(
    name="network-interfaces",
    title="NICs",
    level=Level.quick,
    probes=(PROBE,),
    seconds=1,
    measures="NICs and RDMA devices of each node: state, rate, MTU",
    how="/sys/class/net, /sys/class/infiniband",
    evidence="the state of as many NICs as the machine has",
    references="the machine's row (data_nics), the network stack's row (rdma, networks.mtu)",
    meaning="a NIC is down, missing, slow or was not given to the job: traffic between nodes loses"
    " its share",
    action="check the cable, the port and the driver of that NIC; restart the node",
    judge=judge,
)
