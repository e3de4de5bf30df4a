"""The kernel log of a node as observed, or why there is none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drillyard.acceptance.check import Check
from drillyard.acceptance.evidence import Observation
from drillyard.acceptance.node_results import node_result, why_not_observed
from drillyard.acceptance.results import CheckResult, Status

PROBE = "kernel_log"
_END_OF_TIME = 4e9
"""Seconds since 1970, in 2096."""
_READ = (
    "let the job read it: run it as root, or sysctl kernel.dmesg_restrict=0, or add its user to the"
    " group systemd-journal"
)
_RECORD = "give the whole output of dmesg in a file of its own"


def log_of(seen: Observation | None) -> Mapping[str, Any] | str:
    """The observed log (`probe_kernel_log.probe`), or why it cannot be judged."""
    if seen is None or seen.values is None:
        return why_not_observed(seen, PROBE)
    log = seen.values
    if log.get("source") is None:
        tried = log.get("tried")
        said = (
            "; ".join(f"{k}: {v}" for k, v in tried.items()) if isinstance(tried, Mapping) else ""
        )
        return said or "no source of it was found"
    lines = log.get("lines")
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        return "the probe gave no lines"
    if not isinstance(log.get("total_lines"), int) or log["total_lines"] < max(1, len(lines)):
        return "the probe gave another number of lines than it says"
    return log


def seconds_of(log: Mapping[str, Any], key: str) -> float | None:
    """A time of the log; None where it is not one."""
    value = log.get(key)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return float(value) if 0 <= value < _END_OF_TIME else None


def unreadable_log(check: Check, rank: int, name: str, why: str, *, recorded: bool) -> CheckResult:
    """The result of a node whose log cannot be judged."""
    reason = f"{name}: the kernel log cannot be read: {why}"
    action = _RECORD if recorded else _READ
    return node_result(check, rank, Status.incomplete, reason, action=action)
