"""Run and cluster become a `Job`: what the agents of every launcher are told, and the files that travel with it.

Pure: no clock, no network, no disk but the carried files that the run config names. Each generated value comes with
the `ExplainedField` that says why it is so.
"""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from drillyard.config import require_valid, resolved_text
from drillyard.config.cluster import ClusterConfig
from drillyard.config.run import RunConfig
from drillyard.config.workload import WorkloadRunConfig
from drillyard.errors import UserError
from drillyard.hardware.capacity import machine_of
from drillyard.hardware.catalog import Catalog
from drillyard.launch.agent import rank_output
from drillyard.launch.agent.job import Job
from drillyard.launch.agent.shared_modules import shipped_files
from drillyard.launch.checks.request import require_launchable
from drillyard.launch.handles import Handle
from drillyard.launch.launcher import LaunchRequest
from drillyard.launch.network import network_file, network_of
from drillyard.launch.plan import ExplainedField, PlanFile
from drillyard.safe_files import require_plain_name

_CHECKPOINTS = "checkpoints/*/manifest.json"
_FIRST_PORT, _NUM_PORTS = 20000, 20000


@dataclass(frozen=True)
class ClusterPaths:
    """Where on the cluster things are, as a launcher decides it. Absolute paths of the nodes."""

    project: str
    """The directory in which commands are started and to which relative paths of the run config refer."""
    output: str
    """The directory that holds run directories."""
    python: str
    agent_python: str = "python3"
    """The interpreter that starts the agent; it need not have drillyard."""


@dataclass(frozen=True)
class PreparedRun:
    """A run made ready for a cluster, whichever launcher takes it."""

    handle: Handle
    job: Job
    image: str | None
    mounts: tuple[str, ...]
    """`host:container` or one path for both; the run's directory and the project's are among them."""
    files: tuple[PlanFile, ...]
    """job.json, run.yaml, cluster.yaml, agent/*.py and the workload's files, relative to the launch directory."""
    fields: tuple[ExplainedField, ...]
    warnings: tuple[str, ...]


def prepare(request: LaunchRequest, place: ClusterPaths) -> PreparedRun:
    """The job of `request` on a cluster laid out as `place`. Raises UserError for what cannot work."""
    run, cluster = request.run, request.cluster
    warnings = require_launchable(request)
    handle = Handle(cluster.platform, cluster.name, run.name)
    processes = processes_per_node(run, cluster, request.facts)
    if isinstance(run, RunConfig):
        require_valid(run, cluster.nodes * processes)
    image = image_of(run, cluster)
    network = network_of(cluster, request.facts, image=image)
    run_directory = posixpath.join(place.output, run.name)
    launch_directory = posixpath.join(run_directory, "launch")
    environment = {**network.environment, **_workload_environment(run), **cluster.environment}
    sourced = network_file(network, environment)
    job = Job(
        run=run.name,
        cluster=cluster.name,
        platform=cluster.platform,
        nodes=cluster.nodes,
        processes_per_node=processes,
        run_directory=run_directory,
        launch_directory=launch_directory,
        command=_command(run, cluster, place, processes),
        working_directory=_working_directory(run, place),
        environment=environment,
        profile_script=posixpath.join(launch_directory, sourced.path) if sourced else None,
        checkpoints=_checkpoints(run, run_directory),
        max_failures=request.max_failures,
        port=port_of(handle),
    )
    saved = run.model_copy(update={"output": place.output})
    files = (
        PlanFile("job.json", job.as_json()),
        PlanFile("run.yaml", resolved_text(saved), 0o600),
        PlanFile("cluster.yaml", resolved_text(cluster), 0o600),
        *([sourced] if sourced else []),
        *agent_files(),
        *_carried(run, Path(request.here)),
    )
    mounts = tuple(dict.fromkeys([place.output, place.project, *network.mounts, *cluster.mounts]))
    fields = [*network.fields, *_fields(run, cluster, job)]
    return PreparedRun(
        handle, job, image, mounts if image else (), files, tuple(fields), (*warnings, *network.warnings)
    )


def processes_per_node(run: RunConfig | WorkloadRunConfig, cluster: ClusterConfig, facts: Catalog) -> int:
    """Ranks per node: as a config says, or the machine's accelerators."""
    wanted = run.processes_per_node if isinstance(run, WorkloadRunConfig) else None
    if wanted or cluster.processes_per_node:
        return wanted or cluster.processes_per_node or 1
    if cluster.machine is not None:
        return machine_of(cluster, facts).num_accelerators
    raise UserError(
        "cluster config: how many ranks a node runs is not known; "
        "name the `machine`, or set `processes_per_node` (one per GPU; 1 where there is none)"
    )


def image_of(run: RunConfig | WorkloadRunConfig, cluster: ClusterConfig) -> str | None:
    """The container image of the run, if it has one."""
    own = run.workload.image if isinstance(run, WorkloadRunConfig) else None
    return own or cluster.image


