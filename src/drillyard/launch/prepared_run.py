"""What every launcher needs of a run: the `Job` that the agents read, and the files sent with it.

Pure: no clock, no network, no disk but the workload's files. Each generated value has an `ExplainedField` with its
reason. A launcher adds its own settings to the job (`with_job`) and its steps (`plan`).
"""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from drillyard.config import require_valid, resolved_text
from drillyard.config.run import RunConfig, WorkloadConfig
from drillyard.errors import UserError
from drillyard.hardware.capacity import machine_of
from drillyard.launch.agent import exec_command, shipped_files
from drillyard.launch.agent.job import Job
from drillyard.launch.checks import require_launchable
from drillyard.launch.network import network_file, network_of
from drillyard.launch.plan import ExplainedField, Plan, PlanFile, Step
from drillyard.launch.request import LaunchRequest
from drillyard.launch.run_status import Handle
from drillyard.safe_files import require_plain_name

_CHECKPOINTS = "checkpoints/*/manifest.json"
_FIRST_PORT, _NUM_PORTS = 20000, 20000
SENT_AGENT = 'd=$(mktemp -d) && trap \'rm -rf "$d"\' EXIT && tar -x -C "$d" -f - && "$0" "$d/agent" "$@"'
"""Runs a verb of the agent whose source (`agent_files`) is the archive on standard input; "$0" is its Python."""


@dataclass(frozen=True)
class ClusterPaths:
    """Absolute paths of the nodes, as a launcher chooses them."""

    project: str
    """The directory in which commands start, and to which relative paths of the run config refer."""
    output: str
    """The directory that contains run directories."""
    python: str
    agent_python: str = "python3"
    """The interpreter that starts the agent; it needs no packages."""


@dataclass(frozen=True)
class PreparedRun:
    """A run ready for any launcher."""

    handle: Handle
    job: Job
    image: str | None
    mounts: tuple[str, ...]
    """`host:container` or one path for both, the run's directory and the project's included."""
    files: tuple[PlanFile, ...]
    """job.json, run.yaml, cluster.yaml, agent/*.py and the workload's files, relative to the launch directory."""
    fields: tuple[ExplainedField, ...]
    warnings: tuple[str, ...]

    def with_job(self, job: Job, fields: Iterable[ExplainedField] = (), files: Iterable[PlanFile] = ()) -> PreparedRun:
        """The same run with another job, and with more fields and files."""
        same = [replace(file, content=job.as_json()) if file.path == "job.json" else file for file in self.files]
        return replace(self, job=job, files=(*same, *files), fields=(*self.fields, *fields))

    def plan(
        self,
        code: str,
        steps: Sequence[Step],
        *,
        files: Sequence[PlanFile] = (),
        fields: Iterable[ExplainedField] = (),
        warnings: Iterable[str] = (),
        script: str = "",
    ) -> Plan:
        """The plan of this run; `files` replace its own."""
        return Plan(
            handle=self.handle,
            nodes=self.job.nodes,
            processes_per_node=self.job.processes_per_node,
            run_directory=self.job.run_directory,
            launch_directory=self.job.launch_directory,
            code=code,
            files=tuple(files or self.files),
            steps=tuple(steps),
            fields=(*self.fields, *fields),
            warnings=(*self.warnings, *warnings),
            script=script,
        )


def paths_on(request: LaunchRequest) -> ClusterPaths:
    """The paths on a cluster whose hosts share a file system. Raises UserError for a relative one."""
    cluster = request.cluster
    project = _absolute(cluster.section.project_directory or request.here, f"{cluster.platform}.directory")
    storage = cluster.storage.directory
    root = _absolute(storage, "storage.directory") if storage else project
    output = posixpath.normpath(posixpath.join(root, request.run.output))
    python = cluster.python or ("python3" if request.image else posixpath.join(project, ".venv/bin/python"))
    return ClusterPaths(project, output, python)


def _absolute(path: str, setting: str) -> str:
    if not path.startswith("/"):
        raise UserError(f"{setting}: '{path}' is not an absolute path; on the hosts it would depend on the login")
    return posixpath.normpath(path)


def prepare(request: LaunchRequest, paths: ClusterPaths) -> PreparedRun:
    """Prepare a request with these paths. Raises UserError for every mistake in it."""
    run, cluster, image, workload = request.run, request.cluster, request.image, request.workload
    warnings = require_launchable(request)
    handle = Handle(cluster.platform, cluster.name, run.name)
    processes = processes_per_node(request)
    if isinstance(run, RunConfig):
        require_valid(run, cluster.nodes * processes)
    network = network_of(cluster, request.facts, image=image)
    run_directory = posixpath.join(paths.output, run.name)
    launch_directory = posixpath.join(run_directory, "launch")
    own = workload.environment if workload else {}
    environment = {**network.environment, **own, **cluster.environment}
    sourced = network_file(network, environment)
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
        command=_command(request, paths, processes),
        working_directory=posixpath.join(paths.project, directory) if directory else paths.project,
        environment=environment,
        profile_script=posixpath.join(launch_directory, sourced.path) if sourced else None,
        checkpoints=None if pattern is None else posixpath.join(run_directory, pattern),
        max_failures=request.max_failures,
        port=port_of(handle),
    )
    files = (
        PlanFile("job.json", job.as_json()),
        PlanFile("run.yaml", resolved_text(run.model_copy(update={"output": paths.output})), 0o600),
        PlanFile("cluster.yaml", resolved_text(cluster), 0o600),
        *([sourced] if sourced else []),
        *agent_files(),
        *(_workload_files(workload, Path(request.here)) if workload else ()),
    )
    mounts = tuple(dict.fromkeys([paths.output, paths.project, *network.mounts, *cluster.mounts])) if image else ()
    fields = (*network.fields, *_fields(request, job))
    return PreparedRun(handle, job, image, mounts, files, fields, (*warnings, *network.warnings))


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


