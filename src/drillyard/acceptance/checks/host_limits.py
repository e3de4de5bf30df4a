"""The host of each node: processors, memory, swap, /dev/shm, disks, locked memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.node_results import (
    has_gpus,
    node_observations,
    node_result,
    why_not_observed,
)
from drillyard.acceptance.results import CheckResult, Status, Threshold
from drillyard.hardware.facts import cited

PROBE = "host"
LEAST_MEMORY = 0.95
"""Of the machine's memory: kernels and firmware keep up to 5 %; one of sixteen modules is 6 %."""
LEAST_FREE_SHARE = 0.05
"""Of a file system: imbue-ai/cluster-health@8f5964a fails from 95 % in use."""
LEAST_FREE_DISK = 20 << 30
"""A file system with so much free is not full, however large it is."""
LEAST_FREE_SHARED_MEMORY = 16 << 20
LEAST_SHARED_MEMORY_WITH_GPUS = 1 << 30
"""Free in /dev/shm where NCCL connects GPUs: NVIDIA's NCCL user guide, troubleshooting, starts
containers with --shm-size=1g."""
_IPC_LOCK = 14
"""Bit of CAP_IPC_LOCK, which lifts the limit of locked memory: capabilities(7)."""
_GIB = float(1 << 30)


def judge(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """Several results per node, each about one part."""
    for rank, seen in node_observations(evidence, PROBE):
        name = evidence.name_of(rank)
        if seen is None or seen.values is None:
            why = f"{name}: {why_not_observed(seen, PROBE)}"
            yield node_result(CHECK, rank, Status.incomplete, why)
            continue
        found = list(_judge_node(rank, name, seen.values, expected))
        yield from found
        if not found:
            reason = f"{name}: processors, memory, /dev/shm and disks are as they should be"
            yield node_result(CHECK, rank, Status.passed, reason)


def _judge_node(
    rank: int, name: str, values: Mapping[str, Any], expected: Expected
) -> Iterator[CheckResult]:
    """What does not pass."""
    if expected.machine is not None:
        yield from _cores(rank, name, values, expected)
        yield from _memory(rank, name, values, expected)
        yield from _swap(rank, name, values)
        if expected.stack is not None and expected.stack.rdma:
            yield from _locked_memory(rank, name, values)
    yield from _shared_memory(rank, name, values, expected)
    yield from _disks(rank, name, values)


def _cores(
    rank: int, name: str, values: Mapping[str, Any], expected: Expected
) -> Iterator[CheckResult]:
    machine, found = expected.machine, _count(values.get("cores_online"))
    assert machine is not None
    # With simultaneous multithreading off a machine shows its cores.
    needed, key = (machine.cores, "cores") if machine.cores else (machine.vcpus, "vcpus")
    if needed is None:
        return
    if found is None:
        yield _incomplete(rank, name, "processors")
    elif found < needed:
        threshold = Threshold(needed, "processors", True, cited(machine, key))
        reason = f"{name}: has {found} processors; the machine has {needed}"
        yield node_result(
            CHECK, rank, Status.fail, reason,
            metric="processors", observed=found, unit="processors", threshold=threshold,
        )  # fmt: skip


def _memory(
    rank: int, name: str, values: Mapping[str, Any], expected: Expected
) -> Iterator[CheckResult]:
    machine = expected.machine
    if machine is None or machine.host_memory_gib is None:
        return
    found = re.search(r"^MemTotal:\s+(\d{1,15}) kB$", str(values.get("memory")), re.MULTILINE)
    if not found:
        yield _incomplete(rank, name, "memory")
        return
    gib = int(found[1]) * 1024 / _GIB
    least = LEAST_MEMORY * machine.host_memory_gib
    if gib < least:
        source = f"95 % of {machine.host_memory_gib} GiB: {cited(machine, 'host_memory_gib')}"
        threshold = Threshold(least, "GiB", True, source, reference=machine.host_memory_gib)
        reason = f"{name}: has {gib:.0f} GiB of memory; the machine has {machine.host_memory_gib}"
        yield node_result(
            CHECK, rank, Status.fail, reason,
            metric="memory", observed=gib, unit="GiB", threshold=threshold,
            action="restart the node; if the memory stays, have it repaired",
        )  # fmt: skip


def _swap(rank: int, name: str, values: Mapping[str, Any]) -> Iterator[CheckResult]:
    text = values.get("swap")
    if not isinstance(text, str):
        yield _incomplete(rank, name, "swap")
    elif areas := text.splitlines()[1:]:
        reason = f"{name}: uses swap ({areas[0].split()[0]}): a rank that swaps stops all others"
        yield node_result(
            CHECK, rank, Status.fail, reason,
            metric="swap", observed=len(areas), unit="areas", action="swapoff -a",
        )  # fmt: skip


def _locked_memory(rank: int, name: str, values: Mapping[str, Any]) -> Iterator[CheckResult]:
    limits = values.get("limits")
    effective = re.search(r"^CapEff:\s+([0-9a-f]{1,16})$", str(values.get("process")), re.MULTILINE)
    if not isinstance(limits, Mapping) or "locked_memory" not in limits:
        yield _incomplete(rank, name, "the limit of locked memory")
        return
    if effective and int(effective[1], 16) >> _IPC_LOCK & 1:
        return
    if limits["locked_memory"] is None:
        return
    most = _count(limits["locked_memory"])
    if most is None:
        yield _incomplete(rank, name, "the limit of locked memory")
    else:
        reason = f"{name}: may lock {most:,} bytes of memory; RDMA needs it without a limit"
        yield node_result(
            CHECK, rank, Status.fail, reason,
            metric="locked memory", observed=most, unit="bytes",
            action="set memlock to unlimited (/etc/security/limits.conf, LimitMEMLOCK of slurmd)",
        )  # fmt: skip


def _shared_memory(
    rank: int, name: str, values: Mapping[str, Any], expected: Expected
) -> Iterator[CheckResult]:
    space: Any = values.get("shared_memory")
    if not _is_space(space):
        yield _incomplete(rank, name, "shared memory")
        return
    least = max(LEAST_FREE_SHARED_MEMORY, LEAST_FREE_SHARE * space["size"])
    if has_gpus(expected):
        least = max(least, LEAST_SHARED_MEMORY_WITH_GPUS)
    if space["free"] < least:
        reason = (
            f"{name}: /dev/shm has {space['free'] / _GIB:.2f} GiB free of"
            f" {space['size'] / _GIB:.2f} GiB"
        )
        threshold = Threshold(least, "bytes", True, "5 % of it; with GPUs 1 GiB (NCCL user guide)")
        yield node_result(
            CHECK, rank, Status.fail, reason,
            metric="shared memory", observed=space["free"], unit="bytes", threshold=threshold,
            action="remove what jobs left in /dev/shm, or make it larger",
        )  # fmt: skip


def _disks(rank: int, name: str, values: Mapping[str, Any]) -> Iterator[CheckResult]:
    disks = values.get("disks")
    if not isinstance(disks, Mapping) or not disks or not all(map(_is_space, disks.values())):
        yield _incomplete(rank, name, "disks")
        return
    known = set()
    for path, space in disks.items():
        if space["device"] in known:
            continue
        known.add(space["device"])
        least = min(LEAST_FREE_DISK, LEAST_FREE_SHARE * space["size"])
        # File systems that grow on demand have size 0.
        if space["size"] and space["free"] < least:
            reason = f"{name}: the disk of {path} has {space['free'] / _GIB:.1f} GiB free"
            threshold = Threshold(least, "bytes", True, "5 % of it, at most 20 GiB")
            yield node_result(
                CHECK, rank, Status.fail, reason,
                metric="disk", observed=space["free"], unit="bytes", threshold=threshold,
                action=f"remove what is not needed below {path}",
            )  # fmt: skip


def _incomplete(rank: int, name: str, what: str) -> CheckResult:
    return node_result(
        CHECK, rank, Status.incomplete, f"{name}: {what} could not be read", metric=what
    )


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _is_space(value: Any) -> bool:
    keys = ("size", "free", "device")
    return isinstance(value, Mapping) and all(_count(value.get(key)) is not None for key in keys)


CHECK = Check(
    name="host-limits",
    title="Host",
    level=Level.quick,
    probes=(PROBE,),
    seconds=1,
    measures="processors, memory, swap, free space in /dev/shm and on disks, locked memory",
    how="/proc, statvfs, getrlimit, in the job",
    evidence="a value of each from every node",
    references="the machine's row (cores, host_memory_gib); no swap; 5 % free",
    meaning="the host is smaller than the machine, or something has filled it",
    action="compare the node with the machine's row; restart it",
    judge=judge,
)
