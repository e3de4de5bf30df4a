"""What Google says of a request for the nodes of a managed group, and of the machines that it
brought."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drillyard.programs import parallel_map
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.google.api import ApiError, GoogleApis, google_apis
from drillyard.provision.made_hosts import MadeHost
from drillyard.provision.node_request import GROUP_KIND, NodeRequest

_AT_ONCE = 8


def node_request(plan: ClusterPlan, group: Mapping[str, Any]) -> NodeRequest:
    """What Google says of the request of a group, by the group's attributes `name` and `zone`. Its
    request has the group's name. Raises ApiError."""
    apis = google_apis(plan.project)
    names = {
        "project": plan.project,
        "zone": str(group["zone"]).rpartition("/")[2],
        "instanceGroupManager": str(group["name"]),
    }
    found = _asked(apis, names)
    members: list[str] = []
    try:
        for page in apis.pages("compute", "instanceGroupManagers.listManagedInstances", **names):
            members += [str(each["instance"]) for each in page.get("managedInstances") or ()]
    except ApiError as error:
        if error.refusal != "absent":
            raise
    made = parallel_map(lambda each: _host(apis, names, each), members, _AT_ONCE)
    hosts = sorted((each for each in made if each is not None), key=lambda each: each.name)
    return NodeRequest(str(found.get("state") or ""), _why(found), tuple(hosts), len(members))


def _asked(apis: GoogleApis, names: Mapping[str, str]) -> Mapping[str, Any]:
    request = names["instanceGroupManager"]
    try:
        return apis.call(
            "compute", "instanceGroupManagerResizeRequests.get", **names, resizeRequest=request
        )
    except ApiError as error:
        if error.refusal == "absent":
            return {}
        raise


def _why(found: Mapping[str, Any]) -> str:
    """The error that ended it, or that its last attempt met."""
    status = found.get("status")
    for holder in (status, status.get("lastAttempt") if isinstance(status, dict) else None):
        error = holder.get("error") if isinstance(holder, dict) else None
        for each in (error or {}).get("errors") or ():
            return str(each.get("message") or each.get("code"))
    return ""


def _host(apis: GoogleApis, names: Mapping[str, str], address: str) -> MadeHost | None:
    """A machine of the group; None where it does not run yet, or no longer."""
    name = address.rpartition("/")[2]
    try:
        body = apis.call(
            "compute", "instances.get", project=apis.project, zone=names["zone"], instance=name
        )
    except ApiError as error:
        if error.refusal == "absent":
            return None
        raise
    if body.get("status") != "RUNNING":
        return None
    (first, *_) = body.get("networkInterfaces") or [{}]
    (outside, *_) = first.get("accessConfigs") or [{}]
    return MadeHost(
        f"{GROUP_KIND}.nodes",
        name,
        names["zone"],
        str(first.get("networkIP") or ""),
        str(outside.get("natIP") or ""),
        str(body.get("id") or ""),
        str(body.get("creationTimestamp") or ""),
    )
