"""Rules of the cluster: its machine and how it is bought, GPUs per node, network stack, limits of time.

Vertex AI's own rules are in vertex_rules.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from drillyard.config.cluster import SlurmConfig
from drillyard.config.run import RunConfig
from drillyard.config.workload import WorkloadRunConfig
from drillyard.errors import UserError
from drillyard.hardware.capacity import consumption_problem
from drillyard.hardware.machines import Machine
from drillyard.launch.agent import rank_output
from drillyard.launch.agent.shared_modules import launched, redaction
from drillyard.launch.checks.request import Config, LaunchFinding, Rule, error, warning
from drillyard.launch.launcher import LaunchRequest
from drillyard.launch.network import lacks_stack, stack_of, why_not_there

FLEX_START_DAYS = 7
_FLEX_SOURCE = "Google Cloud: Dynamic Workload Scheduler, flex-start runs for at most 7 days"
_SBATCH = "https://slurm.schedmd.com/sbatch.html"
_SIGNAL_IS_EARLY_SECONDS = 60
"""Slurm may send the signal up to this much earlier (sbatch, --signal)."""
_MAX_SIGNAL_SECONDS = 65535
_DAY_SECONDS = 86400


def _machine(request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
    name = request.cluster.machine
    if name is None:
        return
    if machine is None:
        try:
            request.facts.machine(name)
        except UserError as missing:
            yield error("cluster", "machine", " ".join(str(missing).splitlines()))
        return
    unsold = consumption_problem(request.cluster.consumption, machine)
    if unsold is not None:
        yield error("cluster", "consumption", f"{unsold} ({machine.fact('consumption').source})")


def _ranks(request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
    """Ranks that a node cannot hold, or that leave some of its GPUs idle."""
    run = request.run
    own = run.processes_per_node if isinstance(run, WorkloadRunConfig) else None
    processes = _wanted_ranks(request)
    if machine is None or processes is None or machine.accelerator == "cpu" or _without_gpus(run):
        return
    has = machine.num_accelerators
    source = machine.fact("num_accelerators").source
    if processes > has:
        message = f"{processes} ranks, but {machine.name} has {has} accelerators ({source}); write {has}, or more nodes"
        yield error("run" if own is not None else "cluster", "processes_per_node", message)
    elif processes < has and not isinstance(run, WorkloadRunConfig):
        idle = has - processes
        yield warning("cluster", "processes_per_node", f"{idle} of the {has} accelerators of each node stay idle")


def _gres(request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
    """GPUs asked of Slurm against the machine's."""
    slurm = request.cluster.slurm
    if slurm is None or slurm.gres is None or machine is None:
        return
    count, has = gpus_of_gres(slurm.gres), machine.num_accelerators
    ranks = _wanted_ranks(request) or has
    advice = f"write gpu:TYPE:{has}, as `sinfo -o %G` shows it"
    if count is None:
        yield error("cluster", "slurm.gres", f"'{slurm.gres}' names no gpu: {advice}")
    elif count > has:
        yield error("cluster", "slurm.gres", f"asks for {count} GPUs per node; {machine.name} has {has}: {advice}")
    elif count < ranks and not _without_gpus(request.run):
        message = f"asks for {count} GPUs per node, for {ranks} ranks: {advice}, or set processes_per_node: {count}"
        yield error("cluster", "slurm.gres", message)


