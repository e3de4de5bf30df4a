"""What a launch needs, looked for on all hosts of platform ssh at once: one connection to each, in
which it also joins the first host's agent and sees its file. Nothing is created but that one file,
which is removed."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence

from drillyard.config.cluster import ClusterConfig
from drillyard.formatting import plural
from drillyard.hardware.catalog import Catalog
from drillyard.launch.cluster_check import ClusterCheck, Finding, by_check, shared_findings
from drillyard.launch.hosts.host_agents import ask_all
from drillyard.launch.hosts.host_facts import HostAnswer, no_answer_reason
from drillyard.launch.hosts.launcher import HostsLauncher
from drillyard.launch.hosts.plan import layout_of
from drillyard.launch.node_probe import (
    HOST_PROGRAMS,
    Looked,
    NodeAnswer,
    forget,
    meeting_words,
    node_findings,
    parse_answers,
    probe_argv,
    status_request,
    storage_words,
)
from drillyard.launch.prepared_run import agent_files, paths_on, port_of
from drillyard.launch.run_status import Handle
from drillyard.programs import Host, Programs, archive

_SECONDS = 240.0


def check_hosts(cluster: ClusterConfig, facts: Catalog, programs: Programs) -> ClusterCheck:
    """Look at all hosts of a cluster. Raises UserError for a config that `launch` would refuse."""
    request = status_request(cluster, facts)
    HostsLauncher(cluster, programs).plan(request)
    layout, nonce = layout_of(cluster, sys.executable), secrets.token_hex(16)
    hosts = [host.title for host in layout.hosts]
    port = port_of(Handle(cluster.platform, cluster.name, request.run.name))
    words = [*storage_words(request), "--project", paths_on(request).project]
    words += ["--image", request.image] if request.image else []
    words += ["--python", paths_on(request).python] if not request.image else []
    others = len(hosts) - 1
    meeting = meeting_words(layout.leader, port, nonce, others) if others else []

    def argv(host: Host) -> tuple[str, ...]:
        own = ["--nonce", nonce]
        if host is layout.hosts[0]:
            own = ["--as-leader", "--write-nonce", nonce] if others else []
        return host.argv(probe_argv(HOST_PROGRAMS, [*words, *meeting, *own], python=layout.python))

    sent = archive(agent_files())
    argvs = [argv(host) for host in layout.hosts]
    answers: list[HostAnswer] = []
    left: list[Finding] = []
    try:
        answers = ask_all(hosts, argvs, programs, stdin=sent, seconds=_SECONDS)
    finally:
        if others and not (answers and _is_silent(answers[0])):
            left = forget(layout.hosts[0], request, nonce, programs)
    found = {each.host: parsed for each in answers if (parsed := _parsed(each)) is not None}
    written = found[hosts[0]].facts.get("directory") if hosts[0] in found else None
    looked = Looked(
        answers=found,
        asked={each.host: (each.asked_at, each.answered_at) for each in answers},
        writer=hosts[0],
        is_written=bool(written) and not (written or {}).get("error"),
        leaders=dict.fromkeys(hosts, hosts[0]) if others else {},
        first_port=port,
    )
    findings = [*_reached(answers, found), *node_findings(request, looked), *left]
    return ClusterCheck(
        cluster.name,
        cluster.platform,
        cluster.nodes,
        tuple(hosts),
        tuple(found),
        by_check(findings),
    )


def _parsed(answer: HostAnswer) -> NodeAnswer | None:
    """What the script printed on a host; None where it did not run there."""
    if answer.result is None or answer.result.unreachable:
        return None
    return parse_answers(answer.result.stdout).get("-") or NodeAnswer(
        failed=no_answer_reason(answer)
    )


def _is_silent(answer: HostAnswer) -> bool:
    return answer.result.unreachable if answer.result is not None else not answer.is_reached


def _reached(answers: Sequence[HostAnswer], found: Mapping[str, NodeAnswer]) -> Iterator[Finding]:
    """Hosts that did not answer: nodes that are missing, or, where none did, a cluster of which
    nothing is known."""
    silent = all(_is_silent(each) for each in answers)
    lost = [each for each in answers if each.host not in found]
    if not lost:
        text = "answers" if len(answers) == 1 else f"all {plural(len(answers), 'host')} answer"
        yield Finding("hosts", "ok", text)
    yield from shared_findings(
        Finding("hosts", "unknown" if silent else "missing", no_answer_reason(each), (each.host,))
        for each in lost
    )
