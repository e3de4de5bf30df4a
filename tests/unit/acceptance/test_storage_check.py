"""What storage is judged by: its row, where the file system is of its kind; a baseline; nothing."""

from __future__ import annotations

from typing import Any

import pytest

from drillyard.acceptance.check import Expected
from drillyard.acceptance.checks import storage
from drillyard.acceptance.evidence import AcceptanceEvidence, NodeIdentity, Observation
from drillyard.acceptance.results import CheckResult, Status
from drillyard.hardware import load_catalog

BUCKET, DISK = "fuse.gcsfuse", "ext4"


def evidence(
    seconds: dict[int, float], kind: str = BUCKET, gb: float = 10.0, **values: Any
) -> AcceptanceEvidence:
    """All nodes write `gb` at once, each in its seconds."""
    observations = [
        Observation(
            probe="storage",
            scope="node",
            nodes=(rank,),
            values={
                "bytes": gb * 1e9,
                "filesystem": kind,
                "write": {"seconds": took, "gb_per_s": gb / took},
                "read": {"seconds": took, "gb_per_s": gb / took, "how": "direct"},
                "files": {"count": 1000, "create_per_s": 500.0},
                **values,
            },
        )
        for rank, took in seconds.items()
    ]
    return AcceptanceEvidence(
        level="standard",
        expected_nodes=len(seconds),
        processes_per_node=8,
        nodes=tuple(NodeIdentity(rank=rank, name=f"n{rank}") for rank in seconds),
        observations=tuple(observations),
    )


def expected(machine: str | None = "a4-highgpu-8g", **more: Any) -> Expected:
    facts = load_catalog(None)
    found = None if machine is None else facts.machines[machine]
    return Expected(facts, found, None, None, **more)


def write_of(seen: AcceptanceEvidence, facts: Expected) -> CheckResult:
    return next(each for each in storage.judge(seen, facts) if each.metric == "write")


def test_the_row_of_a_bucket() -> None:
    facts = expected()
    assert facts.machine is not None
    row = facts.machine.storage_gb_per_s(2)
    assert row is not None
    at_the_row = 2 * 10.0 / row.value
    for factor, status in ((1.0, Status.passed), (1.9, Status.passed), (2.1, Status.warn)):
        seen = evidence(dict.fromkeys((0, 1), at_the_row * factor))
        result = write_of(seen, facts)
        assert result.status is status
        assert result.threshold is not None and result.threshold.reference == row.value


def test_a_row_of_another_kind_of_storage_judges_nothing() -> None:
    assert write_of(evidence({0: 1e6}, kind=DISK), expected()).status is Status.recorded
    assert write_of(evidence({0: 1e6}), expected(None)).status is Status.recorded


def test_what_nodes_write_together_is_over_the_time_of_the_slowest() -> None:
    result = write_of(evidence({0: 1.0, 1: 4.0}), expected(None))
    assert result.observed == pytest.approx(20.0 / 4.0)


def test_a_checkpoint_takes_its_size_over_the_rate() -> None:
    found = storage.judge(evidence({0: 2.0}), expected(None, checkpoint_bytes=100e9))
    (saved,) = (each for each in found if each.metric == "save time")
    assert saved.observed == pytest.approx(20.0)


def test_wrong_content_is_the_nodes_fault() -> None:
    wrong = {"read": {"seconds": 1.0, "gb_per_s": 1.0, "how": "direct", "error": "differs"}}
    found = list(storage.judge(evidence({0: 1.0}, **wrong), expected(None)))
    assert [each.culprits for each in found if each.status is Status.fail] == [(0,)]


def test_without_evidence_it_is_incomplete() -> None:
    seen = evidence({0: 1.0})
    nothing = seen.model_copy(update={"observations": ()})
    assert [each.status for each in storage.judge(nothing, expected())] == [Status.incomplete]
    broken = evidence({0: 1.0}, write={})
    statuses = {each.metric: each.status for each in storage.judge(broken, expected())}
    assert statuses["write"] is Status.incomplete
