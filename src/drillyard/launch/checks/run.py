"""Rules of the run on a cluster: what its launcher can do, its command, its files, and where they are looked for."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator

from drillyard.config.cluster import SlurmConfig
from drillyard.config.environment import OPENING
from drillyard.config.run import RunConfig, SourceConfig
from drillyard.config.workload import WorkloadRunConfig
from drillyard.errors import UserError
from drillyard.hardware.machines import Machine
from drillyard.launch.checks.request import Config, LaunchFinding, Rule, error, warning
from drillyard.launch.launcher import LaunchRequest
from drillyard.launch.registry import LAUNCHERS, require

_FILE_ENDINGS = (".jsonl", ".json", ".parquet", ".csv", ".txt", ".arrow", ".gz", ".zst", ".bz2", ".xz")
_BUILTIN = "builtin:"


def _capabilities(request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
    """What is asked for that the launcher cannot do, with those that can."""
    run, cluster = request.run, request.cluster
    own_image = isinstance(run, WorkloadRunConfig) and run.workload.image is not None
    asked: list[tuple[bool, str, Config, str]] = [
        (cluster.nodes > 1, "multi_node", "cluster", "nodes"),
        (own_image, "image", "run", "workload.image"),
        (request.sync, "sync", "cluster", "platform"),
        (request.dependency is not None, "dependency", "cluster", "platform"),
    ]
    if cluster.platform not in LAUNCHERS:
        return
    for wanted, capability, config, key in asked:
        if wanted:
            try:
                option = {"sync": "--sync", "dependency": "--after"}.get(capability, key)
                require(cluster.platform, capability, option)
            except UserError as lacking:
                yield error(config, key, str(lacking))


def _command(request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
    if not isinstance(request.run, WorkloadRunConfig):
        return
    workload = request.run.workload
    if workload.command is None and workload.launcher_file is None:
        yield error("run", "workload", "has neither `command` nor `launcher_file`; give one of them")
    if workload.command is not None and workload.launcher_file is not None:
        yield error("run", "workload.launcher_file", "and `command` are both given; keep one of them")
    if workload.command is not None and not workload.command[0].strip():
        yield error("run", "workload.command", "its first item is empty; it is the program")


def _carried_files(request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
    """Files travel below the launch directory, each to a place of its own."""
    if not isinstance(request.run, WorkloadRunConfig):
        return
    workload = request.run.workload
    for target in workload.files:
        if target.startswith("/") or ".." in target.split("/") or posixpath.normpath(target) in (".", ""):
            message = "is not a path below the run's launch directory; write a relative one without '..'"
            yield error("run", ("workload", "files", target), message)
    script = workload.launcher_file
    if script is not None and posixpath.basename(script) in map(posixpath.normpath, workload.files):
        message = f"would overwrite `files` {posixpath.basename(script)}; give that another name"
        yield error("run", "workload.launcher_file", message)


def _mounts(request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
    """Mounts are the container's, and one place in it holds one directory."""
    run, cluster = request.run, request.cluster
    image = (isinstance(run, WorkloadRunConfig) and run.workload.image) or cluster.image
    if cluster.mounts and not image:
        yield error(
            "cluster", "mounts", "are what a container sees, and the run has no `image`; remove them or name one"
        )
    seen: dict[str, str] = {}
    for number, mount in enumerate(cluster.mounts):
        host, inside = mount_parts(mount)
        if seen.setdefault(inside, host) != host:
            message = f"{inside} in the container is already {seen[inside]} of the node; mount it elsewhere"
            yield error("cluster", ("mounts", number), message)


