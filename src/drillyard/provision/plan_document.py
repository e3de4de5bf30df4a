"""The JSON of `drillyard cluster plan --json`, made by the models whose schema `drillyard schema
cluster-plan` prints. Fields are only added within one `version`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from drillyard.json_document import DocumentPart, FactEntry, QuotaEntry, read_from
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.existing_objects import ObjectState
from drillyard.provision.prices import UsePrice, price_totals

VERSION = 1


class PoolEntry(DocumentPart):
    """A pool of GPU nodes."""

    name: str
    machine: str = read_from("machine.name")
    accelerator: str = read_from("machine.accelerator")
    accelerators_per_node: int = read_from("machine.num_accelerators")
    consumption: str
    nodes: int = Field(description="The most nodes that it may have.")
    scales_from_zero: bool = Field(description="Whether it has no nodes while no run needs them.")
    zone: str
    reservations: list[str]


class ResourceEntry(DocumentPart):
    """One thing that will exist in the cloud."""

    address: str = Field(description="Terraform's, or the blueprint's module.")
    kind: str
    name: str = Field(description="The cloud's own.")
    location: str | None
    labelled: bool = Field(description="Whether it carries the cluster's label.")
    made_by: str


class AddressRangeEntry(DocumentPart):
    """A range of addresses: of a subnet, or a second one in it (SUBNET/pods)."""

    name: str
    range: str


class PriceLineEntry(DocumentPart):
    """The price of one part, of all `count` together."""

    what: str
    count: int
    usd_per_hour: FactEntry | None = Field(description="Null: not known, see `missing`.")
    missing: str = Field(description="What gives the price where it is not known.")
    running: bool = Field(description="False: the part exists only while runs use it.")
    pool: str = Field(description="The GPU pool whose nodes it is; empty for all else.")


class UsePriceEntry(DocumentPart):
    """A price of what depends on use, which no sum contains."""

    what: str
    usd: FactEntry
    unit: str


class PriceEntry(DocumentPart):
    """Prices in US dollars per hour, before discounts and taxes."""

    lines: list[PriceLineEntry]
    idle: FactEntry = Field(description="The sum while no run needs nodes.")
    full: FactEntry = Field(description="The sum with all nodes.")
    unknown: list[str] = Field(description="Parts without a price, which the sums lack.")
    by_use: list[UsePriceEntry]


class ReleaseEntry(DocumentPart):
    """A Helm release, in the order in which they are installed."""

    name: str
    namespace: str
    chart: str
    version: str
    values: dict[str, Any]


class ObjectEntry(DocumentPart):
    """An object or Helm release of a cluster that exists."""

    kind: str
    name: str = Field(description="NAMESPACE/NAME where it is in one.")
    state: Literal["ours", "used", "add", "missing", "conflict"] = Field(
        description="used: somebody else's, and it fits; missing: to be made by the user."
    )
    why: str


class ClusterPlanDocument(DocumentPart):
    """The answer of `drillyard cluster plan --json`."""

    version: Literal[1]
    kind: Literal["cluster-plan"]
    name: str
    platform: str
    project: str
    region: str
    zone: str
    pools: list[PoolEntry]
    resources: list[ResourceEntry] = Field(description="In the order of creation.")
    ranges: list[AddressRangeEntry]
    state_bucket: str
    price: PriceEntry
    quotas: list[QuotaEntry]
    services: list[str] = Field(description="APIs of the project that must be enabled.")
    labels: dict[str, str]
    releases: list[ReleaseEntry]
    objects: list[ObjectEntry] | None = Field(
        description="What a cluster that exists has; null: it was not asked, or did not answer."
    )
    launch_settings: dict[str, Any] = Field(
        description="Settings that `drillyard launch` needs and the config leaves out."
    )
    warnings: list[str]
    terraform: dict[str, Any] = Field(description="main.tf.json, without the state's backend.")
    files: dict[str, str] = Field(
        description="Of a cluster that Cluster Toolkit or Soperator makes: its files."
    )


def plan_document(
    plan: ClusterPlan, of_use: Sequence[UsePrice], objects: Sequence[ObjectState] | None = None
) -> ClusterPlanDocument:
    """The plan, with prices of what depends on use, and what a cluster that exists has of it."""
    totals = price_totals(plan.prices)
    same = (
        "name",
        "platform",
        "project",
        "region",
        "zone",
        "pools",
        "resources",
        "state_bucket",
        "quotas",
        "services",
        "releases",
        "warnings",
        "terraform",
    )
    content = {
        "version": VERSION,
        "kind": "cluster-plan",
        "ranges": ranges_of(plan),
        "labels": plan.labels or {},
        "objects": objects,
        "files": {name: text for name, (text, _) in _files(plan).items()},
        "launch_settings": plan.launch_settings or {},
        "price": {
            "lines": plan.prices,
            "idle": totals.idle,
            "full": totals.full,
            "unknown": totals.unknown,
            "by_use": of_use,
        },
        **{name: getattr(plan, name) for name in same},
    }
    return ClusterPlanDocument.model_validate(content, strict=False)


def _files(plan: ClusterPlan) -> Mapping[str, tuple[str, int]]:
    made = plan.toolkit or plan.recipe
    return {} if made is None else made.files


def plan_schema() -> dict[str, Any]:
    """The schema (draft 2020-12) of what `drillyard cluster plan --json` prints."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **ClusterPlanDocument.model_json_schema(by_alias=False),
    }


def ranges_of(plan: ClusterPlan) -> list[AddressRangeEntry]:
    """The address ranges of the plan's subnets, in the order of creation."""
    subnets: Mapping[str, Any] = plan.terraform.get("resource", {}).get(
        "google_compute_subnetwork", {}
    )
    found = []
    if plan.toolkit is not None:
        found += [
            AddressRangeEntry(name=name, range=each) for name, each in plan.toolkit.ranges.items()
        ]
    for body in subnets.values():
        if "ip_cidr_range" in body:
            found.append(AddressRangeEntry(name=body["name"], range=body["ip_cidr_range"]))
        for second in body.get("secondary_ip_range", ()):
            name = f"{body['name']}/{second['range_name']}"
            found.append(AddressRangeEntry(name=name, range=second["ip_cidr_range"]))
    return found
