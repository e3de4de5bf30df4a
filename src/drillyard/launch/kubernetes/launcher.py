"""Platform `kubernetes`: a run is one Helm release of the chart `drillyard-run`, of the run's name.

Helm submits and removes, JobSet restarts, Kueue queues, and this launcher reads. A release is never
upgraded: a JobSet cannot be changed. Helm's record keeps a cancelled run's chart and values, from
which it is resumed. Of several launches of a name at once, the one that gets the submit lock
removes the earlier run's release and makes its own; the others are refused.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
import tempfile
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from drillyard.errors import UserError
from drillyard.launch.agent.job import LAUNCHED_FROM as RECORD
from drillyard.launch.kubernetes import nodes
from drillyard.launch.kubernetes.config import KubernetesConfig
from drillyard.launch.kubernetes.release import (
    CHART,
    CLUSTER_LABEL,
    RUN_LABEL,
    VALUES,
    chart_files,
    helm_argv,
    install_argv,
    plan_of,
)
from drillyard.launch.kubernetes.run_status import (
    LAUNCHED_FROM,
    RUN_DIRECTORY,
    RunObjects,
    lost_nodes,
    status_of,
)
from drillyard.launch.kubernetes.submit_lock import submit_lock
from drillyard.launch.launched_from import LaunchedFrom, recorded
from drillyard.launch.launcher import Launcher, cancel_notice
from drillyard.launch.plan import Plan, Program
from drillyard.launch.remote_files import Files, print_notice
from drillyard.launch.request import LaunchRequest
from drillyard.launch.run_status import Handle, RunStatus
from drillyard.launch.submit_lock import being_launched_error
from drillyard.plan_files import PlanFile
from drillyard.programs import Result, defer_interrupt, require_success

if TYPE_CHECKING:
    from drillyard.launch.kubernetes.cluster_api import ClusterApi

_POLL_SECONDS = 0.5
_RECORD = "owner=helm"
_SUBMISSION_LABEL = "drillyard/submission"
"""On Helm's record: the submission that made it, a random number that no plan has."""
_NO_RELEASE = "release: not found"
"""In Helm's error where there is no release of a name (helm, pkg/storage/driver)."""
_UNINSTALLED = "is already deleted"
"""In that of `uninstall --keep-history` where another cancel has done it (pkg/action)."""
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


