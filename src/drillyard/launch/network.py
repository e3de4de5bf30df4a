"""What NCCL needs to use the machine's data NICs: environment, script and mounts, from the facts of its network stack.

A stack's own shell script of settings is sourced on the node, never copied: they belong to the plugin's version, and
TCPXO ends a job whose settings differ from them. The agent sources `NETWORK_FILE`, a file of the plan: it sets the
library path, sources the stack's script, and restores the settings of the plan and the configs, which the scripts,
written for pods, would overwrite. It contains names of variables and no values of a config.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from drillyard.config.cluster import ClusterConfig
from drillyard.config.platforms import platforms
from drillyard.errors import UserError
from drillyard.hardware.capacity import machine_of
from drillyard.hardware.catalog import Catalog
from drillyard.hardware.machines import Machine
from drillyard.hardware.network_stacks import NetworkStack
from drillyard.launch.plan import ExplainedField, PlanFile

NETWORK_FILE = "network.sh"

_EVERY_MACHINE_HAS = "ethernet"
_LIBRARIES = "LD_LIBRARY_PATH"


@dataclass(frozen=True)
class NetworkSetup:
    """The network stack of a run on its nodes."""

    stack: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the run's command; they take precedence over the script's."""
    profile_script: str | None = None
    """The nodes' script that sets the rest; `NETWORK_FILE` sources it (`network_file`)."""
    library_path: str | None = None
    """Put in front of LD_LIBRARY_PATH."""
    shell_environment: Mapping[str, str] = field(default_factory=dict)
    """Variables whose values the node's shell expands."""
    mounts: tuple[str, ...] = ()
    """Directories of the node that a container must see, `host:container` or one path for both."""
    fields: tuple[ExplainedField, ...] = ()
    warnings: tuple[str, ...] = ()


def network_of(cluster: ClusterConfig, facts: Catalog, *, image: str | None) -> NetworkSetup:
    """The network stack of `cluster`; none where no machine or stack is named, and on a single node, where NVLink
    is enough. UserError where the machine lacks the stack."""
    machine = machine_of(cluster, facts) if cluster.machine is not None else None
    stack = stack_of(cluster, machine, facts)
    if stack is None:
        return NetworkSetup()
    if cluster.nodes == 1:
        why = "one node: its GPUs need no data NICs"
        return NetworkSetup(fields=(ExplainedField("network stack", "none", why, "drillyard"),))
    platform = platforms()[cluster.platform]
    network = _setup(stack, machine, image, platform.in_pods)
    if "_JOB_ID}" in str(network.shell_environment) and not platform.has_prolog:
        able = ", ".join(name for name, each in platforms().items() if each.has_prolog or each.in_pods)
        raise UserError(
            f"network stack {stack.name}: on virtual machines its daemon is started by the scheduler's prolog, one per "
            f"job ({stack.fact('host_environment').source}); platform {cluster.platform} has none\n"
            f"Set network_stack: ethernet in the cluster config, or run on one of: {able}"
        )
    return network


def network_file(network: NetworkSetup, environment: Iterable[str]) -> PlanFile | None:
    """The file that the agent sources for `network`, or None where variables are enough.

    `environment`: the names of all variables that the plan sets; the stack's script does not overwrite them.
    """
    if not (network.profile_script or network.library_path or network.shell_environment):
        return None
    kept = [name for name in dict.fromkeys([*network.environment, *environment]) if name != _LIBRARIES]
    lines = [f"# Network stack {network.stack}: sourced in the shell that becomes the run's command."]
    if network.library_path is not None:
        path = network.library_path
        lines.append(f'export {_LIBRARIES}="{path}${{{_LIBRARIES}:+:${_LIBRARIES}}}"')
    lines += [f'export {name}="{value}"' for name, value in network.shell_environment.items() if name not in kept]
    if network.profile_script is not None:
        lines += _sourcing(network, kept)
    return PlanFile(NETWORK_FILE, "\n".join(lines) + "\n")


def stack_of(cluster: ClusterConfig, machine: Machine | None, facts: Catalog) -> NetworkStack | None:
    """The stack that the cluster config names, else the machine's. UserError where the machine does not have it."""
    wanted = cluster.network_stack
    if platforms()[cluster.platform].is_this_machine or (machine is None and wanted is None):
        return None
    if machine is None or wanted is None:
        return facts.network_stack(wanted or (machine.network_stack if machine else _EVERY_MACHINE_HAS))
    if wanted not in (machine.network_stack, _EVERY_MACHINE_HAS):
        raise UserError(f"network_stack: {stack_problem(wanted, machine)}")
    return facts.network_stack(wanted)


