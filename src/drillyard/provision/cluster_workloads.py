"""What goes on in a cluster, and its end before the cluster's: everybody's runs, and what would
stay behind in the cloud.

Load balancers and disks are made by controllers inside of the cluster, so Terraform does not know
them: they must be gone while those controllers still run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from drillyard.errors import UserError
from drillyard.provision.cluster_chart import OWN_CHART
from drillyard.provision.progress import print_progress

if TYPE_CHECKING:
    from drillyard.launch.kubernetes.cluster_api import ApiServer

DELETE_SECONDS = 900.0
"""A run has its grace period to save, and a load balancer takes minutes."""
_POLL_SECONDS = 1.0
_GPU_SUFFIX = "/gpu"
_NEG = "cloud.google.com/neg"
_APPS, _INGRESS = "/apis/apps/v1", "/apis/networking.k8s.io/v1"
_GATEWAYS = "/apis/gateway.networking.k8s.io/v1"
_ENDED = ("Completed", "Complete", "Failed", "Finished")


@dataclass(frozen=True)
class RunningWorkload:
    """One thing that uses the cluster or waits for it."""

    kind: str
    namespace: str
    name: str
    state: str
    """`running` or `queued`."""
    gpus: int = 0
    """That its pods ask for, all together."""

    def __str__(self) -> str:
        gpus = f", {self.gpus} GPUs" if self.gpus else ""
        return f"{self.kind} {self.namespace}/{self.name} ({self.state}{gpus})"


def running_workloads(context: str | None) -> list[RunningWorkload]:
    """Every JobSet, Job, Workload of Kueue and pod with GPUs that has not ended, of all users and
    namespaces; what belongs to one of them is not listed again."""
    from drillyard.launch.kubernetes.cluster_api import CORE, JOBS, JOBSETS, ApiServer

    api = ApiServer(context)
    found: dict[str, RunningWorkload] = {}
    for kind, path in (
        ("JobSet", f"{JOBSETS}/jobsets"),
        ("Job", f"{JOBS}/jobs"),
        ("Workload", f"{api.kueue}/workloads"),
    ):
        for each in api.items(path):
            if not has_ended(each) and not _belongs(each, found):
                found[each["metadata"]["uid"]] = _workload(kind, each)
    owned = _owned_uids(api, found)
    for pod in api.items(f"{CORE}/pods"):
        gpus = _gpus_of(pod["spec"])
        over = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
        if gpus and not over and not _belongs(pod, owned):
            place = pod["metadata"]
            queued = not pod["spec"].get("nodeName")
            state = "queued" if queued else "running"
            found[place["uid"]] = RunningWorkload(
                "Pod", place["namespace"], place["name"], state, gpus
            )
    return sorted(found.values(), key=lambda each: (each.namespace, each.kind, each.name))


def has_ended(found: Mapping[str, Any]) -> bool:
    """Whether a JobSet, Job or Workload is over."""
    conditions = found.get("status", {}).get("conditions") or ()
    return any(each["type"] in _ENDED and each["status"] == "True" for each in conditions)


def delete_workloads(
    context: str | None,
    *,
    seconds: float = DELETE_SECONDS,
    notice: Callable[[str], None] = print_progress,
) -> list[str]:
    """End everything that runs, and delete what Terraform would leave behind: services with a load
    balancer, Ingresses and Gateways, volume claims and their volumes. Returns the disks that stay,
    since their volumes are to be kept (reclaim policy Retain).

    Deletes again what comes back meanwhile. Raises UserError after `seconds` with what is left and
    its finalizers.
    """
    from drillyard.launch.kubernetes.cluster_api import ApiServer

    api = ApiServer(context)
    kept = _retained_disks(api)
    until, said = time.monotonic() + seconds, set[str]()
    while left := list(_to_delete(api)):
        for each in left:
            if not each.deleted:
                if each.title not in said:
                    notice(f"deletes {each.title}")
                    said.add(each.title)
                api.delete_at(each.path, {"propagationPolicy": "Background"})
        if time.monotonic() > until:
            lines = [f"{each.title}{each.held_by}" for each in left]
            raise UserError(
                "\n".join([f"{api.title}: not deleted after {seconds:.0f} s:", *lines])
                + "\ngive the same command again; where a finalizer's controller is gone: kubectl"
                ' patch KIND NAME --type merge --patch \'{"metadata": {"finalizers": null}}\''
            )
        time.sleep(_POLL_SECONDS)
    return kept


@dataclass(frozen=True)
class _Left:
    title: str
    path: str
    deleted: bool
    held_by: str


def _to_delete(api: ApiServer) -> Iterator[_Left]:
    """What is to go and is still there: runs, then what uses volumes, then what the cloud has."""
    from drillyard.launch.kubernetes.cluster_api import CORE, JOBS, JOBSETS

    jobsets = api.items(f"{JOBSETS}/jobsets", metadata=True)
    yield from (_left(JOBSETS, "jobsets", each) for each in jobsets)
    uids = {each["metadata"]["uid"]: each for each in jobsets}
    for each in api.items(f"{JOBS}/jobs", metadata=True):
        if not _belongs(each, uids):
            yield _left(JOBS, "jobs", each)
    for kind in ("statefulsets", "deployments"):
        for each in api.items(f"{_APPS}/{kind}"):
            if each["spec"].get("volumeClaimTemplates") or claims_of(
                each["spec"]["template"]["spec"]
            ):
                yield _left(_APPS, kind, each)
    for each in api.items(f"{CORE}/services"):
        annotations = each["metadata"].get("annotations") or {}
        if each["spec"].get("type") == "LoadBalancer" or _NEG in annotations:
            yield _left(CORE, "services", each)
    yield from (_left(_INGRESS, "ingresses", each) for each in api.items(f"{_INGRESS}/ingresses"))
    yield from (_left(_GATEWAYS, "gateways", each) for each in api.items(f"{_GATEWAYS}/gateways"))
    claims = api.items(f"{CORE}/persistentvolumeclaims")
    names = {(each["metadata"]["namespace"], each["metadata"]["name"]) for each in claims}
    for pod in api.items(f"{CORE}/pods") if claims else ():
        namespace = pod["metadata"]["namespace"]
        used = {(namespace, claim) for claim in claims_of(pod["spec"])}
        if used & names and pod.get("status", {}).get("phase") not in ("Succeeded", "Failed"):
            yield _left(CORE, "pods", pod)
    yield from (_left(CORE, "persistentvolumeclaims", each) for each in claims)
    for each in api.items(f"{CORE}/persistentvolumes"):
        labels = each["metadata"].get("labels") or {}
        if labels.get("app.kubernetes.io/name") == OWN_CHART:
            # Of a directory, which stays; a claim that is made again would not get it back.
            yield _left(CORE, "persistentvolumes", each)
            continue
        policy = each["spec"].get("persistentVolumeReclaimPolicy")
        if policy == "Delete" and each["spec"].get("claimRef"):
            # Its controller deletes disk and volume once the claim is gone: a volume that is
            # deleted before leaves its disk.
            left, status = _left(CORE, "persistentvolumes", each), each.get("status", {})
            why = f": {status.get('phase')} {status.get('message', '')}".rstrip()
            yield replace(left, deleted=True, held_by=why)


def _left(group: str, kind: str, found: Mapping[str, Any]) -> _Left:
    place = found["metadata"]
    namespace, name = place.get("namespace"), place["name"]
    path = f"{group}/namespaces/{namespace}" if namespace else group
    title = "ingress" if kind == "ingresses" else kind.removesuffix("s")
    finalizers = ", ".join(place.get("finalizers") or ())
    held = f": waits for {finalizers}" if finalizers else ""
    return _Left(
        f"{title} {namespace + '/' if namespace else ''}{name}",
        f"{path}/{kind}/{name}",
        "deletionTimestamp" in place,
        held,
    )


def _retained_disks(api: ApiServer) -> list[str]:
    from drillyard.launch.kubernetes.cluster_api import CORE

    return [
        f"{each['metadata']['name']}: {each['spec']['csi'].get('volumeHandle', '')}"
        for each in api.items(f"{CORE}/persistentvolumes")
        if each["spec"].get("persistentVolumeReclaimPolicy") == "Retain" and "csi" in each["spec"]
    ]


def claims_of(pod: Mapping[str, Any]) -> set[str]:
    """The volume claims that a pod's spec names."""
    volumes = pod.get("volumes") or ()
    return {
        each["persistentVolumeClaim"]["claimName"]
        for each in volumes
        if each.get("persistentVolumeClaim")
    }


