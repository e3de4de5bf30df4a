"""Whether zone, reservations, quotas and versions of a project are what a plan needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from drillyard.config.reservation_name import read_reservation
from drillyard.hardware.capacity import Quota
from drillyard.provision.cluster_plan import ClusterPlan, Pool
from drillyard.provision.gke.versions import reaches
from drillyard.provision.google.api import ApiError, GoogleApis
from drillyard.provision.google.findings import known
from drillyard.provision.project_findings import ProjectFinding

_UNLIMITED = -1


def check_zones(plan: ClusterPlan, apis: GoogleApis) -> Iterator[ProjectFinding]:
    """Each pool's zone has the machine and its GPU. A service finds its zones itself."""
    if plan.job_service is not None:
        return
    for pool in plan.pools:
        name, zone = pool.machine.name, pool.zone
        where = {"project": plan.project, "zone": zone}
        if _get(apis, "machineTypes.get", machineType=name, **where) is None:
            zones = _zones_with(apis, "machineTypes", name)
            yield ProjectFinding(
                "error",
                f"{_key(pool, 'zone')}: {zone} has no {name}",
                f"{_zones_text(zones, pool.region)}: gcloud compute machine-types list"
                f" --filter=name={name} --project={plan.project}",
            )
            continue
        gpu = pool.machine.accelerator_type
        if gpu and _get(apis, "acceleratorTypes.get", acceleratorType=gpu, **where) is None:
            yield ProjectFinding(
                "error",
                f"{_key(pool, 'zone')}: {zone} has no accelerator {gpu}",
                f"gcloud compute accelerator-types list --filter=name={gpu}"
                f" --project={plan.project}",
            )


def check_network_profiles(plan: ClusterPlan, apis: GoogleApis) -> Iterator[ProjectFinding]:
    """The zone has the profiles of the RDMA networks, such as us-central1-b-vpc-roce."""
    networks = plan.terraform.get("resource", {}).get("google_compute_network", {})
    profiles = {str(body.get("network_profile") or "") for body in networks.values()}
    if plan.toolkit is not None:
        profiles.add(plan.toolkit.network_profile or "")
    profiles.discard("")
    for address in sorted(profiles):
        profile = address.rpartition("/")[2]
        found = _get(apis, "networkProfiles.get", project=plan.project, networkProfile=profile)
        if found is None:
            yield ProjectFinding(
                "error",
                f"location.zone: there is no network profile {profile}, so no RDMA network",
                "choose a zone of this list: gcloud compute network-profiles list"
                f" --project={plan.project}",
            )


def check_versions(plan: ClusterPlan, apis: GoogleApis) -> Iterator[ProjectFinding]:
    """The channel has the version of the config, or its default one is new enough."""
    if not plan.has_kubernetes:
        return
    bodies = plan.terraform.get("resource", {}).get("google_container_cluster", {})
    body: Mapping[str, Any] = next(iter(bodies.values()), {})
    channel = (body.get("release_channel") or [{}])[0].get("channel", "UNSPECIFIED")
    config = apis.call(
        "container",
        "projects.locations.getServerConfig",
        name=f"projects/{plan.project}/locations/{plan.region}",
    )
    channels = {each.get("channel"): each for each in config.get("channels") or ()}
    offered = channels.get(channel, {})
    versions = offered.get("validVersions") or config.get("validMasterVersions") or []
    command = (
        f"gcloud container get-server-config --location={plan.region} --project={plan.project}"
    )
    if not versions:
        yield ProjectFinding(
            "unknown", f"versions of GKE in channel {channel}: none listed", command
        )
        return
    given = body.get("min_master_version")
    version = str(offered.get("defaultVersion") or versions[0])
    if given is not None:
        fitting = [
            each
            for each in versions
            if each == given or each.startswith((f"{given}.", f"{given}-"))
        ]
        if not fitting:
            yield ProjectFinding(
                "error",
                f"cluster.version: channel {channel} has no {given} in {plan.region}; it has"
                f" {', '.join(versions[:4])}",
                command,
            )
            return
        version = fitting[0]
    for what, needed in plan.version_needs:
        if not reaches(version, needed):
            yield ProjectFinding(
                "error",
                f"cluster.version: {plan.region} would make {version}, and {what} needs"
                f" {' or '.join(needed)} or later",
                f"set cluster.version, or another cluster.release_channel; {command}",
            )


