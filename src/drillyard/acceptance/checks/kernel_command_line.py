"""The kernel's command line: the same on all nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.node_results import (
    majority,
    named,
    node_observations,
    node_result,
    why_not_observed,
)
from drillyard.acceptance.results import CheckResult, Status

PROBE = "host"
_OWN = re.compile(
    r"(root|BOOT_IMAGE|initrd|resume|ip|hostname|ds|rd\.\S+|systemd\.machine_id|nodename|UUID)="
)
"""Words that name the node or its disks."""


def judge(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """One result for each node that differs or was not read, else one for all."""
    words: dict[int, frozenset[str]] = {}
    for rank, seen in node_observations(evidence, PROBE):
        line = (seen.values or {}).get("command_line") if seen else None
        if isinstance(line, str):
            words[rank] = frozenset(word for word in line.split() if not _OWN.match(word))
        else:
            why = why_not_observed(seen, PROBE) if seen is None or seen.values is None else None
            reason = f"{evidence.name_of(rank)}: {why or 'the command line cannot be read'}"
            yield node_result(CHECK, rank, Status.incomplete, reason)
    if not words:
        return
    common = majority(words)
    odd = [rank for rank, each in words.items() if each != common]
    for rank in odd:
        if common is None:
            others = frozenset().union(*(each for at, each in words.items() if at != rank))
            different = sorted(words[rank] - others)
        else:
            different = sorted(words[rank] ^ common)
        reason = (
            f"{evidence.name_of(rank)}: differs in {' '.join(different)[:200] or 'what it lacks'}"
        )
        yield node_result(CHECK, rank, Status.warn, reason, observed=" ".join(different)[:400])
    if not odd:
        ranks = sorted(words)
        reason = f"{named(evidence, ranks)}: the same"
        if len(ranks) == 1:
            reason = f"{evidence.name_of(ranks[0])}: no other node to compare with"
        status = Status.passed if len(ranks) > 1 else Status.skipped
        yield CHECK.result(tuple(ranks), status, reason)


CHECK = Check(
    name="kernel-command-line",
    title="Kernel command line",
    level=Level.quick,
    probes=(PROBE,),
    seconds=1,
    measures="parameters with which each node's kernel was started",
    how="/proc/cmdline, without the words that name a node or its disks",
    evidence="the line of every node",
    references="that of most nodes; a difference warns: no row says which is right",
    meaning="nodes were made from different images or settings (IOMMU, huge pages, power)",
    action="start the node with the parameters of the others",
    judge=judge,
)
