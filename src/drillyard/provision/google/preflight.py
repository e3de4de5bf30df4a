"""Whether a project is ready for a cluster: asked before anything is made.

Nothing is changed. What cannot be found out is said as `unknown`, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from drillyard.provision.cluster_plan import CLUSTER_LABEL, ClusterPlan, PlannedResource
from drillyard.provision.google.api import (
    LOGIN,
    PERMISSIONS_AT_ONCE,
    ApiError,
    CredentialsError,
    GoogleApis,
)
from drillyard.provision.google.capacity_checks import (
    check_network_profiles,
    check_quotas,
    check_reservations,
    check_versions,
    check_zones,
)
from drillyard.provision.google.findings import known
from drillyard.provision.google.inventory import Inventory, Thing, take_inventory
from drillyard.provision.google.listings import LISTINGS
from drillyard.provision.google.network_checks import check_job_network, check_network
from drillyard.provision.google.ownership import Ownership
from drillyard.provision.google.permissions import rights_of
from drillyard.provision.google.resource_marks import plain_kind
from drillyard.provision.leak_report import kind_title
from drillyard.provision.project_findings import ProjectFinding, in_order

FIRST_SERVICES = ("cloudresourcemanager.googleapis.com", "serviceusage.googleapis.com")
"""Terraform enables the other services by means of these
(https://registry.terraform.io/providers/hashicorp/google/latest/docs/resources/google_project_service)."""
_SERVICES_AT_ONCE = 20
"""https://cloud.google.com/service-usage/docs/reference/rest/v1/services/batchGet: at most 30."""


def check_project(plan: ClusterPlan, apis: GoogleApis) -> list[ProjectFinding]:
    """What is missing in the project for this plan, errors first. Credentials that are absent or
    expired are one finding, `unknown`."""
    try:
        found = list(_findings(plan, apis))
    except CredentialsError as error:
        return [ProjectFinding("unknown", f"nothing of the project was checked: {error}", LOGIN)]
    return in_order(found)


def _findings(plan: ClusterPlan, apis: GoogleApis) -> Iterator[ProjectFinding]:
    absent = list(_project(plan, apis))
    yield from absent
    if any(each.level == "error" for each in absent):
        return
    yield from known("billing of the project", partial(_billing, plan, apis))
    yield from known("services of the project", partial(_services, plan, apis))
    yield from known("permissions", partial(_permissions, plan, apis))
    yield from known("machines of the zone", partial(check_zones, plan, apis))
    yield from known("network profiles", partial(check_network_profiles, plan, apis))
    yield from known("versions of GKE", partial(check_versions, plan, apis))
    yield from known("network of the jobs", partial(_job_network, plan, apis))
    yield from known("network of the jobs", partial(check_job_network, plan, apis))
    yield from known("network of the nodes", partial(check_network, plan, apis))
    yield from known("reservations", partial(check_reservations, plan, apis))
    yield from known("quotas", partial(check_quotas, plan, apis))
    yield from _taken_names(plan, apis)


def _project(plan: ClusterPlan, apis: GoogleApis) -> Iterator[ProjectFinding]:
    listed = "gcloud projects list"
    try:
        body = apis.call("cloudresourcemanager", "projects.get", name=f"projects/{plan.project}")
    except ApiError as error:
        if error.refusal in ("absent", "denied"):
            # Google does not tell a project that is not there from one that may not be seen.
            what = f"location.project: {plan.project} does not exist, or is not yours to see"
            yield ProjectFinding("error", what, listed)
        elif error.refusal == "disabled":
            yield ProjectFinding(
                "error",
                f"{FIRST_SERVICES[0]} is not enabled in project {plan.project}, and nothing can be"
                " checked or made without it",
                _enable(plan, FIRST_SERVICES),
            )
        else:
            yield ProjectFinding("unknown", f"project {plan.project}: {error}")
        return
    if (state := body.get("state", "ACTIVE")) != "ACTIVE":
        what = f"location.project: {plan.project} is {state}"
        yield ProjectFinding("error", what, f"gcloud projects undelete {plan.project}")


def _billing(plan: ClusterPlan, apis: GoogleApis) -> Iterator[ProjectFinding]:
    body = apis.call("cloudbilling", "projects.getBillingInfo", name=f"projects/{plan.project}")
    if not body.get("billingEnabled"):
        yield ProjectFinding(
            "error",
            f"location.project: billing of {plan.project} is off",
            f"gcloud billing projects link {plan.project} --billing-account=ACCOUNT_ID (gcloud"
            " billing accounts list)",
        )


def _services(plan: ClusterPlan, apis: GoogleApis) -> Iterator[ProjectFinding]:
    wanted = list(dict.fromkeys((*FIRST_SERVICES, *plan.services)))
    off: list[str] = []
    for begin in range(0, len(wanted), _SERVICES_AT_ONCE):
        names = [
            f"projects/{plan.project}/services/{each}"
            for each in wanted[begin : begin + _SERVICES_AT_ONCE]
        ]
        body = apis.call(
            "serviceusage", "services.batchGet", parent=f"projects/{plan.project}", names=names
        )
        on = {
            str(each.get("name")).rpartition("/")[2]
            for each in body.get("services") or ()
            if each.get("state") == "ENABLED"
        }
        off += [name.rpartition("/")[2] for name in names if name.rpartition("/")[2] not in on]
    made = {each.name for each in plan.resources if each.kind == "google_project_service"}
    first = [each for each in off if each in FIRST_SERVICES or each not in made]
    later = [each for each in off if each not in first]
    if first:
        yield ProjectFinding(
            "error", f"not enabled in project: {', '.join(first)}", _enable(plan, first)
        )
    if later:
        yield ProjectFinding(
            "warning",
            f"not enabled yet, which `up` does: {', '.join(later)}; what they hold could not be"
            " checked",
            _enable(plan, later),
        )


def _permissions(plan: ClusterPlan, apis: GoogleApis) -> Iterator[ProjectFinding]:
    further = () if plan.toolkit is None else plan.toolkit.further_kinds
    rights, unknown = rights_of([*(each.kind for each in plan.resources), *further])
    wanted = sorted({each for needed in rights.values() for each in needed})
    granted: set[str] = set()
    for begin in range(0, len(wanted), PERMISSIONS_AT_ONCE):
        body = apis.call(
            "cloudresourcemanager",
            "projects.testIamPermissions",
            resource=f"projects/{plan.project}",
            body={"permissions": wanted[begin : begin + PERMISSIONS_AT_ONCE]},
        )
        granted.update(body.get("permissions") or ())
    missing = {
        role: lacking
        for role, needed in rights.items()
        if (lacking := [each for each in needed if each not in granted])
    }
    member = (apis.account() or "user:EMAIL") if missing else ""
    for role, lacking in missing.items():
        yield ProjectFinding(
            "error",
            f"{member} lacks {', '.join(lacking)} on project {plan.project}",
            f"gcloud projects add-iam-policy-binding {plan.project} --member={member}"
            f" --role={role} --condition=None",
        )
    if unknown:
        yield ProjectFinding("unknown", f"permissions for {', '.join(unknown)}")


def _job_network(plan: ClusterPlan, apis: GoogleApis) -> Iterator[ProjectFinding]:
    """The VPC of the jobs that is made here is named by this project's number."""
    if plan.job_service is None:
        return
    given = str((plan.launch_settings or {}).get(plan.platform, {}).get("network", ""))
    number = apis.number() if given else None
    if number is not None and given.split("/")[1] != number:
        right = f"projects/{number}/global/networks/{given.rpartition('/')[2]}"
        yield ProjectFinding(
            "error",
            f"vertex.network: {given} is of another project; the number of {plan.project} is"
            f" {number} (a shared VPC has another name than the cluster)",
            f"write {right}",
        )


def _taken_names(plan: ClusterPlan, apis: GoogleApis) -> Iterator[ProjectFinding]:
    """Names of the plan that something else has already."""
    kinds = {plain_kind(each.kind) for each in plan.resources}
    rows = [row for row in LISTINGS if plain_kind(row.kind) in kinds]
    taken = take_inventory(apis, plan.region, rows)
    ownership = Ownership(plan, taken, apis.number())
    for thing in taken.things:
        if thing.kind == "google_storage_bucket" or not ownership.planned(thing):
            continue
        if _is_of_others(plan, ownership, thing):
            yield ProjectFinding(
                "error",
                f"{kind_title(thing.kind)} {thing.name} exists, and is not of this cluster",
                "choose another `name`, or look at it, and delete it:"
                f" {thing.command(plan.project)}",
            )
    for gap in taken.gaps:
        yield ProjectFinding("unknown", f"whether names are free: {gap.why}")
    number = apis.number()
    buckets = (each for each in plan.resources if each.kind == "google_storage_bucket")
    # The toolkit names its bucket when it makes it.
    for bucket in (each for each in buckets if each.made_by != "gcluster"):
        check = partial(_bucket, plan, apis, bucket, taken, number)
        yield from known(f"gs://{bucket.name}", check)


def _is_of_others(plan: ClusterPlan, ownership: Ownership, thing: Thing) -> bool:
    """Whether it lacks the mark that the plan's own thing of this name would have."""
    if thing.part is not None:
        return False  # Its parent decides.
    if ownership.has_foreign_mark(thing):
        return True
    planned = ownership.planned(thing)
    labels = thing.body.get("labels") or thing.body.get("resourceLabels") or {}
    if any(each.labelled for each in planned):
        return bool(labels.get(CLUSTER_LABEL) != plan.name)
    described = {ownership.description(each) for each in planned} - {None}
    return bool(described) and thing.body.get("description") not in described


def _bucket(
    plan: ClusterPlan,
    apis: GoogleApis,
    planned: PlannedResource,
    taken: Inventory,
    number: str | None,
) -> Iterator[ProjectFinding]:
    """Names of buckets are those of all projects together."""
    own = {each.name for each in taken.things if each.kind == "google_storage_bucket"}
    setting = "cluster.state_bucket" if planned.name == plan.state_bucket else "storage.bucket"
    another = ProjectFinding(
        "error",
        f"{setting}: gs://{planned.name} is a bucket of another project",
        "choose another name",
    )
    try:
        body = apis.call("storage", "buckets.get", bucket=planned.name)
    except ApiError as error:
        if error.refusal == "denied" and planned.name not in own:
            yield another
        elif error.refusal not in ("absent", "disabled"):
            raise
        return
    if number is not None and str(body.get("projectNumber")) != number:
        yield another
    elif (body.get("labels") or {}).get(CLUSTER_LABEL) != plan.name:
        yield ProjectFinding(
            "error",
            f"{setting}: gs://{planned.name} exists, and is not of this cluster",
            "choose another name"
            if setting == "cluster.state_bucket"
            else "choose another name, or set cluster.existing_bucket: true",
        )


def _enable(plan: ClusterPlan, services: list[str] | tuple[str, ...]) -> str:
    return f"gcloud services enable {' '.join(services)} --project={plan.project}"
