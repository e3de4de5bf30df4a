"""The request for nodes that are granted all at once (flex-start): the hosts that it brought, and
waiting for them.

Nobody knows how long it takes, so `up` waits without a limit, and without the state's lock: Ctrl-C
ends the waiting and leaves the request, which a further `up` waits for and `down` cancels. A
request that has ended, and whose nodes are not all there any more, is made again with its group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drillyard.errors import UserError
from drillyard.formatting import plural
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.made_hosts import MadeHost, made_hosts
from drillyard.provision.terraform_output import StateResource

GROUP_KIND = "google_compute_instance_group_manager"
GRANTED, FAILED, CANCELLED = "SUCCEEDED", "FAILED", "CANCELLED"
"""States in which a request has ended: https://cloud.google.com/compute/docs/reference/rest/v1/\
instanceGroupManagerResizeRequests#State"""
Ask = Callable[[ClusterPlan, Mapping[str, Any]], "NodeRequest"]
"""Says what the cloud has of the request of a group with these attributes."""
PAUSE_SECONDS = 20.0
_SAY_SECONDS = 600.0


@dataclass(frozen=True)
class NodeRequest:
    """`state`: Google's word for it, empty where the request does not exist; `why`: its last error;
    `hosts`: the machines of the group that run, by name; `nodes`: how many machines the group has,
    also ones that are not ready."""

    state: str
    why: str
    hosts: tuple[MadeHost, ...]
    nodes: int

    @property
    def has_ended(self) -> bool:
        """Whether it brings no further node."""
        return self.state in ("", GRANTED, FAILED, CANCELLED)


def hosts_of(
    plan: ClusterPlan,
    state: Mapping[str, StateResource],
    ask: Ask,
) -> tuple[MadeHost, ...]:
    """The hosts that exist: those of the state itself, and those of its groups, whom `ask` asks
    for."""
    groups = [each for each in state.values() if each.kind == GROUP_KIND]
    granted = [host for each in groups for host in ask(plan, each.attributes).hosts]
    return (*made_hosts(state), *granted)


def spent_requests(
    plan: ClusterPlan, read_state: Callable[[], Mapping[str, StateResource]], ask: Ask
) -> list[str]:
    """The addresses of what is to be made again: a group whose request has ended, and which has not
    all of its nodes, with the request. Raises UserError where nodes are there without a request."""
    login = plan.login
    if login is None or login.group is None:
        return []
    state = read_state()
    if login.group.group not in state:
        return []
    found = ask(plan, state[login.group.group].attributes)
    (pool,) = plan.pools
    if not found.state and found.nodes:
        raise UserError(
            f"{login.group.request}: is gone, and {plural(found.nodes, 'node')} of it are there:"
            " `up` would ask for as many again\nRemove the cluster first. Nothing was changed."
        )
    if not found.has_ended or (found.state == GRANTED and found.nodes == pool.nodes):
        return []
    return [each for each in (login.group.group, login.group.request) if each in state]


def wait_for_nodes(
    plan: ClusterPlan,
    state: Mapping[str, StateResource],
    ask: Ask,
    report: Callable[[str], None],
    down_command: str,
) -> Sequence[MadeHost]:
    """The hosts of the request, once all of them run. Raises UserError where it fails."""
    assert plan.login is not None and plan.login.group is not None
    (pool,) = plan.pools
    group = state[plan.login.group.group].attributes
    said, said_at = "", 0.0
    while True:
        found = ask(plan, group)
        if found.state in (FAILED, CANCELLED, ""):
            raise UserError(
                f"{plan.login.group.request}: the request for {plural(pool.nodes, 'node')} is"
                f" {found.state or 'gone'}{f': {found.why}' if found.why else ''}\nAsk again by the"
                f" same command, or remove the cluster: {down_command}"
            )
        if found.state == GRANTED and len(found.hosts) == pool.nodes:
            return found.hosts
        words = f"{found.state}, {len(found.hosts)} of {pool.nodes} run"
        words += f" ({found.why})" if found.why else ""
        if words != said or time.monotonic() - said_at > _SAY_SECONDS:
            report(
                f"waiting for {pool.nodes} x {pool.machine.name}: {words}. Ctrl-C leaves the"
                f" request; {down_command} cancels it"
            )
            said, said_at = words, time.monotonic()
        time.sleep(PAUSE_SECONDS)
