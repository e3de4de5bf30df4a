"""Run directories on a volume: read through a running pod of the run, with `kubectl exec`.

The program in the pod is `file_server.py`, as on other hosts. Where no pod of the run is there, the volume cannot be
read from this machine, and the error names the claim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drillyard.errors import UserError
from drillyard.launch.kubernetes.cluster_api import ClusterApi
from drillyard.launch.kubernetes.config import KubernetesConfig
from drillyard.launch.programs import Host, Programs
from drillyard.launch.remote_files import Files, ReadRequest, ReadResult, RemoteFiles


@dataclass(frozen=True)
class PodHost(Host):
    """A pod in which commands are run by kubectl."""

    before: tuple[str, ...] = ()

    def argv(self, command: Sequence[str]) -> tuple[str, ...]:
        return (*self.before, *command)


class PodFiles(Files):
    """The files that the pods of runs see. `pod_of`: a running pod of the run whose directory has a path."""

    def __init__(
        self, api: ClusterApi, section: KubernetesConfig, programs: Programs, pod_of: Callable[[str], str | None]
    ) -> None:
        self._section, self._programs, self._pod_of = section, programs, pod_of
        self._open: dict[str, RemoteFiles] = {}
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

    def _through(self, path: str) -> RemoteFiles:
        pod = self._pod_of(path)
        if pod is None:
            claim = self._section.volume_claim or "the bucket"
            raise UserError(f"{path}: no pod of the run is there to read it; it is on {claim}")
        if pod not in self._open:
            context = ("--context", self._section.context) if self._section.context else ()
            before = (
                "kubectl",
                *context,
                "--namespace",
                self._section.namespace,
                "exec",
                "-i",
                pod,
                "-c",
                "train",
                "--",
            )
            self._open[pod] = RemoteFiles(PodHost(pod, before=before), self._programs)
        return self._open[pod]
