"""The runs of a namespace, each put together from its objects: JobSet or Job, pods, Kueue's
Workload, events, and Helm's record.

Cost: five or six lists for any number of runs, and a call of Helm for each that was cancelled.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from drillyard.config.cluster import ClusterConfig
from drillyard.launch.kubernetes.helm_release import OF_HELM, HelmReleases, uid_of
from drillyard.launch.kubernetes.release import RUN_LABEL
from drillyard.launch.kubernetes.run_status import (
    LAUNCHED_FROM,
    RUN_DIRECTORY,
    RunObjects,
    status_of,
)
from drillyard.launch.launched_from import LaunchedFrom, recorded
from drillyard.launch.run_status import RunStatus

_OF_JOBSET = "jobset.sigs.k8s.io/jobset-name"  # on the Jobs that a JobSet has made


@dataclass(frozen=True)
class KubernetesRun:
    """A run, by the objects that it has now."""

    status: RunStatus
    pods: tuple[dict[str, Any], ...] = ()
    record: str | None = None
    """The uid of the Secret in which Helm keeps the release; None: there is none."""
    launched_from: LaunchedFrom | None = None

    @property
    def job_title(self) -> str:
        return f"release {self.status.handle.run}"

    @property
    def launch_directory(self) -> str:
        """As pods see it."""
        return f"{self.status.run_directory or ''}/launch"


def found_runs(
    cluster: ClusterConfig, releases: HelmReleases, selector: str
) -> list[KubernetesRun]:
    """The runs that a label selector matches, by their JobSet or Job and by Helm's records."""
    from drillyard.launch.kubernetes.cluster_api import CORE, JOBS, JOBSETS, by_run

    api = releases.api
    # Before the others: the objects of a release whose record is complete are there by then.
    kept = api.listed(CORE, "secrets", f"{OF_HELM},{selector}", metadata=True)
    with ThreadPoolExecutor() as pool:
        jobsets = pool.submit(api.listed, JOBSETS, "jobsets", selector)
        jobs = pool.submit(api.listed, JOBS, "jobs", f"{selector},!{_OF_JOBSET}")
        all_pods = pool.submit(api.listed, CORE, "pods", selector)
        queued = (
            pool.submit(api.listed, api.kueue, "workloads", needed=False)
            if releases.section.queue
            else None
        )
    controllers = dict(by_run([*jobsets.result(), *jobs.result()], RUN_LABEL))
    records = dict(by_run(kept, RUN_LABEL))
    pods: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for name, pod in by_run(all_pods.result(), RUN_LABEL):
        pods[name].append(pod)
    workloads = _Workloads(queued.result() if queued else [])
    may_start = any(
        not _ended(each) and not each["spec"].get("suspend") for each in controllers.values()
    )
    events = api.listed(CORE, "events", needed=False) if may_start else []
    found = _Found(controllers, records, pods, workloads, events)
    return [
        _run_of(name, found, cluster, releases) for name in dict.fromkeys([*controllers, *records])
    ]


@dataclass(frozen=True)
class _Found:
    """The objects of several runs, most of them by the run's name."""

    controllers: Mapping[str, dict[str, Any]]
    """JobSets and Jobs."""
    records: Mapping[str, dict[str, Any]]
    pods: Mapping[str, list[dict[str, Any]]]
    workloads: _Workloads
    events: Sequence[dict[str, Any]]


def _run_of(
    name: str, found: _Found, cluster: ClusterConfig, releases: HelmReleases
) -> KubernetesRun:
    controller, record = found.controllers.get(name), found.records.get(name)
    pods = found.pods.get(name, [])
    uid = None if controller is None else controller["metadata"]["uid"]
    workload = found.workloads.of(uid)
    own = [
        event
        for event in found.events
        if event.get("involvedObject", {}).get("name", "").startswith(name)
    ]
    ahead = found.workloads.ahead_of(workload)
    kept = controller or releases.controller(name)
    annotations = {} if kept is None else kept["metadata"].get("annotations", {})
    directory = annotations.get(RUN_DIRECTORY) if controller is None else None
    objects = RunObjects(
        name, controller, workload, pods, own, record, ahead, cluster.nodes, directory
    )
    return KubernetesRun(
        status_of(cluster.name, cluster.platform, objects),
        tuple(pods),
        uid_of(record),
        recorded(annotations.get(LAUNCHED_FROM, "")),
    )


def _ended(controller: dict[str, Any]) -> bool:
    conditions = controller.get("status", {}).get("conditions", ())
    return any(
        each["type"] in ("Completed", "Complete", "Failed") and each["status"] == "True"
        for each in conditions
    )


class _Workloads:
    """Kueue's Workloads, by the object that owns each, and their places in their queues."""

    def __init__(self, workloads: Sequence[dict[str, Any]]) -> None:
        self._by_owner = {
            owner["uid"]: each
            for each in workloads
            for owner in each["metadata"].get("ownerReferences", ())
        }
        self._waiting: dict[str | None, list[tuple[int, str]]] = defaultdict(list)
        for each in filter(_waits, workloads):
            self._waiting[each["spec"].get("queueName")].append(_place(each))
        for places in self._waiting.values():
            places.sort()

    def of(self, uid: str | None) -> dict[str, Any] | None:
        """The Workload of the object `uid`."""
        return self._by_owner.get(uid or "")

    def ahead_of(self, workload: dict[str, Any] | None) -> int | None:
        """Workloads of the same queue without quota that come before: of higher priority, or as
        high and older."""
        if workload is None:
            return None
        return bisect_left(self._waiting[workload["spec"].get("queueName")], _place(workload))


def _place(workload: dict[str, Any]) -> tuple[int, str]:
    return -int(workload["spec"].get("priority") or 0), str(
        workload["metadata"].get("creationTimestamp")
    )


def _waits(workload: dict[str, Any]) -> bool:
    reached = {
        found["type"]: found["status"] for found in workload.get("status", {}).get("conditions", ())
    }
    is_active: bool = workload["spec"].get("active", True)
    return "True" not in (reached.get("QuotaReserved"), reached.get("Finished")) and is_active
