"""What of a cluster is left in its project of Nebius, asked of each service's own list.

Everything that the cluster makes carries its label, by which it is recognised. Nothing is deleted:
every leak has the command that deletes it, in the order in which they work. Cost: one list for each
kind, and one for the rules of each security group that is left.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from drillyard.errors import UserError
from drillyard.hardware.catalog import Catalog
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.leak_report import Gap, Leak, LeakReport
from drillyard.provision.nebius import cli
from drillyard.provision.nebius.instances import DISK_KIND, FILESYSTEM_KIND, KIND
from drillyard.provision.nebius.listings import BY_KIND, LISTINGS, ClusterKind
from drillyard.provision.nebius.managed_kubernetes import NODE_GROUP_KIND
from drillyard.provision.nebius.nebius_plan import BUCKET_KIND

HOURS_PER_DAY = 24
_STOPPED = "STOPPED"


def find_leaks(plan: ClusterPlan, owned: frozenset[str], facts: Catalog) -> LeakReport:
    """What is left of the plan's cluster, besides `owned`: `kind//name` of what the state has, or
    of what `down` kept. A list that was refused is part of the report."""
    if any(not each.startswith(f"{FILESYSTEM_KIND}/") for each in owned):
        # It exists for as long as the state has anything; a file system alone is what `down` kept.
        owned |= {f"{BUCKET_KIND}//{plan.state_bucket}"}
    gaps: list[Gap] = []
    ours: dict[str, list[cli.Item]] = {}
    for row in sorted(LISTINGS, key=lambda each: bool(each.of)):
        parents = [plan.project] if not row.of else [cli.id_of(each) for each in ours[row.of]]
        ours[row.kind] = [
            each
            for parent in parents
            for each in _listed(row, parent, gaps)
            if _is_left(plan, each)
        ]
    if ours[NODE_GROUP_KIND]:
        # Its nodes are deleted with it, and are in no state.
        ours |= {KIND: [], DISK_KIND: []}
    leaks = tuple(
        _leak(plan, row, each, facts)
        for row in LISTINGS
        for each in ours[row.kind]
        if f"{row.kind}//{cli.name_of(each)}" not in owned
    )
    return LeakReport(
        cluster=plan.name,
        project=plan.project,
        leaks=leaks,
        doubtful=(),
        unknown=tuple(gaps),
        disabled=(),
        reservations=(),
    )


def _listed(row: ClusterKind, parent: str, gaps: list[Gap]) -> Iterator[cli.Item]:
    try:
        yield from cli.items(*row.words, parent=parent)
    except UserError as error:
        gaps.append(Gap("nebius", f"{' '.join(row.words)} list", str(error)))


def _is_left(plan: ClusterPlan, item: cli.Item) -> bool:
    """Whether it is the cluster's; a bucket that was deleted is kept for some days by Nebius."""
    deleted = (item.get("status") or {}).get("state") == "SCHEDULED_FOR_DELETION"
    return cli.is_ours(plan, item) and not deleted


def _leak(plan: ClusterPlan, row: ClusterKind, item: cli.Item, facts: Catalog) -> Leak:
    why, command = "it carries the cluster's label", row.deletion(shlex.quote(cli.id_of(item)))
    if row.kind == FILESYSTEM_KIND:
        # `down` keeps one on purpose.
        why, command = f"{why}; it may have data, which this deletes with it: {command}", ""
    return Leak(
        kind=row.kind,
        name=cli.name_of(item),
        location=plan.region,
        why=why,
        usd_per_day=_usd_per_day(plan, row, item, facts),
        command=command,
    )


def _usd_per_day(
    plan: ClusterPlan, row: ClusterKind, item: Mapping[str, Any], facts: Catalog
) -> float | None:
    """Dollars per day; None where no price is known. A machine that is stopped is not billed
    (https://docs.nebius.com/compute/resources/pricing)."""
    if not BY_KIND[row.kind].billed:
        return 0.0
    if row.kind not in (KIND, NODE_GROUP_KIND):
        return None
    if (item.get("status") or {}).get("state") == _STOPPED:
        return 0.0
    spec, nodes = item.get("spec") or {}, 1
    if row.kind == NODE_GROUP_KIND:
        nodes, spec = int(spec.get("fixed_node_count") or 0), spec.get("template") or {}
    hour = _usd_per_hour(plan, spec, facts)
    return None if hour is None else nodes * hour * HOURS_PER_DAY


def _usd_per_hour(plan: ClusterPlan, spec: Mapping[str, Any], facts: Catalog) -> float | None:
    """Dollars per hour of a machine with this spec; None where no price is known."""
    resources = spec.get("resources") or {}
    kind = resources.get("platform"), resources.get("preset")
    bought = "spot" if spec.get("preemptible") is not None else "on-demand"
    for machine in facts.machines.values():
        if machine.cloud == "nebius" and (machine.name.partition("_")[0], machine.preset) == kind:
            price = facts.price(machine.name, bought, plan.region)
            return None if price is None else price.node_hour(machine).value
    cpu = facts.cpu_machines.get("_".join(map(str, kind)))
    found = None if cpu is None else facts.cpu_machine_price(cpu, plan.region)
    return None if found is None else found.value
