"""Xids and SXids: errors of GPUs and NVSwitches in the kernel log since the node's start."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.gpu_evidence import gpus_of
from drillyard.acceptance.kernel_log_evidence import PROBE, log_of, seconds_of, unreadable_log
from drillyard.acceptance.node_results import (
    has_gpus,
    node_observations,
    node_result,
)
from drillyard.acceptance.parsers.kernel_log import XidEvent, parsed_lines, xid_events
from drillyard.acceptance.results import CheckResult, Status
from drillyard.hardware.xids import XidAction, find_xid

_FATAL_SWITCH = "drain and restart the node; if it comes back, have the NVSwitch replaced"


def judge(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """One result per GPU and number, and one per node that passes."""
    addresses = {
        node.rank: {gpu.bus_id: gpu.index for gpu in node.table.gpus} if node.table else {}
        for node in gpus_of(evidence)
    }
    for rank, seen in node_observations(evidence, PROBE):
        name = evidence.name_of(rank)
        log = log_of(seen)
        if isinstance(log, str):
            if not has_gpus(expected) and not addresses.get(rank):
                why = f"{name}: has no known GPUs"
                yield node_result(CHECK, rank, Status.skipped, why)
            else:
                yield unreadable_log(CHECK, rank, name, log, recorded=evidence.recorded)
            continue
        yield from _judge_node(rank, name, log, addresses.get(rank, {}), expected)


def _judge_node(
    rank: int, name: str, log: Mapping[str, Any], addresses: Mapping[str, int], expected: Expected
) -> Iterator[CheckResult]:
    accelerator = expected.accelerator.name if expected.accelerator else None
    by_fault: dict[tuple[str, int, bool], list[XidEvent]] = {}
    for event in xid_events(parsed_lines(log["lines"])):
        by_fault.setdefault((event.bus_id, event.number, event.switch), []).append(event)
    clean = True
    for (bus_id, number, switch), events in by_fault.items():
        last = events[-1]
        where = f"NVSwitch {bus_id}" if switch else _device(bus_id, addresses)
        device = None if switch else addresses.get(bus_id)
        common = {
            "metric": f"{'SXid' if switch else 'Xid'} {number}",
            "device": device,
            "observed": number,
            "evidence": tuple(event.text for event in events[-3:]),
        }
        when = _when(last, log)
        if switch:
            action, title = _switch_action(last), "error of an NVSwitch"
        else:
            row = find_xid(number)
            if row is None:
                clean = False
                reason = f"{name}: {where}: Xid {number} {when}, an unknown Xid"
                remedy = "look the number up in NVIDIA's Xid catalog"
                yield node_result(CHECK, rank, Status.incomplete, reason, action=remedy, **common)
                continue
            action, title = row.action_for(last.text, accelerator), row.title
        blamed = action.blames_node
        clean = clean and not blamed
        remedy = _FATAL_SWITCH if switch and blamed else action.remedy
        text = f"{name}: {where}: {common['metric']} ({title}) {when}"
        yield node_result(
            CHECK,
            rank,
            Status.fail if blamed else Status.recorded,
            text if blamed else f"{text}: not the node's fault",
            action=f"{action}: {remedy}",
            **common,
        )
    if clean:
        since = seconds_of(log, "first_second")
        begins = "its start" if since is None or since < 60 else f"{since:.0f} s after its start"
        reason = f"{name}: no Xid that is the node's fault since {begins} ({log['source']})"
        yield node_result(CHECK, rank, Status.passed, reason, observed=0, unit="Xids")


def _switch_action(event: XidEvent) -> XidAction:
    fatal = "fatal" in event.text.lower() and "non-fatal" not in event.text.lower()
    return XidAction.RESTART_BM if fatal else XidAction.IGNORE


def _device(bus_id: str, addresses: Mapping[str, int]) -> str:
    index = addresses.get(bus_id)
    return f"the GPU at {bus_id}" if index is None else f"GPU {index} ({bus_id})"


def _when(event: XidEvent, log: Mapping[str, Any]) -> str:
    if event.second is None:
        return "at an unknown time"
    now, uptime = seconds_of(log, "now"), seconds_of(log, "uptime")
    if now is None or uptime is None or not uptime <= now or event.second > uptime:
        return f"{event.second:.0f} s after the start"
    return time.strftime("at %Y-%m-%d %H:%M:%S UTC", time.gmtime(now - uptime + event.second))


CHECK = Check(
    name="xids",
    title="Xids since the start",
    level=Level.quick,
    probes=("kernel_log", "accelerators"),
    seconds=1,
    measures="errors of GPUs and NVSwitches that the driver wrote into the kernel log",
    how="dmesg, /dev/kmsg or journalctl -k",
    evidence="a readable kernel log of every node",
    references="the table of Xids (hardware/xids.yaml), after NVIDIA's Xid catalog",
    meaning="by number: the application's fault, or a GPU, its memory, a link or the node",
    action="as NVIDIA's catalog says for the number",
    judge=judge,
)
