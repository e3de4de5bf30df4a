"""What a node tells of itself before anything is launched there, and what of it a run would miss.

One shell script looks at a node: for programs and the version of Python without Python, then by the
agent's verb `check`, whose source it gets on standard input. It prints lines `NODE KIND TEXT`, so
that the output of many nodes can be one stream; lines of srun have at most 1,024 bytes in one
piece, so JSON is folded.
"""

from __future__ import annotations

import json
import os
import posixpath
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from drillyard.config.cluster import ClusterConfig
from drillyard.config.run import WorkloadConfig, WorkloadRunConfig
from drillyard.errors import UserError
from drillyard.formatting import size
from drillyard.hardware.capacity import machine_of
from drillyard.hardware.catalog import Catalog
from drillyard.launch.agent.protocol import NUM_PORTS
from drillyard.launch.cluster_check import Finding, FindingResult, shared_findings
from drillyard.launch.hosts.host_facts import (
    CLOCK_SECONDS,
    HostAnswer,
    clock_problems,
    differences,
    gpu_names,
    problems_of_host,
    unshared_text,
)
from drillyard.launch.prepared_run import paths_on
from drillyard.launch.request import LaunchRequest
from drillyard.programs import TEMPORARY, Host, Programs, require_success

OLDEST_PYTHON = (3, 9)
"""Of the agent (tests/unit/launch/agent/test_shipped.py)."""
HOST_PROGRAMS = ("python3", "tar", "mktemp", "sha256sum", "cut", "id")
"""What a launch runs on a host (hosts/plan.py)."""
_SECONDS = 150
"""Storage that hangs must not hide the other nodes."""
_MEET_SECONDS = 16.0
_FORGET_SECONDS = 30.0
_SCRIPT = f"""\
programs=$1; leader=$2; shift 2
node=${{SLURMD_NODENAME:--}}
say() {{ printf '%s %s\\n' "$node" "$*"; }}
lacks=
for each in $programs; do command -v "$each" >/dev/null 2>&1 || lacks="$lacks $each"; done
[ -z "$lacks" ] || say "lacks$lacks"
command -v "$0" >/dev/null 2>&1 || exit 0
if ! "$0" -c 'import sys; sys.exit(sys.version_info < {OLDEST_PYTHON})' 2>/dev/null; then
    say "python $("$0" -c 'import sys; print(sys.version.split()[0])' 2>&1 | tail -n 1)"
    exit 0
fi
if ! {{ {TEMPORARY} && tar -x -C "$d" -f - ; }} 2>/dev/null; then
    say "failed no files can be written in ${{TMPDIR:-/tmp}}"
    exit 0
fi
[ "$node" != "$leader" ] || set -- "$@" --as-leader
code=0
timeout -s KILL {_SECONDS} "$0" "$d/agent" check "$@" >"$d/facts" 2>"$d/errors" || code=$?
if [ "$code" = 137 ]; then
    say "failed the check did not end within {_SECONDS} s: does its storage answer (df -h)?"
elif [ "$code" != 0 ]; then
    say "failed the check ended with exit code $code: $(tail -n 1 "$d/errors" | cut -c -300)"
else
    fold -w 500 "$d/facts" | sed "s/^/$node facts /"
fi
"""


def probe_argv(
    programs: Sequence[str], words: Sequence[str], *, leader: str = "", python: str = "python3"
) -> list[str]:
    """The command that looks at a node. `words`: options of `check`; `leader`: the Slurm node that
    lets the others join."""
    return ["sh", "-c", _SCRIPT, python, " ".join(programs), leader, *words]


def meeting_words(leader: str, port: int, secret: str, others: int) -> list[str]:
    """Options of `check` by which `others` nodes join the leader; `leader`: its names, with commas
    between."""
    seconds = _MEET_SECONDS + others / 20
    return ["--meet", leader, str(port), secret, str(others), f"{seconds:g}"]


def status_request(cluster: ClusterConfig, facts: Catalog) -> LaunchRequest:
    """The launch of a workload that needs nothing: what every run on the cluster has in common."""
    ranks = None if cluster.machine or cluster.processes_per_node else 1
    run = WorkloadRunConfig(
        name="cluster-status",
        workload=WorkloadConfig(command=["true"]),
        processes_per_node=ranks,
    )
    return LaunchRequest(run, cluster, facts, os.getcwd(), sys.executable)


def _storage(request: LaunchRequest) -> tuple[str, str]:
    """The directory of runs, and the one above it that must be there."""
    paths = paths_on(request)
    return paths.output, posixpath.normpath(request.cluster.storage.directory or paths.project)


def storage_words(request: LaunchRequest) -> list[str]:
    """Options of `check` by which it looks at the storage of runs."""
    directory, base = _storage(request)
    return ["--directory", directory, "--base", base]


