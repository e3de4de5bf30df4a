"""The plan of a run on hosts without a scheduler: hosts reached by ssh, or this machine. Pure. Its
stages:

    check, share, forget   every host in parallel; whether all see a file of the head host; nothing
                           is left there
    carry                  `--sync`: the working directory, once where the hosts share it, else to
                           every host
    write                  on the head host: the submit lock, the launch directory, the run in the
                           index
    start, release         an agent on every host, detached from the connection; the submit lock,
                           also after a failure

Each stage is checked before the next one begins (`host_facts.py`). A submission is identified by a
digest of its secret: agents of different submissions never join, and the file of `share` is never
an earlier one's.
"""

from __future__ import annotations

import json
import posixpath
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from drillyard.config.cluster import ClusterConfig
from drillyard.launch.agent.job import Job
from drillyard.launch.hosts.config import SshConfig
from drillyard.launch.plan import Plan, Program, secret_names
from drillyard.launch.prepared_run import ClusterPaths, agent_files, paths_on, prepare
from drillyard.launch.request import LaunchRequest
from drillyard.launch.request_checks import AGENT_VARIABLES, mount_parts
from drillyard.launch.sync_archive import sync_step
from drillyard.plan_files import ExplainedField, PlanFile
from drillyard.programs import TEMPORARY, Host
from drillyard.supervise.reaper import AGENT_MARK, RUN_MARK

CHECK, SHARE, FORGET = "check", "share", "forget"
WRITE, START, UNLOCK = "write", "start", "release"

CONTAINER_SCRIPT = "container.sh"
_UNPACKED = f"""\
{TEMPORARY} && tar -x -C "$d" -f - && n=$(sha256sum <"$d/secret" | cut -c1-16)"""
"""Unpacks the archive on standard input into `$d`; `$n` is a digest of its secret."""
_PROBE = f'{_UNPACKED} && "$0" "$d/agent" check "$@"'
"""Runs the agent from the archive on standard input, in a temporary directory. `$0` is its
Python."""
_FORGET = 'n=$(tar -x -O -f - secret | sha256sum | cut -c1-16) && rm -f -- "$0/.drillyard-$n"'
_WRITE = f"""\
umask go-w && {_UNPACKED} &&
"$0" "$d/agent" place --sent "$d" --launch-directory "$1" --submission "$n" --entry "$2"
"""
_UNLOCK = f'{_UNPACKED} && "$0" "$d/agent" unlock --launch-directory "$1" --submission "$n"'
_START = """\
scope=
export XDG_RUNTIME_DIR="${XDG_RUNTIME_DIR:-/run/user/$(id -u)}"
if command -v systemd-run >/dev/null && [ -e "$XDG_RUNTIME_DIR/systemd/private" ] &&
    [ -e "/var/lib/systemd/linger/$(id -un)" ]; then
    scope='systemd-run --user --scope --quiet --collect'
fi
python=$(command -v "$0")
[ ! -e "$1/path" ] || export PATH="$(cat "$1/path"):$PATH"
unset SSH_CLIENT SSH2_CLIENT SSH_CONNECTION SSH_TTY
exec $scope "$python" "$1/agent" start --job "$1/job.json" --node-rank "$2" --leader "$3" \\
    --submission "$(sha256sum <"$1/secret" | cut -c1-16)"
"""
"""Starts a node's agent in a new session, with the directory of the run's Python first on its PATH.
Where systemd kills a login's processes at logout and this user's manager lingers (loginctl
enable-linger), the agent gets a scope of that manager, which survives the logout. It is not a
login: with SSH_CLIENT each `bash -c` of the run would read ~/.bashrc again (bash(1),
INVOCATION)."""


@dataclass(frozen=True)
class HostLayout:
    """The hosts of a cluster. The first is node 0 and the head host."""

    hosts: tuple[Host, ...]
    leader: str
    """Name or address under which all hosts reach the first one."""
    python: str = "python3"
    """The interpreter that starts the agents; it needs no packages."""


def layout_of(cluster: ClusterConfig, python: str) -> HostLayout:
    """The hosts of a cluster: those of its config, or this machine, where `python` starts the
    agent."""
    ssh = cluster.section
    if not isinstance(ssh, SshConfig):
        return HostLayout((Host(),), "127.0.0.1", python)
    hosts = tuple(
        Host(name, ssh.user, ssh.port, ssh.identity_file, ssh.config_file) for name in ssh.hosts
    )
    return HostLayout(hosts, ssh.rendezvous_host or ssh.hosts[0].rpartition("@")[2])


def plan_of(request: LaunchRequest) -> Plan:
    """The plan of a request. Raises UserError for every mistake in it."""
    layout, paths = layout_of(request.cluster, request.python), paths_on(request)
    prepared = prepare(request, paths=paths)
    needs = ["--python", paths.python] if request.workload is None else []
    if prepared.image:
        needs = ["--image", prepared.image]
        prepared = _in_containers(prepared)
    else:
        # First on PATH, as an ssh login activates no environment.
        path = PlanFile("path", f"{posixpath.dirname(paths.python)}\n")
        prepared = replace(prepared, files=(*prepared.files, path))
    synced = _synced_hosts(layout, paths, request)
    sync = [sync_step(host, request.here, paths.project) for host in synced]
    steps = _steps(layout, prepared.job, needs, [file.path for file in prepared.files], sync)
    fields = (*prepared.fields, *_fields(layout, paths, prepared, request))
    return replace(
        prepared, code=_code(paths, len(synced), prepared, request), steps=steps, fields=fields
    )


