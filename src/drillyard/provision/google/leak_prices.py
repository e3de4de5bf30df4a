"""What a thing that was left costs per day, where the catalog has its price."""

from __future__ import annotations

from drillyard.hardware.catalog import Catalog
from drillyard.hardware.cluster_parts import HOURS_PER_MONTH
from drillyard.hardware.facts import Fact
from drillyard.provision.google.inventory import Thing
from drillyard.provision.google.resource_marks import plain_kind, region_of

HOURS_PER_DAY = 24
_NOT_BILLED = frozenset(
    f"google_{kind}"
    for kind in (
        "compute_backend_service",
        "compute_firewall",
        "compute_health_check",
        "compute_http_health_check",
        "compute_https_health_check",
        "compute_instance_group",
        "compute_instance_group_manager",
        "compute_instance_template",
        "compute_network",
        "compute_network_attachment",
        "compute_network_endpoint_group",
        "compute_network_peering",
        "compute_resize_request",
        "compute_resource_policy",
        "compute_route",
        "compute_router",
        "compute_ssl_certificate",
        "compute_ssl_policy",
        "compute_subnetwork",
        "compute_target_http_proxy",
        "compute_target_https_proxy",
        "compute_target_pool",
        "compute_url_map",
        "container_node_pool",
        "project_iam_member",
        "service_account",
    )
)
"""Costs nothing by itself: nodes, disks, addresses, forwarding rules and traffic are billed
(https://cloud.google.com/vpc/network-pricing, https://cloud.google.com/compute/all-pricing)."""
_CONSUMPTION = {
    "STANDARD": "on-demand",
    "SPOT": "spot",
    "FLEX_START": "flex-start",
    "RESERVATION_BOUND": "reservation",
}
"""By `scheduling.provisioningModel`; what a reservation holds is billed as on-demand."""


def usd_per_day(thing: Thing, facts: Catalog) -> float | None:
    """Dollars per day before discounts; None where no price is known."""
    kind = plain_kind(thing.kind)
    if kind in _NOT_BILLED:
        return 0.0
    hour = _usd_per_hour(kind, thing, facts)
    return None if hour is None else hour * HOURS_PER_DAY


def _usd_per_hour(kind: str, thing: Thing, facts: Catalog) -> float | None:
    region, body = region_of(thing.location), thing.body
    match kind:
        case "google_container_cluster":
            return _part("gke-control-plane", region, facts)
        case "google_compute_router_nat":
            return _part("cloud-nat-gateway", region, facts)
        case "google_compute_address":
            if body.get("addressType") == "INTERNAL":
                return 0.0
            return _part("external-address", region, facts)
        case "google_compute_disk":
            disk = str(body.get("type")).rpartition("/")[2]
            gib_month = facts.part_price(disk, region, "usd_per_gib_month")
            if gib_month is None:
                return None
            copies = 2 if thing.path.startswith("regions/") else 1
            gib = copies * float(body.get("sizeGb") or 0)
            return gib_month.value * gib / HOURS_PER_MONTH
        case "google_compute_instance":
            return _instance(thing, region, facts)
        case "google_vertex_ai_custom_job" | "google_vertex_ai_persistent_resource":
            return _of_service(thing, region, facts)
    return None


def _of_service(thing: Thing, region: str, facts: Catalog) -> float | None:
    """The machines that a service runs for a job, or keeps for jobs, by Compute Engine's prices."""
    if thing.body.get("state") in ("JOB_STATE_QUEUED", "JOB_STATE_PENDING", "JOB_STATE_PAUSED"):
        return 0.0
    spec = thing.body.get("jobSpec") or {}
    strategy = str((spec.get("scheduling") or {}).get("strategy", "STANDARD"))
    usd = 0.0
    for pool in (*spec.get("workerPoolSpecs", ()), *thing.body.get("resourcePools", ())):
        machine = facts.find_machine(str((pool.get("machineSpec") or {}).get("machineType")))
        bought = _CONSUMPTION.get(strategy, "")
        price = None if machine is None else facts.price(machine.name, bought, region)
        if machine is None or price is None:
            return None
        usd += price.node_hour(machine).value * int(pool.get("replicaCount") or 0)
    return usd


def _instance(thing: Thing, region: str, facts: Catalog) -> float | None:
    if thing.body.get("status") in ("TERMINATED", "STOPPED", "SUSPENDED"):
        return 0.0 if thing.body["status"] != "SUSPENDED" else None
    name = str(thing.body.get("machineType")).rpartition("/")[2]
    hour: Fact[float] | None = None
    if (machine := facts.find_machine(name)) is not None:
        model = (thing.body.get("scheduling") or {}).get("provisioningModel", "STANDARD")
        price = facts.price(name, _CONSUMPTION.get(model, ""), region)
        hour = None if price is None else price.node_hour(machine)
    elif (cpu := facts.cpu_machines.get(name)) is not None:
        hour = facts.cpu_machine_price(cpu, region)
    return None if hour is None else hour.value


def _part(part: str, region: str, facts: Catalog) -> float | None:
    price = facts.part_price(part, region)
    return None if price is None else price.value
