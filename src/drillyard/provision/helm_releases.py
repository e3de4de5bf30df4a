"""Installs the Helm releases of a plan, waits until their programs run, and says what keeps them.

Helm writes the objects; waiting is ours, since Helm's says only that time is up. Each call ends in
the same state, whatever an earlier one that was killed has left: a release that was being installed
by a process that is gone is continued, and of two calls at once one is refused.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from drillyard.errors import UserError
from drillyard.launch.kubernetes.submit_lock import config_map_lock
from drillyard.programs import Programs, Result, require_success
from drillyard.provision.cluster_chart import (
    JOBSET,
    JOBSET_VERSION,
    KUEUE,
    OWN_CHART,
    OWN_NAMESPACE,
    chart_directory,
)
from drillyard.provision.cluster_plan import ChartRelease, ClusterPlan
from drillyard.provision.progress import print_progress

if TYPE_CHECKING:
    from drillyard.launch.kubernetes.cluster_api import ApiServer

READY_SECONDS = 900.0
"""The longest that a release's programs may take: nodes of a CPU pool are made for some of them."""
LOCK_SECONDS = 3600.0
_POLL_SECONDS = 1.0
_LOCK = "cluster.install-lock"
_CLAIMS = f"/api/v1/namespaces/{OWN_NAMESPACE}/configmaps/cluster.releases"
_NOT_SERVING = ("failed calling webhook", "no endpoints available", "no matches for kind")
"""In Helm's errors while a controller that an earlier release has started is not yet answering."""
_FOREIGN = "invalid ownership metadata"
_APPS = "/apis/apps/v1"
_PROGRAMS = {"Deployment": "deployments", "DaemonSet": "daemonsets"}


@dataclass(frozen=True)
class InstalledRelease:
    """A release as Helm lists it: `status` is deployed, failed, pending-install, ..."""

    name: str
    namespace: str
    chart: str
    status: str


def install_releases(
    plan: ClusterPlan,
    context: str | None,
    *,
    programs: Programs | None = None,
    ready_seconds: float = READY_SECONDS,
    notice: Callable[[str], None] = print_progress,
) -> None:
    """Install or update every release of the plan, in order, and wait for each. JobSet and Kueue
    that somebody else has installed are used as they are.

    Raises UserError where another process installs, Helm refuses, what is there is too old, or a
    program does not run after `ready_seconds`: which object, and why.
    """
    from drillyard.launch.kubernetes.cluster_api import CORE, ClusterApi

    api = ClusterApi(context, OWN_NAMESPACE)
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": OWN_NAMESPACE}}
    api.created_at(f"{CORE}/namespaces", namespace)
    helm = Helm(context, programs or Programs())

    def taken(whose: str) -> UserError:
        return UserError(
            f"{plan.name}: its charts are being installed by another command ({whose})"
        )

    with config_map_lock(api, _LOCK, LOCK_SECONDS, taken):
        for release in plan.releases:
            if is_foreign(api, release):
                require_recent(api, release)
                notice(f"{release.name}: is there already, from elsewhere; left as it is")
                continue
            if release.chart == OWN_CHART and records(api, release):
                require_own_cluster(helm, release)
            _claim(api, release)
            _end_pending(api, release, notice)
            _install(helm, release, ready_seconds)
            _await_programs(api, helm, release, ready_seconds, notice)


class Helm:
    """Calls of Helm on one cluster."""

    def __init__(self, context: str | None, programs: Programs) -> None:
        self._context = ("--kube-context", context) if context else ()
        self._programs = programs

    def run(self, *words: str, files: Mapping[str, str] | None = None) -> Result:
        """Run Helm in a directory with these files and our chart."""
        with tempfile.TemporaryDirectory(prefix="drillyard-") as directory:
            if OWN_CHART in "".join(words):
                _copy(chart_directory(), Path(directory, OWN_CHART))
            for name, content in (files or {}).items():
                Path(directory, name).write_text(content, encoding="utf-8")
            return self._programs.run(("helm", *words, *self._context), directory=Path(directory))

    def releases(self) -> list[InstalledRelease]:
        """All releases of the cluster, in whatever state."""
        result = self.run("list", "--all-namespaces", "--all", "--max", "0", "--output", "json")
        found = require_success(result, "helm list").printed_json()
        return [
            InstalledRelease(each["name"], each["namespace"], each["chart"], each["status"])
            for each in found
        ]


def install_argv(release: ChartRelease) -> tuple[str, ...]:
    """The call of Helm that installs a release, with its values in values.json."""
    is_own = release.chart == OWN_CHART
    # A path: Helm would look for the chart of a bare name in a repository of that name.
    chart = (f"./{OWN_CHART}",) if is_own else (release.chart, "--version", release.version)
    return (
        *("upgrade", "--install", release.name, *chart, "--namespace", release.namespace),
        *("--create-namespace", "--values", "values.json", "--history-max", "3"),
    )


