"""The part of `up`, `down` and `status` that happens on the hosts of a cluster without Kubernetes, by
the agent that runs have there: which of them answer, and what runs on them."""  # noqa: E501

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from drillyard.config.cluster import cluster_model
from drillyard.errors import UnreachableError, UserError
from drillyard.formatting import first_few
from drillyard.launch.hosts.host_facts import HostAnswer, no_answer_reason, problem_lines
from drillyard.launch.hosts.launcher import HostsLauncher
from drillyard.programs import Programs
from drillyard.provision.clouds import state_bucket
from drillyard.provision.cluster_objects import ClusterObjects, PoolStatus
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.made_hosts import (
    MadeHost,
    launch_values_of_hosts,
    planned_hosts,
    write_login,
)
from drillyard.provision.node_request import NodeRequest, hosts_of
from drillyard.provision.terraform_output import StateResource

TUNNEL = "gcloud"


def require_programs(plan: ClusterPlan) -> None:
    """Raise UserError where a program is missing by which this machine reaches the hosts."""
    assert plan.login is not None
    if shutil.which("ssh") is None:
        raise UserError(
            "ssh: is not installed, and runs are launched by it\nInstall OpenSSH's client:"
            " apt-get install openssh-client"
        )
    if plan.login.through_iap and shutil.which(TUNNEL) is None:
        raise UserError(
            f"{TUNNEL}: is not installed, and ssh to nodes without public addresses goes through"
            " its tunnel\nInstall the Google Cloud CLI: https://cloud.google.com/sdk/docs/install,"
            " or set cluster.private_nodes: false"
        )


def running_on_hosts(plan: ClusterPlan, hosts: Sequence[MadeHost]) -> list[str]:
    """The runs of any user that are active on the hosts, each with its hosts. Raises
    UnreachableError where none is known and a host does not answer."""
    answers = _ask(plan, hosts, "--runs")
    active: dict[str, list[str]] = {}
    for answer in answers:
        for run in (answer.parsed() or {}).get("runs", []):
            active.setdefault(f"{run['run']} of {run['cluster']}", []).append(answer.host)
    silent = [each for each in answers if each.parsed() is None]
    if silent and not active:
        raise UnreachableError("; ".join(_problems(silent)))
    return [f"{run} on {first_few(where, 4)}" for run, where in active.items()]


def hosts_status(plan: ClusterPlan) -> ClusterObjects:
    """Which hosts are there and answer, with their GPUs. Raises UserError where the state cannot be
    read, or has none."""
    bucket = state_bucket(plan)
    state = {} if bucket.find() is None else bucket.resources()
    hosts = planned_hosts(plan, hosts_of(plan, state, _node_request))
    if not hosts:
        raise UserError(_why_none(plan, state) or f"none is made yet, by {bucket.title}")
    (pool,) = plan.pools
    answers = _ask(plan, hosts)
    silent = [each for each in answers if each.parsed() is None]
    short = [*_short_of_gpus(answers, pool.machine.num_accelerators)]
    absent = pool.nodes - len(hosts)
    missing = [f"{absent} of {pool.nodes} hosts: not made yet"] if absent else []
    missing += _problems(silent)
    missing += problem_lines(short)
    ready = len(hosts) - len(silent) - len(short)
    made = tuple(each.created for each in hosts)
    status = PoolStatus(pool.name, len(hosts), ready, pool.nodes, False, made)
    return ClusterObjects(min(made), (status,), (), (), tuple(missing))


def _node_request(plan: ClusterPlan, group: Mapping[str, Any]) -> NodeRequest:
    # Imported here: most hosts are in the state itself, and need no client of Google's.
    from drillyard.provision.google.granted_nodes import node_request

    return node_request(plan, group)


def _why_none(plan: ClusterPlan, state: Mapping[str, StateResource]) -> str:
    """What keeps the nodes of a request from coming; empty where there is none."""
    assert plan.login is not None
    group = None if plan.login.group is None else state.get(plan.login.group.group)
    if group is None:
        return ""
    found = _node_request(plan, group.attributes)
    (pool,) = plan.pools
    why = f": {found.why}" if found.why else ""
    return f"the request for {pool.nodes} nodes is {found.state or 'gone'}{why}"


def _ask(plan: ClusterPlan, hosts: Sequence[MadeHost], *words: str) -> list[HostAnswer]:
    write_login(plan, hosts)
    values = launch_values_of_hosts(plan, hosts)
    return HostsLauncher(cluster_model().model_validate(values), Programs()).host_answers(*words)


def _problems(silent: Sequence[HostAnswer]) -> list[str]:
    return problem_lines((each.host, no_answer_reason(each)) for each in silent)


def _short_of_gpus(answers: Sequence[HostAnswer], wanted: int) -> Iterator[tuple[str, str]]:
    for answer in answers:
        facts = answer.parsed()
        if facts is not None and (found := facts.get("gpus") or 0) < wanted:
            yield answer.host, f"offers {found} of {wanted} GPUs; does the image have the driver?"