def port_of(handle: Handle) -> int:
    """The first port on which the run's agents may meet: from the handle, so that a plan repeats."""
    digest = hashlib.sha256(str(handle).encode()).digest()
    return _FIRST_PORT + int.from_bytes(digest[:4], "big") % _NUM_PORTS


def agent_files() -> tuple[PlanFile, ...]:
    """The agent's own source, which travels with the plan as agent/*.py."""
    return tuple(PlanFile(f"agent/{name}", text) for name, text in shipped_files().items())


def _command(
    run: RunConfig | WorkloadRunConfig, cluster: ClusterConfig, place: ClusterPaths, processes: int
) -> list[str]:
    if isinstance(run, RunConfig):
        meeting = ["--nnodes", "{nodes}", "--node-rank", "{node_rank}", "--master-addr", "{master_addr}"]
        meeting += ["--master-port", "{master_port}"]
        command = [place.python, "-m", "drillyard", "train", "{launch_directory}/run.yaml", "--console", "text"]
        # The agents start all nodes again together; a node alone must not.
        command += ["--nproc-per-node", str(processes), "--max-restarts", "0"]
        return [*command, *(meeting if cluster.nodes > 1 else [])]
    workload = run.workload
    command = list(workload.command or ["bash", f"{{launch_directory}}/{_launcher_path(workload.launcher_file or '')}"])
    command += workload.arguments
    if workload.per == "node":
        return command
    # In an image its own torchrun is the right one; elsewhere that of the interpreter that is named.
    torchrun = ["torchrun"] if image_of(run, cluster) else [place.python, "-m", "torch.distributed.run"]
    torchrun += ["--nnodes={nodes}", "--nproc-per-node={processes_per_node}", "--node-rank={node_rank}"]
    torchrun += ["--master-addr={master_addr}", "--master-port={master_port}", "--max-restarts=0"]
    # Ranks are started through a script that gives each a pipe of its own: who has printed a line stays known.
    return [*torchrun, f"{{launch_directory}}/agent/{rank_output.SCRIPT}", *command]


def _working_directory(run: RunConfig | WorkloadRunConfig, place: ClusterPaths) -> str | None:
    own = run.workload.working_directory if isinstance(run, WorkloadRunConfig) else None
    return posixpath.join(place.project, own) if own else place.project


def _workload_environment(run: RunConfig | WorkloadRunConfig) -> Mapping[str, str]:
    return run.workload.environment if isinstance(run, WorkloadRunConfig) else {}


def _checkpoints(run: RunConfig | WorkloadRunConfig, run_directory: str) -> str | None:
    pattern = _CHECKPOINTS if isinstance(run, RunConfig) else run.workload.checkpoints
    return None if pattern is None else posixpath.join(run_directory, pattern)


def _launcher_path(launcher_file: str) -> str:
    return f"files/{posixpath.basename(launcher_file)}"


def _carried(run: RunConfig | WorkloadRunConfig, here: Path) -> list[PlanFile]:
    """The workload's own files. Raises UserError for one that is not here or is no text."""
    if isinstance(run, RunConfig):
        return []
    workload = run.workload
    wanted = {f"files/{target}": source for target, source in workload.files.items()}
    if workload.launcher_file is not None:
        wanted[_launcher_path(workload.launcher_file)] = workload.launcher_file
    carried = []
    for target, source in wanted.items():
        path = here / Path(source).expanduser()
        require_plain_name(target, "run.yaml: workload.files")
        try:
            carried.append(
                PlanFile(target, path.read_text(encoding="utf-8"), 0o755 if target.endswith(".sh") else 0o644)
            )
        except OSError as error:
            message = f"workload: {path}: cannot be read ({error.strerror}); it was to travel as {target}"
            raise UserError(message) from None
        except UnicodeDecodeError:
            message = f"workload: {path}: is not a text file; put binary files on the cluster's storage"
            raise UserError(message) from None
    return carried


def _fields(run: RunConfig | WorkloadRunConfig, cluster: ClusterConfig, job: Job) -> list[ExplainedField]:
    trainer = isinstance(run, RunConfig)
    set_here = cluster.processes_per_node is not None
    told = [
        ExplainedField(
            "job.json: command",
            " ".join(job.command),
            "Drillyard's trainer, once per node" if trainer else "the workload's command, once per node",
            "drillyard" if trainer else "run.yaml: workload",
        ),
        ExplainedField(
            "job.json: processes_per_node",
            str(job.processes_per_node),
            "as set" if set_here else "one rank per accelerator",
            "cluster.yaml: processes_per_node" if set_here else f"cluster.yaml: machine {cluster.machine}",
        ),
        ExplainedField("job.json: port", str(job.port), "from the run's handle, so that the plan repeats", "drillyard"),
        ExplainedField("job.json: max_failures", str(job.max_failures), "restarts that count", "--max-failures"),
    ]
    for name, value in cluster.environment.items():
        told.append(ExplainedField(f"environment: {name}", value, "as set", "cluster.yaml: environment"))
    for name, value in _workload_environment(run).items():
        told.append(ExplainedField(f"environment: {name}", value, "as set", "run.yaml: workload.environment"))
    return told
