"""What labels, metadata, names and places of Google Cloud's things say about where they come from.

Names of load balancers contain a hash of the Kubernetes cluster that made them (`k8s1-HASH-...`,
`k8s-be-PORT--HASH`: https://github.com/kubernetes/ingress-gce, pkg/utils/namer).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from drillyard.provision.google.inventory import Thing

GKE_NAME_LABEL = "goog-k8s-cluster-name"
"""On nodes, their disks and volumes
(https://cloud.google.com/kubernetes-engine/docs/how-to/creating-managing-labels)."""
GKE_LOCATION_LABEL = "goog-k8s-cluster-location"
GKE_POOL_LABEL = "goog-k8s-node-pool-name"
_TOKENS = (
    re.compile(r"^k8s1-(?P<token>[0-9a-z]{8})-"),
    re.compile(r"^k8s2-(?:[a-z]{2}-)?(?P<token>[0-9a-z]{8})-"),
    re.compile(r"--(?P<token>[0-9a-f]{8})[0-9a-f]{8}(?:--|$)"),
    re.compile(r"^k8s-(?P<token>[0-9a-f]{8})[0-9a-f]{8}-node"),
    re.compile(r"^(?P<token>gkegw\d-[0-9a-z]{4})-"),
    re.compile(r"(?:^|-)(?P<token>a[0-9a-f]{31})(?:-|$)"),
)
MADE_BY_KUBERNETES = re.compile(
    r"^(pvc-|snapshot-[0-9a-f]{8}-|k8s\d?-|k8s-|gkegw\d-|mcrt-|a[0-9a-f]{31}$)"
)


def plain_kind(kind: str) -> str:
    """Terraform's name of a kind wherever it lies: google_compute_region_disk is a disk. The
    peering with Google's services is listed as one of the VPC."""
    if kind == "google_service_networking_connection":
        return "google_compute_network_peering"
    return re.sub(r"^google_compute_(region|global)_", "google_compute_", kind)


def region_of(location: str | None) -> str:
    """The region of a zone or region, in lower case; empty for what is global."""
    place = (location or "").lower()
    if place in ("global", "-"):
        return ""
    return re.sub(r"^([a-z]+(?:-[a-z]+)+\d+)-[a-z0-9]+$", r"\1", place)


def labels_of(thing: Thing) -> Mapping[str, str]:
    """Its labels; those of a template are what it gives to instances."""
    body = thing.body
    for holder in (body, body.get("properties") or {}):
        for key in ("labels", "resourceLabels", "userLabels"):
            if isinstance(found := holder.get(key), Mapping):
                return found
    return {}


def metadata_of(body: Mapping[str, Any]) -> Mapping[str, str]:
    """The metadata of an instance or template."""
    items = (body.get("metadata") or {}).get("items") or ()
    return {str(each.get("key")): str(each.get("value")) for each in items}


def tokens_of(name: str) -> Iterator[str]:
    """The hashes in a name by which a Kubernetes cluster marks what it makes."""
    for pattern in _TOKENS:
        if found := pattern.search(name):
            yield found["token"]
