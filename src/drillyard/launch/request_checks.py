"""Mistakes and likely mistakes in a run and a cluster together, found before anything is sent.

    warnings = require_launchable(request)

Each check yields findings with the rule, its source and the fix, at the config's line of the value;
one error lists all mistakes. Checks are pure: no disk, no network. Those of one platform belong to
its launcher, which gives them to `prepared_run.prepare`; contradictions within one config are
checked by `config`.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator

from drillyard import redaction
from drillyard.config.environment import OPENING
from drillyard.config.platforms import platforms, require_capability
from drillyard.config.problems import (
    SourceLocation,
    location_of,
    looks_like_file,
    problem_line,
    remote_scheme,
)
from drillyard.config.run import RunConfig, WorkloadRunConfig
from drillyard.config.run_data import SourceConfig
from drillyard.errors import ConfigError, UserError
from drillyard.hardware.capacity import consumption_problem
from drillyard.hardware.machines import Machine
from drillyard.launch.agent import exec_command
from drillyard.launch.image_rules import floor_findings, image_floors
from drillyard.launch.network import stack_of, stack_problem
from drillyard.launch.request import Check, ConfigName, LaunchFinding, LaunchRequest, error, warning
from drillyard.supervise import launch_contract

AGENT_VARIABLES = (*launch_contract.GIVEN, exec_command.RANK_PIPES, redaction.GIVEN_NAMES)
"""What the agent sets for each attempt and node."""
RESERVED_VARIABLES = (*AGENT_VARIABLES, launch_contract.RESTARTED_BY)
"""What no config may set."""
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


def require_launchable(request: LaunchRequest, *own: Check) -> tuple[str, ...]:
    """The warnings of `request`. `own`: the platform's checks, in addition to those of every
    platform.

    Raises one ConfigError with all mistakes, run config first, in order of lines.
    """
    name = request.cluster.machine
    machine = None if name is None else request.facts.find_machine(name)
    every = dict.fromkeys(
        finding for check in (*CHECKS, *own) for finding in check(request, machine)
    )
    found = sorted(
        every, key=lambda each: (each.config == "cluster", _location(request, each).order)
    )
    lines = {
        finding: problem_line(_location(request, finding), finding.problem) for finding in found
    }
    mistakes = [line for finding, line in lines.items() if finding.fatal]
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return tuple(lines.values())


def _location(request: LaunchRequest, finding: LaunchFinding) -> SourceLocation:
    config = request.run if finding.config == "run" else request.cluster
    places = config._origin.places
    if places is None:
        return SourceLocation(f"{finding.config} config", 0)
    return location_of(finding.problem.path, places)


def _machine(request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
    """The machine, how it is bought, its network stack, and more ranks than a node has GPUs, or
    fewer."""
    cluster, name = request.cluster, request.cluster.machine
    if name is None:
        return
    if machine is None:
        try:
            request.facts.machine(name)
        except UserError as missing:
            yield error("cluster", "machine", " ".join(str(missing).splitlines()))
        return
    if (problem := consumption_problem(cluster.consumption, machine)) is not None:
        yield error("cluster", "consumption", f"{problem} ({machine.fact('consumption').source})")
    if stack_lacking := stack_problem(cluster, machine):
        yield error("cluster", "network_stack", stack_lacking)
    processes, available = request.processes_per_node, machine.num_accelerators
    if processes is None or machine.accelerator == "cpu" or not request.uses_gpus:
        return
    if processes > available:
        has = (
            f"{machine.name} has {available} accelerators"
            f" ({machine.fact('num_accelerators').source})"
        )
        message = f"{processes} ranks, but {has}; write {available}, or more nodes"
        own = (
            isinstance(request.run, WorkloadRunConfig)
            and request.run.processes_per_node is not None
        )
        yield error("run" if own else "cluster", "processes_per_node", message)
    elif processes < available and request.workload is None:
        idle = available - processes
        yield warning(
            "cluster",
            "processes_per_node",
            f"{idle} of the {available} accelerators of each node are idle",
        )


def _stack_settings(request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
    """Variables in the configs that the network stack forbids, checks, or has replaced."""
    cluster = request.cluster
    stack = stack_of(cluster, machine, request.facts)
    if stack is None or cluster.nodes == 1:
        return
    source = stack.provenance.row.text
    for config, key, environment in environments(request):
        for name, value in environment.items():
            at, right = f"{key}.{name}", stack.profile_environment.get(name)
            if name in stack.forbidden:
                yield error(
                    config,
                    at,
                    f"must not be set with network stack {stack.name} ({source}); remove it",
                )
            elif name in stack.enforced and value != right:
                rule = f"{stack.name} ends a job where it is not {right} ({source})"
                yield error(config, at, f"{rule}; remove it: the node's script sets it")
            elif name in stack.superseded:
                message = (
                    f"belongs to earlier settings of {stack.name}; do not mix them with the present"
                    " ones"
                )
                yield warning(config, at, f"{message} ({source})")


def _reserved_variables(request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
    reserved = (
        (*RESERVED_VARIABLES, *_TORCHRUN_VARIABLES)
        if request.workload is None
        else RESERVED_VARIABLES
    )
    for config, key, environment in environments(request):
        for name in environment:
            if name in reserved:
                yield error(
                    config,
                    f"{key}.{name}",
                    "is set by the launcher for each attempt and node; remove it",
                )


def _image(request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
    """An image that is too old for the machines, or whose tag does not show it."""
    image, stacks = request.image, request.facts.network_stacks.values()
    if image is None or any(image in stack.images.values() for stack in stacks):
        # A network stack's own images are made for its machines.
        return
    config, key = request.image_setting
    floors = image_floors(request.cluster, machine, request.facts)
    for found in floor_findings(image, floors):
        yield (error if found.fatal else warning)(config, key, found.message)


def _capabilities(request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
    """List what the request needs and the launcher cannot do."""
    needed: list[tuple[bool, str, ConfigName, str]] = [
        (request.cluster.nodes > 1, "multi_node", "cluster", "nodes"),
        (request.image_setting[0] == "run", "image", "run", "workload.image"),
    ]
    for is_needed, capability, config, key in needed:
        if is_needed:
            try:
                require_capability(request.cluster.platform, capability, key)
            except UserError as lacking:
                yield error(config, key, str(lacking))


def _workload(request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
    """One command; each of the workload's files has its own path below the launch directory."""
    workload = request.workload
    if workload is None:
        return
    script = workload.launcher_file
    if workload.command is None and script is None:
        yield error(
            "run", "workload", "has neither `command` nor `launcher_file`; give one of them"
        )
    if workload.command is not None and script is not None:
        yield error(
            "run", "workload.launcher_file", "and `command` are both given; keep one of them"
        )
    if workload.command is not None and not workload.command[0].strip():
        yield error("run", "workload.command", "its first item is empty; it is the program")
    for target in workload.files:
        if (
            target.startswith("/")
            or ".." in target.split("/")
            or posixpath.normpath(target) in (".", "")
        ):
            message = (
                "is not a path below the run's launch directory; write a relative one without '..'"
            )
            yield error("run", ("workload", "files", target), message)
    if script is not None and posixpath.basename(script) in map(posixpath.normpath, workload.files):
        message = f"would overwrite `files` {posixpath.basename(script)}; give that another name"
        yield error("run", "workload.launcher_file", message)


