"""What Slurm itself says of a partition, its nodes and its settings, and what of it a run would
miss: `scontrol show partition`, `scontrol show config`, `sinfo`. Pure.

Values are those of https://slurm.schedmd.com/scontrol.html and slurm.conf(5).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from drillyard.formatting import first_few
from drillyard.launch.cluster_check import Finding
from drillyard.launch.slurm.config import SlurmConfig, seconds_of
from drillyard.launch.slurm.nodes import SlurmNode, undrain_command

SHOW_PARTITIONS = ("scontrol", "--oneliner", "show", "partition")
SHOW_CONFIG = ("scontrol", "show", "config")
SINFO_HARDWARE = ("sinfo", "--noheader", "--Node", "--format=%N|%c|%m|%o")
"""Processors, MiB of memory and address of each node, once per partition."""
_LOST = ("down", "fail", "failg", "error", "unk", "futr", "inval")
_NAMED = 4


def parse_partitions(text: str) -> list[dict[str, str]]:
    """The fields of each partition in what SHOW_PARTITIONS printed."""
    rows = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in text.splitlines()]
    return [row for row in rows if "PartitionName" in row]


def parse_config(text: str) -> dict[str, str]:
    """The settings in what SHOW_CONFIG printed."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


@dataclass(frozen=True)
class NodeHardware:
    """What Slurm is configured to know of a node."""

    cpus: int
    memory_mib: int
    address: str


def parse_hardware(text: str) -> dict[str, NodeHardware]:
    """By node. Numbers may have a `+` where lines were joined."""
    found = {}
    for line in text.splitlines():
        words = line.strip().split("|")
        if len(words) == 4:
            cpus, memory = (int(re.sub(r"\D", "", each) or 0) for each in words[1:3])
            found[words[0]] = NodeHardware(cpus, memory, words[3])
    return found


def partition_names(slurm: SlurmConfig) -> Sequence[str | None]:
    """The partitions of which a job gets one; None: the cluster's default."""
    return slurm.partition.split(",") if slurm.partition else (None,)


def most_nodes(partitions: Sequence[Mapping[str, str]], slurm: SlurmConfig) -> int | None:
    """The nodes that each of the config's partitions gives a job; None: all."""
    found = (find_partition(partitions, name) or {} for name in partition_names(slurm))
    limits = [int(each["MaxNodes"]) for each in found if each.get("MaxNodes", "").isdecimal()]
    return min(limits, default=None)


def starts_jobs(partitions: Sequence[Mapping[str, str]], slurm: SlurmConfig) -> bool:
    """Whether one of the config's partitions does."""
    found = (find_partition(partitions, name) for name in partition_names(slurm))
    return any(each is not None and each.get("State", "UP") == "UP" for each in found)


def partition_findings(
    partitions: Sequence[Mapping[str, str]], slurm: SlurmConfig, nodes: int
) -> list[Finding]:
    """Whether a partition takes a job of `nodes` nodes for as long as the config says: of several,
    one is enough."""
    each = [list(_one_partition(partitions, name, slurm, nodes)) for name in partition_names(slurm)]
    findings = [finding for found in each for finding in found]
    if any(finding.result == "ok" for finding in findings):
        return [
            replace(finding, result="note") if finding.result == "missing" else finding
            for finding in findings
        ]
    return findings


def _one_partition(
    partitions: Sequence[Mapping[str, str]], wanted: str | None, slurm: SlurmConfig, nodes: int
) -> Iterator[Finding]:
    found = find_partition(partitions, wanted)
    if found is None:
        names = first_few([each["PartitionName"] for each in partitions], _NAMED) or "none"
        text = (
            f"there is no partition {wanted}, but {names}: set slurm.partition"
            if wanted
            else f"no partition is the default of the cluster: set slurm.partition ({names})"
        )
        yield Finding("partition", "missing", text)
        return
    problems = list(_partition_problems(found, slurm, nodes))
    yield from problems
    if not any(each.result == "missing" for each in problems):
        limits = f"MaxTime {found.get('MaxTime', '?')}, MaxNodes {found.get('MaxNodes', '?')}"
        yield Finding("partition", "ok", f"{found['PartitionName']}: up, {limits}")


def find_partition(
    partitions: Sequence[Mapping[str, str]], name: str | None
) -> Mapping[str, str] | None:
    """The partition of that name; None: the default one."""
    return next(
        (
            each
            for each in partitions
            if (each["PartitionName"] == name if name else each.get("Default") == "YES")
        ),
        None,
    )


def _partition_problems(
    found: Mapping[str, str], slurm: SlurmConfig, nodes: int
) -> Iterator[Finding]:
    name = found["PartitionName"]
    if (state := found.get("State", "UP")) != "UP":
        repair = shlex.join(["scontrol", "update", f"PartitionName={name}", "State=UP"])
        text = f"{name} is {state}, and starts no jobs: an operator of Slurm may do: {repair}"
        yield Finding("partition", "missing", text)
    most, least = found.get("MaxNodes", ""), found.get("MinNodes", "")
    if most.isdecimal() and int(most) < nodes:
        text = f"{name} gives a job at most {most} nodes: set nodes: {most}, or another partition"
        yield Finding("partition", "missing", text)
    if least.isdecimal() and int(least) > nodes:
        text = f"{name} takes jobs of {least} nodes or more: set nodes: {least}"
        yield Finding("partition", "missing", text)
    limit, longest = slurm.limit_seconds, seconds_of(found.get("MaxTime", ""))
    if limit is not None and longest is not None and longest < limit:
        text = (
            f"{name} gives a job at most {found['MaxTime']}, and slurm.time_limit is"
            f" {slurm.time_limit}: a job would wait for ever. Set slurm.time_limit:"
            f' "{found["MaxTime"]}"'
        )
        yield Finding("partition", "missing", text)
    if "CANCEL" in found.get("PreemptMode", ""):
        text = (
            f"Slurm cancels preempted jobs of {name}; a run queues itself again, where GraceTime"
            " leaves its ranks the time to save. PreemptMode=REQUEUE in slurm.conf makes it certain"
        )
        yield Finding("settings", "note", text)


