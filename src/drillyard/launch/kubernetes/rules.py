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
from drillyard.launch.kubernetes.config import BUCKET_MOUNT, FILES_MOUNT, KubernetesConfig
from drillyard.launch.request import LaunchFinding, LaunchRequest, error
from drillyard.launch.request_checks import RESERVED_VARIABLES, environments, mount_parts
from drillyard.launch.vertex.config import bucket_of

MAX_NAME = 63
_OWN_PATHS = (FILES_MOUNT, "/dev/shm", "/dev/termination-log")  # noqa: S108
"""Where the chart mounts something in every pod."""
_TOLERATION = ("key", "operator", "value", "effect")
_JOBSET = "https://jobset.sigs.k8s.io/docs/concepts/"
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_DNS_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_LABEL_KEY = re.compile(
    rf"({_DNS_LABEL}(\.{_DNS_LABEL})*/)?[A-Za-z0-9]([A-Za-z0-9_.-]{{0,61}}[A-Za-z0-9])?"
)
_OWN_LABELS = re.compile(
    r"drillyard/.*|app\.kubernetes\.io/(name|instance|managed-by)"
    r"|(.*\.)?(kueue\.x-k8s\.io|jobset\.sigs\.k8s\.io|batch\.kubernetes\.io)/.*"
)
"""Keys of labels by which the run, its queue and its pods are found."""
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
_FILE_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")


def findings(request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
    """Every rule that the request breaks."""
    cluster, section = request.cluster, request.cluster.section_as(KubernetesConfig)
    yield from _names(request)
    yield from _storage(request, section)
    yield from _secrets(request, section)
    yield from _labels(section)
    yield from _mounts(request, machine)
    image = request.image or ""
    if not image:
        message = (
            f"missing: pods need an image, by the address of its registry: {image_address(cluster)}"
        )
        yield error("cluster", "image", message)
    if re.search(r"\s", image):
        yield error(*request.image_setting, f"'{image}' has a space; it is NAME:TAG of a registry")
    yield from pod_network.findings(request, machine)
    if cluster.platform == "gke":
        yield from gke.findings(request, machine)


def image_address(cluster: ClusterConfig) -> str:
    """The form of an image's address: on GKE in the project's registry."""
    place = cluster.location
    if cluster.platform != "gke" or place is None:
        return "REGISTRY/REPOSITORY/IMAGE:TAG"
    return f"{place.region}-docker.pkg.dev/{place.project}/{cluster.name}/IMAGE:TAG"


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


def _labels(section: KubernetesConfig) -> Iterator[LaunchFinding]:
    """Labels and selectors that Kubernetes would refuse, and labels that replace the run's own."""
    for key, labels in (("labels", section.labels), ("node_selector", section.node_selector)):
        for name, value in labels.items():
            at = ("kubernetes", key, name)
            if not _LABEL_KEY.fullmatch(name) or not _LABEL_VALUE.fullmatch(value):
                message = (
                    f"{name}: {value} is not a label: at most 63 letters, digits, '-', '_' and '.',"
                    " and a prefix of the key is a host name"
                )
                yield error("cluster", at, message)
            elif key == "labels" and _OWN_LABELS.fullmatch(name):
                message = f"{name} is set by Drillyard or the run's controllers; remove it"
                yield error("cluster", at, message)
    for number, toleration in enumerate(section.tolerations):
        if unknown := sorted(toleration.keys() - _TOLERATION):
            message = f"{', '.join(unknown)}: not a key of a toleration: {', '.join(_TOLERATION)}"
            yield error("cluster", ("kubernetes", "tolerations", number), message)


def _mounts(request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
    """Directories of the node that would hide what the pods have: the run's files, its storage or
    run directory, and the libraries of its network stack."""
    root = storage_root(request.cluster)
    run_directory = posixpath.normpath(posixpath.join(root, request.run.output, request.run.name))
    own = {path: "the run's files" for path in _OWN_PATHS}
    stack = pod_network.pod_stack(request, machine)
    for volume in stack.volumes if stack else ():
        own[volume.mount_path] = "the network stack's libraries"
    for number, mount in enumerate(request.cluster.mounts):
        inside = posixpath.normpath(mount_parts(mount)[1])
        hidden = [path for path in own if _is_over(inside, path) or _is_over(path, inside)]
        hidden += [path for path in (root, run_directory) if _is_over(inside, path)]
        if hidden:
            what = own.get(hidden[0], "where the run writes")
            message = f"{inside} would be mounted over {hidden[0]}, {what}; mount it elsewhere"
            yield error("cluster", ("mounts", number), message)


def _is_over(mount: str, path: str) -> bool:
    """Whether what is mounted at `mount` hides `path`."""
    return f"{path}/".startswith(f"{mount.rstrip('/')}/")


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
    for variable in section.secrets:
        if variable in RESERVED_VARIABLES:
            message = "is set by the launcher for each attempt and node; remove it"
            yield error("cluster", f"kubernetes.secrets.{variable}", message)
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
