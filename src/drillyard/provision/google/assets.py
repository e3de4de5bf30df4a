"""Cloud Asset inventory: everything of a project with a label or a name, of any service.

It may be minutes old, and knows kinds that no list of ours covers
(https://cloud.google.com/asset-inventory/docs/query-syntax).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drillyard.provision.cluster_plan import CLUSTER_LABEL
from drillyard.provision.google.api import ApiError, GoogleApis
from drillyard.provision.google.inventory import Inventory, Thing, path_in
from drillyard.provision.google.listings import LISTINGS, Listing
from drillyard.provision.google.resource_marks import GKE_NAME_LABEL
from drillyard.provision.leak_report import Gap

_SERVICE, _METHOD = "cloudasset", "v1.searchAllResources"
_NAME = re.compile(r"^//(?P<service>[a-z]+)\.googleapis\.com/(?P<rest>.+)$")


@dataclass(frozen=True)
class Asset:
    """One resource by the inventory; `path` as a Thing has it."""

    kind: str
    name: str
    location: str
    service: str
    path: str
    labels: Mapping[str, str]
    description: str | None


def search_assets(apis: GoogleApis, cluster: str) -> tuple[list[Asset], list[Gap]]:
    """What has the cluster's label, GKE's label for it, or its name. Raises CredentialsError."""
    found: dict[str, Asset] = {}
    queries = (
        f"labels.{CLUSTER_LABEL}={cluster}",
        f"labels.{GKE_NAME_LABEL}={cluster}",
        f"name:{cluster}",
    )
    try:
        for query in queries:
            pages = apis.pages(
                _SERVICE, _METHOD, scope=f"projects/{apis.project}", query=query, pageSize=500
            )
            for page in pages:
                for body in page.get("results") or ():
                    if asset := _asset(body, apis):
                        found[f"{asset.service}/{asset.path}"] = asset
    except ApiError as error:
        why = str(error)
        if error.refusal == "disabled":
            why = (
                "not enabled, so kinds without a list of their own were not searched:"
                f" gcloud services enable cloudasset.googleapis.com"
                f" --project={apis.project}"
            )
        return list(found.values()), [Gap(_SERVICE, _METHOD, why)]
    return list(found.values()), []


def things_of_gaps(
    assets: Iterable[Asset], inventory: Inventory, rows: Sequence[Listing] = LISTINGS
) -> Iterator[Thing]:
    """Assets whose own list of `rows` was refused or had a gap. Where the list was given, it
    decides: an asset that it lacks has been deleted meanwhile. What may be only a record of what
    was is left out: the gap says that it is not known."""
    gaps = {(each.service, each.method) for each in inventory.gaps}
    known = {each.path for each in inventory.things}
    for asset in assets:
        row = _row_of(asset.service, _collections(asset.path)[0], rows)
        if row is None or row.ended or (row.service, row.method) not in gaps or asset.path in known:
            continue
        body: dict[str, Any] = {"name": asset.name, "labels": asset.labels}
        if asset.description:
            body["description"] = asset.description
        yield Thing(row.kind, asset.name, asset.location, asset.path, body, row)


def unlisted(
    assets: Iterable[Asset], cluster: str, rows: Sequence[Listing] = LISTINGS
) -> Iterator[Asset]:
    """Assets with the cluster's label that no list covers, nor a list of what they are in: objects
    of Kubernetes, images of a repository."""
    for asset in assets:
        if asset.labels.get(CLUSTER_LABEL) == cluster:
            found = (_row_of(asset.service, each, rows) for each in _collections(asset.path))
            if not any(found):
                yield asset


def _asset(body: Mapping[str, Any], apis: GoogleApis) -> Asset | None:
    found = _NAME.match(str(body.get("name")))
    if found is None:
        return None
    service, rest = found["service"], found["rest"]
    path = path_in(apis.project, apis.number(), rest) if "/" in rest else rest
    if path is None:
        return None
    if service == "container":
        path = re.sub("^zones/", "locations/", path)
    elif service == "storage":
        path = f"storage:items/{path}"
    elif service != "compute":
        path = f"{service}:{path}"
    location = str(body.get("location") or "")
    return Asset(
        kind=str(body.get("assetType")),
        name=path.rpartition("/")[2],
        location="" if location == "global" else location,
        service=service,
        path=path,
        labels=body.get("labels") or {},
        description=body.get("description"),
    )


def _collections(path: str) -> list[str]:
    """What a path is in, the innermost first: `nodePools`, `train`, `clusters`."""
    return (path.partition(":")[2] or path).split("/")[-2::-1]


def _row_of(service: str, collection: str, rows: Sequence[Listing]) -> Listing | None:
    for row in rows:
        if row.service == service and collection in (row.items, row.method.split(".")[-2]):
            return row
    return None
