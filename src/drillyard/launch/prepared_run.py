"""Parts of a plan that every launcher needs: the `Job` that the agents read, and the files sent
with it.

Pure: no clock, no network, no disk but the workload's files. Each generated value has an
`ExplainedField` with its reason. A launcher gives its own settings of the job, and adds its files
and steps.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from drillyard.config.load import resolved_text
from drillyard.config.platforms import platforms
from drillyard.config.run import RunConfig, WorkloadConfig
from drillyard.config.run_checks import require_valid
from drillyard.errors import UserError
from drillyard.hardware.capacity import machine_of
from drillyard.launch import agent
from drillyard.launch.agent import exec_command
from drillyard.launch.agent.job import Job
from drillyard.launch.network import NETWORK_FILE, network_of
from drillyard.launch.plan import Plan
from drillyard.launch.request import Check, LaunchRequest
from drillyard.launch.request_checks import environments, require_launchable
from drillyard.launch.run_status import Handle
from drillyard.plan_files import ExplainedField, PlanFile, explained
from drillyard.programs import TEMPORARY
from drillyard.safe_files import require_plain_name

_SHARED = {
    "drillyard": ("host_probe", "host_tools", "redaction"),
    "drillyard.supervise": (
        "cause",
        "launch_contract",
        "process_identity",
        "reaper",
        "restart_policy",
        "sockets",
        "stop_requests",
    ),
}
"""Modules of other packages that travel with the agent, as siblings of its files."""
_IMPORT = re.compile(r"^( *)from drillyard(?:\.supervise)?(\.\w+)? import", re.MULTILINE)
_CHECKPOINTS = "checkpoints/*/manifest.json"
_FIRST_PORT, _NUM_PORTS = 20000, 20000
JobSettings = Mapping[str, tuple[Any, str, str]]
"""Settings of the job that a launcher chooses, by name: value, reason and source."""
SENT_AGENT = f'{TEMPORARY} && tar -x -C "$d" -f - && "$0" "$d/agent" "$@"'
"""Runs a verb of the agent whose source (`agent_files`) is the archive on standard input; "$0" is
its Python."""


@dataclass(frozen=True)
class ClusterPaths:
    """Absolute paths of the nodes, as a launcher chooses them."""

    project: str
    """The directory in which commands start, and to which relative paths of the run config
    refer."""
    output: str
    """The directory that contains run directories."""
    python: str


def paths_on(request: LaunchRequest) -> ClusterPaths:
    """The paths on this machine, or on hosts that share a file system, where the checks of
    `prepare` refuse relative ones."""
    cluster = request.cluster
    project = posixpath.normpath(cluster.section.project_directory or request.here)
    storage = cluster.storage.directory or project
    python = "python3" if request.image else posixpath.join(project, ".venv/bin/python")
    if platforms()[cluster.platform].is_this_machine:
        storage, python = posixpath.join(project, os.path.expanduser(storage)), request.python
    output = posixpath.normpath(posixpath.join(storage, request.run.output))
    return ClusterPaths(project, output, cluster.python or python)


def prepare(
    request: LaunchRequest,
    *,
    checks: Sequence[Check] = (),
    paths: ClusterPaths | None = None,
    settings: JobSettings | None = None,
    agents: bool = True,
    launch_directory: str | None = None,
) -> Plan:
    """The plan of a request, without steps. `checks`: the platform's own; `paths`: by default those
    of `paths_on`.

    `agents`: the nodes run agents, which get job.json and their own source. `launch_directory`:
    where the nodes find the plan's files; default: launch/ of the run directory.

    Raises UserError for every mistake in the request.
    """
    paths, settings = paths or paths_on(request), settings or {}
    run, cluster, image, workload = request.run, request.cluster, request.image, request.workload
    warnings = require_launchable(request, *checks)
    handle = Handle(cluster.platform, cluster.name, run.name)
    processes = processes_per_node(request)
    if isinstance(run, RunConfig):
        require_valid(run, cluster.nodes * processes)
    configured = {**(workload.environment if workload else {}), **cluster.environment}
    network = network_of(cluster, request.facts, image=image, configured=configured)
    run_directory = posixpath.join(paths.output, run.name)
    launch_directory = launch_directory or posixpath.join(run_directory, "launch")
    pattern = workload.checkpoints if workload else _CHECKPOINTS
    directory = workload.working_directory if workload else None
    job = Job(
        run=run.name,
        cluster=cluster.name,
        platform=cluster.platform,
        nodes=cluster.nodes,
        processes_per_node=processes,
        run_directory=run_directory,
        launch_directory=launch_directory,
        command=_command(request, paths, processes, agents),
        working_directory=posixpath.join(paths.project, directory) if directory else paths.project,
        environment={**network.environment, **configured},
        profile_script=posixpath.join(launch_directory, NETWORK_FILE) if network.file else None,
        checkpoints=None if pattern is None else posixpath.join(run_directory, pattern),
        max_failures=request.max_failures,
        port=port_of(handle),
    )
    job = replace(job, **{name: value for name, (value, _, _) in settings.items()})
    sent = (
        *([PlanFile("job.json", job.as_json())] if agents else []),
        PlanFile("run.yaml", resolved_text(run.model_copy(update={"output": paths.output})), 0o600),
        PlanFile("cluster.yaml", resolved_text(cluster), 0o600),
        *([network.file] if network.file else []),
        *(agent_files() if agents else ()),
        *(_workload_files(workload, Path(request.here)) if workload else ()),
        *(replace(file, path=f"files/{file.path}") for file in request.files),
    )
    mounts = (
        tuple(dict.fromkeys([paths.output, paths.project, *network.mounts, *cluster.mounts]))
        if image
        else ()
    )
    set_fields = (explained(f"job.json: {name}", *setting) for name, setting in settings.items())
    own = (
        field for field in _fields(request, job) if agents or not field.place.startswith("job.json")
    )
    fields = (*network.fields, *own, *set_fields)
    return Plan(job, sent, fields, (*warnings, *network.warnings), image, mounts)


def processes_per_node(request: LaunchRequest) -> int:
    """Ranks per node: as a config sets them, or the machine's accelerators."""
    if request.processes_per_node:
        return request.processes_per_node
    if request.cluster.machine is not None:
        return machine_of(request.cluster, request.facts).num_accelerators
    raise UserError(
        "cluster config: the number of ranks per node is not known; "
        "name the `machine`, or set `processes_per_node` (one per GPU; 1 where there is none)"
    )


