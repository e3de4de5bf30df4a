"""Observations of collectives as PyTorch's probe gives them."""

from __future__ import annotations

from drillyard.acceptance.check import Expected
from drillyard.acceptance.evidence import AcceptanceEvidence, NodeIdentity, Observation
from drillyard.acceptance.judgement import judge
from drillyard.acceptance.node.search import next_round
from drillyard.acceptance.results import CheckResult
from drillyard.hardware import catalog
from drillyard.hardware.bandwidths import bus_factor

GIB = 1 << 30
BANDWIDTH_CHECKS = ("collectives-node", "collectives-pairs", "collectives-all", "slow-pairs")


def expected_on(machine=None, **more):
    facts = catalog()
    found = None if machine is None else facts.machine(machine)
    accelerator = None if found is None else facts.accelerator_of(found)
    return Expected(facts, found, accelerator, None, **more)


def observed(nodes, bus, collective="all_gather", *, processes=8, number=None, **changes):
    """`bus`: GB/s of each repeat by bytes."""
    ranks = len(nodes) * processes
    factor = bus_factor("alltoall" if collective == "all_to_all" else collective, ranks)
    rows = [
        {
            "bytes": size,
            "seconds": [size * factor / value / 1e9 for value in values],
            "wrong": changes.get("wrong", 0),
        }
        for size, values in bus.items()
    ]
    values = [
        {"rank": rank, "node": nodes[rank // processes], "local_rank": rank % processes,
         "values": {"collective": collective, "rows": rows}, "error": None}
        for rank in range(ranks)
    ]  # fmt: skip
    scope = {1: "node", 2: "pairs"}.get(len(nodes), "all")
    return Observation(
        probe="collective", scope=scope, nodes=tuple(nodes), round=number,
        arguments={"collective": collective, "sizes": list(bus)},
        values={"ranks": values}, error=changes.get("error"),
    )  # fmt: skip


def evidence_of(count, observations, *, processes=8, names=None, **changes):
    names = names or [f"n{rank}" for rank in range(count)]
    return AcceptanceEvidence(
        level="quick", expected_nodes=count, processes_per_node=processes,
        nodes=tuple(
            NodeIdentity(rank=rank, name=name, rack=changes.pop("racks", {}).get(rank, ""))
            for rank, name in enumerate(names)
        ),
        observations=tuple(observations), **changes,
    )  # fmt: skip


def searched_pairs(count, speed_of, *, size=8 * GIB, at_least=338.76, processes=8):
    """Observations of all rounds; `speed_of(one, other)` is in GB/s."""
    from drillyard.acceptance.node.search import PairResult

    found, results, number = [], [], 0
    while pairs := next_round(range(count), {}, results):
        for one, other in pairs:
            value = speed_of(one, other)
            found.append(
                observed([one, other], {size: [value]}, number=number, processes=processes)
            )
            passed = None if at_least is None else value >= at_least
            results.append(PairResult((one, other), value, passed, number))
        number += 1
    return found


def bandwidth_results(evidence, expected) -> list[CheckResult]:
    """The results of the checks of collectives."""
    return [each for each in judge(evidence, expected).results if each.check in BANDWIDTH_CHECKS]