def _segment(request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
    cluster = request.cluster
    if cluster.slurm is not None and cluster.slurm.segment is not None and cluster.nodes % cluster.slurm.segment:
        message = f"{cluster.nodes} nodes are no multiple of segments of {cluster.slurm.segment} ({_SBATCH}, --segment)"
        yield error("cluster", "slurm.segment", message)


def _stack(request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
    wanted = request.cluster.network_stack
    if wanted is not None and machine is not None and lacks_stack(request.cluster, machine):
        yield error("cluster", "network_stack", why_not_there(wanted, machine))


def _stack_settings(request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
    """Variables in the configs that the network stack forbids, checks, or has replaced."""
    cluster = request.cluster
    if (machine is not None and lacks_stack(cluster, machine)) or cluster.nodes == 1:
        return
    stack = stack_of(cluster, machine, request.facts)
    if stack is None:
        return
    source = stack.provenance.row.text
    for config, key, environment in _environments(request):
        for name, value in environment.items():
            at, right = f"{key}.{name}", stack.profile_environment.get(name)
            if name in stack.forbidden:
                message = f"must not be set with network stack {stack.name} ({source}); remove it"
                yield error(config, at, message)
            elif name in stack.enforced and value != right:
                message = (
                    f"{stack.name} ends a job where it is not {right} ({source}); remove it: the node's script sets it"
                )
                yield error(config, at, message)
            elif name in stack.superseded:
                message = f"belongs to an earlier set of settings of {stack.name}, not to be mixed with the present one"
                yield warning(config, at, f"{message} ({source})")


def _set_by_the_agent(request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
    of_torchrun = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    ours = (*launched.GIVEN, rank_output.PIPES, redaction.GIVEN_NAMES)
    taken = (*ours, *of_torchrun) if isinstance(request.run, RunConfig) else ours
    for config, key, environment in _environments(request):
        for name in environment:
            if name in taken:
                yield error(config, f"{key}.{name}", "is set by the launcher for each round and node; remove it")


def _flex_start(request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
    cluster, limit = request.cluster, request.cluster.slurm.limit_seconds if request.cluster.slurm else None
    if cluster.consumption not in ("flex-start", "flex-start-queued") or limit is None:
        return
    if limit > FLEX_START_DAYS * _DAY_SECONDS:
        message = f"is more than flex-start gives ({_FLEX_SOURCE}); write {FLEX_START_DAYS}-00:00:00 or less"
        yield error("cluster", "slurm.time_limit", f"{message}: after it the run is queued again and goes on")


def _slurm_times(request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
    """The signal comes after the start and before the limit."""
    slurm = request.cluster.slurm or SlurmConfig()
    if request.cluster.platform != "slurm":
        return
    limit, ahead = slurm.limit_seconds, slurm.signal_seconds
    if limit is not None and limit <= ahead:
        message = (
            f"{slurm.time_limit} ({limit} s) is not longer than slurm.signal_seconds: {ahead}, so the run would be "
            f"told to stop at once ({_SBATCH}, --signal); raise it, or lower signal_seconds"
        )
        yield error("cluster", "slurm.time_limit", message)
    elif limit is not None and limit <= ahead + _SIGNAL_IS_EARLY_SECONDS:
        message = f"leaves less than a minute of work: Slurm may signal {_SIGNAL_IS_EARLY_SECONDS} s early ({_SBATCH})"
        yield warning("cluster", "slurm.time_limit", message)
    if ahead > _MAX_SIGNAL_SECONDS:
        yield error("cluster", "slurm.signal_seconds", f"at most {_MAX_SIGNAL_SECONDS} ({_SBATCH}, --signal)")


RULES: tuple[Rule, ...] = (
    _machine,
    _ranks,
    _gres,
    _segment,
    _stack,
    _stack_settings,
    _set_by_the_agent,
    _flex_start,
    _slurm_times,
)


def gpus_of_gres(gres: str) -> int | None:
    """GPUs in a `--gres` value, such as 8 in `gpu:nvidia_h100_80gb_hbm3:8`; 1 where it has no number. None: no gpu."""
    counts = []
    for part in gres.split(","):
        words = re.sub(r"\(.*\)", "", part).split(":")
        if words[0] in ("gpu", "gres/gpu"):
            counts.append(int(words[-1]) if words[-1].isdecimal() else 1)
    return sum(counts) if counts else None


def _wanted_ranks(request: LaunchRequest) -> int | None:
    """Ranks per node as a config says; None: one per accelerator."""
    own = request.run.processes_per_node if isinstance(request.run, WorkloadRunConfig) else None
    return own or request.cluster.processes_per_node


def _without_gpus(run: RunConfig | WorkloadRunConfig) -> bool:
    return isinstance(run, RunConfig) and run.training.device == "cpu"


def _environments(request: LaunchRequest) -> Iterator[tuple[Config, str, dict[str, str]]]:
    yield "cluster", "environment", request.cluster.environment
    if isinstance(request.run, WorkloadRunConfig):
        yield "run", "workload.environment", request.run.workload.environment
