"""The processes of the test cluster's nodes and pods, by their numbers on this machine."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from tests.integration.gcs import Bucket
from tests.integration.kubernetes.cluster import NODES, ROOT, Cluster, tool
from tests.integration.kubernetes.team import USER
from tests.unit.launch.requests import cluster, planned, request

from drillyard.launch.kubernetes.release import VALUES

CHART = ROOT / "charts/drillyard-run"


def bucket_options() -> list[str]:
    """What the chart has Cloud Storage FUSE mount the bucket of a run with, for USER's pods, as
    options of gcsfuse itself: `a:b:0` of the driver is --a-b=0."""
    text = cluster(
        "kubernetes",
        None,
        2,
        processes_per_node="1",
        kubernetes=f"{{run_as_user: {USER}}}",
        storage="{bucket: my-bucket}",
        image="i:1",
    )
    values = planned(request(text, "name: w\nworkload: {command: [train]}\n")).file(VALUES).content
    rendered = subprocess.run(
        [tool("helm"), "template", "r", str(CHART), "--values", "-", "--kube-version", "1.34"],
        input=values,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    jobset = next(
        each for each in yaml.safe_load_all(rendered) if each and each["kind"] == "JobSet"
    )
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (bucket,) = [each["csi"] for each in pod["volumes"] if each["name"] == "bucket"]
    found = []
    for option in bucket["volumeAttributes"]["mountOptions"].split(","):
        name, _, value = option.replace("=", ":").rpartition(":")
        found.append(f"--{name.replace(':', '-')}={value}" if name else f"--{value}")
    return found


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
def bucket_on_nodes(on: Cluster, directory: Path) -> Iterator[Bucket]:
    """A bucket at `place` of this machine and of each node, by gcsfuse three times: no lock holds
    between them."""
    bucket, options = Bucket(directory), bucket_options()
    try:
        bucket.start_server()
        for node in NODES:
            namespace = ["nsenter", f"--mount=/proc/{kubelet_of(on, node)}/ns/mnt", "--"]
            # The driver's own: a pod is another user than the one who mounts.
            bucket.mount_again(bucket.place, namespace, "-o", "allow_other", *options)
        bucket.mount(*options)
        yield bucket
    finally:
        bucket.discard()