def forget(host: Host, request: LaunchRequest, nonce: str, programs: Programs) -> list[Finding]:
    """Remove the file that all nodes should see; a finding where that fails."""
    paths = [posixpath.join(each, f".drillyard-{nonce}") for each in _storage(request)]
    command = ["rm", "-f", "--", *paths]
    try:
        require_success(programs.run(host.argv(command), timeout=_FORGET_SECONDS), host.title)
    except UserError as error:
        said = str(error).splitlines()[0]
        text = f"the check's own file may be left: {said}: {shlex.join(command)}"
        return [Finding("storage", "note", text, (host.title,))]
    return []


@dataclass(frozen=True)
class NodeAnswer:
    """What the script printed on a node."""

    lacks: tuple[str, ...] = ()
    """Programs that are not there."""
    python: str = ""
    """Its version, where it is too old."""
    failed: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


def parse_answers(text: str) -> dict[str, NodeAnswer]:
    """The answer of each node; other lines, such as those of a node's prolog, are left out."""
    answers: dict[str, NodeAnswer] = {}
    folded: dict[str, str] = {}
    for line in text.splitlines():
        node, _, rest = line.partition(" ")
        kind, _, said = rest.partition(" ")
        answer = answers.get(node, NodeAnswer())
        if kind == "lacks":
            answers[node] = replace(answer, lacks=tuple(said.split()))
        elif kind == "python":
            answers[node] = replace(answer, python=said or "a version that does not start")
        elif kind == "failed":
            answers[node] = replace(answer, failed=said)
        elif kind == "facts":
            folded[node] = folded.get(node, "") + said
    for node, joined in folded.items():
        answer = answers.get(node, NodeAnswer())
        try:
            facts = json.loads(joined)
        except (ValueError, RecursionError):
            facts = None
        if isinstance(facts, dict):
            answers[node] = replace(answer, facts=facts)
        else:
            answers[node] = replace(
                answer, failed="the check printed something else than its facts"
            )
    return answers


@dataclass(frozen=True)
class Looked:
    """All nodes that were looked at."""

    answers: Mapping[str, NodeAnswer]
    asked: Mapping[str, tuple[float, float]]
    """Unix time at which each was asked and had answered."""
    writer: str
    """The host whose file all should see."""
    is_written: bool
    leaders: Mapping[str, str]
    """The node that each joins, itself for that one; of nodes that were asked alone none."""
    first_port: int


def node_findings(request: LaunchRequest, looked: Looked) -> list[Finding]:
    """What each check found on the nodes."""
    cluster, catalog = request.cluster, request.facts
    facts = {node: each.facts for node, each in looked.answers.items() if each.facts}
    machine = None if cluster.machine is None else machine_of(cluster, catalog)
    problems: list[Finding] = []
    for node, answer in looked.answers.items():
        problems += _failures(node, answer)
    for node, reported in facts.items():
        for each in problems_of_host(node, reported, request.image, machine):
            problems.append(Finding(each.check, _result(each.check, cluster), each.text, (node,)))
        problems += _gpu_models(node, reported, cluster, catalog)
        problems += _project(node, reported)
    for each in differences(facts):
        problems.append(Finding(each.check, "missing", each.text, (each.host,)))
    times = [HostAnswer(node, None, "", *looked.asked[node]) for node in facts]
    for each in clock_problems(times, facts):
        problems.append(Finding(each.check, "missing", each.text, (each.host,)))
    problems += _sharing(facts, looked)
    problems += _meeting(facts, looked)
    found = shared_findings(problems)
    with_problems = {each.check for each in found}
    well = [
        Finding(check, "ok", text)
        for check, text in _well(request, facts, looked)
        if check not in with_problems
    ]
    return [each for name in _ORDER for each in (*found, *well) if each.check == name]


_ORDER = (
    "programs",
    "storage",
    "project",
    "drillyard",
    "image",
    "gpus",
    "user",
    "clocks",
    "ports",
)


def _result(check: str, cluster: ClusterConfig) -> FindingResult:
    # Without `python` in the config only runs of Drillyard's own trainer would use the default.
    return "note" if check == "drillyard" and cluster.python is None else "missing"


def login_findings(title: str, answer: NodeAnswer) -> Iterator[Finding]:
    """What is missing on the host from which runs are submitted."""
    yield from (replace(each, check="login") for each in _failures(title, answer))
    if answer.facts:
        for each in problems_of_host(title, answer.facts, None, None):
            if each.check == "storage":
                yield Finding("storage", "missing", each.text, (title,))
        yield from _project(title, answer.facts)


