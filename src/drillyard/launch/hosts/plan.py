"""The plan of a run on hosts that are reached directly: by ssh, or the one that we are on. Pure.

    check    on every host at once: nothing stays there; all must be well before anything is started
    share    do the others see what the head host wrote into the directory of runs? `forget` removes it
    carry    `--sync`: the working directory, once where the hosts share it, else to every host
    claim    the launch directory, on the head host: one submission at a time writes there and starts agents
    write    the launch directory, once: it is on storage that the hosts share
    record   the run's entry in the index of the head host, where `runs` finds it: nothing runs that is not found
    start    an agent on every host, detached: it outlives the connection
    release  the claim, also where one of the three before has failed

What the steps of a stage print is judged before the next stage begins (`checks.py`). A submission is named by a
digest of the run's secret, which is made for it: agents of different submissions never join, and the mark of `share` is
never one of an earlier look.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass, replace

from drillyard.config.run import RunConfig
from drillyard.errors import UserError
from drillyard.launch.agent.job import Job
from drillyard.launch.handles import Handle
from drillyard.launch.hosts import container
from drillyard.launch.launcher import LaunchRequest
from drillyard.launch.plan import ExplainedField, Plan, PlanFile, Program
from drillyard.launch.prepared_run import ClusterPaths, PreparedRun, agent_files, prepare
from drillyard.launch.programs import Host
from drillyard.launch.submit_lock import LOCK, LOCK_ALL, UNLOCK, UNLOCK_ALL, UNPACKED
from drillyard.launch.submit_secrets import secret_names
from drillyard.launch.sync_archive import CARRIED_LIST, UNPACK_OVER

CHECK, SHARE, FORGET, CARRY = "check", "share", "forget", "carry"
WRITE, RECORD, START = "write", "record", "start"

_ASK = f'{UNPACKED} && "$0" "$d/agent" check "$@"'
"""The agent out of the archive on standard input, which leaves nothing behind. `$0` is its Python."""
_FORGET = 'n=$(tar -x -O -f - secret | sha256sum | cut -c1-16) && rm -f -- "$0/.drillyard-$n"'
_CLAIM = f"""\
umask go-w && {UNPACKED} || exit 1
launch=$1
"$0" "$d/agent" prepare --launch-directory "$launch" || exit 1
set -- "$launch/claim"
{LOCK_ALL}"$0" "$d/agent" check --launch-directory "$launch" 9>&-
"""
"""Makes LAUNCH_DIR, or refuses it, claims LAUNCH_DIR/claim, then tells which agents of the run live there: another
launch may have had its claim, and released it, since the hosts were looked at."""
_RELEASE = f"""\
set -- "$0/claim"
{UNLOCK_ALL}"""
_UNPACK = 'umask go-w && cd "$0" && rm -f state.json && exec tar -x --no-same-permissions --no-same-owner -f -'
_START = """\
scope=
export XDG_RUNTIME_DIR="${XDG_RUNTIME_DIR:-/run/user/$(id -u)}"
if command -v systemd-run >/dev/null && [ -e "$XDG_RUNTIME_DIR/systemd/private" ] &&
    [ -e "/var/lib/systemd/linger/$(id -un)" ]; then
    scope='systemd-run --user --scope --quiet --collect'
fi
python=$(command -v "$0")
[ ! -e "$1/path" ] || export PATH="$(cat "$1/path"):$PATH"
exec $scope "$python" "$1/agent" start --job "$1/job.json" --node-rank "$2" --leader "$3" \\
    --submission "$(sha256sum <"$1/secret" | cut -c1-16)"
