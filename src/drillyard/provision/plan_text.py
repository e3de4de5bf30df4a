"""The plan of a cluster for a person: what will exist, what it costs, what it counts against
quotas, and what to do next. It depends on the plan alone, byte for byte."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from drillyard.formatting import plural
from drillyard.hardware.facts import Fact
from drillyard.provision.cluster_chart import OWN_CHART
from drillyard.provision.cluster_plan import ClusterPlan, Pool, PriceLine
from drillyard.provision.plan_document import ranges_of
from drillyard.provision.prices import HOURS_PER_DAY, UsePrice, price_totals

_WIDTH = 100
_TITLES = {
    "google_project_service": "APIs of the project",
    "google_compute_network": "networks",
    "google_compute_subnetwork": "subnets",
    "google_compute_global_address": "ranges of peerings",
    "google_service_networking_connection": "peerings with Google's services",
    "google_compute_router": "routers",
    "google_compute_router_nat": "NAT gateways",
    "google_compute_firewall": "firewall rules",
    "google_compute_resource_policy": "placement policies",
    "google_compute_instance": "virtual machines",
    "google_compute_region_instance_template": "templates of machines",
    "google_compute_instance_group_manager": "groups of machines",
    "google_compute_resize_request": "requests for machines",
    "google_container_cluster": "clusters",
    "google_container_node_pool": "node pools",
    "google_service_account": "service accounts",
    "google_project_iam_member": "rights in the project",
    "google_service_account_iam_member": "users of accounts",
    "google_artifact_registry_repository_iam_member": "rights on images",
    "google_storage_bucket_iam_member": "rights on buckets",
    "google_storage_bucket": "buckets",
    "google_artifact_registry_repository": "image repositories",
    "google_compute_image": "images of boot disks",
    "google_filestore_instance": "Filestore instances",
    "google_lustre_instance": "Lustre instances",
    "nebius_vpc_v1_network": "networks",
    "nebius_vpc_v1_subnet": "subnets",
    "nebius_vpc_v1_security_group": "security groups",
    "nebius_vpc_v1_security_rule": "rules of security groups",
    "nebius_compute_v1_gpu_cluster": "GPU clusters",
    "nebius_compute_v1_filesystem": "shared file systems",
    "nebius_compute_v1_disk": "boot disks",
    "nebius_compute_v1_instance": "virtual machines",
    "nebius_mk8s_v1_cluster": "clusters of Kubernetes",
    "nebius_mk8s_v1_node_group": "groups of nodes",
    "nebius_applications_v1alpha1_k8s_release": "applications of Nebius",
}
"""What a kind of resource is called; others by their own name in words."""


def plan_text(
    plan: ClusterPlan,
    of_use: Sequence[UsePrice],
    config: str,
    options: str = "",
    on_cluster: Sequence[str] = (),
) -> str:
    """The plan in sections, at most 100 columns where names allow it. `config` and `options` are
    those of the command, for the one that comes next; `on_cluster` says what a cluster that exists
    has of it."""
    sections = (
        _pools(plan) if plan.pools else (),
        _existing(plan) if plan.state_bucket else (),
        _ranges(plan),
        _releases(plan),
        _queues(plan) if not plan.pools else (),
        on_cluster,
        _prices(plan, of_use) if plan.prices else (),
        _quotas(plan),
        _warnings(plan),
        _next(plan, config, options),
    )
    title = f"cluster {plan.name}: {plan.platform}"
    title += f", project {plan.project}, {plan.zone}" if plan.project else ""
    texts = ["\n".join(lines) for lines in sections]
    return "\n\n".join([title, *filter(None, texts)]) + "\n"


def _pools(plan: ClusterPlan) -> Iterator[str]:
    rows = [("pool", "machine", "bought", "nodes", "zone", "$ per node-hour")]
    for pool in plan.pools:
        line = next((each for each in plan.prices if each.pool == pool.name), None)
        node = None if line is None or line.usd_per_hour is None else line.usd_per_hour / line.count
        names = ", ".join(pool.reservations)
        rows.append(
            (
                pool.name,
                pool.machine.name,
                f"{pool.consumption}{f' ({names})' if names else ''}",
                _nodes(pool),
                pool.zone,
                "not known" if node is None else _dollars(node),
            )
        )
    yield from _table(rows)


def _nodes(pool: Pool) -> str:
    return f"0 to {pool.nodes}" if pool.scales_from_zero else str(pool.nodes)


def _existing(plan: ClusterPlan) -> Iterator[str]:
    by_title: dict[str, list[str]] = {}
    made = [each for each in plan.resources if each.made_by != "drillyard"]
    for resource in made:
        words = resource.kind.removeprefix("google_").replace("_", " ")
        by_title.setdefault(_TITLES.get(resource.kind, words), []).append(resource.name)
    things = {"state": [plan.state_bucket], **by_title}
    yield f"will exist: {plural(len(made), 'thing')}, and the bucket of the state"
    width = max(map(len, things))
    for title, names in things.items():
        head = f"  {title:<{width}} {len(names):>3}  "
        yield from _wrapped(head, ", ".join(names))


def _ranges(plan: ClusterPlan) -> Iterator[str]:
    if ranges := ranges_of(plan):
        yield "address ranges"
        yield from _table([(f"  {each.name}", each.range) for each in ranges])


def _releases(plan: ClusterPlan) -> Iterator[str]:
    if plan.releases:
        yield "charts, in this order"
        yield from _table(
            [(f"  {each.name}", each.version, each.namespace, each.chart) for each in plan.releases]
        )


def _queues(plan: ClusterPlan) -> Iterator[str]:
    """What runs find on a cluster that exists."""
    own = [each.values for each in plan.releases if each.chart == OWN_CHART]
    if not own:
        return
    (values,) = own
    yield "for runs"
    rows: list[tuple[str, ...]] = []
    for each in values["pools"]:
        amounts = ", ".join(f"{amount} {name}" for name, amount in each["resources"].items())
        rows.append(("  queue", each["queue"], amounts))
    for each in values["namespaces"]:
        level = f"made, level {each['level']}" if each["create"] else "must be there"
        rows.append(("  namespace", each["name"], level))
    account = values["serviceAccount"]
    how = "made" if account["create"] else "must be there"
    rows.append(("  service account", account["name"], how))
    yield from _table(rows)


def _prices(plan: ClusterPlan, of_use: Sequence[UsePrice]) -> Iterator[str]:
    totals = price_totals(plan.prices)
    at_least = ", at least" if totals.unknown else ""
    rows = [("price in US dollars", "per hour", "per day")]
    rows += [_price_row(line) for line in plan.prices]
    rows += [
        (f"{title}{at_least}", *_hour_and_day(price))
        for title, price in (("while idle", totals.idle), ("at full size", totals.full))
    ]
    yield from _table(rows, numbers=2)
    notes = []
    if not all(line.running for line in plan.prices):
        notes.append("* only while runs use it.")
    if totals.full.unverified:
        notes.append("? no primary source confirms it.")
    if totals.full.date is not None:
        notes.append(f"The oldest price is of {totals.full.date}.")
    prices = [f"{each.what} ({_usd(each.usd.value)} per {each.unit})" for each in of_use]
    notes.append(f"Not counted: {', '.join([*prices, 'images, logs, discounts, taxes'])}.")
    yield from textwrap.wrap(" ".join(notes), _WIDTH)
    # Boot disks of several pools lack the same row.
    yield from dict.fromkeys(line.missing for line in plan.prices if line.usd_per_hour is None)


def _price_row(line: PriceLine) -> tuple[str, str, str]:
    what = f"{'  ' if line.running else '* '}{line.what}"
    if line.usd_per_hour is None:
        return what, "not known", ""
    return what, *_hour_and_day(line.usd_per_hour)


def _hour_and_day(price: Fact[float]) -> tuple[str, str]:
    return _dollars(price), _dollars(price * HOURS_PER_DAY)


def _dollars(price: Fact[float]) -> str:
    """Cents, or three digits below 10 cents; `?`: no primary source confirms it."""
    return f"{_usd(price.value)}{'?' if price.unverified else ''}"


def _usd(value: float) -> str:
    return f"{value:,.2f}" if value >= 0.1 or value == 0 else f"{value:.3g}"


def _quotas(plan: ClusterPlan) -> Iterator[str]:
    if plan.quotas:
        yield "quotas needed"
        for quota in plan.quotas:
            yield from _wrapped("  ", f"{quota.in_words} ({quota.reason})", "    ")


def _warnings(plan: ClusterPlan) -> Iterator[str]:
    for warning in plan.warnings:
        yield from _wrapped("warning: ", warning, "  ")


def _next(plan: ClusterPlan, config: str, options: str) -> Iterator[str]:
    command = f"drillyard cluster up {shlex.quote(config)}{options}"
    if plan.recipe is not None:
        yield f"next: drillyard cluster plan {shlex.quote(config)}{options} --output {plan.name}"
        return
    # Where a service makes the machines, nothing is bought before a run.
    needed = () if plan.job_service is not None else plan.prices
    missing = [line.price_option for line in needed if line.usd_per_hour is None]
    yield f"next: {command}{''.join(f' {option}' for option in missing if option)}"


def _wrapped(head: str, text: str, indent: str | None = None) -> list[str]:
    after = " " * len(head) if indent is None else indent
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=head,
        subsequent_indent=after,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _table(rows: Iterable[tuple[str, ...]], numbers: int = 0) -> Iterator[str]:
    """Columns side by side; the last `numbers` of them are aligned at the right."""
    every = list(rows)
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    for row in every:
        cells = [
            cell.rjust(width) if index >= len(row) - numbers else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
