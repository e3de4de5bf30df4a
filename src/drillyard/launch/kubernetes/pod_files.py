"""Run directories on a volume: read through a pod, with `kubectl exec`.

A running pod of the run, or else, when the run is over, a pod made for reading: of the run's image,
user and volume, without GPUs and outside of queues. It is deleted at the end of this process, and
ends by itself after READING_SECONDS. The program in the pod is `file_server.py`, as on other hosts.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drillyard.errors import NotFoundError, UserError
from drillyard.launch.agent.state_file import json_object
from drillyard.launch.kubernetes.cluster_api import CORE, ClusterApi
from drillyard.launch.kubernetes.config import KubernetesConfig
from drillyard.launch.kubernetes.run_status import waiting_reason
from drillyard.launch.remote_files import Files, ReadRequest, ReadResult, RemoteFiles
from drillyard.programs import CONNECT_SECONDS, Host, Programs
from drillyard.supervise.process_identity import process_of, this_process


@dataclass(frozen=True)
class PodHost(Host):
    """A pod in which commands are run by kubectl."""

    before: tuple[str, ...] = ()

    def argv(self, command: Sequence[str]) -> tuple[str, ...]:
        return (*self.before, *command)


READS_LABEL = "drillyard/reads"
READER = "drillyard/reader"
"""Annotation: the process for which the pod was made."""
READING_SECONDS = 900
_START_SECONDS = 120.0
_POLL_SECONDS = 0.3
_KEPT = ("serviceAccountName", "imagePullSecrets", "nodeSelector", "tolerations", "securityContext")
_STORAGE = ("storage", "bucket")
"""The chart's volumes with run directories."""
_RESOURCES = {
    "requests": {"cpu": "100m", "memory": "256Mi"},
    "limits": {"cpu": "1", "memory": "1Gi"},
}
"""What the reading pod asks for, where the run's container asks for any: the namespace's quota may
refuse pods that do not."""


def reading_pod(run: str, pod: Mapping[str, Any]) -> dict[str, Any]:
    """The pod that reads what the pods of `run` see. `pod`: their template, as the chart writes
    it."""
    spec = pod["spec"]
    train = next(each for each in spec["containers"] if each["name"] == "train")
    annotations = {
        key: value
        for key, value in pod["metadata"].get("annotations", {}).items()
        if "gcsfuse" in key
    }
    container = {
        "name": "train",
        "image": train["image"],
        "command": ["sleep", str(READING_SECONDS)],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [each for each in train["volumeMounts"] if each["name"] in _STORAGE],
    }
    if resources := _reading_resources(train.get("resources", {})):
        container["resources"] = resources
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": f"{run}-read-",
            "labels": {READS_LABEL: run},
            "annotations": {**annotations, READER: json.dumps(this_process().as_json())},
        },
        "spec": {
            **{key: spec[key] for key in _KEPT if key in spec},
            "restartPolicy": "Never",
            "activeDeadlineSeconds": READING_SECONDS,
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": spec.get("automountServiceAccountToken", False),
            "containers": [container],
            "volumes": [each for each in spec["volumes"] if each["name"] in _STORAGE],
        },
    }


def _reading_resources(of_run: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    found = {
        kind: {name: amount for name, amount in amounts.items() if name in of_run.get(kind, {})}
        for kind, amounts in _RESOURCES.items()
    }
    return {kind: amounts for kind, amounts in found.items() if amounts}


def delete_reading_pods(api: ClusterApi, run: str) -> None:
    """Delete the reading pods of a run that earlier processes left: those that have ended, and
    those of dead processes of this machine. Another process may still read through the rest, which
    end by themselves."""
    for pod in api.listed(CORE, "pods", f"{READS_LABEL}={run}"):
        reader = process_of(json_object(pod["metadata"].get("annotations", {}).get(READER, "")))
        has_ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
        if has_ended or (reader is not None and reader.here and not reader.alive):
            api.delete_pod(pod["metadata"]["name"], 0)


class PodFiles(Files):
    """The files that the pods of runs see.

    `pod_of`: a running pod of the run whose directory has a path; of one that is over, its name and
    pods' template.
    """

    def __init__(
        self,
        api: ClusterApi,
        section: KubernetesConfig,
        programs: Programs,
        pod_of: Callable[[str], str | tuple[str, Mapping[str, Any]] | None],
    ) -> None:
        self._api, self._section, self._programs, self._pod_of = api, section, programs, pod_of
        self._open: dict[str, RemoteFiles] = {}
        self._reading: dict[str, str] = {}
        self.title = api.title

    def find(self, patterns: Sequence[str]) -> list[tuple[str, int]]:
        return self._through(patterns[0]).find(patterns) if patterns else []

    def tree(self, directory: str) -> list[tuple[str, int]]:
        return self._through(directory).tree(directory)

    def read(self, requests: Sequence[ReadRequest]) -> list[ReadResult | None]:
        return self._through(requests[0].path).read(requests) if requests else []

    def close(self) -> None:
        for files in self._open.values():
            files.close()
        self._open.clear()
        for pod in self._reading.values():
            with contextlib.suppress(UserError):
                self._api.delete_pod(pod, 0)
        self._reading.clear()

    def _through(self, path: str) -> RemoteFiles:
        found = self._pod_of(path)
        if found is None:
            claim = self._section.volume_claim or "the bucket"
            raise NotFoundError(f"{path}: no pod of the run can read it now; it is on {claim}")
        pod = found if isinstance(found, str) else self._started(*found)
        if pod not in self._open:
            context = ("--context", self._section.context) if self._section.context else ()
            before = ("kubectl", *context, "--namespace", self._section.namespace)
            before = (*before, "exec", "-i", pod, "-c", "train", "--")
            self._open[pod] = RemoteFiles(
                PodHost(pod, before=before), self._programs, connect_seconds=CONNECT_SECONDS
            )
        return self._open[pod]

    def _started(self, run: str, template: Mapping[str, Any]) -> str:
        """A reading pod that runs. Raises UserError where it does not start."""
        if run in self._reading:
            return self._reading[run]
        name = self._api.create_pod(reading_pod(run, template))
        self._reading[run] = name
        atexit.register(self.close)
        deadline = time.monotonic() + _START_SECONDS
        while True:
            pod = self._api.one(f"{CORE}/namespaces/{self._section.namespace}/pods/{name}") or {}
            phase = pod.get("status", {}).get("phase")
            if phase == "Running":
                return name
            if time.monotonic() > deadline or phase in ("Failed", "Succeeded"):
                events = self._api.listed(CORE, "events", needed=False)
                self.close()
                reason = waiting_reason([pod], events) if pod else None
                raise UserError(
                    f"{run}: pod {name}, which was to read the run directory, does not run:"
                    f" {reason or phase}"
                )
            time.sleep(_POLL_SECONDS)
