"""Accelerators of each node: as many as its machine has."""

from __future__ import annotations

from collections.abc import Iterator

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.results import CheckResult, Status


def judge(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """One result per node."""
    for seen in evidence.of("host"):
        (rank,) = seen.nodes
        found = (seen.values or {}).get("accelerators")
        name = evidence.name_of(rank)
        if expected.machine is None:
            yield _result(rank, Status.skipped, "the cluster config names no machine", found)
        elif not isinstance(found, int):
            yield _result(
                rank, Status.incomplete, f"{name}: {seen.error or 'was not counted'}", None
            )
        else:
            needed = expected.machine.num_accelerators
            status = Status.passed if found == needed else Status.fail
            reason = f"{name} has {found} of {needed} accelerators"
            yield _result(rank, status, reason, found)


def _result(rank: int, status: Status, reason: str, found: int | None) -> CheckResult:
    return CheckResult(
        check=CHECK.name,
        metric="accelerators",
        nodes=(rank,),
        status=status,
        reason=reason,
        observed=found,
        action=CHECK.action if status is Status.fail else "",
        culprits=(rank,) if status is Status.fail else (),
    )


CHECK = Check(
    name="accelerator-count",
    title="Accelerators",
    level=Level.quick,
    probes=("host",),
    seconds=1,
    measures="accelerators of each node",
    how="device files /dev/nvidia0, /dev/nvidia1, ...",
    evidence="a count from every node",
    references="the machine's row",
    meaning="an accelerator is missing: off the bus, or not given to the job",
    action="restart the node; if the count stays, have it repaired",
    judge=judge,
)
