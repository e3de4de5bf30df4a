"""Lines of the kernel log: errors of GPUs and NVSwitches (Xids, SXids), and the host's own faults.

A rule matches what the kernel writes for an event, not words: "no Xid errors found" and "ECC
uncorrectable errors: 0" do not match.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from drillyard.acceptance.evidence import Observation
from drillyard.acceptance.parsers.nvidia_smi import short_bus_id

HOST_FAULT_SECONDS = 24 * 3600.0
"""Host faults that are older are reported, and decide nothing: a node that has recovered is not
drained for its history."""
MOST_LINK_FLAPS = 5
"""Losses of carrier in that time from which a link counts as unstable; fewer are a cable that was
touched. Azure/azurehpc-health-checks@0e0a1ac: 5 per 24 h."""

_STAMP = re.compile(r"\s*(?:<\d+>)?\[\s*(\d{1,12}(?:\.\d{1,9})?)\]\s*(?:\S+ kernel: )?(.*)")
LONGEST_LINE = 4096
_PRINTED_STAMP = re.compile(r"(?:<\d+>)?\[[ \d]{5,12}\.\d{6}\].*")
"""As dmesg and journalctl print it: `[%5lu.%06lu]`. `[0] text` is another program's."""
_DATED = re.compile(
    r"\[\w{3} \w{3}\s+\d+ [\d:]{8} \d{4}\] .*"
    r"|(?:\w{3}\s+\d+ [\d:]{8}|\d{4}-\d\d-\d\dT\S+) \S+ kernel: .*"
)
"""Lines of `dmesg -T`, of journalctl and of syslog: they keep their date."""
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]{1,40})\): (\d{1,9})\b,?\s*(.*)")
_SXID = re.compile(r"SXid \((?:PCI:)?([0-9a-fA-F:.]{1,40})\): (\d{1,9})\b,?\s*(.*)")


@dataclass(frozen=True)
class KernelLine:
    """A line: seconds since boot, None where it has no time stamp, and its text."""

    second: float | None
    text: str


@dataclass(frozen=True)
class XidEvent:
    """An Xid or, with `switch`, an SXid of an NVSwitch. `bus_id`: 0000:05:00."""

    second: float | None
    bus_id: str
    number: int
    text: str
    switch: bool = False


@dataclass(frozen=True)
class HostRule:
    """An event of the host. `fault`: it is one of the node; otherwise it is only reported."""

    name: str
    pattern: re.Pattern[str]
    meaning: str
    action: str
    fault: bool = True


def _rule(name: str, pattern: str, meaning: str, action: str, fault: bool = True) -> HostRule:
    return HostRule(name, re.compile(pattern), meaning, action, fault)


_DISK = "drain the node; have the disk checked"
_HARDWARE = r"(?!loop|nbd|zram|sr\d|fd\d)"
"""Before a device's name: not a file or a network that poses as a disk."""
HOST_RULES: tuple[HostRule, ...] = (
    _rule(
        "soft-lockup",
        r"soft lockup - CPU#\d+ stuck for \d+s",
        "a processor did not schedule for seconds",
        "restart the node; look at what ran",
    ),
    _rule(
        "hung-task",
        r"task (?!\S*loop\d)\S+ blocked for more than \d+ seconds",
        "a task waits for a disk or a file system that does not answer",
        "look at the task's file system; restart the node",
    ),
    _rule("io-error", rf"I/O error,? (?:on )?dev {_HARDWARE}\w+", "a disk fails", _DISK),
    _rule(
        "nvme-timeout", r"nvme\S*: I/O .*timeout, (?:reset|aborting|disable)", "a disk hangs", _DISK
    ),
    _rule(
        "read-only",
        rf"\({_HARDWARE}[\w-]+\).*(?:Remounting filesystem read-only|Shutting down filesystem)",
        "a file system had errors and became read-only",
        "drain the node; check the file system",
    ),
    _rule(
        "raid",
        r"(?:md/raid\S*: )?Disk failure on \S+, disabling|failing array",
        "a RAID lost a disk",
        _DISK,
    ),
    _rule(
        "memory-error",
        r"EDAC .*\bUE\b|Uncorrected (?:hardware )?memory error"
        r"|Machine check: Processor context corrupt|\[Hardware Error\]: .*(?:Uncorrected|Fatal)",
        "memory or a processor had an error that was not corrected",
        "drain the node; have its memory checked",
    ),
    _rule(
        "slot-power",
        r"Detected insufficient power on the PCIe slot",
        "a network adapter gets too little power",
        "check the power cables and the slot",
    ),
    _rule(
        "port-temperature",
        r"Port module event.*High Temperature",
        "a cable or transceiver is too hot",
        "check cooling and the cable",
    ),
    _rule(
        "peer-memory",
        r"detected invalid context",
        "peer memory of the network adapter failed",
        "load nvidia_peermem again; restart the node",
    ),
    _rule(
        "link-flap",
        r"(?:NIC )?Link is Down\b|\bLink down\b|Lost carrier",
        "a network link is unstable",
        "check the cable and the port",
    ),
    _rule(
        "nfs",
        r"nfs: server \S+ not responding",
        "a file server did not answer",
        "look at the file server and its network",
    ),
    _rule(
        "out-of-memory",
        r"invoked oom-killer|(?:Memory cgroup out|Out) of memory: Killed process",
        "a job exceeded its memory limit",
        "look at the job's memory",
        fault=False,
    ),
)
_NFS_ANSWERS = re.compile(r"nfs: server (\S+) OK")


