"""Checks between nodes: who is blamed, and who is not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from drillyard.acceptance.check import Check, Expected
from drillyard.acceptance.checks import clock, connection, names, path_mtu, ports, tcp_bandwidth
from drillyard.acceptance.checks.blame import blame
from drillyard.acceptance.evidence import AcceptanceEvidence, NodeIdentity, Observation
from drillyard.acceptance.results import CheckResult, Status
from drillyard.hardware import load_catalog

CHECKS = (connection, clock, ports, path_mtu, names, tcp_bandwidth)
TRIP = 0.0002


def expected(**more: Any) -> Expected:
    facts = load_catalog(None)
    given: dict[str, Any] = {"machine": None, "accelerator": None, "stack": None, **more}
    return Expected(facts, **given)


def healthy(nodes: int, offsets: Mapping[int, float] | None = None) -> dict[int, dict[str, Any]]:
    """The values of a network step on nodes without a fault, but for their clocks."""
    ahead = {rank: 0.0 for rank in range(nodes)} | dict(offsets or {})

    def peer(rank: int, other: int) -> dict[str, Any]:
        return {
            "node": other,
            "ports": [{"kind": "high", "port": 40_000 + other, "seconds": 0.001, "error": None}],
            "clock": {
                "offset": ahead[other] - ahead[rank],
                "round_trip": TRIP,
                "answered": 8,
            },
            "mtu": {"path": 1500, "interface": 1500, "kernel": 1500, "local": f"10.0.0.{rank}"},
            "name": {
                "name": f"h{other}",
                "addresses": [f"10.0.0.{other}"],
                "reaches": other,
                "error": None,
                "seconds": 0.001,
            },
            "reverse": {"names": [f"h{other}"], "error": None},
        }

    return {
        rank: {
            "peers": [peer(rank, other) for other in range(nodes) if other != rank],
            "interfaces": [{"name": "eth0", "mtu": 1500, "mbps": 10_000, "queues": ["mq"]}],
            "clock": {
                "watched": {"seconds": 60.0, "num_steps": 0, "steps": []},
                "synchronized": True,
                "storage": {"offset": 0.0, "uncertain": 0.02},
            },
        }
        for rank in range(nodes)
    }


def evidence(
    *steps: Mapping[int, Any],
    bandwidths: Mapping[tuple[int, int], float] | None = None,
    nodes: int | None = None,
    **more: Any,
) -> AcceptanceEvidence:
    count = nodes or len(steps[0])
    observations = [
        Observation(probe="network", scope="mesh", nodes=(rank,), values=values)
        for step in steps
        for rank, values in step.items()
    ]
    observations += [
        Observation(
            probe="tcp_bandwidth", scope="mesh", nodes=pair, values={tcp_bandwidth.FIGURE: value}
        )
        for pair, value in (bandwidths or {}).items()
    ]
    return AcceptanceEvidence(
        level="quick",
        expected_nodes=count,
        processes_per_node=1,
        nodes=tuple(
            NodeIdentity(rank=rank, name=f"n{rank}", address=f"10.0.0.{rank}", host=f"h{rank}")
            for rank in range(count)
        ),
        **{"observations": tuple(observations), **more},
    )


def results(
    check: Check, seen: AcceptanceEvidence, facts: Expected | None = None
) -> list[CheckResult]:
    return list(check.judge(seen, facts or expected()))


def culprits(check: Check, seen: AcceptanceEvidence, facts: Expected | None = None) -> set[int]:
    return {rank for each in results(check, seen, facts) for rank in each.culprits}


def statuses(check: Check, seen: AcceptanceEvidence, facts: Expected | None = None) -> set[Status]:
    return {each.status for each in results(check, seen, facts)}


def change(values: dict[int, Any], rank: int, other: int, key: str, new: Any) -> None:
    """Let a node have found something else of a peer."""
    for peer in values[rank]["peers"]:
        if peer["node"] == other:
            peer[key] = {**peer[key], **new} if isinstance(new, dict) else new


@pytest.mark.parametrize("nodes", [2, 3, 7])
def test_healthy_nodes_pass_every_check(nodes: int) -> None:
    pairs = {(a, b): 1.0 for a in range(nodes) for b in range(a + 1, nodes)}
    seen = evidence(healthy(nodes), healthy(nodes), bandwidths=pairs)
    for module in CHECKS:
        found = statuses(module.CHECK, seen)
        alone = module is tcp_bandwidth and nodes == 2
        assert found == {Status.recorded if alone else Status.passed}, module.__name__


def test_one_node_skips_what_is_between_nodes() -> None:
    seen = evidence({0: {"peers": []}})
    for module in CHECKS[1:]:
        assert Status.skipped in statuses(module.CHECK, seen)


def test_without_the_evidence_nothing_passes() -> None:
    for seen in (
        evidence({}, nodes=3),
        evidence(dict.fromkeys(range(3))),
        evidence({rank: {} for rank in range(3)}),
    ):
        for module in CHECKS[1:]:
            assert Status.passed not in statuses(module.CHECK, seen), module.__name__


# Clocks.


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("seconds", [2.0, -5.0])
def test_of_three_clocks_the_one_that_differs_is_wrong(bad: int, seconds: float) -> None:
    seen = evidence(healthy(3, {bad: seconds}))
    assert culprits(clock.CHECK, seen) == {bad}
    (failed,) = (each for each in results(clock.CHECK, seen) if each.status is Status.fail)
    assert failed.observed == pytest.approx(seconds)


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("seconds", [2.0, -2.0])
def test_of_two_clocks_a_third_one_tells(bad: int, seconds: float) -> None:
    values = healthy(2, {bad: seconds})
    assert culprits(clock.CHECK, evidence(values)) == set()
    assert Status.fail in statuses(clock.CHECK, evidence(values))

    storage = copy.deepcopy(values)
    storage[bad]["clock"]["storage"]["offset"] = -seconds
    assert culprits(clock.CHECK, evidence(storage)) == {bad}

    kernel = copy.deepcopy(values)
    kernel[bad]["clock"]["synchronized"] = False
    assert culprits(clock.CHECK, evidence(kernel)) == {bad}


def test_a_storage_clock_that_disagrees_with_the_nodes_is_no_witness() -> None:
    values = healthy(2, {1: 2.0})
    values[0]["clock"]["storage"]["offset"] = 9.0
    assert culprits(clock.CHECK, evidence(values)) == set()


def test_a_clock_that_is_a_little_off_warns() -> None:
    seen = evidence(healthy(3, {2: 0.4}))
    assert statuses(clock.CHECK, seen) == {Status.warn, Status.passed}
    assert culprits(clock.CHECK, seen) == set()
    assert statuses(clock.CHECK, evidence(healthy(3, {2: 0.1}))) == {Status.passed}


def test_slow_answers_prove_nothing() -> None:
    values = healthy(3, {2: 1.5})
    for rank in range(3):
        for other in range(3):
            change(values, rank, other, "clock", {"round_trip": 4.0})
    assert statuses(clock.CHECK, evidence(values)) == {Status.incomplete, Status.passed}


def test_two_of_four_clocks_prove_nothing() -> None:
    seen = evidence(healthy(4, {2: 3.0, 3: 3.0}))
    assert culprits(clock.CHECK, seen) == set()
    assert Status.fail in statuses(clock.CHECK, seen)


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_a_clock_that_stepped_back(nodes: int) -> None:
    values = healthy(nodes)
    last = copy.deepcopy(values)
    last[nodes - 1]["clock"]["watched"]["steps"] = [{"at": 5.0, "seconds": -0.75}]
    assert culprits(clock.CHECK, evidence(values, last)) == {nodes - 1}
    last[nodes - 1]["clock"]["watched"]["steps"] = [{"at": 5.0, "seconds": 0.75}]
    assert culprits(clock.CHECK, evidence(values, last)) == set()


def test_a_clock_that_moved_against_the_others() -> None:
    assert culprits(clock.CHECK, evidence(healthy(3), healthy(3, {1: -0.6}))) == {1}
    assert culprits(clock.CHECK, evidence(healthy(2), healthy(2, {1: -0.6}))) == set()


# Pairs.


def test_a_node_is_blamed_only_where_its_partners_are_good_elsewhere() -> None:
    assert blame([(1, 2)], [(0, 1), (0, 2)]).nodes == (0,)
    assert blame([], [(0, 1), (0, 2), (1, 2)]).nodes == ()
    assert blame([(0, 2), (1, 2)], [(0, 1)]).links == ((0, 1),)
    assert blame([(1, 2), (2, 3), (1, 3)], [(0, 1)]).nodes == ()
    both = blame([(2, 3)], [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3)])
    assert both.nodes == (0, 1) and both.links == ()


def test_ports_that_one_node_keeps_closed() -> None:
    values = healthy(4)
    for rank in (0, 1, 3):
        change(values, rank, 2, "ports", [{"kind": "high", "port": 1, "error": "timed out"}])
    assert culprits(ports.CHECK, evidence(values)) == {2}
    pair = healthy(2)
    change(pair, 0, 1, "ports", [{"kind": "high", "port": 1, "error": "timed out"}])
    seen = evidence(pair)
    assert culprits(ports.CHECK, seen) == set()
    assert statuses(ports.CHECK, seen) == {Status.fail}
    change(pair, 0, 1, "ports", None)
    assert Status.incomplete in statuses(ports.CHECK, evidence(pair))


def test_a_node_that_says_nothing_of_one_that_measured_it() -> None:
    values = healthy(3)
    del values[1]["peers"][0]
    for module in (clock, ports, path_mtu, names):
        assert Status.incomplete in statuses(module.CHECK, evidence(values))


def _mtu(values: dict[int, Any], rank: int, size: int) -> None:
    """A node's interface takes packets of this size only, whoever sends."""
    for other in values:
        change(values, rank, other, "mtu", {"path": size, "interface": size, "kernel": size})
        change(values, other, rank, "mtu", {"path": size})


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_interface_with_another_mtu(bad: int) -> None:
    values = healthy(3)
    _mtu(values, bad, 1400)
    assert culprits(path_mtu.CHECK, evidence(values)) == {bad}