def check_reservations(plan: ClusterPlan, apis: GoogleApis) -> Iterator[ProjectFinding]:
    """Each reservation exists in the pool's zone, is of its machine and has room for its nodes."""
    wanted: dict[tuple[str, str, str], list[Pool]] = {}
    for pool in plan.pools:
        for text in pool.reservations:
            if (given := read_reservation(text)) is not None:
                key = given.project or plan.project, pool.zone, given.name
                wanted.setdefault(key, []).append(pool)
    for (project, zone, name), pools in wanted.items():
        check = partial(_reservation, plan, apis, project, zone, name, pools)
        yield from known(f"reservation {name}", check)


def _reservation(
    plan: ClusterPlan,
    apis: GoogleApis,
    project: str,
    zone: str,
    name: str,
    pools: Sequence[Pool],
) -> Iterator[ProjectFinding]:
    pool, key = pools[0], _key(pools[0], "reservation")
    look = f"gcloud compute reservations list --project={project}"
    found = _get(apis, "reservations.get", project=project, zone=zone, reservation=name)
    if found is None:
        yield _absent(apis, project, zone, name, pool)
        return
    specific = found.get("specificReservation") or {}
    machine = (specific.get("instanceProperties") or {}).get("machineType")
    if machine and machine != pool.machine.name:
        yield ProjectFinding(
            "error", f"{key}: {name} holds {machine}, not {pool.machine.name}", look
        )
    if not found.get("specificReservationRequired"):
        yield ProjectFinding(
            "error",
            f"{key}: {name} can be used without naming it, so other VMs take it, and nodes cannot"
            " ask for it by name",
            f"create another one with --require-specific-reservation; {look}",
        )
    if (status := found.get("status")) not in (None, "READY"):
        yield ProjectFinding("error", f"{key}: {name} is {status}", look)
    policy = (found.get("reservationSharingPolicy") or {}).get("serviceShareType")
    if plan.job_service is not None and policy != "ALLOW_ALL":
        yield ProjectFinding(
            "error",
            f"{key}: {name} is not shared with Vertex AI, whose jobs could not use it",
            f"gcloud compute reservations update {name} --zone={zone} --project={project}"
            " --reservation-sharing-policy=ALLOW_ALL",
        )
    if project != plan.project:
        shared = (found.get("shareSettings") or {}).get("projectMap") or {}
        if plan.project not in shared and apis.number() not in shared:
            yield ProjectFinding(
                "error",
                f"{key}: {name} of project {project} is not shared with {plan.project}",
                f"gcloud compute reservations update {name} --zone={zone} --project={project}"
                f" --add-share-with={plan.project}",
            )
    yield from _placement(plan, found, name, pool)
    if "count" in specific:
        free = int(specific["count"]) - int(specific.get("inUseCount") or 0)
        nodes = sum(each.nodes for each in pools)
        if free < nodes:
            yield ProjectFinding(
                "warning" if _exists(plan, apis) else "error",
                f"{key}: {name} has {free} of {specific['count']} VMs free, and the pool has"
                f" {nodes} nodes",
                look,
            )


def _placement(
    plan: ClusterPlan, found: Mapping[str, Any], name: str, pool: Pool
) -> Iterator[ProjectFinding]:
    """A pool with a placement policy cannot take VMs of a reservation that has another one
    (https://cloud.google.com/compute/docs/instances/reservations-overview)."""
    resources = plan.terraform.get("resource", {})
    pools = resources.get("google_container_node_pool", {}).values()
    compact = any(
        body.get("placement_policy") for body in pools if body.get("name") == pool.name
    ) or any(
        body.get("resource_policies")
        for body in resources.get("google_compute_instance", {}).values()
    )
    dense = found.get("deploymentType") == "DENSE" or bool(found.get("resourcePolicies"))
    if compact and not dense:
        yield ProjectFinding(
            "error",
            f"{_key(pool, 'reservation')}: {name} has no compact placement, and the pool asks for"
            " it",
            "set cluster.compact_placement: false",
        )