def _failures(node: str, answer: NodeAnswer) -> Iterator[Finding]:
    oldest = ".".join(map(str, OLDEST_PYTHON))
    needed = "which the agent needs: install it"
    lacks = [each for each in answer.lacks if each != "python3"]
    if lacks:
        yield Finding("programs", "missing", f"has no {', '.join(lacks)}: install it", (node,))
    if "python3" in answer.lacks or answer.python:
        text = (
            f"has Python {answer.python}, and the agent needs {oldest} or newer: install it as"
            " python3"
            if answer.python
            else f"has no python3 on its PATH, {needed} (any version from {oldest} on, no packages)"
        )
        yield Finding("programs", "missing", text, (node,))
    if answer.failed and not lacks:
        yield Finding("programs", "missing", answer.failed, (node,))


def _gpu_models(
    node: str, facts: Mapping[str, Any], cluster: ClusterConfig, catalog: Catalog
) -> Iterator[Finding]:
    """GPUs of another name than those of the config's machine."""
    if cluster.machine is None:
        return
    machine = machine_of(cluster, catalog)
    accelerator = catalog.accelerators[machine.accelerator]
    for name in sorted(set(facts.get("gpu_models") or ())):
        if accelerator.is_called(name):
            continue
        known = catalog.find_accelerator(name)
        if known is None:
            text = (
                f"a GPU is called '{name}', which is no known name of {accelerator.name}: if it is"
                " the same, give the name as reported_as in a file of --hardware"
            )
            yield Finding("gpus", "unknown", text, (node,))
        else:
            text = (
                f"a GPU is a {known.name}, and machine {machine.name} has {accelerator.name}: name"
                " the machine that it is"
            )
            yield Finding("gpus", "missing", text, (node,))


def _project(node: str, facts: Mapping[str, Any]) -> Iterator[Finding]:
    project = facts.get("project")
    if project and not project["is_there"]:
        text = f"{project['path']} is not there: launch --sync makes it"
        yield Finding("project", "note", text, (node,))
    elif project and not project["writable"]:
        text = f"{project['path']} cannot be written: launch --sync could not copy to it"
        yield Finding("project", "note", text, (node,))


def _sharing(facts: Mapping[str, Mapping[str, Any]], looked: Looked) -> Iterator[Finding]:
    others = [node for node in facts if node != looked.writer]
    if others and not looked.is_written:
        text = f"whether all see the same is not known: nothing could be written on {looked.writer}"
        yield Finding("storage", "unknown", text)
        return
    for node in others:
        directory = facts[node].get("directory") or {}
        if directory.get("seen") is False and directory.get("path"):
            text = unshared_text(directory["path"], looked.writer)
            yield Finding("storage", "missing", text, (node,))


def _meeting(facts: Mapping[str, Mapping[str, Any]], looked: Looked) -> Iterator[Finding]:
    """Nodes that cannot join the one that would lead."""
    ports = f"ports {looked.first_port} to {looked.first_port + NUM_PORTS - 1}"
    for leader in dict.fromkeys(looked.leaders.values()):
        led = (facts.get(leader) or {}).get("meeting") or {}
        if led.get("error"):
            text = f"no agent can lead there: {led['error']}: end what listens there (ss -ltnp)"
            yield Finding("ports", "missing", text, (leader,))
        others = [node for node in facts if node != leader == looked.leaders.get(node)]
        if led.get("joined") is None:
            if others:
                text = f"whether they reach each other is not known: {leader} did not listen"
                yield Finding("ports", "unknown", text, tuple(others))
            continue
        for node in others:
            said = (facts[node].get("meeting") or {}).get("error")
            if said:
                text = (
                    f"cannot join {leader} on {ports}: {said}: let the nodes reach each other on"
                    " TCP ports 20000 to 40014"
                )
                yield Finding("ports", "missing", text, (node,))


def _well(
    request: LaunchRequest, facts: Mapping[str, Mapping[str, Any]], looked: Looked
) -> Iterator[tuple[str, str]]:
    """What is there, by check, where no node has a problem."""
    if not facts:
        return
    some = list(facts.values())
    yield "programs", "all are there"
    directories = [each["directory"] for each in some if each.get("directory")]
    free = [each["free_bytes"] for each in directories if each["free_bytes"] is not None]
    if free:
        shared = ", the same on all" if len(facts) > 1 or looked.writer not in facts else ""
        yield (
            "storage",
            f"{directories[0]['path']}: writable{shared}, {size(min(free))} or more are free",
        )
    if projects := [each["project"]["path"] for each in some if each.get("project")]:
        yield "project", f"{projects[0]}: is there"
    if versions := [each["drillyard"] for each in some if each.get("drillyard")]:
        yield "drillyard", f"{versions[0]['version']} in {versions[0]['python']}"
    if any(each.get("image") for each in some):
        yield "image", f"{request.image} can be run"
    yield "gpus", gpu_names(some[0]) + (" on each" if len(some) > 1 else "")
    if len(facts) > 1:
        yield "user", "the same on all"
        yield "clocks", f"no difference of {CLOCK_SECONDS:g} s or more was seen"
        if leaders := dict.fromkeys(looked.leaders.values()):
            yield "ports", f"all can join {', '.join(leaders)}"
