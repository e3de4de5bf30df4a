"""Requirements of NCCL to use the machine's data NICs: environment, script and mounts, from its
network stack's facts.

A stack's own shell script of settings is sourced on the node, never copied: they belong to the
plugin's version, and TCPXO ends a job whose settings differ from them. The agent sources
`NETWORK_FILE`, a file of the plan: it sets the library path, sources the stack's script, and
restores the settings of the plan and the configs, which the scripts, written for pods, would
overwrite. It contains names of variables and no values of a config.
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
from drillyard.hardware.facts import cited
from drillyard.hardware.machines import Machine
from drillyard.hardware.network_stacks import NetworkStack
from drillyard.plan_files import ExplainedField, PlanFile

NETWORK_FILE = "network.sh"

_EVERY_MACHINE_HAS = "ethernet"
_LIBRARIES = "LD_LIBRARY_PATH"


@dataclass(frozen=True)
class NetworkSetup:
    """The network stack of a run on its nodes."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the run's command; they take precedence over the script's."""
    file: PlanFile | None = None
    """File that the agent sources; None where variables are enough."""
    mounts: tuple[str, ...] = ()
    """Directories of the node that a container must see, `host:container` or one path for both."""
    fields: tuple[ExplainedField, ...] = ()
    warnings: tuple[str, ...] = ()


def network_of(
    cluster: ClusterConfig, facts: Catalog, *, image: str | None, configured: Iterable[str] = ()
) -> NetworkSetup:
    """The network stack of `cluster`; none where no machine or stack is named, and on a single
    node, where NVLink is enough.

    In pods the platform mounts what containers need, or the image has it. On virtual machines and
    bare metal a container sees the interfaces and mounts the libraries of its node. `configured`:
    variables that the configs set, which the stack's script does not overwrite. Raises UserError
    where the platform lacks the prolog that it needs.
    """
    machine = machine_of(cluster, facts) if cluster.machine is not None else None
    stack = stack_of(cluster, machine, facts)
    if stack is None:
        return NetworkSetup()
    if cluster.nodes == 1:
        why = "one node: its GPUs need no data NICs"
        return NetworkSetup(fields=(ExplainedField("network stack", "none", why, "drillyard"),))
    in_pods = platforms()[cluster.platform].in_pods
    name = machine.name if machine else ""
    settings = stack.environment_on(name) if in_pods else stack.host_environment_on(name)
    _require_prolog(cluster, stack, settings)
    script = stack.profile_script if in_pods else stack.host_profile_script
    library_path = settings.pop(_LIBRARIES, None) if in_pods else stack.host_library_path
    mounts = stack.host_volumes if image is not None and not in_pods else ()
    why, source = stack.title, "cluster.yaml: network_stack"
    if machine is not None and stack.name == machine.network_stack:
        why, source = f"{stack.title}: what {machine.name} has", cited(machine, "network_stack")
    fields = [ExplainedField("network stack", stack.name, why, source)]
    fields += _settings(stack, settings, name, "environment" if in_pods else "host_environment")
    if script is not None:
        reason = f"sourced, not copied: it belongs to the node's version of {stack.name}"
        source = cited(stack, "profile_script" if in_pods else "host_profile_script")
        fields.append(ExplainedField(f"{NETWORK_FILE}: source", script, reason, source))
    if library_path is not None:
        source = cited(stack, f"environment.{_LIBRARIES}" if in_pods else "host_library_path")
        reason = "in front of what the node or image has"
        fields.append(ExplainedField(f"{NETWORK_FILE}: {_LIBRARIES}", library_path, reason, source))
    for path in mounts:
        reason = f"the container needs it for {stack.name}"
        fields.append(ExplainedField(f"mount: {path}", path, reason, cited(stack, "host_volumes")))
    from_node = cluster.section.mounts_network_libraries
    if from_node is None:
        from_node = not has_libraries_in_image(stack, machine)
    unmounted = (
        f"network stack {stack.name}: the image must bring {script} and the libraries of the stack"
        " where the platform does not mount them"
    )
    environment = {name: value for name, value in settings.items() if "$" not in value}
    kept = [name for name in dict.fromkeys([*environment, *configured]) if name != _LIBRARIES]
    expanded = {
        name: value for name, value in settings.items() if name not in (*environment, *kept)
    }
    return NetworkSetup(
        environment=environment,
        file=_file(stack.name, library_path, expanded, script, kept),
        mounts=mounts,
        fields=tuple(fields),
        warnings=((unmounted,) if in_pods and script and not from_node else ()),
    )