@pytest.mark.parametrize("bad", [0, 1])
def test_of_two_interfaces_the_one_below_ethernets_size(bad: int) -> None:
    values = healthy(2)
    _mtu(values, bad, 1400)
    assert culprits(path_mtu.CHECK, evidence(values)) == {bad}


@pytest.mark.parametrize("bad", [0, 1])
def test_of_two_interfaces_the_one_that_the_baseline_does_not_have(bad: int) -> None:
    before, values = healthy(2), healthy(2)
    for rank in (0, 1):
        _mtu(before, rank, 8896)
        _mtu(values, rank, 8896)
    _mtu(values, bad, 1500)
    seen = evidence(values)
    assert culprits(path_mtu.CHECK, seen) == set()
    assert Status.fail in statuses(path_mtu.CHECK, seen)
    facts = expected(baseline=evidence(before))
    assert culprits(path_mtu.CHECK, seen, facts) == {bad}


def test_the_stacks_mtu_is_what_every_interface_needs() -> None:
    facts = load_catalog(None)
    stack = next(
        each for each in facts.network_stacks.values() if each.networks and each.networks.host_mtu
    )
    seen = evidence(healthy(2))
    assert culprits(path_mtu.CHECK, seen, expected(stack=stack)) == {0, 1}


def test_a_path_that_drops_large_packets_without_a_word() -> None:
    values = healthy(3)
    for other in (0, 2):
        change(values, 1, other, "mtu", {"path": 1280})
        change(values, other, 1, "mtu", {"path": 1280})
    assert culprits(path_mtu.CHECK, evidence(values)) == {1}
    # A router that says so leaves the kernel its size: connections work.
    for rank in range(3):
        for other in range(3):
            change(values, rank, other, "mtu", {"path": 1280, "kernel": 1280})
    assert statuses(path_mtu.CHECK, evidence(values)) == {Status.passed}