"""
"""Starts a node's agent, with the programs beside the run's Python first on its PATH. It leads a session of its own;
where logins are scopes of systemd and this user's manager stays without any (loginctl enable-linger), it is in a scope
of that, which no logout ends."""


@dataclass(frozen=True)
class HostLayout:
    """The hosts of a cluster and where things are on them."""

    hosts: tuple[Host, ...]
    leader: str
    """Name or address under which all hosts reach the first one."""
    place: ClusterPaths
    project_is_shared: bool
    """Whether the hosts see the same project directory."""
    code: str
    """How the code gets there where nothing is carried and there is no image, in words."""


def plan_on(layout: HostLayout, request: LaunchRequest) -> Plan:
    """The plan of `request` on hosts. Raises UserError for what cannot work there."""
    prepared = prepare(request, layout.place)
    prepared = _in_containers(prepared) if prepared.image else _with_path(prepared, layout.place)
    job, files = prepared.job, tuple(file.path for file in prepared.files)
    agent = [path for path in files if path.startswith("agent/")]
    needs = ["--python", layout.place.python] if isinstance(request.run, RunConfig) else []
    needs = ["--image", prepared.image] if prepared.image else needs
    steps = [
        *_checks(layout, job, agent, needs),
        *_carry(layout, request),
        _claim(layout, job, agent),
        _write(layout.hosts[0], job, files),
        _record(layout, job),
        *_starts(layout, job),
        _release(layout, job),
    ]
    return Plan(
        handle=prepared.handle,
        nodes=job.nodes,
        processes_per_node=job.processes_per_node,
        run_directory=job.run_directory,
        launch_directory=job.launch_directory,
        code=_code(layout, prepared, request),
        files=prepared.files,
        steps=tuple(steps),
        fields=(*prepared.fields, *_fields(layout, prepared, request)),
        warnings=prepared.warnings,
    )


def plan_again(layout: HostLayout, job: Job) -> Plan:
    """The plan of a run whose launch directory is there: its agents are started as before, by the files it has."""
    trainer = job.command[1:3] == ["-m", "drillyard"]
    files = agent_files()
    steps = [
        *_checks(layout, job, [file.path for file in files], ["--python", job.command[0]] if trainer else []),
        _claim(layout, job, [file.path for file in files]),
        _write(layout.hosts[0], job, ()),
        _record(layout, job),
        *_starts(layout, job),
        _release(layout, job),
    ]
    return Plan(
        handle=Handle(job.platform, job.cluster, job.run),
        nodes=job.nodes,
        processes_per_node=job.processes_per_node,
        run_directory=job.run_directory,
        launch_directory=job.launch_directory,
        code="as it was",
        files=(PlanFile("job.json", job.as_json()), *files),
        steps=tuple(steps),
        fields=(),
    )


def _checks(layout: HostLayout, job: Job, sent: Sequence[str], needs: Sequence[str]) -> list[Program]:
    head, *others = layout.hosts
    output = posixpath.dirname(job.run_directory)
    words = ["--directory", output, "--launch-directory", job.launch_directory, "--runs", *needs]
    leaving_a_mark = _ASK.replace(" check ", ' check --write-nonce "$n" ') if others else _ASK
    looking_for_it = _ASK.replace(" check ", ' check --nonce "$n" ')

    def ask(host: Host, purpose: str, stage: str, script: str, more: Sequence[str]) -> Program:
        argv = host.argv(["sh", "-c", script, layout.place.agent_python, *more])
        return Program(purpose, argv, sends=tuple(sent), parallel=True, stage=stage)

    what = "GPUs, clock, disk, ports, programs, other runs"
    steps = [ask(head, f"look at {head.title}: {what}", CHECK, leaving_a_mark, [*words, "--port", str(job.port)])]
    steps += [ask(host, f"look at {host.title}: {what}", CHECK, _ASK, words) for host in others]
    steps += [
        ask(host, f"does {host.title} share {output}", SHARE, looking_for_it, ["--directory", output])
        for host in others
    ]
    if others:
        forget = head.argv(["sh", "-c", _FORGET, output])
        purpose = "remove the mark that all hosts should see"
        steps.append(Program(purpose, forget, sends=("agent/job.py",), stage=FORGET))
    return steps


def _carry(layout: HostLayout, request: LaunchRequest) -> list[Program]:
    if not request.sync:
        return []
    where = layout.hosts[:1] if layout.project_is_shared else layout.hosts
    return [
        Program(
            f"carry the working directory to {host.title}",
            host.argv(["sh", "-c", UNPACK_OVER, layout.place.project, CARRIED_LIST]),
            sends_directory=request.here,
            parallel=True,
            stage=CARRY,
        )
        for host in where
    ]


def _claim(layout: HostLayout, job: Job, sent: Sequence[str]) -> Program:
    head = layout.hosts[0]
    argv = head.argv(["sh", "-c", _CLAIM, layout.place.agent_python, job.launch_directory])
    purpose = f"claim the launch directory on {head.title}, which no other launch and no agent of the run may have"
    return Program(purpose, argv, sends=tuple(sent), stage=LOCK)


def _release(layout: HostLayout, job: Job) -> Program:
    head = layout.hosts[0]
    argv = head.argv(["sh", "-c", _RELEASE, job.launch_directory])
    # Its input is the submission's secret; the archive of a plan's step is not empty.
    return Program(f"release the claim on {head.title}", argv, sends=("agent/job.py",), stage=UNLOCK)


def _write(head: Host, job: Job, files: Sequence[str]) -> Program:
    return Program(
        f"write the launch directory on {head.title}",
        head.argv(["sh", "-c", _UNPACK, job.launch_directory]),
        sends=tuple(files),
        stage=WRITE,
    )


def _starts(layout: HostLayout, job: Job) -> list[Program]:
    return [
        Program(
            f"start the agent on {host.title}",
            host.argv(["sh", "-c", _START, layout.place.agent_python, job.launch_directory, str(node), layout.leader]),
            parallel=True,
            stage=START,
        )
        for node, host in enumerate(layout.hosts)
    ]


def _record(layout: HostLayout, job: Job) -> Program:
    head = layout.hosts[0]
    entry = {
        "run": job.run,
        "cluster": job.cluster,
        "platform": job.platform,
        "nodes": job.nodes,
        "run_directory": job.run_directory,
        "launch_directory": job.launch_directory,
    }
    words = [layout.place.agent_python, posixpath.join(job.launch_directory, "agent"), "index"]
    argv = head.argv([*words, "--entry", json.dumps(entry)])
    return Program(f"enter the run into the index of {head.title}", argv, stage=RECORD)


def _code(layout: HostLayout, prepared: PreparedRun, request: LaunchRequest) -> str:
    if prepared.image is not None and not request.sync:
        return f"in the image {prepared.image}"
    if not request.sync:
        return layout.code
    times = "once, as the hosts share it" if layout.project_is_shared else f"to each of {len(layout.hosts)} hosts"
    carried = f"carried (--sync): {request.here}, what git does not ignore, to {layout.place.project}, {times}"
    return f"{carried}; the rest is in the image {prepared.image}" if prepared.image else carried


def _fields(layout: HostLayout, prepared: PreparedRun, request: LaunchRequest) -> list[ExplainedField]:
    fields = [
        ExplainedField(
            "agent: python", layout.place.agent_python, "starts the agents, which need no packages", "drillyard"
        )
    ]
    ssh = request.cluster.ssh
    if ssh is not None:
        source = "cluster.yaml: ssh.rendezvous_host" if ssh.rendezvous_host else "cluster.yaml: the first of ssh.hosts"
        why = "under this name the hosts reach the first one"
        fields.append(ExplainedField("agent start: --leader", layout.leader, why, source))
    if prepared.image is None:
        default = "the .venv of the project's directory" if ssh is not None else "the interpreter that launches"
        source = "cluster.yaml: python" if request.cluster.python else f"default: {default}"
        fields += [
            ExplainedField("python", layout.place.python, "starts the ranks", source),
            ExplainedField(
                "path", _beside(layout.place), "first on PATH of what the agents start: torchrun is there", source
            ),
        ]
    return fields


def _beside(place: ClusterPaths) -> str:
    return posixpath.dirname(place.python)


def _with_path(prepared: PreparedRun, place: ClusterPaths) -> PreparedRun:
    """The same run, which finds torchrun and the like beside its Python: a login by ssh activates no environment."""
    return replace(prepared, files=(*prepared.files, PlanFile("path", f"{_beside(place)}\n")))


def _in_containers(prepared: PreparedRun) -> PreparedRun:
    """The same run with its command in a container of the image."""
    job = prepared.job
    assert prepared.image is not None
    text = container.script(
        prepared.handle,
        prepared.image,
        prepared.mounts,
        job.environment,
        secret_names(prepared.files),
        job.working_directory,
        job.profile_script,
    )
    inside = replace(
        job,
        command=["sh", f"{{launch_directory}}/{container.SCRIPT}", *job.command],
        working_directory=None,
        profile_script=None,
    )
    files = [replace(file, content=inside.as_json()) if file.path == "job.json" else file for file in prepared.files]
    fields = [
        ExplainedField(
            "container.sh: docker run",
            prepared.image,
            "the agent runs on the host and the command in the container, which the agent stops as its own",
            "run.yaml: workload.image, or cluster.yaml: image",
        ),
        *(
            ExplainedField(
                "container.sh: --volume", mount, "the nodes' paths inside", "storage, project, cluster.yaml: mounts"
            )
            for mount in prepared.mounts
        ),
    ]
    return replace(
        prepared,
        job=inside,
        files=(*files, PlanFile(container.SCRIPT, text, 0o755)),
        fields=(*prepared.fields, *fields),
    )


def absolute(path: str, setting: str) -> str:
    """`path`, which must be absolute on the hosts. Raises UserError."""
    if not path.startswith("/"):
        raise UserError(f"{setting}: '{path}' is not an absolute path; on the hosts it would depend on who logs in")
    return posixpath.normpath(path)
