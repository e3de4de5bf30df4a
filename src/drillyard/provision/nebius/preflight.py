"""Whether a project of Nebius is ready for a cluster: asked before anything is made.

Nothing is changed. What cannot be found out is said as `unknown`, with the reason. Which fabrics a
region has for a machine is what Nebius advises to the tenant
(https://github.com/nebius/api/blob/main/nebius/capacity/v1/resource_advice.proto).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from drillyard.errors import UserError
from drillyard.formatting import first_few
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.leak_report import kind_title
from drillyard.provision.nebius import cli
from drillyard.provision.nebius.instances import GPU_CLUSTER_KIND, KIND
from drillyard.provision.nebius.listings import BY_KIND
from drillyard.provision.nebius.managed_kubernetes import NODE_GROUP_KIND
from drillyard.provision.nebius.nebius_plan import BUCKET_KIND
from drillyard.provision.nebius.storage_key import key_fix, missing_text, missing_variables
from drillyard.provision.project_findings import ProjectFinding, in_order

Findings = Iterator[ProjectFinding]
_LOGIN = "nebius profile create"


def check_project(plan: ClusterPlan) -> list[ProjectFinding]:
    """What is missing in the project for this plan, errors first. Raises UserError where Nebius'
    CLI is not installed."""
    return in_order(_findings(plan))


def _findings(plan: ClusterPlan) -> Findings:
    if missing := missing_variables():
        yield ProjectFinding("error", missing_text(missing), key_fix(plan))
    try:
        project = cli.call("iam", "project", "get", "--id", plan.project)
    except cli.NebiusError as error:
        yield _no_project(plan, error)
        return
    region = (project.get("spec") or {}).get("region") or (project.get("status") or {}).get(
        "region"
    )
    if region and region != plan.region:
        yield ProjectFinding(
            "error",
            f"location.region: {plan.region}, and project {plan.project} is in {region}",
            f"write region: {region}, or another project: nebius iam project list --parent-id"
            f" {project['metadata'].get('parent_id', 'TENANT')}",
        )
        return
    tenant = str(project["metadata"].get("parent_id", ""))
    yield from _known("machines of the region", partial(_platform, plan))
    yield from _known("fabrics of the region", partial(_fabric, plan, tenant))
    yield from _known("file system", partial(_filesystem, plan))
    yield from _known("quotas", partial(_quotas, plan))
    for kind in dict.fromkeys(each.kind for each in plan.resources):
        if kind in BY_KIND and not BY_KIND[kind].of:
            yield from _known(f"names of {kind_title(kind)}s", partial(_taken_names, plan, kind))


def _no_project(plan: ClusterPlan, error: cli.NebiusError) -> ProjectFinding:
    if error.refusal == "login":
        return ProjectFinding(
            "error", f"nothing of the project was checked: {_first(error)}", _LOGIN
        )
    if error.refusal in ("absent", "denied"):
        # Nebius does not tell a project that is not there from one that may not be seen.
        what = f"location.project: {plan.project} does not exist, or is not yours to see"
        return ProjectFinding("error", what, "nebius iam project list --parent-id TENANT")
    return ProjectFinding("unknown", f"project {plan.project}: {_first(error)}")


def _known(what: str, check: Callable[[], Findings]) -> Findings:
    """The findings of a check; where Nebius does not answer it, that `what` is unknown."""
    try:
        yield from check()
    except UserError as error:
        yield ProjectFinding("unknown", f"{what}: {_first(error)}")


def _first(error: UserError) -> str:
    return str(error).partition("\n")[0]


def _platform(plan: ClusterPlan) -> Findings:
    """The project has the machine."""
    (pool,) = plan.pools
    wanted, command = pool.machine.name.partition("_")[0], _list("compute", "platform", plan)
    platforms = {
        cli.name_of(each): each for each in cli.items("compute", "platform", parent=plan.project)
    }
    if wanted not in platforms:
        there = first_few(list(platforms), 8)
        what = f"machine: project {plan.project} has no platform {wanted}: {there}"
        yield ProjectFinding("error", what, command)
        return
    presets = {
        each["name"]: each for each in (platforms[wanted].get("spec") or {}).get("presets", ())
    }
    preset = pool.machine.preset
    if preset not in presets:
        what = f"machine: {wanted} has no preset {preset} here: {first_few(list(presets), 8)}"
        yield ProjectFinding("error", what, command)
    elif _fabric_of(plan) and not presets[preset].get("allow_gpu_clustering"):
        what = f"machine: {wanted} of preset {preset} joins no GPU cluster here"
        yield ProjectFinding("error", what, "write network_stack: ethernet, or another machine")


def _fabric(plan: ClusterPlan, tenant: str) -> Findings:
    """The region has the fabric for the machine."""
    wanted = _fabric_of(plan)
    if wanted is None:
        return
    platform = plan.pools[0].machine.name.partition("_")[0]
    rows = (each.get("spec") or {} for each in cli.items(*_ADVICE, parent=tenant))
    fabrics = {
        each.get("fabric")
        for each in rows
        if each.get("region") == plan.region
        and (each.get("compute_instance") or {}).get("platform") == platform
    } - {None, ""}
    if not fabrics:
        what = f"nebius.fabric: Nebius names no fabric of {plan.region} for {platform}"
        yield ProjectFinding("unknown", what, _list(*_ADVICE, plan, tenant))
    elif wanted not in fabrics:
        what = f"nebius.fabric: {plan.region} has no {wanted} for {platform}"
        yield ProjectFinding("error", what, f"write one of {', '.join(sorted(map(str, fabrics)))}")


_ADVICE = ("capacity", "resource-advice")


def _fabric_of(plan: ClusterPlan) -> str | None:
    for body in _bodies(plan, GPU_CLUSTER_KIND):
        return str(body["infiniband_fabric"])
    return None


def _filesystem(plan: ClusterPlan) -> Findings:
    """A file system that the config names exists."""
    groups = (each["template"] for each in _bodies(plan, NODE_GROUP_KIND))
    for body in (*_bodies(plan, KIND), *groups):
        for each in body.get("filesystems", ()):
            identifier = str(each["existing_filesystem"]["id"])
            if identifier.startswith("${"):
                continue
            try:
                cli.call("compute", "filesystem", "get", "--id", identifier)
            except cli.NebiusError as error:
                if error.refusal not in ("absent", "denied"):
                    raise
                what = f"nebius.filesystem: {identifier} does not exist, or is not yours to see"
                yield ProjectFinding("error", what, _list("compute", "filesystem", plan))


def _quotas(plan: ClusterPlan) -> Findings:
    """The project may have as much as the plan needs, beside what it uses already."""
    if not plan.quotas:
        return
    command = _list("quotas", "quota-allowance", plan)
    granted = {
        (cli.name_of(each), (each.get("spec") or {}).get("region")): each
        for each in cli.items("quotas", "quota-allowance", parent=plan.project)
    }
    exists = any(
        cli.is_ours(plan, each) for each in cli.items("compute", "instance", parent=plan.project)
    )
    for quota in plan.quotas:
        row = granted.get((quota.metric, quota.region))
        limit = None if row is None else (row.get("spec") or {}).get("limit")
        if row is None or limit is None:
            what = f"{quota.metric}: the project does not report its limit"
            yield ProjectFinding("unknown", what, command)
            continue
        usage = int((row.get("status") or {}).get("usage") or 0)
        if usage + quota.amount <= int(limit):
            continue
        used = f"{usage:,} in use{', perhaps by this cluster itself' if exists else ''}"
        what = f"{quota.in_words}: {int(limit):,} are granted, {used}"
        yield ProjectFinding("warning" if exists else "error", what, f"ask for more: {command}")


def _taken_names(plan: ClusterPlan, kind: str) -> Findings:
    """Names of the plan that something else has already."""
    listing = BY_KIND[kind]
    names = {each.name for each in plan.resources if each.kind == kind}
    for each in cli.items(*listing.words, parent=plan.project):
        if cli.name_of(each) not in names or cli.is_ours(plan, each):
            continue
        other = "cluster.state_bucket" if kind == BUCKET_KIND else "name"
        yield ProjectFinding(
            "error",
            f"{kind_title(kind)} {cli.name_of(each)} exists, and is not of this cluster",
            f"choose another `{other}`, or look at it, and delete it:"
            f" {listing.deletion(cli.id_of(each))}",
        )


def _bodies(plan: ClusterPlan, kind: str) -> Iterator[Mapping[str, Any]]:
    yield from plan.terraform["resource"].get(kind, {}).values()


def _list(service: str, kind: str, plan: ClusterPlan, parent: str | None = None) -> str:
    return f"nebius {service} {kind} list --parent-id {parent or plan.project} --all"
