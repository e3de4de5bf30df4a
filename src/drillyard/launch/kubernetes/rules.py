"""Rules of Kubernetes, JobSet and the chart that a run can break, checked before anything is sent.

Names become parts of host names and labels, which have at most 63 characters (RFC 1123, 2.1).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator

from drillyard.config.cluster import ClusterConfig
from drillyard.config.environment import REFERENCE
from drillyard.hardware.machines import Machine
from drillyard.launch.kubernetes import gke, pod_network
from drillyard.launch.kubernetes.config import BUCKET_MOUNT, KubernetesConfig
from drillyard.launch.request import LaunchFinding, LaunchRequest, error
from drillyard.launch.request_checks import environments
from drillyard.launch.vertex.config import bucket_of

MAX_NAME = 63
_JOBSET = "https://jobset.sigs.k8s.io/docs/concepts/"
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_LABEL_KEY = re.compile(
    r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
)
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
_FILE_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")


def findings(request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
    """Every rule that the request breaks."""
    cluster, section = request.cluster, request.cluster.section_as(KubernetesConfig)
    yield from _names(request)
    yield from _storage(request, section)
    yield from _secrets(request, section)
    for name, value in section.labels.items():
        if not _LABEL_KEY.fullmatch(name) or not _LABEL_VALUE.fullmatch(value):
            message = f"{name}: {value} is no label: at most 63 letters, digits, '-', '_' and '.'"
            yield error("cluster", ("kubernetes", "labels", name), message)
    yield from pod_network.findings(request, machine)
    if cluster.platform == "gke":
        yield from gke.findings(request, machine)


def longest_name(nodes: int) -> int:
    """Length of the longest name of a run: its pods are NAME-w-0-INDEX-xxxxx."""
    return MAX_NAME - len(f"-w-0-{nodes - 1}-xxxxx")


def _names(request: LaunchRequest) -> Iterator[LaunchFinding]:
    name, longest = request.run.name, longest_name(request.cluster.nodes)
    if not _NAME.fullmatch(name):
        message = (
            f"'{name}' becomes host names: lower case letters, digits and '-', beginning with a"
            " letter"
        )
        yield error("run", "name", message)
    elif len(name) > longest:
        message = (
            f"has {len(name)} characters; with the suffixes of its pods at most {longest}"
            f" ({_JOBSET})"
        )
        yield error("run", "name", message)
    workload = request.workload
    for path in workload.files if workload else ():
        if not _FILE_PATH.fullmatch(path):
            message = "is a path in a ConfigMap's volume: letters, digits, '_', '.' and '-'"
            yield error("run", ("workload", "files", path), message)


def _storage(request: LaunchRequest, section: KubernetesConfig) -> Iterator[LaunchFinding]:
    storage = request.cluster.storage
    if section.volume_claim is None and storage.bucket is None:
        message = (
            "missing: name a PersistentVolumeClaim that all nodes may write to, or set"
            " storage.bucket"
        )
        yield error("cluster", "kubernetes.volume_claim", message)
    if section.volume_claim is not None and storage.bucket is not None:
        yield error(
            "cluster",
            "kubernetes.volume_claim",
            "and storage.bucket are both given; keep one of them",
        )
    if section.volume_claim is not None and not (storage.directory or "").startswith("/"):
        message = (
            "missing: the absolute path at which pods see kubernetes.volume_claim, such as /data"
        )
        yield error("cluster", "storage.directory", message)
    elif section.volume_claim is not None or storage.bucket is not None:
        root = storage_root(request.cluster)
        output = posixpath.normpath(posixpath.join(root, request.run.output))
        if not f"{output}/".startswith(f"{root.rstrip('/')}/"):
            message = (
                f"'{request.run.output}' would be lost with its pod: write a relative path, or one"
                f" below {root}"
            )
            yield error("run", "output", message)


def storage_root(cluster: ClusterConfig) -> str:
    """The directory of the pods that relative paths of a run refer to: on the volume, or in the
    bucket.

    Raises UserError for a name that no bucket can have.
    """
    if cluster.storage.bucket is None:
        return posixpath.normpath(cluster.storage.directory or "/")
    return posixpath.normpath(
        posixpath.join(BUCKET_MOUNT, bucket_of(cluster), cluster.storage.directory or "")
    )


def _secrets(request: LaunchRequest, section: KubernetesConfig) -> Iterator[LaunchFinding]:
    """Pods get secrets from Secrets of the namespace: all who may read a release or a ConfigMap see
    its values."""
    for config, key, environment in environments(request):
        for variable, value in environment.items():
            if variable in section.secrets:
                yield error(
                    config, f"{key}.{variable}", "is in kubernetes.secrets too; keep one of them"
                )
            for name in dict.fromkeys(REFERENCE.findall(value)):
                make = (
                    f"kubectl -n {section.namespace} create secret generic drillyard --from-literal"
                    f' {name}="${name}"'
                )
                yield error(
                    config,
                    f"{key}.{variable}",
                    f"refers to ${{env:{name}}}: make a Secret of it ({make}), set"
                    f" kubernetes.secrets: {{{variable}: drillyard/{name}}}, and remove it here",
                )