def stack_problem(wanted: str, machine: Machine) -> str:
    """Why a machine cannot use the stack `wanted`, and what to write."""
    own = machine.network_stack
    source = machine.fact("network_stack").source
    choice = own if own == _EVERY_MACHINE_HAS else f"{own}, or {_EVERY_MACHINE_HAS} for plain TCP"
    return f"{machine.name} has no '{wanted}' ({source}); remove it, or write {choice}"


def lacks_stack(cluster: ClusterConfig, machine: Machine) -> bool:
    """Whether the config names a stack that the machine does not have."""
    return cluster.network_stack not in (None, machine.network_stack, _EVERY_MACHINE_HAS)


def _setup(stack: NetworkStack, machine: Machine | None, image: str | None, in_pods: bool) -> NetworkSetup:
    """In pods the platform mounts what containers need, or the image has it. On virtual machines and bare metal a
    container sees the interfaces and mounts the libraries of its node."""
    name, prefix = machine.name if machine else "", "" if in_pods else "host_"
    settings = stack.environment_on(name) if in_pods else stack.host_environment_on(name)
    script = stack.profile_script if in_pods else stack.host_profile_script
    library_path = settings.pop(_LIBRARIES, None) if in_pods else stack.host_library_path
    mounts = stack.host_volumes if image is not None and not in_pods else ()
    fields = [*_why(stack, machine), *_settings(stack, settings, name, f"{prefix}environment")]
    if script is not None:
        reason = f"sourced, not copied: it belongs to the node's version of {stack.name}"
        fields.append(
            ExplainedField(f"{NETWORK_FILE}: source", script, reason, cited(stack, f"{prefix}profile_script"))
        )
    if library_path is not None:
        source = cited(stack, f"environment.{_LIBRARIES}" if in_pods else "host_library_path")
        reason = "in front of what the node or image has"
        fields.append(ExplainedField(f"{NETWORK_FILE}: {_LIBRARIES}", library_path, reason, source))
    for path in mounts:
        reason = f"the container needs it for {stack.name}"
        fields.append(ExplainedField(f"mount: {path}", path, reason, cited(stack, "host_volumes")))
    unmounted = (
        f"network stack {stack.name}: the image must bring {script} and the libraries of the stack where the platform "
        "does not mount them"
    )
    return NetworkSetup(
        stack=stack.name,
        environment={name: value for name, value in settings.items() if "$" not in value},
        profile_script=script,
        library_path=library_path,
        shell_environment={name: value for name, value in settings.items() if "$" in value},
        mounts=mounts,
        fields=tuple(fields),
        warnings=(unmounted,) if in_pods and script is not None else (),
    )


def _sourcing(network: NetworkSetup, kept: list[str]) -> list[str]:
    script = shlex.quote(network.profile_script or "")
    missing = (
        f"error: network stack {network.stack}: {network.profile_script} is not on this node, or not in its container;"
        " install the stack, or set network_stack: ethernet in the cluster config"
    )
    return [
        f"if [ ! -r {script} ]; then",
        f"    echo {shlex.quote(missing)} >&2",
        # Refused: no restart fixes this.
        "    return 2",
        "fi",
        "# Settings of the plan and the configs take precedence over the script's.",
        *(f'kept_{name}="${name}"' for name in kept),
        f". {script}",
        *(f'export {name}="$kept_{name}"' for name in kept),
    ]


def _why(stack: NetworkStack, machine: Machine | None) -> list[ExplainedField]:
    if machine is None or stack.name != machine.network_stack:
        return [ExplainedField("network stack", stack.name, stack.title, "cluster.yaml: network_stack")]
    why = f"{stack.title}: what {machine.name} has"
    return [ExplainedField("network stack", stack.name, why, cited(machine, "network_stack"))]


def _settings(stack: NetworkStack, settings: Mapping[str, str], machine: str, first: str) -> Iterator[ExplainedField]:
    for name, value in settings.items():
        origin = first if name in getattr(stack, first) else "environment"
        if stack.machine_environment.get(machine, {}).get(name) == value:
            origin = f"machine_environment.{machine}"
        why = f"network stack {stack.name}"
        yield ExplainedField(f"environment: {name}", value, why, cited(stack, f"{origin}.{name}"))


def cited(row: NetworkStack | Machine, path: str) -> str:
    """The source of a fact with its date. Machine names contain dots, so a path is looked up from its first part."""
    source = row.provenance.of(path)
    return f"{source.text}, {source.date}{' (unverified)' if source.unverified else ''}"