def accelerators_of(request: LaunchRequest) -> int:
    """Accelerators of each node of the machine that the config names; 0 where it names none."""
    if request.cluster.machine is None:
        return 0
    return machine_of(request.cluster, request.facts).num_accelerators


def port_of(handle: Handle) -> int:
    """The first port of the run's agents: derived from the handle, so that a plan repeats."""
    digest = hashlib.sha256(str(handle).encode()).digest()
    return _FIRST_PORT + int.from_bytes(digest[:4], "big") % _NUM_PORTS


def agent_files() -> tuple[PlanFile, ...]:
    """The agent's own source, which the plan sends as agent/*.py, in order of names.

    Read as resources of the packages, so that a zipped wheel has them too.
    """
    found = [each for each in files(agent).iterdir() if each.name.endswith(".py")]
    found += [
        files(package).joinpath(f"{name}.py")
        for package, names in _SHARED.items()
        for name in names
    ]
    texts = {
        each.name: each.read_text(encoding="utf-8")
        for each in sorted(found, key=lambda each: each.name)
    }
    return tuple(PlanFile(f"agent/{name}", as_siblings(text)) for name, text in texts.items())


def as_siblings(source: str) -> str:
    """Source whose imports of our other modules are of files beside it, as they are on nodes."""
    return _IMPORT.sub(lambda match: f"{match[1]}from {match[2] or '.'} import", source)


