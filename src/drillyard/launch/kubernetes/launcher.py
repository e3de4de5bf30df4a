"""Platform `kubernetes`: a run is one Helm release of the chart `drillyard-run`, of the run's name.

Helm submits and removes, JobSet restarts, Kueue queues, and this launcher reads. A release is never
upgraded: a JobSet cannot be changed. Helm's record keeps a cancelled run's chart and values, from
which it is resumed. Of several launches of a name at once, the one that gets the submit lock
removes the earlier run's release and makes its own; the others are refused.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from drillyard.launch.agent.job import LAUNCHED_FROM as RECORD
from drillyard.launch.kubernetes import nodes
from drillyard.launch.kubernetes.config import KubernetesConfig
from drillyard.launch.kubernetes.found_runs import KubernetesRun, found_runs
from drillyard.launch.kubernetes.helm_release import HelmReleases, run_helm, uid_of
from drillyard.launch.kubernetes.release import (
    CHART,
    CLUSTER_LABEL,
    RUN_LABEL,
    VALUES,
    chart_files,
    install_argv,
    plan_of,
)
from drillyard.launch.kubernetes.run_status import LAUNCHED_FROM, lost_nodes
from drillyard.launch.kubernetes.submit_lock import submit_lock
from drillyard.launch.launched_from import LaunchedFrom
from drillyard.launch.launcher import Launcher, cancel_notice
from drillyard.launch.plan import Plan, Program
from drillyard.launch.remote_files import Files, print_notice
from drillyard.launch.request import LaunchRequest
from drillyard.launch.run_status import Handle, RunStatus
from drillyard.plan_files import PlanFile
from drillyard.programs import require_success

if TYPE_CHECKING:
    from drillyard.launch.kubernetes.cluster_api import ClusterApi


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

    @cached_property
    def _releases(self) -> HelmReleases:
        return HelmReleases(self.cluster.name, self._section, self._api, self.programs)

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
        result = run_helm(self.programs, argv, plan.files)
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
        return uid_of(self._releases.record(run, needed=False))

    @contextlib.contextmanager
    def submit_lock(self, handle: Handle, seen: str | None) -> Iterator[None]:
        with submit_lock(self._api, handle, self._section.grace_seconds):
            record = self._releases.record(handle.run)
            if record is not None and uid_of(record) != seen:
                raise self._releases.taken_error(handle, record)
            yield

    def find(self, names: Collection[str] | None = None) -> list[KubernetesRun]:
        own = f"{CLUSTER_LABEL}={self.cluster.name}"
        selectors = [own] if names is None else [f"{own},{RUN_LABEL}={name}" for name in names]
        return [
            run
            for selector in selectors
            for run in found_runs(self.cluster, self._releases, selector)
        ]

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
                kept = self._releases.controller(name)
                return None if kept is None else (name, _pod_template(kept))
        return None

    def execute(
        self, plan: Plan, secrets_json: PlanFile, existing: Sequence[KubernetesRun]
    ) -> None:
        for run in existing:
            self.remove(run)
        (install,) = plan.steps
        assert isinstance(install, Program)
        self._releases.install(plan.handle, install.argv, _with_annotation(plan))

    def configs(self, run: KubernetesRun) -> list[PlanFile]:
        # Its secrets are in the release's values.
        return []

    def resubmit(self, run: KubernetesRun, secrets_json: PlanFile) -> None:
        handle = run.status.handle
        values = PlanFile(VALUES, self._releases.values(handle), 0o600)
        self.remove(run)
        argv = install_argv(self._section, self.cluster.name, handle.run)
        self._releases.install(handle, argv, (values, *chart_files()))

    def stop(self, run: KubernetesRun) -> RunStatus:
        handle = run.status.handle
        if run.pods and all(pod["metadata"].get("deletionTimestamp") for pod in run.pods):
            for pod in run.pods:
                self._api.delete_pod(pod["metadata"]["name"], 1)
        else:
            self._releases.uninstall(handle, run.record, "--keep-history")
        with cancel_notice(handle, self._section.grace_seconds):
            self._releases.await_gone(handle.run)
        return self.status(handle.run)

    def may_still_run(self, run: KubernetesRun) -> bool:
        return any(pod["metadata"].get("deletionTimestamp") for pod in run.pods)

    def remove(self, run: KubernetesRun) -> None:
        """Remove a run that is over, with Helm's record, and wait until none of its objects is
        left. Raises UserError where another release has its name now."""
        from drillyard.launch.kubernetes.pod_files import delete_reading_pods

        handle = run.status.handle
        self._releases.uninstall(handle, run.record)
        delete_reading_pods(self._api, handle.run)
        self._releases.await_gone(handle.run)

    def log_files(self, run: KubernetesRun) -> Files:
        from drillyard.launch.kubernetes.pod_logs import PodLogs

        status = run.status
        selector = f"{CLUSTER_LABEL}={self.cluster.name},{RUN_LABEL}={status.handle.run}"
        size = (status.nodes, _processes_per_node(run.pods))
        return PodLogs(self._api, selector, status.run_directory or "", self.files(), *size)


def _with_annotation(plan: Plan) -> list[PlanFile]:
    """The files of a plan, with the record of where it is launched as an annotation of its values:
    a run here has no launch directory."""
    files = {file.path: file for file in plan.files}
    values, record = json.loads(files[VALUES].content), files.pop(RECORD)
    values["annotations"] = {**values["annotations"], LAUNCHED_FROM: record.content.strip()}
    files[VALUES] = replace(files[VALUES], content=json.dumps(values, indent=2) + "\n")
    return list(files.values())


def _pod_template(controller: dict[str, Any]) -> dict[str, Any]:
    spec = controller["spec"]
    if controller["kind"] == "JobSet":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    template: dict[str, Any] = spec["template"]
    return template


def _processes_per_node(pods: Sequence[dict[str, Any]]) -> int:
    variables = [each for pod in pods[:1] for each in pod["spec"]["containers"][0].get("env", ())]
    return next((int(each["value"]) for each in variables if each["name"] == "NPROC_PER_NODE"), 1)
