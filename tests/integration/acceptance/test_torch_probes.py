"""The probes with PyTorch on real gloo ranks, two nodes of two ranks as processes on loopback: what
a healthy host gives, and faults from outside of the code, each named by node and rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.acceptance.two_nodes import (
    NODES,
    RANKS,
    expected,
    observe,
    slowed,
    torch_steps,
)

from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.judgement import Outcome, judge
from drillyard.acceptance.rank_values import ranks_of
from drillyard.acceptance.results import Status
from drillyard.acceptance.training_phases import phases_of

CHECKS = ("bit-equality", "stragglers", "matmul", "memory-bandwidth", "training-speed")


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> AcceptanceEvidence:
    """The quick level's steps with ranks, without a fault."""
    return observe(tmp_path_factory.mktemp("healthy"), torch_steps())


def step(probe: str) -> list[dict[str, object]]:
    return [each for each in torch_steps() if each["probe"] == probe]


def failed(outcome: Outcome) -> list[tuple[str, str, tuple[int, ...], int | None]]:
    return [
        (each.check, each.metric, each.culprits, each.device)
        for each in outcome.results
        if each.status is Status.fail
    ]


def of(outcome: Outcome, checks: tuple[str, ...]) -> set[tuple[str, Status]]:
    return {(each.check, each.status) for each in outcome.results if each.check in checks}


def test_a_healthy_host_passes_against_itself(healthy: AcceptanceEvidence) -> None:
    assert not [each.error for each in healthy.observations if each.error]
    outcome = judge(healthy, expected(baseline=healthy))
    assert failed(outcome) == []
    assert of(outcome, CHECKS) >= {(check, Status.passed) for check in CHECKS}
    assert Status.incomplete not in {status for _, status in of(outcome, CHECKS)}
    first = judge(healthy, expected())
    assert failed(first) == []
    assert ("matmul", Status.recorded) in of(first, CHECKS)


def test_every_rank_measured_every_part(healthy: AcceptanceEvidence) -> None:
    (training,) = healthy.of("training")
    ranks = ranks_of(healthy, training).ranks
    assert [(each.node, each.local_rank) for each in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for each in ranks:
        assert [phase.ranks for phase in phases_of(each)] == [1, 2, 4, 2]
        assert [phase.accumulated for phase in phases_of(each)] == [1, 1, 1, NODES]
    collectives = healthy.of("collective")
    assert sorted(seen.nodes for seen in collectives) == [(0,), (0, 1), (1,)]
    for seen in collectives:
        for each in ranks_of(healthy, seen).ranks:
            assert each.values["collective"] == "all_reduce"
            assert each.values["backend"] == "gloo"
            assert each.values["ranks"] == len(seen.nodes) * RANKS
            assert [row["wrong"] for row in each.values["rows"]] == [0, 0]
            assert [row["bytes"] for row in each.values["rows"]] == [1 << 16, 1 << 22]
            assert all(len(row["seconds"]) == 5 for row in each.values["rows"])


def test_a_rank_that_is_stopped_in_turns_is_named(
    tmp_path: Path, healthy: AcceptanceEvidence
) -> None:
    with slowed(1, 0, tmp_path):
        seen = observe(tmp_path, step("training"), {"ACCEPTANCE_TEST": str(tmp_path)})
    outcome = judge(seen, expected(baseline=healthy))
    assert outcome.verdict is Status.fail
    assert outcome.culprits == (1,)
    assert failed(outcome)[0] == ("stragglers", "local time", (1,), 0)
    assert {each[2:] for each in failed(outcome) if each[2]} == {((1,), 0)}


@pytest.mark.parametrize(
    ("probe", "metric", "rank", "call", "bit"),
    [("devices", "product", 1, 6, 22), ("training", "gradients", 2, 100, 20)],
)
def test_one_flipped_bit_is_found(
    tmp_path: Path, probe: str, metric: str, rank: int, call: int, bit: int
) -> None:
    environment = {
        "PYTHONPATH": str(Path(__file__).parent / "flipped_bit"),
        "FLIPPED": f"torch_{probe}.py:{rank}:{call}:{bit}",
    }
    outcome = judge(observe(tmp_path, step(probe), environment, forks=False), expected())
    node, local = divmod(rank, RANKS)
    # The devices probe has ranks of its own on each node, so the same one of both is hit.
    named = {((0,), 1), ((1,), 1)} if probe == "devices" else {((node,), local)}
    assert {each[2:] for each in failed(outcome)} == named
    assert {each[:2] for each in failed(outcome)} == {("bit-equality", metric)}
