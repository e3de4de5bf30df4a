"""What of a cluster is left in its project, asked of the cloud itself.

Each service's own list decides. Cloud Asset inventory is asked as well, for kinds that no list
covers and for lists that are refused. Nothing is deleted: every leak has the command that deletes
it, and they work in the order in which they are given.

`none` is said only where every list was given in full. Reservations are shown apart: they are
bought for longer than a cluster. Cost: about 70 requests, 8 at a time, and one for each managed
instance group and each bucket that is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from drillyard.hardware.catalog import Catalog, catalog
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.google.api import ApiError, GoogleApis
from drillyard.provision.google.assets import Asset, search_assets, things_of_gaps, unlisted
from drillyard.provision.google.inventory import (
    Inventory,
    Thing,
    resize_requests,
    take_inventory,
)
from drillyard.provision.google.leak_prices import usd_per_day
from drillyard.provision.google.listings import JOB_LISTINGS, LISTINGS, RESIZE_REQUESTS
from drillyard.provision.google.ownership import Ownership
from drillyard.provision.google.resource_marks import plain_kind, region_of
from drillyard.provision.leak_report import Gap, Leak, LeakReport, kind_title

_GROUP = "google_compute_instance_group_manager"
_OF_CONTROLLER = (
    _GROUP,
    *("google_compute_resize_request", "google_compute_instance", "google_compute_disk"),
    *("google_compute_resource_policy", "google_compute_image"),
)
"""What Slurm's controller makes for jobs, and the image of its nodes."""


def find_leaks(
    plan: ClusterPlan,
    apis: GoogleApis,
    owned: frozenset[str] = frozenset(),
    facts: Catalog | None = None,
) -> LeakReport:
    """What is left of the plan's cluster, besides `owned`: `kind/location/name` of what the state
    has (kind is Terraform's, location empty for what is global), empty after `down`.

    Raises CredentialsError; a refused list is part of the report.
    """
    known = facts or catalog()
    rows = LISTINGS if plan.job_service is None else (*JOB_LISTINGS, *LISTINGS)
    taken = take_inventory(apis, plan.region, rows)
    assets, gaps = search_assets(apis, plan.name)
    taken = replace(
        taken,
        things=(*taken.things, *things_of_gaps(assets, taken, rows)),
        gaps=(*taken.gaps, *gaps),
    )
    number = apis.number()
    if number is None:
        why = "the project's number is unknown, by which some things name its networks"
        gap = Gap("cloudresourcemanager", "projects.get", why)
        taken = replace(taken, gaps=(*taken.gaps, gap))
    ownership = Ownership(plan, taken, number)
    found = ownership.recognise()
    groups = [
        each for each in taken.things if plain_kind(each.kind) == _GROUP and each.path in found.ours
    ]
    requests = resize_requests(apis, groups)
    reasons = {
        **found.ours,
        **{each.path: "a request for nodes of this cluster" for each in requests.things},
    }
    things = {each.path: each for each in (*taken.things, *requests.things)}
    if plan.existing_bucket is not None:
        owned |= {f"google_storage_bucket//{plan.existing_bucket}"}
    state = _State(owned, plan.state_bucket)
    controller = None if plan.toolkit is None else plan.toolkit.controller
    report = _Report(apis, known, ownership, reasons, things, state, controller)
    of_host, host_gaps = _rules_of_host(plan, apis, ownership)
    return LeakReport(
        cluster=plan.name,
        project=apis.project,
        leaks=(
            *report.leaks(),
            *of_host,
            *(_unlisted(each) for each in unlisted(assets, plan.name, rows)),
        ),
        doubtful=tuple(
            report.leak(things[path], why, None) for path, why in sorted(found.doubtful.items())
        ),
        unknown=(*taken.gaps, *requests.gaps, *host_gaps),
        disabled=taken.disabled,
        reservations=tuple(_reservations(plan, taken)),
    )


def _rules_of_host(
    plan: ClusterPlan, apis: GoogleApis, ownership: Ownership
) -> tuple[list[Leak], tuple[Gap, ...]]:
    """Firewall rules in the host project of a shared VPC that GKE made for a cluster which is gone.
    Nothing else of a cluster is there."""
    network = plan.network
    if network is None or network.project == plan.project or not plan.has_kubernetes:
        return [], ()
    rows = [row for row in LISTINGS if row.kind == "google_compute_firewall"]
    taken = take_inventory(apis.of_project(network.project), plan.region, rows)
    left = [] if ownership.has_cluster else [*taken.things]
    return [
        Leak(
            kind=thing.kind,
            name=thing.name,
            location=thing.location,
            why=f"named by GKE for this cluster, in {network.project}, the host of its VPC",
            usd_per_day=usd_per_day(thing, catalog()),
            command=thing.command(network.project),
        )
        for thing in left
        if ownership.is_gke_name(thing.name)
    ], taken.gaps


class _State:
    """What the state has, by kind and name; the same place is the same region."""

    def __init__(self, owned: frozenset[str], state_bucket: str) -> None:
        self._places: dict[tuple[str, str], set[str]] = {}
        self.bucket = state_bucket
        for each in owned:
            kind, location, name = each.split("/", 2)
            key = plain_kind(kind), _short(name)
            self._places.setdefault(key, set()).add(region_of(location))
        kinds = {kind for kind, _ in self._places}
        if kinds - {"google_storage_bucket"}:
            # It exists for as long as the state has anything; buckets alone are what `down` kept.
            self._places["google_storage_bucket", state_bucket] = {""}

    def has(self, thing: Thing) -> bool:
        places = self._places.get((plain_kind(thing.kind), _short(thing.name)))
        if places is None:
            return False
        if thing.kind == "google_storage_bucket":
            return True  # The names of buckets are global.
        place = region_of(thing.location)
        return not place or "" in places or place in places