def settings_findings(settings: Mapping[str, str]) -> Iterator[Finding]:
    """What of slurm.conf changes how runs end."""
    version = settings.get("SLURM_VERSION", "?")
    accounts = settings.get("AccountingStorageType", "").removeprefix("accounting_storage/")
    tracking = settings.get("ProctrackType", "").removeprefix("proctrack/")
    preemption = settings.get("PreemptMode", "?")
    text = (
        f"Slurm {version}; accounts {accounts or '?'}, process tracking {tracking or '?'},"
        f" PreemptMode {preemption}, JobRequeue {settings.get('JobRequeue', '?')}"
    )
    yield Finding("settings", "ok", text)
    if accounts in ("none", "(null)"):
        text = (
            "Slurm keeps no accounts (AccountingStorageType): once it has forgotten a job"
            f" (MinJobAge, {settings.get('MinJobAge', '?')}), only the run's own files show how it"
            " ended"
        )
        yield Finding("settings", "note", text)
    # Slurm 24.11 and newer list several: Prolog[0].
    prologs = {each for name, each in settings.items() if name.partition("[")[0] == "Prolog"}
    scheduler = settings.get("SchedulerParameters", "").split(",")
    if prologs - {"(null)"} and "nohold_on_prolog_fail" not in scheduler:
        text = (
            "Slurm holds a job whose prolog has failed, until somebody types scontrol release JOB;"
            " SchedulerParameters=nohold_on_prolog_fail in slurm.conf lets it start elsewhere"
        )
        yield Finding("settings", "note", text)
    if tracking and tracking != "cgroup":
        text = (
            f"ProctrackType={tracking}: processes that leave a job's session may outlive it;"
            " proctrack/cgroup ends all"
        )
        yield Finding("settings", "note", text)


@dataclass
class SortedNodes:
    """The nodes that a run may get, by whether they can be looked at now."""

    idle: list[str] = field(default_factory=list)
    busy: dict[str, list[str]] = field(default_factory=dict)
    """By their state: other jobs', powered down, reserved."""
    out: dict[str, list[str]] = field(default_factory=dict)
    """Nodes that get no job, by what is wrong with them and Slurm's reason."""


def sorted_nodes(nodes: Sequence[SlurmNode]) -> SortedNodes:
    """The nodes by what can be done with them."""
    found = SortedNodes()
    for each in nodes:
        base = each.state.rstrip("*~#!%$@^-+")
        reason = "" if each.reason in ("", "none", "(null)") else f" ({each.reason})"
        if each.is_drained:
            found.out.setdefault(f"is drained{reason}: when it is repaired", []).append(each.name)
        elif base in _LOST or "*" in each.state:
            silent = " and does not answer" if "*" in each.state else ""
            text = f"is {base}{silent}{reason}: start its slurmd, and if it stays so"
            found.out.setdefault(text, []).append(each.name)
        elif each.state == "idle":
            found.idle.append(each.name)
        else:
            found.busy.setdefault(each.state, []).append(each.name)
    return found


def state_findings(found: SortedNodes, wanted: int) -> Iterator[Finding]:
    """Nodes that cannot be looked at, and whether the others are enough for a run."""
    busy = sum(len(names) for names in found.busy.values())
    left = len(found.idle) + busy
    out = sum(len(names) for names in found.out.values())
    total = left + out
    if left < wanted:
        text = f"{left} of {total} can take a run, and a run takes {wanted}: see the others below"
        if not out:
            fewer = f"set nodes: {total}, or " if total else ""
            text = (
                f"there are {total}, and a run takes {wanted}: {fewer}look at slurm.partition,"
                " slurm.constraint and slurm.exclude"
            )
        yield Finding("nodes", "missing", text)
    else:
        yield Finding("nodes", "ok", f"{len(found.idle)} of {total} are idle")
    for text, names in found.out.items():
        again = f"{text}, an operator may do: {shlex.join(undrain_command(','.join(names)))}"
        yield Finding("nodes", "note" if left >= wanted else "missing", again, tuple(names))
    for state, names in found.busy.items():
        text = f"not looked at in state {state}: repeat the command when it is idle"
        yield Finding("nodes", "note", text, tuple(names))


def hardware_findings(
    hardware: Mapping[str, NodeHardware], names: Sequence[str]
) -> Iterator[Finding]:
    """Nodes with fewer processors or less memory than most others of the partition."""
    known = {name: hardware[name] for name in names if name in hardware}
    if not known:
        return
    cpus = sorted(each.cpus for each in known.values())
    usual_cpus = cpus[len(cpus) // 2]
    memory = sorted(each.memory_mib for each in known.values())
    usual_memory = memory[len(memory) // 2]
    less = False
    for name, each in known.items():
        if each.cpus < usual_cpus or each.memory_mib < usual_memory:
            less = True
            text = (
                f"has {each.cpus} processors and {each.memory_mib} MiB by slurm.conf, where most"
                f" have {usual_cpus} and {usual_memory}: a run is as fast as its slowest node;"
                " slurm.exclude leaves it out"
            )
            yield Finding("hardware", "note", text, (name,))
    if not less:
        yield Finding(
            "hardware", "ok", f"{usual_cpus} processors and {usual_memory} MiB by slurm.conf"
        )