def has_libraries_in_image(stack: NetworkStack, machine: Machine | None) -> bool:
    """Whether no installer puts the stack's libraries on the nodes of `machine`."""
    return machine is not None and machine.pods is not None and stack.name == machine.network_stack


def stack_of(
    cluster: ClusterConfig, machine: Machine | None, facts: Catalog
) -> NetworkStack | None:
    """The stack that the cluster config names, else the machine's; None without either, and where
    the machine lacks it."""
    name = cluster.network_stack or (machine.network_stack if machine else None)
    lacking = machine is not None and stack_problem(cluster, machine)
    if name is None or lacking or platforms()[cluster.platform].is_this_machine:
        return None
    return facts.network_stack(name)


def stack_problem(cluster: ClusterConfig, machine: Machine) -> str | None:
    """Reason why a machine cannot use the stack that the config names, and what to write; None
    where it can."""
    wanted, own = cluster.network_stack, machine.network_stack
    if wanted in (None, own, _EVERY_MACHINE_HAS):
        return None
    source = machine.fact("network_stack").source
    choice = own if own == _EVERY_MACHINE_HAS else f"{own}, or {_EVERY_MACHINE_HAS} for plain TCP"
    return f"{machine.name} has no '{wanted}' ({source}); remove it, or write {choice}"


def needs_prolog(settings: Mapping[str, str]) -> bool:
    """Whether the variables of a stack on hosts name a job's own daemon, which the scheduler's
    prolog starts."""
    return "_JOB_ID}" in str(settings)


def _require_prolog(
    cluster: ClusterConfig, stack: NetworkStack, settings: Mapping[str, str]
) -> None:
    """Raise UserError where the settings name a job's daemon and the scheduler does not start
    one."""
    if needs_prolog(settings) and not platforms()[cluster.platform].has_prolog:
        can = (name for name, each in platforms().items() if each.has_prolog or each.in_pods)
        able = ", ".join(name for name in can if platforms()[name].launcher)
        raise UserError(
            f"network stack {stack.name}: on virtual machines its daemon is started by the"
            f" scheduler's prolog, one per job ({stack.fact('host_environment').source}); platform"
            f" {cluster.platform} has none\nSet network_stack: ethernet in the cluster config, or"
            f" run on one of: {able}"
        )


def _file(
    stack: str,
    library_path: str | None,
    expanded: Mapping[str, str],
    script: str | None,
    kept: list[str],
) -> PlanFile | None:
    """`expanded`: variables whose values the node's shell expands. `kept`: those that the script
    must not change."""
    lines = [f"# Network stack {stack}: sourced in the shell that becomes the run's command."]
    if library_path is not None:
        lines.append(f'export {_LIBRARIES}="{library_path}${{{_LIBRARIES}:+:${_LIBRARIES}}}"')
    lines += [f'export {name}="{value}"' for name, value in expanded.items()]
    if script is not None:
        missing = (
            f"error: network stack {stack}: {script} is not on this node, or not in its container;"
            " install the stack, or set network_stack: ethernet in the cluster config"
        )
        lines += [
            f"if [ ! -r {shlex.quote(script)} ]; then",
            f"    echo {shlex.quote(missing)} >&2",
            # Refused: no restart fixes this.
            "    return 2",
            "fi",
            "# Settings of the plan and the configs take precedence over the script's.",
            *(f'kept_{name}="${name}"' for name in kept),
            f". {shlex.quote(script)}",
            *(f'export {name}="$kept_{name}"' for name in kept),
        ]
    return PlanFile(NETWORK_FILE, "\n".join(lines) + "\n") if len(lines) > 1 else None


def _settings(
    stack: NetworkStack, settings: Mapping[str, str], machine: str, first: str
) -> Iterator[ExplainedField]:
    for name, value in settings.items():
        origin = first if name in getattr(stack, first) else "environment"
        if stack.machine_environment.get(machine, {}).get(name) == value:
            origin = f"machine_environment.{machine}"
        why = f"network stack {stack.name}"
        yield ExplainedField(f"environment: {name}", value, why, cited(stack, f"{origin}.{name}"))
