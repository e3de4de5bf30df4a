"""Settings that Slurm refuses or misreads: GPUs per node, segments, time limits, and options of
sbatch in `slurm.arguments` that contradict the job's own.

Of two options that contradict each other sbatch refuses some and takes the last of others without a
word, so both are named here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator

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

_RESERVED = {
    "--nodes --ntasks": "`nodes`",
    "--ntasks-per-node --ntasks-per-gpu": "`processes_per_node`",
    "--job-name": "`name` of the run config",
    "--export --export-file": "`environment`",
    "--time": "`slurm.time_limit`",
    "--signal": "`slurm.signal_seconds`",
    "--requeue --no-requeue": "`slurm.max_requeues`",
    "--gpus": "`slurm.gres`, as all nodes need the same number of GPUs",
    "--container": "`image`",
    "--array": "launch --sweep",
    "--wait": "launch --wait",
    "--test-only": "launch --dry-run",
    "--clusters": (
        "`slurm.login_host`, a login node of that cluster: else cancel would not find the job"
    ),
    "--comment": "none, as drillyard finds its runs by it",
    "--open-mode": "none, as the script appends to the log of its run",
    "--output --error": "none, as the log is in the run's launch directory",
    "--input --wrap": "none, as the script is drillyard's and reads no input",
    "--help --usage --version": "none, as sbatch then submits nothing",
}
"""Options that the job sets itself, or that undo it, by the setting to use instead."""
_SETTINGS = {
    "--partition": "partition",
    "--account": "account",
    "--qos": "qos",
    "--exclude": "exclude",
    "--constraint": "constraint",
    "--segment": "segment",
}
"""Options that one setting of the section makes."""
_GPUS_PER_NODE = {"--gpus-per-node", "--gpus-per-task", "--gpus-per-socket"}
MEMORY_OPTIONS = frozenset({"--mem", "--mem-per-cpu", "--mem-per-gpu"})
"""Options of which sbatch takes one; one in `slurm.arguments` takes the place of ours."""
_SHORT = {
    **{"-A": "--account", "-C": "--constraint", "-G": "--gpus", "-J": "--job-name"},
    **{"-M": "--clusters", "-N": "--nodes", "-V": "--version", "-W": "--wait", "-a": "--array"},
    **{"-d": "--dependency", "-e": "--error", "-h": "--help", "-i": "--input", "-n": "--ntasks"},
    **{"-o": "--output", "-p": "--partition", "-q": "--qos", "-s": "--oversubscribe"},
    **{"-t": "--time", "-x": "--exclude"},
}
_CHECKED = {
    *(name for names in _RESERVED for name in names.split()),
    *_SETTINGS,
    *_GPUS_PER_NODE,
    *MEMORY_OPTIONS,
    *("--dependency", "--exclusive", "--gres", "--oversubscribe"),
}


def options_in(arguments: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Name and value of each option of sbatch: `-N4` is ("--nodes", "4"). An argument may have
    several options. Raises ValueError for a quote that does not end."""
    for argument in arguments:
        words = shlex.split(argument)
        for word, after in zip(words, [*words[1:], ""], strict=True):
            if word.startswith("--"):
                name, equals, value = word.partition("=")
            elif word.startswith("-") and len(word) > 1:
                name, equals, value = _SHORT.get(word[:2], word[:2]), word[2:], word[2:]
            else:
                continue
            yield name, value if equals or after.startswith("-") else after


def findings(request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
    """Every setting that Slurm refuses or misreads. Pure."""
    cluster, slurm = request.cluster, request.cluster.section_as(SlurmConfig)
    yield from _arguments(request, machine)
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


def _arguments(request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
    """Each of `slurm.arguments` that is no option, or contradicts another setting."""
    slurm = request.cluster.section_as(SlurmConfig)
    memory: list[str] = []
    for number, argument in enumerate(slurm.arguments):
        try:
            options = list(options_in([argument]))
        except ValueError:
            options = []
        if not options or not argument.startswith("-") or not argument.isprintable():
            message = f"'{argument}' is not an option such as --mail-type=END"
            yield error("cluster", ("slurm", "arguments", number), message)
            continue
        memory += [name for name, _ in options if name in MEMORY_OPTIONS]
        for name, value in options:
            if problem := _contradiction(name, value, request, machine):
                yield error("cluster", ("slurm", "arguments", number), problem)
    if len(set(memory)) > 1:
        message = f"{' and '.join(sorted(set(memory)))} exclude each other; keep one of them"
        yield error("cluster", ("slurm", "arguments"), message)


def _contradiction(
    name: str, value: str, request: LaunchRequest, machine: Machine | None
) -> str | None:
    """What an option of sbatch contradicts, and what to do; None where nothing."""
    slurm = request.cluster.section_as(SlurmConfig)
    in_full = sorted(each for each in _CHECKED if each.startswith(name))
    if name.startswith("--") and name not in _CHECKED and in_full:
        return f"{name} is an abbreviation; write the option in full: {' or '.join(in_full)}"
    for names, setting in _RESERVED.items():
        if name in names.split():
            return f"{name} is set by drillyard; use {setting}"
    setting = _SETTINGS.get(name, "")
    if name == "--exclude" and request.exclude:
        return "--exclude is given twice; put these nodes into slurm.exclude"
    if setting and getattr(slurm, setting):
        return f"{name} and slurm.{setting} are both given; keep slurm.{setting}"
    gpus = "slurm.gres" if slurm.gres is not None else None
    if gpus is None and machine is not None and machine.num_accelerators:
        gpus = "the GPUs of `machine`"
    if gpus and (name in _GPUS_PER_NODE or (name == "--gres" and gpus_of_gres(value))):
        return f"{name} contradicts {gpus}; give the GPUs of a node in slurm.gres alone"
    if name == "--gres" and slurm.gres is not None:
        return f"--gres={value} would replace slurm.gres; write slurm.gres: '{slurm.gres},{value}'"
    is_shared = name == "--oversubscribe" or (name == "--exclusive" and bool(value))
    if is_shared and slurm.exclusive:
        option = f"{name}={value}" if value else name
        return f"{option} contradicts slurm.exclusive: true; set slurm.exclusive: false beside it"
    if name == "--dependency" and request.dependency is not None:
        return f"--dependency={value} would be replaced by --after; keep one of them"
    return None


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
    # Sockets in parentheses may be a list: gpu:8(S:0,2).
    for part in re.sub(r"\([^)]*\)", "", gres).split(","):
        words = part.split(":")
        if words[0] in ("gpu", "gres/gpu"):
            counts.append(int(words[-1]) if words[-1].isdecimal() else 1)
    return sum(counts) if counts else None