def _inputs(request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
    """Data and models that are named by a path: they are looked for on the nodes, not here."""
    run, cluster = request.run, request.cluster
    if not isinstance(run, RunConfig) or cluster.platform == "local":
        return
    visible = [mount_parts(mount)[1] for mount in cluster.mounts]
    own = cluster.slurm.directory if cluster.slurm else cluster.ssh.directory if cluster.ssh else None
    visible += [path for path in (own or request.here, cluster.storage.directory) if path is not None]
    if cluster.platform == "vertex":
        visible.append(f"/gcs/{cluster.storage.bucket}")
    for key, path in _paths(run):
        if not path.startswith(("/", "~")):
            if cluster.platform == "vertex":
                yield warning(
                    "run", key, f"'{path}' is looked for in the image; put it on /gcs/{cluster.storage.bucket}"
                )
            elif not request.sync and not _project_is_here(request):
                message = (
                    f"'{path}' is looked for below the project's directory on the cluster; --sync carries it there"
                )
                yield warning("run", key, message)
        elif not any(path == top or path.startswith(top.rstrip("/") + "/") for top in visible):
            where = "in the container" if cluster.image else "on every node"
            message = f"'{path}' is looked for {where}, not on this machine; {_shared(request)}"
            yield warning("run", key, message)


def _output(request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
    """All nodes read and write one run directory."""
    run, cluster = request.run, request.cluster
    named: list[tuple[Config, str, str | None]] = [
        ("run", "output", run.output),
        ("cluster", "storage.directory", cluster.storage.directory),
        ("cluster", "slurm.directory", cluster.slurm.directory if cluster.slurm else None),
        ("cluster", "ssh.directory", cluster.ssh.directory if cluster.ssh else None),
    ]
    for config, key, path in named:
        if path is not None and OPENING in path:
            # Plans, job scripts and the index name these directories; each host may have another value.
            yield error(config, key, f"'{path}': a launched run's directories are written out; write the path itself")
    together = cluster.platform in ("ssh", "slurm") and cluster.nodes > 1
    if together and cluster.storage.directory is None and not run.output.startswith("/"):
        message = (
            f"the run directory is {run.output}/{run.name} below the project's directory on the cluster, which all "
            f"{cluster.nodes} nodes must share; if they do not, set storage.directory in the cluster config"
        )
        yield warning("run", "output", message)


RULES: tuple[Rule, ...] = (_capabilities, _command, _carried_files, _mounts, _inputs, _output)


def mount_parts(mount: str) -> tuple[str, str]:
    """Directory of the node and place in the container of `/here`, `/here:/there` and either with `:ro`."""
    host, *rest = mount.removesuffix(":ro").split(":")
    return host, rest[0] if rest else host


def _project_is_here(request: LaunchRequest) -> bool:
    """Whether the cluster's project directory is the one we are in: on a login node, whose files the nodes see."""
    slurm = request.cluster.slurm or SlurmConfig()
    there = slurm.login_host is None and slurm.directory in (None, request.here)
    return request.cluster.platform == "slurm" and there


def _paths(run: RunConfig) -> Iterator[tuple[str, str]]:
    """Key and value of everything in a run config that is a path of files, as far as its form tells."""
    named: list[tuple[str, object]] = [
        ("data.source", run.data.source),
        ("data.held_out.source", run.data.held_out.source),
    ]
    named += [("model.id", run.model.id), ("data.tokenizer", run.data.tokenizer)]
    for key, value in named:
        many = value if isinstance(value, list) else [value]
        for number, one in enumerate(many):
            at = f"{key}.{number}" if isinstance(value, list) else key
            text = one.path if isinstance(one, SourceConfig) else one
            if isinstance(text, str) and not text.startswith(_BUILTIN) and _is_path(text):
                yield at, text


def _is_path(text: str) -> bool:
    return text.startswith(("/", "~", "./", "../")) or text.endswith(_FILE_ENDINGS)


def _shared(request: LaunchRequest) -> str:
    if request.cluster.platform == "vertex":
        return f"put it on the bucket, which the nodes see as /gcs/{request.cluster.storage.bucket}"
    if request.cluster.image:
        return "add its directory to `mounts` of the cluster config, or put it below storage.directory"
    return "put it on storage that the nodes share, and name that in storage.directory of the cluster config"
