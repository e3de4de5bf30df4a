"""Checks of collectives: what a row judges, what is recorded, and which node is blamed."""

from __future__ import annotations

import dataclasses

import pytest
from tests.unit.acceptance.collective_observations import (
    GIB,
    bandwidth_results,
    evidence_of,
    expected_on,
    observed,
    searched_pairs,
)

from drillyard.acceptance.results import Status

A4 = expected_on("a4-highgpu-8g")
REDUCE = {16 * GIB: [845.0, 846.0, 844.0]}
GATHER = {8 * GIB: [376.0, 377.0, 375.0]}
ONE_NODE = observed([0], REDUCE, "all_reduce")
PAIR = observed([0, 1], GATHER)


def by_check(evidence, expected=A4):
    found = {}
    for each in bandwidth_results(evidence, expected):
        found.setdefault(each.check, []).append(each)
    return found


def only(results):
    (result,) = results
    return result


def two_nodes(*observations):
    return evidence_of(2, [ONE_NODE, observed([1], REDUCE, "all_reduce"), *observations])


def test_healthy_nodes_pass():
    found = by_check(two_nodes(PAIR))
    assert {each.status for each in found["collectives-node"]} == {Status.passed}
    pair = only(found["collectives-pairs"])
    assert (pair.status, pair.observed, pair.interval) == (
        Status.passed, pytest.approx(376), (pytest.approx(375), pytest.approx(377)),
    )  # fmt: skip
    assert pair.series[-1][0] == 8 * GIB and pair.reference_series[-1] == (8 * GIB, 376.40)
    assert only(found["slow-pairs"]).status is Status.passed


@pytest.mark.parametrize(
    ("values", "status"),
    [([329.4], Status.fail), ([329.0, 330.0, 331.0], Status.fail),
     ([329.0, 330.0, 360.0], Status.incomplete), ([330.0, 360.0, 361.0], Status.passed),
     ([800.0], Status.incomplete)],
)  # fmt: skip
def test_repeats_of_a_pair(values, status):
    found = by_check(two_nodes(observed([0, 1], {8 * GIB: values})))
    assert only(found["collectives-pairs"]).status is status


def test_a_slow_node_is_blamed_by_its_own_collective():
    slow = observed([1], {16 * GIB: [600.0]}, "all_reduce")
    found = by_check(evidence_of(2, [ONE_NODE, slow, PAIR]))
    assert [each.culprits for each in found["collectives-node"]] == [(), (1,)]


def broken(**changes):
    return PAIR.model_copy(update=changes)


def without_rank(rank):
    ranks = [each for each in PAIR.values["ranks"] if each["rank"] != rank]
    return broken(values={"ranks": ranks})


def with_rows(rows):
    ranks = [
        {**each, "values": {"collective": "all_gather", "rows": rows}}
        for each in PAIR.values["ranks"]
    ]
    return broken(values={"ranks": ranks})


ROW = {"bytes": 8 * GIB, "seconds": [0.0214], "wrong": 0}


@pytest.mark.parametrize(
    ("observation", "status"),
    [(broken(values=None, error="killed by SIGKILL"), Status.incomplete),
     (broken(error="exit code 1"), Status.incomplete),
     (broken(values={}), Status.incomplete),
     (broken(values={"ranks": "x"}), Status.incomplete),
     (without_rank(15), Status.incomplete),
     (with_rows([]), Status.incomplete),
     (with_rows([{**ROW, "seconds": []}]), Status.incomplete),
     (with_rows([{**ROW, "seconds": [0.0]}]), Status.incomplete),
     (with_rows([{**ROW, "seconds": [float("nan")]}]), Status.incomplete),
     (with_rows([{**ROW, "seconds": ["x"]}]), Status.incomplete),
     (with_rows([{**ROW, "bytes": "8"}]), Status.incomplete),
     (with_rows([ROW, ROW]), Status.incomplete),
     (with_rows([{"bytes": 8 * GIB, "seconds": [0.0214]}]), Status.incomplete),
     (with_rows([{**ROW, "wrong": 3}]), Status.fail),
     (with_rows([ROW]), Status.passed),
     (broken(arguments={"collective": "all_reduce", "sizes": [8 * GIB]}), Status.incomplete),
     (broken(arguments={"collective": "all_gather", "sizes": [GIB, 8 * GIB]}),
      Status.incomplete)],
)  # fmt: skip
def test_evidence_that_does_not_agree_with_itself_never_passes(observation, status):
    found = by_check(two_nodes(observation))
    assert status in {each.status for each in found["collectives-pairs"]}
    if status is not Status.passed:
        assert Status.passed not in {each.status for each in found["collectives-pairs"]}


def test_what_was_not_measured_is_incomplete():
    found = by_check(evidence_of(3, [ONE_NODE, PAIR]))
    assert [(each.nodes, each.status) for each in found["collectives-node"]] == [
        ((0,), Status.passed), ((1,), Status.incomplete), ((2,), Status.incomplete),
    ]  # fmt: skip
    assert [each.nodes for each in found["collectives-pairs"]] == [(0, 1), (2,)]