def test_names() -> None:
    values = healthy(4)
    for other in (0, 1, 2):
        change(values, 3, other, "name", {"error": "Name or service not known", "reaches": None})
    assert culprits(names.CHECK, evidence(values)) == {3}

    hidden = healthy(4)
    for rank in (0, 1, 2):
        change(hidden, rank, 3, "name", {"addresses": ["10.0.0.9"], "reaches": None})
    assert culprits(names.CHECK, evidence(hidden)) == {3}

    wrong = healthy(2)
    change(wrong, 0, 1, "name", {"addresses": ["127.0.1.1"], "reaches": 0})
    seen = evidence(wrong)
    assert statuses(names.CHECK, seen) == {Status.fail}
    assert culprits(names.CHECK, seen) == set()

    nobody = healthy(2)
    for rank in (0, 1):
        change(nobody, rank, 1 - rank, "name", {"error": "not known", "reaches": None})
    assert statuses(names.CHECK, evidence(nobody)) == {Status.recorded}


def test_names_that_several_nodes_have_say_nothing() -> None:
    seen = evidence(healthy(3))
    alike = tuple(node.model_copy(update={"host": "vm"}) for node in seen.nodes)
    seen = seen.model_copy(update={"nodes": alike})
    assert statuses(names.CHECK, seen) == {Status.skipped}