class KubernetesLauncher(Launcher[KubernetesRun]):
    """Runs of one namespace of a Kubernetes cluster."""

    reads_after_end = False
    keeps_record = True

    @cached_property
    def _section(self) -> KubernetesConfig:
        return self.cluster.section_as(KubernetesConfig)

    @cached_property
    def _api(self) -> ClusterApi:
        from drillyard.launch.kubernetes.cluster_api import ClusterApi

        return ClusterApi.of(self.cluster)

    def plan(self, request: LaunchRequest) -> Plan:
        return plan_of(request)

    def rendered(self, plan: Plan) -> str:
        argv = (
            "helm",
            "template",
            plan.job.run,
            CHART,
            "--namespace",
            self._section.namespace,
            "--values",
            VALUES,
        )
        result = self._helm(argv, plan.files)
        return require_success(result, f"{plan.handle}: helm template").stdout

    def check(self, plan: Plan) -> None:
        from drillyard.launch.kubernetes.submission_checks import require_accepted, require_cluster

        for line in require_cluster(
            self._api, self._section, json.loads(plan.file(VALUES).content)
        ):
            print_notice(f"warning: {line}")
        require_accepted(self._api, self.rendered(plan))

    def idle_nodes(self, request: LaunchRequest) -> list[str] | None:
        return nodes.idle_nodes(self._api, request)

    def nodes_short_of_gpus(self, request: LaunchRequest) -> dict[str, str]:
        return nodes.nodes_short_of_gpus(self._api, request)

    def drain(self, node: str, reason: str) -> str | None:
        if not nodes.cordon(self._api, node, reason):
            return None
        context = ("--context", self._section.context) if self._section.context else ()
        return shlex.join(["kubectl", *context, "uncordon", node])

    def newest_submission(self, run: str) -> str | None:
        # Without the right to list Secrets: require_cluster lists all rights that are missing.
        return _uid(self._record(run, needed=False))

    @contextlib.contextmanager
    def submit_lock(self, handle: Handle, seen: str | None) -> Iterator[None]:
        with submit_lock(self._api, handle, self._section.grace_seconds):
            record = self._record(handle.run)
            if record is not None and _uid(record) != seen:
                raise self._taken_error(handle, record)
            yield

    def find(self, names: Collection[str] | None = None) -> list[KubernetesRun]:
        own = f"{CLUSTER_LABEL}={self.cluster.name}"
        if names is None:
            return self._found(own)
        return [run for name in names for run in self._found(f"{own},{RUN_LABEL}={name}")]

    def _found(self, selector: str) -> list[KubernetesRun]:
        """The runs that a label selector matches, by their JobSet or Job and by Helm's records."""
        from drillyard.launch.kubernetes.cluster_api import CORE, JOBS, JOBSETS, by_run

        api = self._api
        # Before the others: the objects of a release whose record is complete are there by then.
        kept = api.listed(CORE, "secrets", f"{_RECORD},{selector}", metadata=True)
        with ThreadPoolExecutor() as pool:
            jobsets = pool.submit(api.listed, JOBSETS, "jobsets", selector)
            jobs = pool.submit(api.listed, JOBS, "jobs", f"{selector},!{_OF_JOBSET}")
            all_pods = pool.submit(api.listed, CORE, "pods", selector)
            queued = (
                pool.submit(api.listed, api.kueue, "workloads", needed=False)
                if self._section.queue
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
        return [
            self._run_of(
                name, controllers.get(name), pods[name], workloads, events, records.get(name)
            )
            for name in dict.fromkeys([*controllers, *records])
        ]

    def _run_of(
        self,
        name: str,
        controller: dict[str, Any] | None,
        pods: list[dict[str, Any]],
        workloads: _Workloads,
        events: list[dict[str, Any]],
        record: dict[str, Any] | None,
    ) -> KubernetesRun:
        uid = None if controller is None else controller["metadata"]["uid"]
        workload = workloads.of(uid)
        own = [
            event
            for event in events
            if event.get("involvedObject", {}).get("name", "").startswith(name)
        ]
        ahead = workloads.ahead_of(workload)
        kept = controller or self._controller(name)
        annotations = {} if kept is None else kept["metadata"].get("annotations", {})
        directory = annotations.get(RUN_DIRECTORY) if controller is None else None
        objects = RunObjects(
            name, controller, workload, pods, own, record, ahead, self.cluster.nodes, directory
        )
        return KubernetesRun(
            status_of(self.cluster.name, self.cluster.platform, objects),
            tuple(pods),
            _uid(record),
            recorded(annotations.get(LAUNCHED_FROM, "")),
        )

    def launched_from(self, run: KubernetesRun) -> LaunchedFrom | None:
        return run.launched_from

    def files(self) -> Files:
        from drillyard.launch.kubernetes.pod_files import PodFiles

        return PodFiles(self._api, self._section, self.programs, self._pod_of)

    def _pod_of(self, path: str) -> str | tuple[str, dict[str, Any]] | None:
        """A running pod of the run whose directory contains `path`, on a node that is not lost; of
        one that is over its name and pods' template."""
        for run in self.find():
            directory = run.status.run_directory
            if (directory and path.startswith(f"{directory}/")) or path == directory:
                lost = lost_nodes(run.pods)
                for pod in run.pods:
                    if (
                        pod.get("status", {}).get("phase") == "Running"
                        and pod["spec"].get("nodeName") not in lost
                    ):
                        return str(pod["metadata"]["name"])
                if not run.status.state.over:
                    return None
                name = run.status.handle.run
                kept = self._controller(name)
                return None if kept is None else (name, _pod_template(kept))
        return None

    def _controller(self, run: str) -> dict[str, Any] | None:
        """The JobSet or Job of a run as Helm's record has it: that of a cancelled run too. None
        where another command has removed it since it was listed."""
        asked = self._helm(helm_argv(self._section, "get", "manifest", run))
        if asked.returncode != 0 and _NO_RELEASE in asked.stderr:
            return None
        objects = yaml.safe_load_all(require_success(asked, f"{run}: helm get manifest").stdout)
        kinds = ("JobSet", "Job")
        found: dict[str, Any] = next(each for each in objects if each and each["kind"] in kinds)
        return found

    def execute(
        self, plan: Plan, secrets_json: PlanFile, existing: Sequence[KubernetesRun]
    ) -> None:
        for run in existing:
            self.remove(run)
        (install,) = plan.steps
        assert isinstance(install, Program)
        self._install(plan.handle, install.argv, _with_annotation(plan))

    def configs(self, run: KubernetesRun) -> list[PlanFile]:
        # Its secrets are in the release's values.
        return []

    def resubmit(self, run: KubernetesRun, secrets_json: PlanFile) -> None:
        handle = run.status.handle
        argv = helm_argv(self._section, "get", "values", handle.run, "--output", "json")
        values = require_success(self._helm(argv), f"{handle}: helm get values").stdout
        self.remove(run)
        argv = install_argv(self._section, self.cluster.name, handle.run)
        self._install(handle, argv, (PlanFile(VALUES, values, 0o600), *chart_files()))

    def _install(self, handle: Handle, argv: Sequence[str], files: Sequence[PlanFile]) -> None:
        submission = secrets.token_hex(8)
        *words, labels = argv[: argv.index("--labels") + 2]
        own = f"{labels},{_SUBMISSION_LABEL}={submission}"
        with defer_interrupt(str(handle)):
            result = self._helm((*words, own, *argv[len(words) + 1 :]), files)
        if result.returncode == 0:
            return
        record = self._record(handle.run)
        if record is not None and record["metadata"]["labels"].get(_SUBMISSION_LABEL) != submission:
            raise self._taken_error(handle, record)
        if record is not None:
            # A failed installation of ours leaves its record and perhaps objects.
            self._helm(helm_argv(self._section, "uninstall", handle.run, "--ignore-not-found"))
        require_success(result, f"{handle}: nothing was submitted: helm install")

    def _taken_error(self, handle: Handle, record: dict[str, Any]) -> UserError:
        """The error where the release of a run's name is another launch's."""
        namespace = self._section.namespace
        release = f"Helm release {handle.run} of namespace {namespace}"
        cluster = record["metadata"].get("labels", {}).get(CLUSTER_LABEL)
        if cluster == handle.cluster:
            return being_launched_error(handle, release)
        whose = f"of cluster config {cluster}" if cluster else "which Drillyard did not make"
        return UserError(
            f"{handle}: its name is that of {release}, {whose}; nothing was submitted\n"
            f"give this run another name; helm status {handle.run} --namespace {namespace} shows"
            " that one"
        )

    def _record(self, name: str, *, needed: bool = True) -> dict[str, Any] | None:
        """Metadata of Helm's record of this name, of whichever launch made it. Not `needed`: None,
        too, where this user may not list Secrets."""
        from drillyard.launch.kubernetes.cluster_api import CORE

        selector = f"{_RECORD},name={name}"
        found = self._api.listed(CORE, "secrets", selector, metadata=True, needed=needed)
        return found[-1] if found else None

    def stop(self, run: KubernetesRun) -> RunStatus:
        name = run.status.handle.run
        if run.pods and all(pod["metadata"].get("deletionTimestamp") for pod in run.pods):
            for pod in run.pods:
                self._api.delete_pod(pod["metadata"]["name"], 1)
        else:
            self._uninstall(run, "--keep-history")
        with cancel_notice(run.status.handle, self._section.grace_seconds):
            self._await_gone(name)
        return self.status(name)

    def may_still_run(self, run: KubernetesRun) -> bool:
        return any(pod["metadata"].get("deletionTimestamp") for pod in run.pods)

    def remove(self, run: KubernetesRun) -> None:
        """Remove a run that is over, with Helm's record, and wait until none of its objects is
        left. Raises UserError where another release has its name now."""
        from drillyard.launch.kubernetes.pod_files import delete_reading_pods

        self._uninstall(run)
        name = run.status.handle.run
        delete_reading_pods(self._api, name)
        self._await_gone(name)

    def _uninstall(self, found: KubernetesRun, *options: str) -> None:
        """Uninstall the release of a run. Raises UserError where another one has its name now."""
        handle = found.status.handle
        if (record := self._record(handle.run)) is not None and _uid(record) != found.record:
            raise UserError(
                f"{handle}: has been launched again since it was read; nothing was removed\n"
                f"see drillyard runs status {handle}, then give the same command again"
            )
        argv = helm_argv(self._section, "uninstall", handle.run, *options, "--ignore-not-found")
        result = self._helm(argv)
        if _UNINSTALLED not in result.stderr:
            require_success(result, f"{handle}: helm uninstall")

    def _await_gone(self, run: str) -> None:
        """Wait until the run has neither JobSet nor pods: a lost node's pods end once it is back or
        released."""
        from drillyard.launch.kubernetes.cluster_api import CORE, JOBS, JOBSETS

        selector = f"{CLUSTER_LABEL}={self.cluster.name},{RUN_LABEL}={run}"
        deadline = time.monotonic() + self._section.grace_seconds + 120.0
        kinds = ((JOBSETS, "jobsets"), (JOBS, "jobs"), (CORE, "pods"))
        while left := [
            each
            for group, kind in kinds
            for each in self._api.listed(group, kind, selector, metadata=True)
        ]:
            if time.monotonic() > deadline:
                names = ", ".join(each["metadata"]["name"] for each in left[:4])
                raise UserError(
                    f"{run}: {names} cannot end; its node may be lost: kubectl -n"
                    f" {self._section.namespace} get pods -l {RUN_LABEL}={run} -o wide"
                )
            time.sleep(_POLL_SECONDS)

    def log_files(self, run: KubernetesRun) -> Files:
        from drillyard.launch.kubernetes.pod_logs import PodLogs

        status = run.status
        selector = f"{CLUSTER_LABEL}={self.cluster.name},{RUN_LABEL}={status.handle.run}"
        size = (status.nodes, _processes_per_node(run.pods))
        return PodLogs(self._api, selector, status.run_directory or "", self.files(), *size)

    def _helm(self, argv: Sequence[str], files: Sequence[PlanFile] = ()) -> Result:
        """Run Helm in a directory with these files."""
        with tempfile.TemporaryDirectory(prefix="drillyard-") as directory:
            for file in files:
                path = Path(directory, file.path)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch(file.mode)
                path.write_text(file.content, encoding="utf-8")
            return self.programs.run(argv, directory=Path(directory))


def _with_annotation(plan: Plan) -> list[PlanFile]:
    """The files of a plan, with the record of where it is launched as an annotation of its values:
    a run here has no launch directory."""
    files = {file.path: file for file in plan.files}
    values, record = json.loads(files[VALUES].content), files.pop(RECORD)
    values["annotations"] = {**values["annotations"], LAUNCHED_FROM: record.content.strip()}
    files[VALUES] = replace(files[VALUES], content=json.dumps(values, indent=2) + "\n")
    return list(files.values())


def _uid(record: dict[str, Any] | None) -> str | None:
    """The uid of Helm's record; None where there is none."""
    return None if record is None else str(record["metadata"]["uid"])


def _pod_template(controller: dict[str, Any]) -> dict[str, Any]:
    spec = controller["spec"]
    if controller["kind"] == "JobSet":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    template: dict[str, Any] = spec["template"]
    return template


def _processes_per_node(pods: Sequence[dict[str, Any]]) -> int:
    variables = [each for pod in pods[:1] for each in pod["spec"]["containers"][0].get("env", ())]
    return next((int(each["value"]) for each in variables if each["name"] == "NPROC_PER_NODE"), 1)


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