def test_one_node_has_no_pairs():
    found = by_check(evidence_of(1, [ONE_NODE]))
    assert only(found["collectives-pairs"]).status is Status.skipped
    assert only(found["slow-pairs"]).status is Status.skipped
    assert only(found["collectives-node"]).status is Status.passed


def test_collectives_without_a_row_and_more_nodes_are_recorded_and_decide_nothing():
    many = observed([0, 1, 2, 3], {8 * GIB: [200.0]})
    other = observed([0, 1], {8 * GIB: [100.0]}, "all_to_all")
    found = by_check(evidence_of(4, [many, other]))
    assert all(
        (each.status, each.required) == (Status.recorded, False)
        for each in [*found.get("collectives-all", []), *found["collectives-pairs"]]
        if len(each.nodes) > 1
    )
    found = by_check(evidence_of(4, [PAIR, broken(nodes=(2, 3)), many]))
    assert {each.status for each in found["collectives-pairs"]} == {Status.passed}


def test_a_row_of_exactly_as_many_nodes_judges():
    p6 = expected_on("p6-b200.48xlarge")
    for value, status in ((382.0, Status.passed), (330.0, Status.fail)):
        seen = observed(range(4), {16 * GIB: [value]}, "all_reduce")
        evidence = evidence_of(4, [seen]).model_copy(update={"level": "standard"})
        assert only(by_check(evidence, p6)["collectives-all"]).status is status


def test_the_bad_node_of_eight_is_named_with_its_pairs():
    pairs = searched_pairs(8, lambda one, other: 250.0 if 5 in (one, other) else 376.0)
    found = by_check(evidence_of(8, pairs))
    (bad,) = found["slow-pairs"]
    assert (bad.status, bad.culprits, bad.nodes) == (Status.fail, (5,), (5,))
    assert len(bad.evidence) == 3 and all("n5" in line for line in bad.evidence)


def test_without_a_threshold_pairs_are_judged_by_each_other():
    cpu = expected_on()
    pairs = searched_pairs(
        8, lambda one, other: 0.04 if 2 in (one, other) else 1.0, at_least=None, processes=2
    )
    found = by_check(evidence_of(8, pairs, processes=2), cpu)
    assert {each.status for each in found["collectives-pairs"]} == {Status.recorded}
    (bad,) = found["slow-pairs"]
    assert (bad.status, bad.culprits) == (Status.fail, (2,))
    assert len(bad.evidence) == 3 and all(line.endswith("0.04 GB/s") for line in bad.evidence)


def test_two_slow_nodes_alone_are_not_distinguished():
    found = by_check(two_nodes(observed([0, 1], {8 * GIB: [200.0]})))
    (cause,) = found["slow-pairs"]
    assert (cause.status, cause.culprits, cause.required) == (Status.recorded, (), False)
    assert only(found["collectives-pairs"]).status is Status.fail


SIZE = 4 << 20


def cpu_run(pair, one=(1.0, 1.1, 0.9)):
    return evidence_of(
        2,
        [observed([0], {SIZE: list(one)}, "all_reduce", processes=2),
         observed([1], {SIZE: [1.0, 1.0, 1.0]}, "all_reduce", processes=2),
         observed([0, 1], {SIZE: list(pair)}, "all_reduce", processes=2)],
        processes=2,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("pair", "status"),
    [([0.5, 0.6, 0.55], Status.passed), ([0.35, 0.3, 0.33], Status.passed),
     ([0.1, 0.12, 0.14], Status.fail), ([0.1, 0.12, 0.5], Status.incomplete)],
)  # fmt: skip
def test_an_earlier_run_is_the_reference_where_there_is_no_row(pair, status):
    first = cpu_run([0.5, 0.6, 0.55])
    assert {each.status for each in bandwidth_results(first, expected_on())} <= {
        Status.recorded, Status.passed, Status.skipped,
    }  # fmt: skip
    expected = expected_on(baseline=first)
    result = only(by_check(cpu_run(pair), expected)["collectives-pairs"])
    assert (result.status, result.required) == (status, True)
    assert result.threshold.reference == pytest.approx(0.5)


def test_a_row_comes_before_an_earlier_run():
    before = two_nodes(observed([0, 1], {8 * GIB: [100.0]}))
    expected = dataclasses.replace(A4, baseline=before)
    found = by_check(two_nodes(observed([0, 1], {8 * GIB: [120.0]})), expected)
    assert only(found["collectives-pairs"]).status is Status.fail


def test_an_earlier_run_judges_more_nodes():
    before = evidence_of(4, [observed(range(4), {8 * GIB: [350.0, 352.0]})])
    expected = dataclasses.replace(A4, baseline=before)
    for value, status in ((340.0, Status.passed), (290.0, Status.fail)):
        seen = evidence_of(4, [observed(range(4), {8 * GIB: [value]})])
        seen = seen.model_copy(update={"level": "standard"})
        assert only(by_check(seen, expected)["collectives-all"]).status is status
