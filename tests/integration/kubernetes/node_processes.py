"""The processes of the test cluster's nodes and pods, by their numbers on this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.integration.gcs import Bucket
from tests.integration.kubernetes.cluster import NODES, Cluster
from tests.integration.kubernetes.team import USER

BUCKET_OPTIONS = ("--metadata-cache-ttl-secs=0", "--metadata-cache-negative-ttl-secs=0")
"""Those of the chart."""


def kubelet_of(cluster: Cluster, node: str) -> int:
    """The process of a node's kubelet."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes().split(b"\0")
            if f"{cluster.directory}/{node}/kubelet.yaml".encode() in words:
                return int(path.name)
    raise LookupError(node)


def processes(pod: dict[str, Any], words: bytes = b"drillyard") -> list[int]:
    """Processes of a pod's containers whose command line has these words."""
    uid, found = pod["metadata"]["uid"], []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (path / "cmdline").read_bytes()
            if uid in (path / "cgroup").read_text() and words in command:
                found.append(int(path.name))
    return sorted(found)


@contextlib.contextmanager
def bucket_on_nodes(cluster: Cluster, directory: Path) -> Iterator[Bucket]:
    """A bucket at `place` of this machine and of each node, by gcsfuse three times: no lock holds
    between them."""
    bucket = Bucket(directory)
    try:
        bucket.start_server()
        for node in NODES:
            namespace = ["nsenter", f"--mount=/proc/{kubelet_of(cluster, node)}/ns/mnt", "--"]
            users = ("-o", "allow_other", f"--uid={USER}", f"--gid={USER}")
            bucket.mount_again(bucket.place, namespace, *users, *BUCKET_OPTIONS)
        bucket.mount(*BUCKET_OPTIONS)
        yield bucket
    finally:
        bucket.discard()
