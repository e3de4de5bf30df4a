"""Settings that Slurm refuses or misreads: GPUs per node, segments, time limits."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drillyard.hardware.machines import Machine
from drillyard.launch.request import LaunchFinding, LaunchRequest, error, warning
from drillyard.launch.slurm.config import SlurmConfig

FLEX_START_DAYS = 7
_FLEX_SOURCE = "Google Cloud: Dynamic Workload Scheduler, flex-start runs for at most 7 days"
_SBATCH = "https://slurm.schedmd.com/sbatch.html"
_SIGNAL_EARLY_SECONDS = 60
"""Slurm may send the signal up to this much earlier (sbatch, --signal)."""
_MAX_SIGNAL_SECONDS = 65535
_DAY_SECONDS = 86400


def findings(request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
    """Every setting that Slurm refuses or misreads. Pure."""
    cluster, slurm = request.cluster, request.cluster.section_as(SlurmConfig)
    if slurm.gres is not None and machine is not None:
        yield from _gres(slurm.gres, request, machine)
    if slurm.segment is not None and cluster.nodes % slurm.segment:
        message = (
            f"{cluster.nodes} nodes are no multiple of segments of {slurm.segment} ({_SBATCH},"
            " --segment)"
        )
        yield error("cluster", "slurm.segment", message)
    limit, ahead = slurm.limit_seconds, slurm.signal_seconds
    if ahead > _MAX_SIGNAL_SECONDS:
        yield error(
            "cluster",
            "slurm.signal_seconds",
            f"at most {_MAX_SIGNAL_SECONDS} ({_SBATCH}, --signal)",
        )
    if limit is None:
        return
    if cluster.consumption == "flex-start" and limit > FLEX_START_DAYS * _DAY_SECONDS:
        message = (
            f"is more than flex-start gives ({_FLEX_SOURCE}); write {FLEX_START_DAYS}-00:00:00 or"
            " less"
        )
        yield error(
            "cluster",
            "slurm.time_limit",
            f"{message}: after it the run is queued again and continues",
        )
    # The signal comes after the start and before the limit.
    if limit <= ahead:
        message = (
            f"{slurm.time_limit} ({limit} s) is not longer than slurm.signal_seconds: {ahead}, so"
            f" the run would get the signal to stop at once ({_SBATCH}, --signal); raise it, or"
            " lower signal_seconds"
        )
        yield error("cluster", "slurm.time_limit", message)
    elif limit <= ahead + _SIGNAL_EARLY_SECONDS:
        message = (
            f"leaves less than a minute of work: Slurm may signal {_SIGNAL_EARLY_SECONDS} s early"
            f" ({_SBATCH})"
        )
        yield warning("cluster", "slurm.time_limit", message)


def _gres(gres: str, request: LaunchRequest, machine: Machine) -> Iterator[LaunchFinding]:
    count, available = gpus_of_gres(gres), machine.num_accelerators
    ranks = request.processes_per_node or available
    advice = f"write gpu:TYPE:{available}, as `sinfo -o %G` shows it"
    if count is None:
        yield error("cluster", "slurm.gres", f"'{gres}' names no gpu: {advice}")
    elif count > available:
        message = f"asks for {count} GPUs per node; {machine.name} has {available}: {advice}"
        yield error("cluster", "slurm.gres", message)
    elif count < ranks and request.uses_gpus:
        message = (
            f"asks for {count} GPUs per node, for {ranks} ranks: {advice}, or set"
            f" processes_per_node: {count}"
        )
        yield error("cluster", "slurm.gres", message)


def gpus_of_gres(gres: str) -> int | None:
    """GPUs in a `--gres` value, such as 8 in `gpu:nvidia_h100_80gb_hbm3:8`; 1 where it has no
    number. None: no gpu."""
    counts = []
    for part in gres.split(","):
        words = re.sub(r"\(.*\)", "", part).split(":")
        if words[0] in ("gpu", "gres/gpu"):
            counts.append(int(words[-1]) if words[-1].isdecimal() else 1)
    return sum(counts) if counts else None