def _absent(apis: GoogleApis, project: str, zone: str, name: str, pool: Pool) -> ProjectFinding:
    elsewhere = sorted(
        str(body.get("zone")).rpartition("/")[2]
        for page in apis.pages("compute", "reservations.aggregatedList", project=project)
        for scope in (page.get("items") or {}).values()
        for body in scope.get("reservations") or ()
        if body.get("name") == name
    )
    key = _key(pool, "reservation")
    if elsewhere:
        places = ", ".join(elsewhere)
        return ProjectFinding(
            "error",
            f"{key}: {name} is in {places}, and the pool in {zone}",
            f"set {_key(pool, 'zone')}: {elsewhere[0]}",
        )
    for page in apis.pages("compute", "futureReservations.list", project=project, zone=zone):
        for body in page.get("items") or ():
            if name in (body.get("name"), body.get("reservationName")):
                window = body.get("timeWindow") or {}
                return ProjectFinding(
                    "warning",
                    f"{key}: {name} is granted from {window.get('startTime')} on"
                    f" ({(body.get('status') or {}).get('procurementStatus')}); nodes come then",
                )
    return ProjectFinding(
        "error",
        f"{key}: there is no reservation {name} in {zone} of project {project}",
        f"gcloud compute reservations list --project={project}",
    )


def check_quotas(plan: ClusterPlan, apis: GoogleApis) -> Iterator[ProjectFinding]:
    """The project may have as much as the plan needs, beside what it uses already."""
    of_compute = plan.job_service is None
    places = {quota.region for quota in plan.quotas if of_compute}
    reported: dict[tuple[str | None, str], tuple[float, float]] = {}
    for region in sorted(places, key=str):
        if region is None:
            body = apis.call("compute", "projects.get", project=plan.project)
        else:
            body = apis.call("compute", "regions.get", project=plan.project, region=region)
        for each in body.get("quotas") or ():
            numbers = float(each.get("limit") or 0), float(each.get("usage") or 0)
            reported[region, str(each.get("metric"))] = numbers
    exists: bool | None = None
    for quota in plan.quotas:
        if not quota.dimensions and (quota.region, quota.metric) in reported:
            limit, usage = reported[quota.region, quota.metric]
            if limit == _UNLIMITED or usage + quota.amount <= limit:
                continue
            exists = _exists(plan, apis) if exists is None else exists
            used = f"{usage:,.0f} in use"
            if exists:
                used += ", perhaps by this cluster itself"
            yield _short_of(plan, quota, limit, used, exists)
        else:
            yield from known(_metric(quota), partial(_of_family, plan, apis, quota))


def _of_family(plan: ClusterPlan, apis: GoogleApis, quota: Quota) -> Iterator[ProjectFinding]:
    """By Service Usage, which reports limits and no usage."""
    service = f"{'compute' if plan.job_service is None else 'aiplatform'}.googleapis.com"
    metric = f"{service}/{quota.metric.lower()}"
    parent = f"projects/{plan.project}/services/{service}/consumerQuotaMetrics"
    try:
        body = apis.call(
            "serviceusage/v1beta1",
            "services.consumerQuotaMetrics.get",
            name=f"{parent}/{metric.replace('/', '%2F')}",
        )
    except ApiError as error:
        if error.refusal != "absent":
            raise
        yield ProjectFinding(
            "unknown", f"{_metric(quota)}: the project does not report it", _quota_page(plan)
        )
        return
    limit = _limit(body, {**quota.dimensions, **({"region": quota.region} if quota.region else {})})
    if limit is None:
        yield ProjectFinding("unknown", f"{_metric(quota)}: it reports no limit", _quota_page(plan))
    elif limit != _UNLIMITED and limit < quota.amount:
        yield _short_of(plan, quota, limit, "its use is not reported", False)
    elif limit != _UNLIMITED:
        yield ProjectFinding(
            "unknown",
            f"{_metric(quota)}: {quota.amount:,} {quota.unit} of {limit:,.0f} are needed, and how"
            " many are in use is not reported",
            _quota_page(plan),
        )