def parsed_lines(lines: Iterable[str]) -> list[KernelLine]:
    """Lines in dmesg's form, with or without a level or the host's name."""
    parsed = []
    for line in lines:
        found = _STAMP.fullmatch(line)
        parsed.append(KernelLine(float(found[1]), found[2]) if found else KernelLine(None, line))
    return parsed


def xid_events(lines: Iterable[KernelLine]) -> Iterator[XidEvent]:
    """Errors of GPUs and NVSwitches, in order."""
    for line in lines:
        for pattern, switch in ((_XID, False), (_SXID, True)):
            if found := pattern.search(line.text):
                yield XidEvent(line.second, _bus_id(found[1]), int(found[2]), line.text, switch)


def host_events(
    lines: Iterable[KernelLine], now: float | None
) -> Iterator[tuple[HostRule, list[KernelLine], bool]]:
    """Events by rule, and whether they count: those of the last `HOST_FAULT_SECONDS` before `now`,
    in seconds since boot. Events without a time count."""
    every = list(lines)
    for rule in HOST_RULES:
        matching = [
            line
            for at, line in enumerate(every)
            if rule.pattern.search(line.text)
            and not (rule.name == "nfs" and _answered_later(line, every[at + 1 :]))
        ]
        if not matching:
            continue
        recent = [
            line
            for line in matching
            if line.second is None or now is None or now - line.second <= HOST_FAULT_SECONDS
        ]
        enough = MOST_LINK_FLAPS if rule.name == "link-flap" else 1
        counts = rule.fault and len(recent) >= enough
        yield rule, recent if counts else matching, counts


def recognise(text: str) -> Observation | None:
    """The kernel log in a text, as dmesg or journalctl print it; with an error where its lines are
    between others, which may hide some. None: it is something else."""
    lines = [line[:LONGEST_LINE] for line in text.splitlines()]
    parsed = parsed_lines(lines)
    first_lines = lines[:200]
    stamped = sum(
        bool(_PRINTED_STAMP.fullmatch(line) or _DATED.fullmatch(line)) for line in first_lines
    )
    event = next(xid_events(parsed), None)
    error = None
    if not stamped or 2 * stamped < len(first_lines):
        if event is None:
            return None
        error = f"it is between other lines: {event.text[:160]}"
    log = {
        "source": "the file",
        "lines": lines,
        "total_lines": len(lines),
        "first_second": next((line.second for line in parsed if line.second is not None), None),
        "uptime": max((line.second or 0.0 for line in parsed), default=None),
    }
    return Observation(probe="kernel_log", scope="node", nodes=(0,), values=log, error=error)


def _answered_later(line: KernelLine, after: list[KernelLine]) -> bool:
    server = line.text.partition("server ")[2].split()[0]
    return any(
        (found := _NFS_ANSWERS.search(each.text)) is not None and found[1] == server
        for each in after
    )


def _bus_id(text: str) -> str:
    return short_bus_id(text) or text.lower()