# TCP bandwidth.


def test_a_slow_node_of_four() -> None:
    pairs = {(a, b): 0.1 if 2 in (a, b) else 1.0 for a in range(4) for b in range(a + 1, 4)}
    seen = evidence(healthy(4), bandwidths=pairs)
    assert culprits(tcp_bandwidth.CHECK, seen) == {2}
    assert [each.status for each in results(tcp_bandwidth.CHECK, seen)].count(Status.fail) == 1


def test_a_slow_pair_blames_nobody() -> None:
    pairs = {(0, 1): 0.1, (0, 2): 1.0, (1, 2): 1.0}
    seen = evidence(healthy(3), bandwidths=pairs)
    assert culprits(tcp_bandwidth.CHECK, seen) == set()
    assert Status.fail in statuses(tcp_bandwidth.CHECK, seen)


@pytest.mark.parametrize("bad", [0, 1])
def test_of_two_nodes_a_rate_limit_of_its_own_tells(bad: int) -> None:
    before = evidence(healthy(2), bandwidths={(0, 1): 1.0})
    values = healthy(2)
    slow = evidence(values, bandwidths={(0, 1): 0.1})
    facts = expected(baseline=before)
    assert Status.fail in statuses(tcp_bandwidth.CHECK, slow, facts)
    assert culprits(tcp_bandwidth.CHECK, slow, facts) == set()
    values[bad]["interfaces"][0]["queues"] = ["tbf"]
    slow = evidence(values, bandwidths={(0, 1): 0.1})
    assert culprits(tcp_bandwidth.CHECK, slow, facts) == {bad}


def test_a_machine_with_nics_sets_the_limit_of_one_pair() -> None:
    machine = load_catalog(None).machines["a4-highgpu-8g"]
    facts = expected(machine=machine)
    for value, status in ((0.5, Status.fail), (0.7, Status.passed)):
        seen = evidence(healthy(2), bandwidths={(0, 1): value})
        assert statuses(tcp_bandwidth.CHECK, seen, facts) == {status}


def test_the_best_measurement_of_a_pair_counts() -> None:
    seen = evidence(healthy(3), bandwidths={(0, 1): 0.1, (0, 2): 1.0, (1, 2): 1.0})
    again = evidence(healthy(3), bandwidths={(1, 0): 0.9})
    more = seen.model_copy(update={"observations": seen.observations + again.observations})
    assert statuses(tcp_bandwidth.CHECK, more) == {Status.passed}


# Nodes that were lost.


def test_lost_nodes_are_named_once_and_first() -> None:
    silent = [
        Observation(probe="host", scope="node", nodes=(1,), error="was silent", silent=(1,)),
        Observation(probe="x", scope="all", nodes=(0, 1, 2), error="lost", silent=(1, 2)),
    ]
    seen = evidence({}, nodes=3, observations=tuple(silent), interrupted="SIGTERM ended it")
    found = results(connection.CHECK, seen)
    assert [each.culprits for each in found] == [(1,), (2,), ()]
    assert [each.status for each in found] == [Status.fail, Status.fail, Status.incomplete]


# Data of nodes are data.


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, each in items:
        yield from _places(each, (*path, key))


JUNK: tuple[Callable[[], Any], ...] = (
    lambda: None,
    lambda: "x",
    lambda: -1,
    lambda: 10**400,
    lambda: float("nan"),
    lambda: [],
    lambda: {},
    lambda: [[1]],
    lambda: True,
)


def test_no_value_of_a_node_breaks_a_check() -> None:
    values = healthy(3)
    pairs = {(0, 1): 1.0, (0, 2): 1.0, (1, 2): 1.0}
    for path in list(_places(values[1])):
        for junk in JUNK:
            broken = copy.deepcopy(values)
            place: Any = broken
            for key in (1, *path)[:-1]:
                place = place[key]
            place[(1, *path)[-1]] = junk()
            if not isinstance(broken[1], dict):
                continue
            seen = evidence(broken, bandwidths=pairs)
            for module in CHECKS:
                assert results(module.CHECK, seen)
