"""Logs of a run's pods, as the API server has them: one growing file per node, `node-K.log`, for
`logs/reader.py`.

A pod's log ends with the pod, and that of a lost node cannot be read: lines of earlier attempts are
those that were read while their pods existed. The ranks' own logs in the run directory are
complete. Every request asks for the lines of the last second read and later, and leaves out those
it has.
"""

from __future__ import annotations

import contextlib
import glob
import json
import posixpath
from collections.abc import Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase

from drillyard.errors import NotFoundError
from drillyard.launch.file_server import HEAD_BYTES
from drillyard.launch.kubernetes.cluster_api import CORE, ClusterApi
from drillyard.launch.kubernetes.run_status import lost_nodes
from drillyard.launch.remote_files import Files, ReadRequest, ReadResult, print_notice

_INDEX = "batch.kubernetes.io/job-completion-index"


class PodLogs(Files):
    """The logs of the pods that a label selector matches, below the launch directory of a run, with
    the run's size as job.json has it; `others`: all other files, such as a rank's own log."""

    def __init__(
        self,
        api: ClusterApi,
        selector: str,
        run_directory: str,
        others: Files,
        nodes: int,
        processes_per_node: int,
    ) -> None:
        self._api, self._selector, self._others = api, selector, others
        self._directory = posixpath.join(run_directory, "launch")
        size = {
            "nodes": nodes,
            "processes_per_node": processes_per_node,
            "run_directory": run_directory,
        }
        job = posixpath.join(self._directory, "job.json")
        self._texts: dict[str, bytearray] = {job: bytearray(json.dumps(size).encode())}
        self._last: dict[str, bytes] = {}
        self.title, self._names_lost = api.title, False

    def find(self, patterns: Sequence[str]) -> list[tuple[str, int]]:
        self._retried(self._refresh)
        own, others = self._split(patterns)
        found = sorted((path, len(text)) for path, text in self._texts.items())
        found = [each for each in found if any(fnmatchcase(each[0], pattern) for pattern in own)]
        with contextlib.suppress(NotFoundError):  # A run without a pod has no other files yet.
            found += self._others.find(others) if others else []
        return found

    def tree(self, directory: str) -> list[tuple[str, int]]:
        return []

    def read(self, requests: Sequence[ReadRequest]) -> list[ReadResult | None]:
        self._retried(self._refresh)
        _, others = self._split([request.path for request in requests])
        pieces = iter(
            self._others.read([each for each in requests if each.path in others]) if others else ()
        )
        return [
            next(pieces) if request.path in others else self._piece(request) for request in requests
        ]

    def close(self) -> None:
        self._others.close()

    def _split(self, paths: Sequence[str]) -> tuple[list[str], list[str]]:
        """Paths of this launch directory, and all others. Paths may be patterns of the directory's
        escaped name."""
        names = (f"{self._directory}/", f"{glob.escape(self._directory)}/")
        own = [path for path in paths if path.startswith(names)]
        return own, [path for path in paths if path not in own]

    def _refresh(self) -> None:
        pods = self._api.listed(CORE, "pods", self._selector)
        lost = lost_nodes(pods)
        if lost and not self._names_lost:
            print_notice(
                f"{self.title}: lost node {', '.join(lost)}: the logs of its pods cannot be read"
            )
        self._names_lost = self._names_lost or bool(lost)
        there = [each for each in pods if each["spec"].get("nodeName") not in lost]
        for pod in sorted(there, key=lambda each: str(each["metadata"].get("creationTimestamp"))):
            name, index = (
                pod["metadata"]["name"],
                pod["metadata"].get("annotations", {}).get(_INDEX, "0"),
            )
            text = self._texts.setdefault(
                posixpath.join(self._directory, f"node-{index}.log"), bytearray()
            )
            last = self._last.get(name, b"")
            since = f"{last[:19].decode()}Z" if last else None
            lines = self._api.log(name, since).splitlines(keepends=True)
            # A line that is being written is read whole next time.
            new = [
                line for line in lines if line.endswith(b"\n") and line.partition(b" ")[0] > last
            ]
            if new:
                text += b"".join(map(_stamped, new))
                self._last[name] = new[-1].partition(b" ")[0]

    def _piece(self, request: ReadRequest) -> ReadResult | None:
        text = self._texts.get(request.path)
        if text is None:
            return None
        begin = max(0, len(text) + request.offset) if request.offset < 0 else request.offset
        return ReadResult(
            bytes(text[:HEAD_BYTES]), False, bytes(text[begin : begin + request.length])
        )


def _stamped(line: bytes) -> bytes:
    """A line of the API server with its stamp as the logs of other launchers have it: UTC, six
    digits of a second."""
    stamp, _, rest = line.partition(b" ")
    if not stamp.endswith(b"Z"):
        stamp = (
            datetime.fromisoformat(stamp.decode()).astimezone(UTC).isoformat()[:-6].encode() + b"Z"
        )
    seconds, _, fraction = stamp[:-1].partition(b".")
    return b"%s.%sZ %s" % (seconds, fraction[:6].ljust(6, b"0"), rest)