def plan_again(layout: HostLayout, job: Job) -> Plan:
    """The plan of a run whose launch directory exists: its agents start as before, from the files
    in it."""
    needs = ["--python", job.command[0]] if job.command[1:3] == ["-m", "drillyard"] else []
    files = agent_files()
    return Plan(
        job,
        files,
        code="as it was",
        steps=_steps(layout, job, needs, [file.path for file in files], ()),
    )


def _steps(
    layout: HostLayout,
    job: Job,
    needs: Sequence[str],
    files: Sequence[str],
    sync: Sequence[Program],
) -> tuple[Program, ...]:
    """All steps. `needs`: what each host is checked for; `files`: paths of the files to write."""
    head, *others = layout.hosts
    python, launch, output = (
        layout.python,
        job.launch_directory,
        posixpath.dirname(job.run_directory),
    )
    agent = [file.path for file in agent_files()]

    def step(
        stage: str,
        host: Host,
        purpose: str,
        words: Sequence[str],
        sends: Sequence[str] = (),
        parallel: bool = False,
    ) -> Program:
        return Program(
            purpose, host.argv(words), sends=tuple(sends), parallel=parallel, stage=stage
        )

    def probe(
        stage: str, host: Host, purpose: str, words: Sequence[str], more: str = ""
    ) -> Program:
        script = _PROBE.replace(" check ", f" check {more} ") if more else _PROBE
        return step(
            stage, host, purpose, ["sh", "-c", script, python, *words], agent, parallel=True
        )

    facts = "GPUs, clock, disk, ports, programs, other runs"
    words = ["--directory", output, "--launch-directory", launch, "--runs", *needs]
    write_nonce = '--write-nonce "$n"' if others else ""
    steps = [
        probe(
            CHECK,
            head,
            f"check {head.title}: {facts}",
            [*words, "--port", str(job.port)],
            write_nonce,
        )
    ]
    steps += [probe(CHECK, host, f"check {host.title}: {facts}", words) for host in others]
    for host in others:
        purpose = f"check that {host.title} shares {output}"
        steps.append(probe(SHARE, host, purpose, ["--directory", output], '--nonce "$n"'))
    if others:
        purpose = "remove the file that all hosts should see"
        # The step reads only the secret, which the launcher adds; the archive of a step is never
        # empty.
        steps.append(step(FORGET, head, purpose, ["sh", "-c", _FORGET, output], agent[:1]))
    purpose = (
        f"lock the launch directory on {head.title}, write it and enter the run into the index"
    )
    names = ("run", "cluster", "platform", "nodes", "run_directory", "launch_directory")
    entry = json.dumps({name: getattr(job, name) for name in names})
    return (
        *steps,
        *sync,
        step(WRITE, head, purpose, ["sh", "-c", _WRITE, python, launch, entry], files),
        *(
            step(
                START,
                host,
                f"start the agent on {host.title}",
                ["sh", "-c", _START, python, launch, str(node), layout.leader],
                parallel=True,
            )
            for node, host in enumerate(layout.hosts)
        ),
        step(
            UNLOCK,
            head,
            f"release the lock on {head.title}",
            ["sh", "-c", _UNLOCK, python, launch],
            agent,
        ),
    )


def _synced_hosts(
    layout: HostLayout, paths: ClusterPaths, request: LaunchRequest
) -> Sequence[Host]:
    """The hosts that `--sync` copies to: the first, where all see the same project directory."""
    if not request.sync:
        return ()
    storage, project = request.cluster.storage.directory, PurePosixPath(paths.project)
    shared = (
        storage is None
        or project.is_relative_to(storage)
        or PurePosixPath(paths.output).is_relative_to(project)
    )
    return layout.hosts[:1] if shared else layout.hosts


def _code(paths: ClusterPaths, num_synced: int, prepared: Plan, request: LaunchRequest) -> str:
    image = f"in the image {prepared.image}" if prepared.image else ""
    if not request.sync:
        where = (
            "on every host" if isinstance(request.cluster.section, SshConfig) else "on this machine"
        )
        return image or f"there already: {paths.project} {where}"
    times = "once, as the hosts share it" if num_synced == 1 else f"to each of {num_synced} hosts"
    carried = (
        f"carried (--sync): {request.here}, what git does not ignore, to {paths.project}, {times}"
    )
    return f"{carried}; the rest is {image}" if image else carried