def port_of(handle: Handle) -> int:
    """The first port of the run's agents: derived from the handle, so that a plan repeats."""
    digest = hashlib.sha256(str(handle).encode()).digest()
    return _FIRST_PORT + int.from_bytes(digest[:4], "big") % _NUM_PORTS


def agent_files() -> tuple[PlanFile, ...]:
    """The agent's own source, which the plan sends as agent/*.py."""
    return tuple(PlanFile(f"agent/{name}", text) for name, text in shipped_files().items())


def _command(request: LaunchRequest, paths: ClusterPaths, processes: int) -> list[str]:
    workload = request.workload
    if workload is None:
        command = [paths.python, "-m", "drillyard", "train", "{launch_directory}/run.yaml", "--console", "text"]
        # The agents restart all nodes together; a node alone must not.
        command += ["--nproc-per-node", str(processes), "--max-restarts", "0"]
        if request.cluster.nodes > 1:
            command += ["--nnodes", "{nodes}", "--node-rank", "{node_rank}", "--master-addr", "{master_addr}"]
            command += ["--master-port", "{master_port}"]
        return command
    command = list(workload.command or ["bash", f"{{launch_directory}}/{_launcher_path(workload.launcher_file or '')}"])
    command += workload.arguments
    if workload.per == "node":
        return command
    # An image has its own torchrun; elsewhere it is that of the named interpreter.
    torchrun = ["torchrun"] if request.image else [paths.python, "-m", "torch.distributed.run"]
    torchrun += ["--nnodes={nodes}", "--nproc-per-node={processes_per_node}", "--node-rank={node_rank}"]
    torchrun += ["--master-addr={master_addr}", "--master-port={master_port}", "--max-restarts=0"]
    # The script gives each rank a pipe of its own, so that the rank of each printed line is known.
    return [*torchrun, "{launch_directory}/agent/exec_command.py", exec_command.RANK_OPTION, *command]


def _launcher_path(launcher_file: str) -> str:
    return f"files/{posixpath.basename(launcher_file)}"


def _workload_files(workload: WorkloadConfig, here: Path) -> list[PlanFile]:
    """The workload's own files. Raises UserError for one that does not exist or is no text."""
    sources = {f"files/{target}": source for target, source in workload.files.items()}
    if workload.launcher_file is not None:
        sources[_launcher_path(workload.launcher_file)] = workload.launcher_file
    files = []
    for target, source in sources.items():
        path = here / Path(source).expanduser()
        require_plain_name(target, "run.yaml: workload.files")
        try:
            files.append(PlanFile(target, path.read_text(encoding="utf-8"), 0o755 if target.endswith(".sh") else 0o644))
        except OSError as error:
            message = f"workload: {path}: cannot be read ({error.strerror}); it is needed as {target}"
            raise UserError(message) from None
        except UnicodeDecodeError:
            message = f"workload: {path}: is not a text file; put binary files on the cluster's storage"
            raise UserError(message) from None
    return files


def _fields(request: LaunchRequest, job: Job) -> Iterator[ExplainedField]:
    cluster, workload = request.cluster, request.workload
    what = ("Drillyard's trainer", "drillyard") if workload is None else ("the command", "run.yaml: workload")
    ranks = ("one rank per accelerator", f"cluster.yaml: machine {cluster.machine}")
    if cluster.processes_per_node is not None:
        ranks = ("as set", "cluster.yaml: processes_per_node")
    yield ExplainedField("job.json: command", " ".join(job.command), f"{what[0]}, once per node", what[1])
    yield ExplainedField("job.json: processes_per_node", str(job.processes_per_node), *ranks)
    why = "derived from the run's handle, so that the plan repeats"
    yield ExplainedField("job.json: port", str(job.port), why, "drillyard")
    yield ExplainedField("job.json: max_failures", str(job.max_failures), "restarts that count", "--max-failures")
    for name, value in cluster.environment.items():
        yield ExplainedField(f"environment: {name}", value, "as set", "cluster.yaml: environment")
    for name, value in workload.environment.items() if workload else ():
        yield ExplainedField(f"environment: {name}", value, "as set", "run.yaml: workload.environment")
