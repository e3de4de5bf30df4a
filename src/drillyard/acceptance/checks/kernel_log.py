"""The host's own faults in the kernel log: disks, memory, file systems, links, processors."""

from __future__ import annotations

from collections.abc import Iterator

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.kernel_log_evidence import PROBE, log_of, seconds_of, unreadable_log
from drillyard.acceptance.node_results import (
    node_observations,
    node_result,
)
from drillyard.acceptance.parsers.kernel_log import host_events, parsed_lines
from drillyard.acceptance.results import CheckResult, Status


def judge(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """One result per kind of event, else one per node."""
    for rank, seen in node_observations(evidence, PROBE):
        name, log = evidence.name_of(rank), log_of(seen)
        if isinstance(log, str):
            if expected.machine is None:
                why = f"{name}: the kernel log cannot be read ({log}), and no machine is named"
                yield node_result(CHECK, rank, Status.skipped, why)
            else:
                yield unreadable_log(CHECK, rank, name, log, recorded=evidence.recorded)
            continue
        clean = True
        now = seconds_of(log, "uptime")
        for rule, lines, counts in host_events(parsed_lines(log["lines"]), now):
            clean = clean and not counts
            text = f"{name}: {rule.meaning}: {lines[-1].text[:160]}"
            yield node_result(
                CHECK,
                rank,
                Status.fail if counts else Status.recorded,
                text if counts else f"{text} (reported only)",
                metric=rule.name,
                observed=len(lines),
                unit="lines",
                action=rule.action if counts else "",
                evidence=tuple(line.text for line in lines[-3:]),
            )
        if clean:
            reason = f"{name}: no fault of the host in the last 24 h ({log['source']})"
            yield node_result(CHECK, rank, Status.passed, reason, observed=0, unit="lines")


CHECK = Check(
    name="kernel-log",
    title="Faults of the host in the kernel log",
    level=Level.quick,
    probes=("kernel_log",),
    seconds=1,
    measures="I/O errors, hung tasks, lockups, read-only file systems, memory errors, links that"
    " come and go",
    how="dmesg, /dev/kmsg or journalctl -k",
    evidence="a readable kernel log of every node; without a machine in the cluster config skipped"
    " where it cannot be read",
    references="none in the last 24 h (of links fewer than 5); older ones, and jobs that ran out of"
    " memory, are only reported",
    meaning="a part of the host fails, or did so recently",
    action="look at the node's kernel log",
    judge=judge,
)