def _limit(body: Mapping[str, Any], wanted: Mapping[str, str]) -> float | None:
    """The limit of the bucket that fits best: one of the same dimensions before a wider one."""
    best: tuple[int, float] | None = None
    for limit in body.get("consumerQuotaLimits") or ():
        for bucket in limit.get("quotaBuckets") or ():
            given = bucket.get("dimensions") or {}
            fits = all(wanted.get(key) == value for key, value in given.items())
            if fits and (best is None or len(given) > best[0]):
                best = len(given), float(bucket.get("effectiveLimit") or 0)
    return None if best is None else best[1]


def _short_of(
    plan: ClusterPlan, quota: Quota, limit: float, used: str, exists: bool
) -> ProjectFinding:
    return ProjectFinding(
        "warning" if exists else "error",
        f"{_metric(quota)}: {quota.amount:,} {quota.unit} are needed ({quota.reason}), the limit is"
        f" {limit:,.0f}, {used}",
        f"ask for more at {_quota_page(plan)}, or take fewer nodes",
    )


def _exists(plan: ClusterPlan, apis: GoogleApis) -> bool:
    """Whether the cluster, or what an interrupted `up` makes first, is there already (its network;
    in a VPC of the user's an account), so that its own parts are in what is in use."""
    name = f"projects/{plan.project}/locations/{plan.region}/clusters/{plan.name}"
    with contextlib.suppress(ApiError):
        apis.call("container", "projects.locations.clusters.get", name=name)
        return True
    accounts = (each.name for each in plan.resources if each.kind == "google_service_account")
    if plan.network is not None:
        for email in accounts:
            with contextlib.suppress(ApiError):
                of_account = f"projects/{plan.project}/serviceAccounts/{email}"
                apis.call("iam", "projects.serviceAccounts.get", name=of_account)
                return True
        return False
    with contextlib.suppress(ApiError):
        named = f"name={plan.name}"
        body = apis.call("compute", "networks.list", project=plan.project, filter=named)
        return any(each.get("name") == plan.name for each in body.get("items") or ())
    return False


def _metric(quota: Quota) -> str:
    narrowed = "".join(f", {value}" for value in quota.dimensions.values())
    return f"quota {quota.metric} ({quota.region or 'global'}{narrowed})"


def _quota_page(plan: ClusterPlan) -> str:
    return f"https://console.cloud.google.com/iam-admin/quotas?project={plan.project}"


def _get(apis: GoogleApis, method: str, **parameters: str) -> dict[str, Any] | None:
    try:
        return apis.call("compute", method, **parameters)
    except ApiError as error:
        if error.refusal == "absent":
            return None
        raise


def _zones_with(apis: GoogleApis, collection: str, name: str) -> list[str]:
    return sorted(
        scope.partition("/")[2]
        for page in apis.pages(
            "compute", f"{collection}.aggregatedList", project=apis.project, filter=f"name={name}"
        )
        for scope, listed in (page.get("items") or {}).items()
        if any(body.get("name") == name for body in listed.get(collection) or ())
    )


def _zones_text(zones: list[str], region: str) -> str:
    if not zones:
        return "no zone that this project sees has it"
    near = [zone for zone in zones if zone.startswith(f"{region}-")]
    return f"it is in {', '.join(near or zones[:6])}"


def _key(pool: Pool, setting: str) -> str:
    """The setting of the config that a finding about the pool is about."""
    if pool.key:
        return f"{pool.key}.{'reservations' if setting == 'reservation' else setting}"
    return "location.zone" if setting == "zone" else setting
