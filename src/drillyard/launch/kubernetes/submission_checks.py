"""What the cluster itself is asked before a run is submitted: nothing is created.

A dry run of a JobSet alone accepts pods that its namespace forbids, so three objects are tried: the
JobSet, a Job of its template and a Pod of that. So are claims on devices.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from drillyard.errors import UserError
from drillyard.launch.kubernetes.cluster_api import CORE, JOBS, JOBSETS, ClusterApi
from drillyard.launch.kubernetes.config import KubernetesConfig
from drillyard.launch.kubernetes.rights import READS, rights_for

JOBSET_VERSION = "0.10.1"
"""The first version that was seen to match messages of failed Jobs."""
_PATTERNS = "onJobFailureMessagePatterns"
_DEVICES = {
    "ResourceClaimTemplate": ("/apis/resource.k8s.io/v1", "resourceclaimtemplates"),
    "ComputeDomain": ("/apis/resource.nvidia.com/v1beta1", "computedomains"),
}


def require_cluster(
    api: ClusterApi, section: KubernetesConfig, values: Mapping[str, Any]
) -> list[str]:
    """Raise UserError where JobSet, Kueue's queue, a Secret or a right is missing; returns what
    could not be checked, and what will not be shown, for lack of a right to read."""
    if section.controller == "jobset":
        _require_jobset(api)
    missing = [
        f"{verb} {resource}"
        for verb, group, resource in rights_for(values)
        if not api.may(verb, group, resource)
    ]
    if missing:
        raise UserError(
            f"{api.title}: you may not {', '.join(missing)}\n"
            "Ask its administrator for the Role that `drillyard launch ... --explain` prints"
        )
    unread = {read: lost for read, lost in READS.items() if not api.may(*read)}
    if section.queue is None:
        unread = {read: lost for read, lost in unread.items() if "kueue" not in read[1]}
    elif ("get", "kueue.x-k8s.io", "localqueues") not in unread and api.one(
        f"{api.kueue}/namespaces/{section.namespace}/localqueues/{section.queue}"
    ) is None:
        raise UserError(
            f"cluster config: kubernetes.queue: there is no LocalQueue {section.queue} in namespace"
            f" {section.namespace}; these are: kubectl -n {section.namespace} get localqueues"
        )
    unread |= _require_priority_class(api, section.priority_class)
    for variable, each in section.secrets.items():
        secret, _, key = each.partition("/")
        found = api.one(f"{CORE}/namespaces/{section.namespace}/secrets/{secret}")
        if found is None or key not in found.get("data", {}):
            raise UserError(
                f"cluster config: kubernetes.secrets.{variable}: namespace {section.namespace} has"
                " no Secret "
                f"{secret} with the key {key}\nkubectl -n {section.namespace} create secret"
                " generic "
                f'{secret} --from-literal {key}="..."'
            )
    return [
        f"not checked: {lost}: you may not {verb} {resource}"
        for (verb, _, resource), lost in unread.items()
    ]


def _require_priority_class(api: ClusterApi, name: str | None) -> dict[tuple[str, str, str], str]:
    """Raise UserError where Kueue has no WorkloadPriorityClass of that name: it would never look at
    the run. The class is in no namespace, so the least Role gives no right to read it: then what is
    not checked."""
    if name is None:
        return {}
    right = ("get", "kueue.x-k8s.io", "workloadpriorityclasses")
    if not api.may(*right, cluster_wide=True):
        return {right: f"whether there is a WorkloadPriorityClass {name}"}
    if api.one(f"{api.kueue}/workloadpriorityclasses/{name}") is None:
        raise UserError(
            f"cluster config: kubernetes.priority_class: the cluster has no WorkloadPriorityClass"
            f" {name}, so the run would wait for ever; these are: kubectl get"
            " workloadpriorityclasses"
        )
    return {}


def _require_jobset(api: ClusterApi) -> None:
    schema = api.one("/openapi/v3/apis/jobset.x-k8s.io/v1alpha2")
    install = (
        f"install JobSet {JOBSET_VERSION} or later (helm install jobset"
        " oci://registry.k8s.io/jobset/charts/jobset), or set kubernetes.controller: job in the"
        " cluster config, where nothing restarts a run"
    )
    if schema is None:
        raise UserError(f"{api.title}: has no JobSet, which restarts runs\n{install}")
    if _PATTERNS not in str(schema):
        raise UserError(
            f"{api.title}: its JobSet has no {_PATTERNS}, so it would restart every"
            f" failure\n{install}"
        )


def require_accepted(api: ClusterApi, manifests: str) -> None:
    """Raise UserError where the server would not create the run's objects. `manifests`: as `helm
    template` prints."""
    for group, kind, body in tried_objects(list(yaml.safe_load_all(manifests))):
        api.dry_run(group, kind, body)


def tried_objects(objects: list[Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """The objects to try: of a JobSet also a Job of its template, and of a Job also its Pod; claims
    on devices.

    Under another name of the same length, as a run of this name may be there.
    """
    for given in filter(None, objects):
        each = copy.deepcopy(given)
        name = each["metadata"]["name"]
        each["metadata"]["name"] = f"d{hashlib.sha256(name.encode()).hexdigest()}"[: len(name)]
        if each["kind"] == "JobSet":
            yield JOBSETS, "jobsets", each
            template = copy.deepcopy(each["spec"]["replicatedJobs"][0]["template"]["spec"])
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": dict(each["metadata"])}
            yield from _job_and_pod({**job, "spec": {**template, "suspend": True}})
        elif each["kind"] == "Job":
            yield from _job_and_pod(each)
        elif each["kind"] in _DEVICES:
            yield *_DEVICES[each["kind"]], each


def _job_and_pod(job: dict[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    name, pod = job["metadata"]["name"], copy.deepcopy(job["spec"]["template"])
    # Kueue would count a Job of the queue.
    labels = {
        key: value for key, value in job["metadata"].get("labels", {}).items() if "kueue" not in key
    }
    job["metadata"] = {"name": name, "labels": labels}
    yield JOBS, "jobs", job
    metadata = {**pod["metadata"], "name": f"{name}-w-0-0"}
    yield (
        CORE,
        "pods",
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod["spec"]},
    )