def _mounts(request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
    """Only containers have mounts, and a path in a container shows one directory."""
    mounts = request.cluster.mounts
    if mounts and not request.image:
        yield error(
            "cluster",
            "mounts",
            "are for containers, and the run has no `image`; remove them or name one",
        )
    sources: dict[str, str] = {}
    for number, mount in enumerate(mounts):
        host, inside = mount_parts(mount)
        if inside in sources and sources[inside] == host:
            message = f"{inside} in the container is listed twice; remove one of them"
            yield error("cluster", ("mounts", number), message)
        elif sources.setdefault(inside, host) != host:
            message = (
                f"{inside} in the container is already {sources[inside]} of the node; mount it"
                " elsewhere"
            )
            yield error("cluster", ("mounts", number), message)


def _inputs(request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
    """Data and models that are named by a path: nodes look for them, not this machine."""
    run, cluster = request.run, request.cluster
    facts = platforms()[cluster.platform]
    if not isinstance(run, RunConfig) or facts.is_this_machine:
        return
    project = cluster.section.project_directory
    is_project_here = (
        facts.bucket_mount is None
        and not cluster.section.head_host
        and project in (None, request.here)
    )
    has_bucket = facts.bucket_mount is not None and cluster.storage.bucket is not None
    bucket = f"{facts.bucket_mount}/{cluster.storage.bucket}" if has_bucket else None
    visible = [mount_parts(mount)[1] for mount in cluster.mounts]
    shared = (project or request.here, cluster.storage.directory) if bucket is None else (bucket,)
    visible += [path for path in shared if path is not None]
    if bucket is not None:
        advice = f"put it on the bucket, which the nodes see as {bucket}"
    elif cluster.image and "mounts" not in facts.optional:
        advice = f"put it below storage.directory, {cluster.storage.directory}"
    elif cluster.image:
        advice = (
            "add its directory to `mounts` of the cluster config, or put it below storage.directory"
        )
    else:
        advice = (
            "put it on storage that the nodes share, and name that in storage.directory of the"
            " cluster config"
        )
    for key, path in _paths(run):
        if not path.startswith(("/", "~")):
            if bucket is not None:
                yield warning(
                    "run", key, f"'{path}' is looked for in the image; put it on {bucket}"
                )
            elif not request.sync and not is_project_here:
                message = (
                    "is looked for below the project's directory on the cluster; --sync copies it"
                    " there"
                )
                yield warning("run", key, f"'{path}' {message}")
        elif not any(path == top or path.startswith(top.rstrip("/") + "/") for top in visible):
            where = "in the container" if cluster.image else "on every node"
            yield warning(
                "run", key, f"'{path}' is looked for {where}, not on this machine; {advice}"
            )


def _output(request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
    """All nodes read and write one run directory."""
    run, cluster = request.run, request.cluster
    facts = platforms()[cluster.platform]
    shares_files = not facts.is_this_machine and facts.bucket_mount is None
    paths: list[tuple[ConfigName, str, str | None]] = [
        ("run", "output", run.output),
        ("cluster", "storage.directory", cluster.storage.directory),
        ("cluster", f"{cluster.platform}.directory", cluster.section.project_directory),
    ]
    for config, key, path in paths:
        if path is not None and OPENING in path:
            # Plans, job scripts and the index contain these paths, and each host may have another
            # value.
            yield error(
                config,
                key,
                f"'{path}': a launched run's directories are written out; write the path itself",
            )
        elif path is not None and config == "cluster" and shares_files and not path.startswith("/"):
            message = f"'{path}' is not an absolute path; on the hosts it would depend on the login"
            yield error(config, key, message)
    if (
        shares_files
        and cluster.nodes > 1
        and cluster.storage.directory is None
        and not run.output.startswith("/")
    ):
        message = (
            f"the run directory is {run.output}/{run.name} below the project's directory on the"
            f" cluster, which all {cluster.nodes} nodes must share; if they do not, set"
            " storage.directory in the cluster config"
        )
        yield warning("run", "output", message)


CHECKS: tuple[Check, ...] = (
    *(
        _machine,
        _stack_settings,
        _reserved_variables,
        _capabilities,
        _workload,
        _mounts,
        _inputs,
        _output,
        _image,
    ),
)


def mount_parts(mount: str) -> tuple[str, str]:
    """Directory of the node and path in the container of `/here`, `/here:/there` and either with
    `:ro`."""
    host, *rest = mount.removesuffix(":ro").split(":")
    return host, rest[0] if rest else host


def environments(request: LaunchRequest) -> Iterator[tuple[ConfigName, str, dict[str, str]]]:
    """The variables that each config sets, with the config and its key."""
    yield "cluster", "environment", request.cluster.environment
    if request.workload is not None:
        yield "run", "workload.environment", request.workload.environment


def _paths(run: RunConfig) -> Iterator[tuple[str, str]]:
    """Key and value of everything in a run config that looks like a path."""
    named: list[tuple[str, object]] = [
        ("data.source", run.data.source),
        ("data.held_out.source", run.data.held_out.source),
        ("model.id", run.model.id),
        ("data.tokenizer", run.data.tokenizer),
        ("data.chat_template", run.data.chat_template),
    ]
    for key, value in named:
        many = value if isinstance(value, list) else [value]
        for number, one in enumerate(many):
            at = f"{key}.{number}" if isinstance(value, list) else key
            text = one.path if isinstance(one, SourceConfig) else one
            if not isinstance(text, str) or text.startswith("builtin:") or remote_scheme(text):
                continue
            if looks_like_file(text):
                yield at, text
