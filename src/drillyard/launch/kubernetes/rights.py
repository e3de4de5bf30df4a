"""Rights in a namespace that a run needs: verb, API group and resource of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_RIGHTS = (
    *((verb, "jobset.x-k8s.io", "jobsets") for verb in ("create", "delete", "get", "list")),
    *((verb, "batch", "jobs") for verb in ("create", "delete", "get", "list")),
    *((verb, "", "pods") for verb in ("create", "delete", "get", "list")),
    *(
        (verb, "", resource)
        for resource in ("configmaps", "secrets")
        for verb in ("create", "delete", "get", "list")
    ),
    ("update", "", "secrets"),
    ("create", "", "pods/exec"),
    ("get", "", "pods/log"),
)
"""What submitting, reading and cancelling a run needs: verb, API group and resource. Helm's records
are Secrets; Jobs and Pods are created as dry runs only."""
READS = {
    ("get", "kueue.x-k8s.io", "localqueues"): "whether the queue is there",
    ("list", "kueue.x-k8s.io", "localqueues"): "which queues there are",
    (
        "list",
        "kueue.x-k8s.io",
        "workloads",
    ): "a run's place in the queue, and why it does not leave it",
    ("list", "", "events"): "why a pod does not start",
}
"""Rights that only tell more, and what is not checked or shown without each."""
_SERVICES = tuple((verb, "", "services") for verb in ("create", "delete", "get"))
_CLAIMS = tuple(
    (verb, "resource.k8s.io", "resourceclaimtemplates") for verb in ("create", "delete", "get")
)
_DOMAINS = tuple(
    (verb, "resource.nvidia.com", "computedomains") for verb in ("create", "delete", "get")
)


def rights_for(values: Mapping[str, Any]) -> tuple[tuple[str, str, str], ...]:
    """The rights that a run with these values needs, without READS."""
    network = values.get("network", {})
    services = _SERVICES if values.get("controller") == "job" else ()
    claims = _CLAIMS if "deviceClaim" in network else ()
    return (*_RIGHTS, *services, *claims, *(_DOMAINS if "computeDomainNodes" in network else ()))
