"""`drillyard cluster status`: what a cluster has, what it lacks, and what it has cost so far.

Each part is asked for itself: one that cannot be read says so, and the others are still shown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pkgutil import resolve_name
from typing import Any, TypeVar, cast

from drillyard.errors import UserError
from drillyard.formatting import plural
from drillyard.provision.clouds import cloud_of
from drillyard.provision.cluster_objects import ClusterObjects
from drillyard.provision.cluster_plan import ClusterPlan, PriceLine
from drillyard.provision.kubernetes_stage import cluster_objects_status, context_name
from drillyard.provision.terraform_output import PlannedChanges

Part = TypeVar("Part")
_DRIFT = "drift"
_ENGINE = "drillyard.provision.terraform_engine"
_LIMITS = "drillyard.provision.running_command:Limits"
"""Imported when it is needed: what is inside of a cluster needs no Terraform."""


@dataclass(frozen=True)
class ClusterCost:
    """Dollars since the cluster was made, at today's prices: of what has existed all the time, and
    of the nodes that are there now of pools that begin without any."""

    usd: float
    hours: float
    unpriced: tuple[str, ...]
    """Parts without a price, which are not in `usd`."""


@dataclass(frozen=True)
class ClusterStatus:
    """The whole. What could not be read is None, and `unread` says why."""

    cluster: str
    context: str | None
    objects: ClusterObjects | None
    drift: tuple[str, ...] | None
    """What Terraform would change, one line each; None: not known."""
    cost: ClusterCost | None
    unread: tuple[str, ...]

    @property
    def ready(self) -> bool:
        """Whether a run finds all that it needs."""
        return self.objects is not None and not self.objects.missing

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "ready": self.ready}


def cluster_status(
    plan: ClusterPlan,
    *,
    drift_of: Callable[[ClusterPlan], tuple[str, ...]] | None = None,
    now: datetime | None = None,
) -> ClusterStatus:
    """The state of the plan's cluster. `drift_of` asks the engine; None: there is nothing of a
    cloud to compare."""
    context, unread = context_name(plan), list[str]()

    def read(what: str, part: Callable[[], Part]) -> Part | None:
        try:
            return part()
        except UserError as error:
            unread.append(f"{what}: {error}")
            return None

    if plan.has_kubernetes:
        objects = read("Kubernetes", lambda: cluster_objects_status(plan, context))
    else:
        what = "hosts" if plan.login is not None else "jobs"
        status = resolve_name(f"drillyard.provision.{what}_stage:{what}_status")
        objects = read(what, lambda: cast(ClusterObjects, status(plan)))
    drift = None if drift_of is None else read(_DRIFT, lambda: drift_of(plan))
    cost = None
    if objects is not None and objects.created:
        cost = cost_so_far(plan, objects, now or datetime.now(UTC))
    return ClusterStatus(plan.name, context, objects, drift, cost, tuple(unread))


def drift_from_engine(plan: ClusterPlan) -> tuple[str, ...]:
    """What Terraform would change, one line each. It reads state and cloud and locks nothing, in a
    directory of its own: an `up` may work at the same time. Raises UserError where it cannot be
    asked."""
    cloud = cloud_of(plan)
    bucket = cloud.state_bucket(plan)
    # Asked first: Terraform waits minutes for a service that does not answer.
    if bucket.find() is None:
        return (f"nothing is made yet: there is no {bucket.title}, the bucket of the state",)
    program = resolve_name("drillyard.provision.cluster_session:terraform_program")(plan)
    directory = resolve_name(f"{_ENGINE}:status_directory")(plan.project, plan.name)
    terraform = resolve_name(f"{_ENGINE}:Terraform")(
        program,
        directory,
        project=plan.project,
        command="drillyard cluster status",
        report=lambda line: None,
        # It changes nothing, so it may be stopped at once.
        limits=resolve_name(_LIMITS)(total=900.0, silent=180.0, stop=5.0, kill=5.0),
        environment=cloud.provider_environment(),
        kinds=cloud.error_kinds,
    )
    terraform.init(plan.terraform, bucket.backend())
    return tuple(drift_lines(terraform.plan()))


def drift_lines(changes: PlannedChanges) -> Iterator[str]:
    """What differs between the config and the cloud, one line for each resource: who has changed
    it, and what `up` does about it. What was never made is one line together."""
    rest = dict(changes.drift)
    new = [each for each in changes.wanted if each.action == "create" and each.address not in rest]
    if new:
        names = ", ".join(each.address for each in new[:3])
        more = f", and {len(new) - 3} more" if len(new) > 3 else ""
        yield f"not made yet: {names}{more}"
    for each in changes.wanted:
        if each in new:
            continue
        because = f" ({', '.join(each.because)})" if each.because else ""
        theirs = rest.pop(each.address, None)
        who = {"delete": "is gone; ", "update": "changed by others; "}.get(theirs or "", "")
        yield f"{each.address}: {who}up would {each.action} it{because}"
    for address in rest:
        yield f"{address}: is gone"


def cost_so_far(plan: ClusterPlan, objects: ClusterObjects, now: datetime) -> ClusterCost | None:
    """None where the plan has no prices: a cluster that was not bought here."""
    if not plan.prices:
        return None
    hours = _hours_since(objects.created, now)
    usd, unpriced = 0.0, list[str]()
    for line in plan.prices:
        if line.usd_per_hour is None:
            unpriced.append(line.what)
        elif line.running:
            usd += line.usd_per_hour.value * hours
        else:
            each = line.usd_per_hour.value / max(line.count, 1)
            usd += each * _node_hours(line, objects, now)
    return ClusterCost(round(usd, 2), round(hours, 2), tuple(unpriced))


def _node_hours(line: PriceLine, objects: ClusterObjects, now: datetime) -> float:
    """Hours of the nodes that are there now of the pool that a price is for."""
    pools = [each for each in objects.pools if each.name == line.pool]
    return sum(_hours_since(made, now) for pool in pools for made in pool.nodes_made)


def _hours_since(created: str, now: datetime) -> float:
    return max((now - datetime.fromisoformat(created)).total_seconds() / 3600.0, 0.0)


def status_text(status: ClusterStatus, config: str = "CLUSTER", launch: str = "") -> str:
    """One table, below it what is missing, and what to do. `config`: the cluster config; `launch`:
    the one that `launch` takes, where it is another."""
    rows: list[tuple[str, str, str]] = []
    objects = status.objects
    for pool in objects.pools if objects else ():
        most = "at most " if pool.starts_at_zero else ""
        wanted = "" if pool.wanted is None else f" of {most}{pool.wanted}"
        rows.append(("pool", pool.name, f"{pool.ready}{wanted} nodes ready"))
    for queue in objects.queues if objects else ():
        runs = f"{queue.admitted} admitted, {queue.pending} waiting"
        rows.append(("queue", queue.name, runs if queue.active else f"not active: {queue.reason}"))
    for release in objects.releases if objects else ():
        found = f"{release.found} {release.state}".strip()
        rows.append(("release", release.name, found))
    if status.drift is not None:
        changes = plural(len(status.drift), "change") if status.drift else "none"
        rows.append(("drift", "Terraform", changes))
    if status.cost is not None:
        at_least = "at least " if status.cost.unpriced else ""
        text = f"{at_least}${status.cost.usd:,.2f} in {status.cost.hours:,.1f} h"
        rows.append(("cost", "so far", text))
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    lines = [f"{part:{widths[0]}}  {name:{widths[1]}}  {state}" for part, name, state in rows]
    lines += [f"drift: {each}" for each in status.drift or ()]
    lines += [f"without a price: {each}" for each in (status.cost.unpriced if status.cost else ())]
    lines += [f"missing: {each}" for each in (objects.missing if objects else ())]
    lines += [f"not read: {each}" for each in status.unread]
    if status.ready and not status.unread:
        lines.append(f"ready: drillyard launch RUN --cluster {launch or config}")
    is_made_here = status.drift is not None or any(
        each.startswith(_DRIFT) for each in status.unread
    )
    if objects is None and is_made_here:
        lines.append(f"next: drillyard cluster up {config} makes it, if it is not there")
    elif objects is not None and (status.drift or not status.ready):
        lines.append(f"next: drillyard cluster up {config} makes what it lacks, and asks first")
    return "\n".join(lines)