class _Report:
    """Turns recognised things into leaks."""

    def __init__(
        self,
        apis: GoogleApis,
        facts: Catalog,
        ownership: Ownership,
        reasons: Mapping[str, str],
        things: Mapping[str, Thing],
        state: _State,
        controller: str | None,
    ) -> None:
        self._controller = controller
        self._apis, self._facts, self._ownership = apis, facts, ownership
        self._reasons, self._things, self._state = reasons, things, state

    def leaks(self) -> list[Leak]:
        """In the order of deletion."""
        found: list[tuple[tuple[float, bool, str], Leak]] = []
        for path, why in self._reasons.items():
            thing = self._things[path]
            if thing.row.never_ours or self._state.has(thing):
                continue
            covered, holder = self._holder(thing)
            if not covered and not self._is_of_controller(thing):
                found.append((_order(thing), self.leak(thing, why, holder)))
        return [leak for _, leak in sorted(found, key=lambda each: each[0])]

    def leak(self, thing: Thing, why: str, holder: Thing | None) -> Leak:
        """The leak of one thing, deleted with `holder` or by a command of its own."""
        command = (holder or thing).command(self._apis.project)
        if thing.kind == "google_storage_bucket" and thing.name != self._state.bucket:
            why, command = self._of_data_bucket(thing, why)
        return Leak(
            kind=thing.kind,
            name=thing.name,
            location=thing.location,
            why=why,
            usd_per_day=usd_per_day(thing, self._facts),
            command=command,
            deleted_with=f"{kind_title(holder.kind)} {holder.name}" if holder else "",
        )

    def _of_data_bucket(self, thing: Thing, why: str) -> tuple[str, str]:
        """Why a bucket is the cluster's, and the command that deletes it, if that costs no data:
        `down` keeps such a bucket on purpose."""
        project = self._apis.project
        with_all = thing.command(project)
        has_data = _has_objects(self._apis, thing.name)
        if has_data is not False:
            what = "has data" if has_data else "may have data (it does not say so)"
            return f"{why}; {what}, which this deletes with it: {with_all}", ""
        if (thing.body.get("hierarchicalNamespace") or {}).get("enabled"):
            return why, with_all  # Its folders keep it from being deleted alone.
        return why, f"gcloud storage buckets delete gs://{thing.name} --project={project}"

    def _is_of_controller(self, thing: Thing) -> bool:
        """Whether it is what Slurm's controller, which is in the state, makes for jobs, or what its
        machines start from: no state has that, and `down` removes it."""
        if self._controller is None or plain_kind(thing.kind) not in _OF_CONTROLLER:
            return False
        machines = (each for each in self._things.values() if each.name == self._controller)
        return any(
            each.kind == "google_compute_instance" and self._state.has(each) for each in machines
        )

    def _holder(self, thing: Thing) -> tuple[bool, Thing | None]:
        """Whether the state's own things answer for it, and else what its deletion goes with."""
        if thing.row is RESIZE_REQUESTS:
            group = self._things.get(thing.parent)
            return self._holder(group) if group else (False, None)
        holder = self._ownership.holder(thing, self._reasons)
        if holder is None:
            return False, None
        if self._state.has(holder):
            # A pool or a NAT is in the state itself, or made outside of it.
            return thing.part is None or not thing.part.goes_with_parent, None
        covered, further = self._holder(holder)
        return covered, further or holder


def _has_objects(apis: GoogleApis, bucket: str) -> bool | None:
    """Whether a bucket has objects, or earlier versions of some; None: it does not say so."""
    try:
        listed = apis.call("storage", "objects.list", bucket=bucket, versions=True, maxResults=1)
    except ApiError as error:
        return False if error.refusal == "absent" else None
    return bool(listed.get("items"))


def _order(thing: Thing) -> tuple[float, bool, str]:
    if thing.row is RESIZE_REQUESTS:
        kinds = [each.kind for each in (*JOB_LISTINGS, *LISTINGS)]
        return kinds.index(_GROUP) - 0.5, False, thing.path
    # Parts come before what they are in.
    rows = (*JOB_LISTINGS, *LISTINGS)
    return float(rows.index(thing.row)), thing.part is None, thing.path


def _unlisted(asset: Asset) -> Leak:
    return Leak(
        kind=asset.kind,
        name=asset.name,
        location=asset.location,
        why="labelled as this cluster's, by Cloud Asset inventory",
        usd_per_day=None,
        command="",
    )


def _reservations(plan: ClusterPlan, taken: Inventory) -> list[Leak]:
    """Reservations that the pools name, and requests for them."""
    names = {part for pool in plan.pools for text in pool.reservations for part in text.split("/")}
    zones = {pool.zone for pool in plan.pools}
    return [
        Leak(
            kind=thing.kind,
            name=thing.name,
            location=thing.location,
            why="named by a pool of the plan; it goes on until it is deleted or ends",
            usd_per_day=None,
            command="",
        )
        for thing in taken.things
        if thing.row.never_ours
        and thing.location in zones
        and (thing.name in names or thing.body.get("reservationName") in names)
    ]


def _short(name: str) -> str:
    """An account's name without its project: `trainer` of trainer@p.iam.gserviceaccount.com."""
    return name.rpartition("/")[2].partition("@")[0] if " " not in name else name