def is_foreign(api: ApiServer, release: ChartRelease) -> bool:
    """Whether the objects of JobSet or Kueue are there without the plan's release."""
    group = {JOBSET: "jobset.x-k8s.io", KUEUE: "kueue.x-k8s.io"}.get(release.name)
    if group is None or api.one(f"/apis/{group}") is None:
        return False
    return not records(api, release) and release.name not in _claimed(api)


def require_recent(api: ApiServer, release: ChartRelease) -> None:
    """Raise UserError where JobSet or Kueue, installed by somebody else, is too old for runs."""
    if (problem := age_problem(api, release.name)) is not None:
        raise UserError(f"{api.title}: {problem}")


def age_problem(api: ApiServer, name: str) -> str | None:
    """What an installed JobSet or Kueue is too old for; None: it is recent enough."""
    if name == JOBSET:
        schema = api.one("/openapi/v3/apis/jobset.x-k8s.io/v1alpha2")
        if "onJobFailureMessagePatterns" not in str(schema):
            return (
                "its JobSet has no onJobFailureMessagePatterns, so it would restart every failure:"
                f" update it to {JOBSET_VERSION} or later"
            )
    if name == KUEUE:
        found = api.one(api.kueue) or {}
        if "topologies" not in {each["name"] for each in found.get("resources", ())}:
            return "its Kueue has no topologies: update it to 0.14 or later"
    return None


def records(api: ApiServer, release: ChartRelease) -> list[dict[str, Any]]:
    """Helm's records of a release, oldest first: Secrets, without their content."""
    from drillyard.launch.kubernetes.cluster_api import CORE

    path = f"{CORE}/namespaces/{release.namespace}/secrets"
    found = api.items(path, f"owner=helm,name={release.name}", metadata=True)
    return sorted(found, key=lambda each: int(each["metadata"]["labels"]["version"]))


def _claimed(api: ApiServer) -> Collection[str]:
    """The releases that a command of ours has begun to install: their objects are not somebody
    else's, also where it was killed and no record of Helm is left."""
    found = api.one(_CLAIMS) or {}
    claimed: dict[str, str] = found.get("data") or {}
    return claimed


def _claim(api: ApiServer, release: ChartRelease) -> None:
    place, name = _CLAIMS.rsplit("/", 1)
    data = {release.name: release.version}
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}
    if api.created_at(place, body) is None:
        api.merge_at(_CLAIMS, {"data": data})


def require_own_cluster(helm: Helm, release: ChartRelease) -> None:
    """Raise UserError where the release describes another cluster config's queues: an upgrade would
    delete them."""
    words = ("get", "values", release.name, "--namespace", release.namespace, "--output", "json")
    result = helm.run(*words)
    found = result.printed_json() if result.returncode == 0 else None
    theirs = (found or {}).get("cluster")
    if theirs and theirs != release.values["cluster"]:
        raise UserError(
            f"{release.name}: describes cluster {theirs} here, whose queues an installation for"
            f" {release.values['cluster']} would delete\nUse the file with `name: {theirs}`, or"
            f" remove its queues first: helm uninstall {release.name} --namespace"
            f" {release.namespace}"
        )


def _end_pending(api: ApiServer, release: ChartRelease, notice: Callable[[str], None]) -> None:
    """Remove the record of an installation whose process was killed. The lock is ours, so no
    command of ours writes it; its objects stay, and the next installation takes them over."""
    from drillyard.launch.kubernetes.cluster_api import CORE

    for record in records(api, release)[-1:]:
        status, place = record["metadata"]["labels"]["status"], record["metadata"]
        if status.startswith("pending-"):
            notice(f"{release.name}: was left {status} by a command that has ended; goes on")
            path = f"{CORE}/namespaces/{release.namespace}/secrets/{place['name']}"
            api.delete_at(path, {"preconditions": {"uid": place["uid"]}})


def _install(helm: Helm, release: ChartRelease, seconds: float) -> None:
    values = json.dumps(dict(release.values), indent=2)
    until = time.monotonic() + seconds
    while (result := helm.run(*install_argv(release), files={"values.json": values})).returncode:
        not_serving = any(words in result.stderr for words in _NOT_SERVING)
        if not not_serving or time.monotonic() > until:
            raise UserError(_refusal(release, result.stderr))
        time.sleep(_POLL_SECONDS)


def _refusal(release: ChartRelease, said: str) -> str:
    text = f"Helm release {release.name} in namespace {release.namespace}: {said.strip()}"
    if _FOREIGN in said:
        return (
            f"{text}\nan object of that name is there and not of this release: remove it, or let"
            " Helm have it by the labels and annotations that it names"
        )
    return text


