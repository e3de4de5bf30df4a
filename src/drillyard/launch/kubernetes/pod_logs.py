"""Logs of a run's pods, as the API server has them: one growing file per node, `node-K.log`, for `logs/reader.py`.

A pod's log ends with the pod, so lines of earlier attempts are only those that were read while their pods existed; the
ranks' own logs in the run directory are complete. Every request asks for the lines of the last second read and later,
and leaves out those it has.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Sequence
from fnmatch import fnmatchcase

from drillyard.launch.file_server import HEAD_BYTES
from drillyard.launch.kubernetes.cluster_api import CORE, ClusterApi
from drillyard.launch.remote_files import Files, ReadRequest, ReadResult

_INDEX = "batch.kubernetes.io/job-completion-index"


class PodLogs(Files):
    """The logs of the pods that a label selector matches, below `directory`, with the run's size as job.json has it."""

    def __init__(self, api: ClusterApi, selector: str, directory: str, nodes: int, processes_per_node: int) -> None:
        self._api, self._selector, self._directory = api, selector, directory
        size = {"nodes": nodes, "processes_per_node": processes_per_node}
        job = posixpath.join(directory, "job.json")
        self._texts: dict[str, bytearray] = {job: bytearray(json.dumps(size).encode())}
        self._last: dict[str, bytes] = {}
        self.title = api.title

    def find(self, patterns: Sequence[str]) -> list[tuple[str, int]]:
        self._retried(self._refresh)
        found = sorted((path, len(text)) for path, text in self._texts.items())
        return [each for each in found if any(fnmatchcase(each[0], pattern) for pattern in patterns)]

    def tree(self, directory: str) -> list[tuple[str, int]]:
        return []

    def read(self, requests: Sequence[ReadRequest]) -> list[ReadResult | None]:
        self._retried(self._refresh)
        return [self._piece(request) for request in requests]

    def close(self) -> None:
        pass  # Nothing stays open between requests.

    def _refresh(self) -> None:
        pods = self._api.listed(CORE, "pods", self._selector)
        for pod in sorted(pods, key=lambda each: str(each["metadata"].get("creationTimestamp"))):
            name, index = pod["metadata"]["name"], pod["metadata"].get("annotations", {}).get(_INDEX, "0")
            text = self._texts.setdefault(posixpath.join(self._directory, f"node-{index}.log"), bytearray())
            last = self._last.get(name, b"")
            since = f"{last[:19].decode()}Z" if last else None
            lines = self._api.log(name, since).splitlines(keepends=True)
            # A line that is being written is read whole next time.
            new = [line for line in lines if line.endswith(b"\n") and line.partition(b" ")[0] > last]
            if new:
                text += b"".join(new)
                self._last[name] = new[-1].partition(b" ")[0]

    def _piece(self, request: ReadRequest) -> ReadResult | None:
        text = self._texts.get(request.path)
        if text is None:
            return None
        begin = max(0, len(text) + request.offset) if request.offset < 0 else request.offset
        return ReadResult(bytes(text[:HEAD_BYTES]), False, bytes(text[begin : begin + request.length]))