def _command(
    request: LaunchRequest, paths: ClusterPaths, processes: int, agents: bool
) -> list[str]:
    workload = request.workload
    if workload is None:
        command = [
            paths.python,
            "-m",
            "drillyard",
            "train",
            "{launch_directory}/run.yaml",
            "--console",
            "text",
        ]
        # The agents restart all nodes together; a node alone must not.
        command += ["--nproc-per-node", str(processes), "--max-restarts", "0"]
        if request.cluster.nodes > 1:
            command += [
                "--nnodes",
                "{nodes}",
                "--node-rank",
                "{node_rank}",
                "--master-addr",
                "{master_addr}",
            ]
            command += ["--master-port", "{master_port}"]
        return command
    command = list(
        workload.command
        or ["bash", f"{{launch_directory}}/{_launcher_path(workload.launcher_file or '')}"]
    )
    command += workload.arguments
    if workload.per == "node":
        return command
    # An image has its own torchrun; elsewhere it is that of the named interpreter.
    torchrun = ["torchrun"] if request.image else [paths.python, "-m", "torch.distributed.run"]
    torchrun += [
        "--nnodes={nodes}",
        "--nproc-per-node={processes_per_node}",
        "--node-rank={node_rank}",
    ]
    torchrun += ["--master-addr={master_addr}", "--master-port={master_port}", "--max-restarts=0"]
    if not agents:
        # With --tee the rank of each printed line is known; -u, as it reads files.
        unbuffered = [command[0], "-u"] if command[0] in ("python", "python3") else command[:1]
        return [*torchrun, "--tee=3", "--no-python", *unbuffered, *command[1:]]
    # The script gives each rank a pipe of its own, so that the rank of each printed line is known.
    return [
        *torchrun,
        "{launch_directory}/agent/exec_command.py",
        exec_command.RANK_OPTION,
        *command,
    ]


def _launcher_path(launcher_file: str) -> str:
    return f"files/{posixpath.basename(launcher_file)}"


def _workload_files(workload: WorkloadConfig, here: Path) -> list[PlanFile]:
    """The workload's own files. Raises UserError for one that does not exist or is no text."""
    sources = {f"files/{target}": source for target, source in workload.files.items()}
    if workload.launcher_file is not None:
        sources[_launcher_path(workload.launcher_file)] = workload.launcher_file
    found = []
    for target, source in sources.items():
        path = here / Path(source).expanduser()
        require_plain_name(target, "run.yaml: workload.files")
        try:
            found.append(
                PlanFile(
                    target,
                    path.read_text(encoding="utf-8"),
                    0o755 if target.endswith(".sh") else 0o644,
                )
            )
        except OSError as error:
            raise UserError(
                f"workload: {path}: cannot be read ({error.strerror}); it is needed as {target}"
            ) from None
        except UnicodeDecodeError:
            raise UserError(
                f"workload: {path}: is not a text file; put binary files on shared storage"
            ) from None
    return found


def _fields(request: LaunchRequest, job: Job) -> Iterator[ExplainedField]:
    cluster = request.cluster
    what = (
        ("Drillyard's trainer", "drillyard")
        if request.workload is None
        else ("the command", "run.yaml: workload")
    )
    ranks = ("one rank per accelerator", f"cluster.yaml: machine {cluster.machine}")
    if cluster.processes_per_node is not None:
        ranks = ("as set", "cluster.yaml: processes_per_node")
    yield ExplainedField(
        "job.json: command", " ".join(job.command), f"{what[0]}, once per node", what[1]
    )
    yield ExplainedField("job.json: processes_per_node", str(job.processes_per_node), *ranks)
    why = "derived from the run's handle, so that the plan repeats"
    yield ExplainedField("job.json: port", str(job.port), why, "drillyard")
    yield ExplainedField(
        "job.json: max_failures", str(job.max_failures), "restarts that count", "--max-failures"
    )
    for config, key, environment in environments(request):
        for name, value in environment.items():
            yield ExplainedField(f"environment: {name}", value, "as set", f"{config}.yaml: {key}")