def _fields(
    layout: HostLayout, paths: ClusterPaths, prepared: Plan, request: LaunchRequest
) -> list[ExplainedField]:
    section = request.cluster.section
    fields = [
        ("agent: python", layout.python, "starts the agents, which need no packages", "drillyard")
    ]
    default = "the interpreter that launches"
    if isinstance(section, SshConfig):
        default = "the .venv of the project's directory"
        source = "ssh.rendezvous_host" if section.rendezvous_host else "the first of ssh.hosts"
        why = "under this name the hosts reach the first one"
        fields.append(("agent start: --leader", layout.leader, why, f"cluster.yaml: {source}"))
    if prepared.image is None:
        source = "cluster.yaml: python" if request.cluster.python else f"default: {default}"
        why = "first on PATH of the agents' programs: torchrun is there"
        fields.append(("python", paths.python, "starts the ranks", source))
        fields.append(("path", posixpath.dirname(paths.python), why, source))
    return [ExplainedField(*field) for field in fields]


def _in_containers(prepared: Plan) -> Plan:
    """The same run with its command in a container of the image."""
    assert prepared.image is not None
    script = PlanFile(CONTAINER_SCRIPT, _container_script(prepared), 0o755)
    command = ["sh", f"{{launch_directory}}/{CONTAINER_SCRIPT}", *prepared.job.command]
    job = replace(prepared.job, command=command, working_directory=None, profile_script=None)
    why = (
        "the agent runs on the host and the command in the container, which the agent stops as"
        " its own"
    )
    source = "run.yaml: workload.image, or cluster.yaml: image"
    fields = [ExplainedField("container.sh: docker run", prepared.image, why, source)]
    for mount in prepared.mounts:
        source = "storage, project, cluster.yaml: mounts"
        fields.append(
            ExplainedField("container.sh: --volume", mount, "the nodes' paths inside", source)
        )
    others = (file for file in prepared.files if file.path != "job.json")
    files = (PlanFile("job.json", job.as_json()), *others, script)
    return replace(prepared, job=job, files=files, fields=(*prepared.fields, *fields))


def volume_options(mounts: Iterable[str]) -> Iterator[str]:
    """`--volume` options of `/here`, `/here:/there` and either with `:ro`."""
    for mount in mounts:
        host, inside = mount_parts(mount)
        yield shlex.join(["--volume", f"{host}:{inside}{':ro' if mount.endswith(':ro') else ''}"])


def _container_script(prepared: Plan) -> str:
    """container.sh: starts its arguments in the image, as the command of one node.

    The container belongs to the agent as any other command does: signals are passed on (`--init`
    hands them to the program), its exit code is the program's, and its processes carry the agent's
    mark in their environment, so that the agent can find and kill them (agent/node_command.py). A
    container left by a node that lost its power has the label of this run and node, and is removed
    before the next one starts; one that only has its name is somebody else's. Variables get their
    values from the agent's environment and are only named.
    """
    job, handle = prepared.job, prepared.handle
    names = dict.fromkeys(
        [*AGENT_VARIABLES, RUN_MARK, AGENT_MARK, *job.environment, *secret_names(prepared.files)]
    )
    directory = None if job.working_directory is None else shlex.quote(job.working_directory)
    options = [
        *("--rm", "--init", '--label "$label"'),
        *("--network host --ipc host", "--ulimit memlock=-1 --ulimit stack=67108864"),
        *([f"--workdir {directory}"] if directory else []),
        *volume_options(prepared.mounts),
        *(f"--env {name}" for name in names),
        # The user of the host is not in the image's passwd and has no home there.
        *([] if "HOME" in names else ["--env HOME=/tmp"]),
    ]
    lines = " \\\n    ".join(options)
    inner = ""
    if job.profile_script is not None:
        # The variables that the network stack checks are those of the process that starts the
        # ranks.
        inner = f' bash -c \'. "$0" && exec "$@"\' {shlex.quote(job.profile_script)}'
    made = f"mkdir -p {directory}\n" if directory else ""
    return f"""\
#!/bin/sh
# The command of one node in a container; its arguments are the program. The agent starts it once per attempt.
set -eu
name=drillyard-{handle.cluster}-{handle.run}-"$NODE_RANK"
label=drillyard.node={shlex.quote(job.launch_directory)}/"$NODE_RANK"
if command -v docker >/dev/null; then
    runtime=docker
    user="--user $(id -u):$(id -g)"
    gpus="--gpus all"
elif command -v podman >/dev/null; then
    runtime=podman
    user="--userns keep-id"
    gpus="--device nvidia.com/gpu=all"
else
    echo "error: $(hostname): neither docker nor podman is installed, and the run has an image" >&2
    exit 2
fi
[ -e /dev/nvidiactl ] || gpus=
devices=
[ ! -d /dev/infiniband ] || devices="--device /dev/infiniband"
{made}left=$("$runtime" ps --all --quiet --filter "label=$label" 2>/dev/null) || left=
# shellcheck disable=SC2086
[ -z "$left" ] || "$runtime" rm --force $left >/dev/null 2>&1 || true
# shellcheck disable=SC2086
exec "$runtime" run --name "$name" $user $gpus $devices \\
    {lines} \\
    {shlex.quote(prepared.image or "")}{inner} "$@"
"""  # noqa: E501