def _belongs(found: Mapping[str, Any], owners: Mapping[str, Any]) -> bool:
    return any(each["uid"] in owners for each in found["metadata"].get("ownerReferences") or ())


def _owned_uids(api: ApiServer, found: Mapping[str, RunningWorkload]) -> dict[str, object]:
    """The listed objects and the Jobs that belong to them: owners of their pods."""
    from drillyard.launch.kubernetes.cluster_api import JOBS

    jobs = {
        each["metadata"]["uid"]: each
        for each in api.items(f"{JOBS}/jobs", metadata=True)
        if _belongs(each, found)
    }
    return {**found, **jobs}


def _workload(kind: str, found: Mapping[str, Any]) -> RunningWorkload:
    spec, place = found["spec"], found["metadata"]
    if kind == "Workload":
        conditions = found.get("status", {}).get("conditions") or ()
        admitted = {each["type"] for each in conditions if each["status"] == "True"}
        state = "running" if "Admitted" in admitted else "queued"
        sets = [(each.get("count", 1), each["template"]["spec"]) for each in spec["podSets"]]
    else:
        state = "queued" if spec.get("suspend") else "running"
        sets = list(_pod_sets(kind, spec))
    gpus = sum(count * _gpus_of(pod) for count, pod in sets)
    return RunningWorkload(kind, place["namespace"], place["name"], state, gpus)


def _pod_sets(kind: str, spec: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    if kind == "Job":
        yield int(spec.get("parallelism") or 1), spec["template"]["spec"]
        return
    for each in spec["replicatedJobs"]:
        job = each["template"]["spec"]
        pods = int(each.get("replicas") or 1) * int(job.get("parallelism") or 1)
        yield pods, job["template"]["spec"]


def _gpus_of(pod: Mapping[str, Any]) -> int:
    containers: Sequence[Mapping[str, Any]] = pod.get("containers") or ()
    total = 0
    for each in containers:
        resources = each.get("resources") or {}
        amounts = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
        total += sum(int(count) for name, count in amounts.items() if name.endswith(_GPU_SUFFIX))
    return total
