"""`launch --accept`: which nodes a run must not use, and when it must not start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from drillyard.acceptance import accept_command, before_launch
from drillyard.acceptance.accept_command import Acceptance
from drillyard.acceptance.check import Level
from drillyard.acceptance.evidence import AcceptanceEvidence, NodeIdentity
from drillyard.acceptance.judgement import Outcome
from drillyard.acceptance.results import CheckResult, Status, verdict_of
from drillyard.errors import UserError

SLURM = "name: c\nplatform: slurm\nnodes: 2\nprocesses_per_node: 1\n"
SSH = "name: c\nplatform: ssh\nnodes: 2\nprocesses_per_node: 1\nssh: {hosts: [h0, h1]}\n"


class Nodes:
    """Idle nodes of a cluster, of which some are bad: proven where `proven`."""

    def __init__(self, idle: Sequence[str] | None, bad: Sequence[str], proven: bool = True) -> None:
        self.idle, self.bad, self.proven = idle, bad, proven
        self.checked: list[tuple[str, ...]] = []

    def run(self, acceptance: Acceptance) -> Outcome:
        request = acceptance.request
        free = [each for each in self.idle or ("h0", "h1") if each not in request.exclude]
        names = tuple(free[: request.cluster.nodes])
        self.checked.append(names)
        results = [
            CheckResult(
                check="memory",
                metric="size",
                nodes=(rank,),
                status=Status.fail if name in self.bad else Status.passed,
                reason=f"{name} is {'bad' if name in self.bad else 'good'}",
                culprits=(rank,) if name in self.bad and self.proven else (),
            )
            for rank, name in enumerate(names)
        ]
        evidence = AcceptanceEvidence(
            level="quick",
            hosts=names,
            expected_nodes=len(names),
            processes_per_node=1,
            nodes=tuple(NodeIdentity(rank=rank, name=name) for rank, name in enumerate(names)),
            observations=(),
        )
        culprits = dict.fromkeys(rank for each in results for rank in each.culprits)
        return Outcome(evidence, tuple(results), verdict_of(results), tuple(culprits))


def excluded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nodes: Nodes, config: str = SLURM
) -> list[str]:
    idle = SimpleNamespace(
        idle_nodes=lambda request: (
            nodes.idle and [each for each in nodes.idle if each not in request.exclude]
        )
    )
    monkeypatch.setattr(before_launch, "launcher_for", lambda cluster: idle)
    monkeypatch.setattr(accept_command, "launcher_for", lambda cluster: idle)
    monkeypatch.setattr(before_launch, "run_acceptance", nodes.run)
    path = tmp_path / "cluster.yaml"
    path.write_text(config)
    return before_launch.nodes_to_exclude(
        path, Level.quick, None, ["x"] if config == SLURM else [], lambda acceptance, outcome: None
    )


def test_the_run_s_nodes_and_spare_ones_are_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nodes = Nodes([f"n{number}" for number in range(10)], [])
    assert excluded(monkeypatch, tmp_path, nodes) == ["x"]
    assert nodes.checked == [("n0", "n1", "n2", "n3")]


def test_a_proven_node_is_excluded_and_enough_good_ones_are_not_checked_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nodes = Nodes(["n1", "n2", "n3"], ["n2"])
    assert excluded(monkeypatch, tmp_path, nodes) == ["x", "n2"]
    assert nodes.checked == [("n1", "n2", "n3")]


def test_nodes_in_place_of_bad_ones_are_checked_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nodes = Nodes(["n1", "n2", "n3", "n4", "n5", "n6"], ["n1", "n2", "n3"])
    assert excluded(monkeypatch, tmp_path, nodes) == ["x", "n1", "n2", "n3"]
    assert nodes.checked == [("n1", "n2", "n3", "n4"), ("n4", "n5", "n6")]


def test_nodes_that_fail_again_and_again_end_the_search(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = [f"n{number}" for number in range(30)]
    with pytest.raises(UserError, match="nothing was submitted"):
        excluded(monkeypatch, tmp_path, Nodes(names, names))


@pytest.mark.parametrize(("config", "proven"), [(SSH, True), (SSH, False), (SLURM, False)], ids=str)
def test_a_start_is_refused_with_the_node_where_it_is_not_proven_or_cannot_be_excluded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: str, proven: bool
) -> None:
    nodes = Nodes(None, ["h1"], proven)
    with pytest.raises(UserError, match="h1 is bad") as caught:
        excluded(monkeypatch, tmp_path, nodes, config)
    assert "nothing was submitted" in str(caught.value) and "h0" not in str(caught.value)


def test_an_incomplete_check_does_not_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nodes = Nodes(None, [])

    def run(acceptance: Acceptance) -> Outcome:
        found = Nodes(None, []).run(acceptance)
        result = replace(found.results[0], status=Status.incomplete, reason="no evidence")
        return replace(found, results=(result,), verdict=Status.incomplete)

    monkeypatch.setattr(nodes, "run", run)
    with pytest.raises(UserError, match="no evidence"):
        excluded(monkeypatch, tmp_path, nodes)
