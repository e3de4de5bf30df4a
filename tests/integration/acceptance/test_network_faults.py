"""Faults of a network and of clocks, made outside of the code: the node that has them is named, and
no other."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integration.acceptance.namespaces import NodeNetwork
from tests.integration.acceptance.node_jobs import NodeJob, judged

from drillyard.acceptance.check import Expected, Level
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.judgement import Outcome
from drillyard.acceptance.results import CheckResult, Status
from drillyard.acceptance.schedule import schedule
from drillyard.hardware import load_catalog

Start = Callable[..., NodeJob]
FAKETIME = "/usr/$LIB/faketime/libfaketime.so.1"


def steps_of(*probes: str, baseline: AcceptanceEvidence | None = None) -> list[dict[str, Any]]:
    """The shipped steps of the quick level that run these probes."""
    expected = Expected(load_catalog(None), None, None, None, baseline=baseline)
    steps = schedule(Level.quick, expected, 4)["steps"]
    return [step for step in steps if step["probe"] in probes]


def failed(outcome: Outcome) -> list[CheckResult]:
    return [each for each in outcome.results if each.status is Status.fail]


def run(
    start: Start, network: Callable[[int], NodeNetwork], nodes: int, steps: Any, *fault: Any
) -> Outcome:
    """A job on a network, after `fault` has changed it."""
    made = network(nodes)
    for change in fault:
        change(made)
    job = start(steps, nodes, master_addr=made.address(0), prefixes=made.prefixes())
    return judged(job.wait())


def test_a_rate_limit_on_one_link_of_four_is_found_in_three_rounds(
    start: Start, network: Callable[[int], NodeNetwork]
) -> None:
    limit = ["root", "tbf", "rate", "100mbit", "burst", "64kb", "latency", "50ms"]

    def slow(made: NodeNetwork) -> None:
        made.on_switch("tc", "qdisc", "add", "dev", "port2", *limit)

    outcome = run(start, network, 4, steps_of("network", "tcp_bandwidth"), slow)
    assert outcome.culprits == (2,)
    assert {each.check for each in failed(outcome)} == {"tcp-bandwidth"}
    rounds = {each.round for each in outcome.evidence.of("tcp_bandwidth")[:6]}
    assert rounds == {0, 1, 2}
    (result,) = failed(outcome)
    assert isinstance(result.observed, float) and result.observed < 0.02


def test_of_two_nodes_the_one_with_a_rate_limit_of_its_own_is_named(
    start: Start, network: Callable[[int], NodeNetwork]
) -> None:
    steps = steps_of("network", "tcp_bandwidth")
    healthy = run(start, network, 2, steps)
    assert failed(healthy) == []

    limit = ["root", "tbf", "rate", "50mbit", "burst", "64kb", "latency", "50ms"]
    for bad in (0, 1):
        made = network(2)
        made.on_node(bad, "tc", "qdisc", "add", "dev", "eth0", *limit)
        job = start(steps, 2, master_addr=made.address(0), prefixes=made.prefixes())
        outcome = judged(job.wait(), baseline=healthy.evidence)
        assert outcome.culprits == (bad,)


@pytest.mark.parametrize("bad", [0, 3])
def test_a_small_mtu_on_one_nodes_interface(
    start: Start, network: Callable[[int], NodeNetwork], bad: int
) -> None:
    def small(made: NodeNetwork) -> None:
        made.on_node(bad, "ip", "link", "set", "eth0", "mtu", "1400")

    outcome = run(start, network, 4, steps_of("network"), small)
    assert outcome.culprits == (bad,)
    assert {each.check for each in failed(outcome)} == {"path-mtu"}
    assert failed(outcome)[0].observed == 1400


def test_a_switch_port_that_drops_large_packets(
    start: Start, network: Callable[[int], NodeNetwork]
) -> None:
    def small(made: NodeNetwork) -> None:
        made.on_switch("ip", "link", "set", "port1", "mtu", "1280")

    outcome = run(start, network, 3, steps_of("network"), small)
    assert outcome.culprits == (1,)
    (result,) = failed(outcome)
    assert result.check == "path-mtu"
    assert any("1280 bytes" in line for line in result.evidence)


def test_a_closed_port_between_nodes(start: Start, network: Callable[[int], NodeNetwork]) -> None:
    def close(made: NodeNetwork) -> None:
        # Node 2 takes its ports from a range of its own; connections into it are refused by rule.
        made.on_node(2, "sysctl", "-qw", "net.ipv4.ip_local_port_range=16000 17000")
        ports = ["sport", "32768-60999", "dport", "16000-17000"]
        for rank in (0, 1):
            made.on_node(
                *(rank, "ip", "rule", "add", "pref", "10", "to", made.address(2)),
                *("ipproto", "tcp", *ports, "prohibit"),
            )

    outcome = run(start, network, 3, steps_of("network"), close)
    assert outcome.culprits == (2,)
    assert failed(outcome)[0].check == "ports"


@pytest.mark.parametrize("monotonic", ["faked", "right"])
def test_a_clock_that_steps_back_during_the_job(
    start: Start, tmp_path: Path, monotonic: str
) -> None:
    rule = tmp_path / "clock"
    rule.write_text("+0\n")
    faked = {"LD_PRELOAD": FAKETIME, "FAKETIME_TIMESTAMP_FILE": str(rule), "FAKETIME_NO_CACHE": "1"}
    if monotonic == "right":
        faked["FAKETIME_DONT_FAKE_MONOTONIC"] = "1"
    waiting = {"probe": "tcp_bandwidth", "scope": "mesh", "disjoint": True, "seconds": 30}
    network, *_, last = steps_of("network")
    pause = {**waiting, "arguments": {"seconds": 2.0}, "judge": {"of_best": 0.0}}
    job = start([network, pause, last], 2, environments={1: faked})
    deadline = time.monotonic() + 30
    while not (job.path.is_file() and job.evidence().of("network")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    rule.write_text("-3\n")
    outcome = judged(job.wait())
    assert outcome.culprits == (1,)
    first = failed(outcome)[0]
    assert (first.check, first.metric) == ("clock", "steps back")
    assert first.observed == pytest.approx(-3, abs=0.3)


@pytest.mark.parametrize("bad", [0, 1])
def test_of_two_nodes_the_one_whose_clock_is_off(start: Start, bad: int) -> None:
    faked = {"LD_PRELOAD": FAKETIME, "FAKETIME": "+2s"}
    outcome = judged(start(steps_of("network"), 2, environments={bad: faked}).wait())
    assert outcome.culprits == (bad,)
    (result,) = failed(outcome)
    assert isinstance(result.observed, float)
    assert result.observed == pytest.approx(2.0, abs=0.005)


def test_offsets_of_16_nodes_are_found(start: Start) -> None:
    planted = {rank: (-1) ** rank * 0.02 * 250 ** (rank / 15) for rank in range(1, 16)}
    faked = {
        rank: {"LD_PRELOAD": FAKETIME, "FAKETIME": f"{seconds:+.6f}s"}
        for rank, seconds in planted.items()
    }
    evidence = start(steps_of("network")[:1], 16, environments=faked).wait()
    planted[0] = 0.0
    pairs = 0
    for seen in evidence.of("network"):
        assert seen.values is not None, seen.error
        for peer in seen.values["peers"]:
            expected = planted[peer["node"]] - planted[seen.nodes[0]]
            assert peer["clock"]["offset"] == pytest.approx(expected, abs=0.005)
            pairs += 1
    assert pairs == 16 * 15


def test_documents_are_small(start: Start) -> None:
    """The evidence of a small job has no more than a few kilobytes per pair."""
    job = start(steps_of("network")[:1], 2)
    job.wait()
    assert os.path.getsize(job.path) < 8192
    assert json.loads(job.path.read_text())["interrupted"] is None
