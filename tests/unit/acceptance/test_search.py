"""The search for bad nodes: nothing healthy is blamed, and what is bad is found in three rounds."""

from __future__ import annotations

import random

import pytest
from benchmarks.acceptance_search import Cluster, after_one_bad_pair, searched

from drillyard.acceptance.checks.slow_pairs import conclude
from drillyard.acceptance.node.search import PairResult, next_round
from drillyard.acceptance.node.worker import NodePlace

SEEDS = range(360)


def speeds(nodes, slow=(), *, links=(), racks=None, slow_racks=(), threshold=True):
    """All rounds of a search without noise; returns the rounds and the conclusions."""
    racks = racks or {}
    results, rounds = [], 0
    while pairs := next_round(range(nodes), racks, results):
        for one, other in pairs:
            across = racks.get(str(one)) != racks.get(str(other))
            is_slow = (
                {one, other} & set(slow)
                or {one, other} in [set(link) for link in links]
                or (across and {racks.get(str(one)), racks.get(str(other))} & set(slow_racks))
            )
            value = 50.0 if is_slow else 100.0
            results.append(
                PairResult((one, other), value, value > 90 if threshold else None, rounds)
            )
        rounds += 1
    return rounds, conclude(range(nodes), racks, results)


def proven(conclusions):
    return {(each.kind, each.nodes) for each in conclusions if each.proven}


def in_racks(nodes, size):
    return {str(node): f"r{node // size}" for node in range(nodes)}


@pytest.mark.parametrize("relative", [False, True])
def test_nothing_healthy_is_blamed(relative):
    trials = [searched(Cluster.drawn(seed), relative=relative) for seed in SEEDS]
    assert [each.cluster.seed for each in trials if each.wrongly] == []
    assert max(each.rounds for each in trials) <= 3
    found = sum(len(each.blamed) for each in trials if each.cluster.kind == "nodes")
    bad = sum(len(each.bad) for each in trials if each.cluster.kind == "nodes")
    assert found > 0.5 * bad


def test_blaming_after_one_bad_pair_blames_healthy_nodes():
    trials = [searched(Cluster.drawn(seed), by=after_one_bad_pair) for seed in SEEDS]
    assert sum(bool(each.wrongly) for each in trials) > len(trials) / 4


def bad_nodes():
    """Numbers of nodes and which of them are bad: the same ones each time. Half of them gather
    where round 1 pairs bad nodes with each other, and where it leaves one out."""
    draw = random.Random(6)
    yield from ((nodes, {0, 1, 2, 4, 6, 16}) for nodes in range(48, 65))
    for at in range(60):
        nodes = draw.randint(48, 64)
        places = range(nodes) if at % 2 else [*range(9), *range(nodes - 3, nodes)]
        yield nodes, set(draw.sample(places, draw.randint(1, 6)))


@pytest.mark.parametrize("threshold", [True, False])
def test_up_to_six_bad_nodes_are_found(threshold):
    for nodes, slow in bad_nodes():
        rounds, conclusions = speeds(nodes, slow, threshold=threshold)
        found = rounds <= 3, proven(conclusions)
        assert found == (True, {("node", (node,)) for node in slow}), (nodes, slow)


@pytest.mark.parametrize("nodes", [3, 4, 5])
def test_one_bad_node_of_a_few(nodes):
    for slow in range(nodes):
        _, conclusions = speeds(nodes, [slow])
        blamed = {node for each in conclusions for node in each.nodes}
        assert blamed == {slow}


def test_of_two_nodes_none_is_blamed():
    rounds, (left,) = speeds(2, [1])
    assert (rounds, left.kind, left.nodes, left.proven) == (1, "link", (0, 1), False)


def test_a_link_between_two_good_nodes_is_named():
    _, (link,) = speeds(8, links=[(2, 3)])
    assert (link.kind, link.nodes) == ("link", (2, 3))


@pytest.mark.parametrize("count", [2, 4])
def test_a_rack_that_is_badly_joined(count):
    racks = in_racks(8 * count, 8)
    _, conclusions = speeds(8 * count, racks=racks, slow_racks=["r1"])
    (rack,) = conclusions
    assert (rack.kind, rack.proven) == ("rack", True)
    assert rack.racks == (("r0", "r1") if count == 2 else ("r1",))


def test_where_no_pair_passes_the_fabric_is_named_and_no_node():
    _, (fabric,) = speeds(8, range(8))
    assert (fabric.kind, fabric.proven) == ("fabric", False)


def test_a_healthy_cluster_needs_one_round_and_two_where_racks_are_known():
    assert speeds(8) == (1, [])
    assert speeds(8, racks=in_racks(8, 4)) == (2, [])


def test_of_an_odd_number_every_node_is_measured():
    results = [PairResult(pair, 100.0, True, 0) for pair in next_round(range(5), {}, [])]
    met = {node for each in results for node in each.pair}
    again = {node for pair in next_round(range(5), {}, results) for node in pair}
    assert met < set(range(5)) and set(range(5)) - met < again


@pytest.mark.parametrize("nodes", range(5, 65, 2))
@pytest.mark.parametrize("threshold", [True, False])
def test_the_node_that_round_1_leaves_out_is_found(nodes, threshold):
    rounds, conclusions = speeds(nodes, {nodes - 1}, threshold=threshold)
    assert rounds <= 3 and proven(conclusions) == {("node", (nodes - 1,))}


def test_pairs_that_could_not_be_measured_name_the_node_that_they_share():
    results, number = [], 0
    while pairs := next_round(range(8), {}, results):
        for pair in pairs:
            value = None if 5 in pair else 100.0
            results.append(PairResult(pair, value, None if value is None else True, number))
        number += 1
    assert proven(conclude(range(8), {}, results)) == {("node", (5,))}


def test_no_second_round_where_nothing_was_measured():
    results = [PairResult((0, 1), None, None, 0), PairResult((2, 3), None, None, 0)]
    assert next_round(range(4), {}, results) == []


@pytest.mark.parametrize(
    ("address", "pattern", "rack"),
    [("s0.leaf4.tux1", "switch.switch.node", "leaf4"), ("tux1", "node", ""),
     ("block3.tux1", "block.node", ""), ("", "", ""), ("leaf4.tux1", "node", "")],
)  # fmt: skip
def test_the_rack_is_the_switch_that_the_scheduler_names(address, pattern, rack, monkeypatch):
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR", address)
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR_PATTERN", pattern)
    assert NodePlace(0, 1, 1, "", 0).rack == rack