def _await_programs(
    api: ApiServer,
    helm: Helm,
    release: ChartRelease,
    seconds: float,
    notice: Callable[[str], None],
) -> None:
    until, said = time.monotonic() + seconds, False
    wanted = list(programs_of(helm, release))
    while waiting := [each for each in wanted if not is_ready(api, *each)]:
        if time.monotonic() > until:
            lines = [
                f"{kind} {namespace}/{name}: {reason}"
                for kind, namespace, name in waiting
                for reason in not_ready_reasons(api, kind, namespace, name)
            ]
            first = f"release {release.name} is not ready after {seconds:.0f} s:"
            raise UserError("\n".join([first, *lines]))
        if not said:
            names = ", ".join(name for _, _, name in waiting)
            notice(f"{release.name}: waits for {names}")
            said = True
        time.sleep(_POLL_SECONDS)


def programs_of(helm: Helm, release: ChartRelease) -> Iterator[tuple[str, str, str]]:
    """Kind, namespace and name of the Deployments and DaemonSets of an installed release."""
    for each in installed_objects(helm, release):
        if each.get("kind") in _PROGRAMS:
            place = each["metadata"]
            yield each["kind"], place.get("namespace", release.namespace), place["name"]


def installed_objects(helm: Helm, release: ChartRelease) -> list[dict[str, Any]]:
    """The objects of an installed release, as it has made them."""
    result = helm.run("get", "manifest", release.name, "--namespace", release.namespace)
    return _objects(require_success(result, f"helm get manifest {release.name}").stdout)


def rendered_objects(helm: Helm, release: ChartRelease, kueue: str) -> list[dict[str, Any]]:
    """The objects that the release of our chart would have, with a version of Kueue's objects.
    Raises UserError where its values contradict each other."""
    place = ("--namespace", release.namespace, "--values", "values.json")
    served = ("--api-versions", f"kueue.x-k8s.io/{kueue}/Topology")
    files = {"values.json": json.dumps(dict(release.values))}
    result = helm.run("template", release.name, f"./{OWN_CHART}", *place, *served, files=files)
    return _objects(require_success(result, f"helm template {release.name}").stdout)


def _objects(text: str) -> list[dict[str, Any]]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [each for each in yaml.load_all(text, Loader=loader) if each]


def _path(kind: str, namespace: str, name: str) -> str:
    return f"{_APPS}/namespaces/{namespace}/{_PROGRAMS[kind]}/{name}"


def is_ready(api: ApiServer, kind: str, namespace: str, name: str) -> bool:
    """Whether all pods of a program run, of its newest version."""
    found = api.one(_path(kind, namespace, name))
    if found is None:
        return False
    status = found.get("status", {})
    if status.get("observedGeneration", 0) < found["metadata"].get("generation", 0):
        return False
    wanted, counts = found["spec"].get("replicas", 1), ("availableReplicas", "updatedReplicas")
    if kind == "DaemonSet":
        wanted = status.get("desiredNumberScheduled", 0)
        counts = ("numberReady", "updatedNumberScheduled")
    return all(int(status.get(count, 0)) >= int(wanted) for count in counts)


def not_ready_reasons(api: ApiServer, kind: str, namespace: str, name: str) -> list[str]:
    """Why a program does not run, by its pods: at least one line."""
    from drillyard.launch.kubernetes.cluster_api import CORE

    found = api.one(_path(kind, namespace, name))
    if found is None:
        return ["is not there"]
    labels = found["spec"]["selector"].get("matchLabels", {})
    selector = ",".join(f"{key}={value}" for key, value in labels.items())
    pods = api.items(f"{CORE}/namespaces/{namespace}/pods", selector)
    reasons = [reason for pod in pods for reason in _pod_reasons(pod)]
    conditions = found.get("status", {}).get("conditions", ())
    failed = [each for each in conditions if each["type"] == "ReplicaFailure"]
    reasons += [str(each.get("message")) for each in failed if each["status"] == "True"]
    return reasons or [f"has {len(pods)} pods, and not all are ready"]


def _pod_reasons(pod: Mapping[str, Any]) -> Iterator[str]:
    status, name = pod.get("status", {}), pod["metadata"]["name"]
    place = pod["spec"].get("nodeName")
    who = f"pod {name}" + (f" on {place}" if place else "")
    for each in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        state = each.get("state", {})
        waiting = state.get("waiting", {})
        if waiting.get("reason") not in (None, "PodInitializing", "ContainerCreating"):
            message = waiting.get("message", "")
            yield f"{who}: {each['name']}: {waiting['reason']}: {message}".rstrip(": ")
        elif state.get("terminated", {}).get("exitCode"):
            ended = state["terminated"]
            yield f"{who}: {each['name']}: ended with {ended['exitCode']}"
    for each in status.get("conditions", ()):
        if each["type"] == "PodScheduled" and each["status"] == "False":
            yield f"{who}: {each.get('message') or each.get('reason')}"


def _copy(source: Traversable, target: Path) -> None:
    target.mkdir()
    for each in source.iterdir():
        if each.is_dir():
            _copy(each, target / each.name)
        else:
            (target / each.name).write_bytes(each.read_bytes())


def own_release(releases: Sequence[ChartRelease]) -> ChartRelease:
    """The release of the chart `drillyard-cluster` among those of a plan."""
    return next(each for each in releases if each.chart == OWN_CHART)
