"""The plan of a run on Vertex AI: the CustomJob request, and the files that its containers read.
Pure, without Google's libraries: the request is a dict in the JSON form of
google.cloud.aiplatform.v1.CustomJob, parsed before it is sent.

The container's command is the agent, the same on every replica; it takes its rank from
CLUSTER_SPEC, which the service sets. The request says where, on what and for how long; the run is
in job.json in the bucket. Everybody who may see the job can read the request, so it has nothing of
the run's environment.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from drillyard.config.cluster import ClusterConfig
from drillyard.hardware.capacity import machine_of, require_own_cloud
from drillyard.hardware.facts import cited
from drillyard.hardware.machines import Machine
from drillyard.launch.plan import Call, Plan, secret_names
from drillyard.launch.prepared_run import ClusterPaths, JobSettings, prepare
from drillyard.launch.request import LaunchRequest
from drillyard.launch.vertex.config import VertexConfig, output_of, project_of, uri_of
from drillyard.launch.vertex.rules import MAX_DISPLAY_NAME, MAX_LABEL_LETTERS, findings
from drillyard.plan_files import ExplainedField, PlanFile, explained
from drillyard.version import __version__

RUN_LABEL, CLUSTER_LABEL, VERSION_LABEL = "drillyard-run", "drillyard-cluster", "drillyard-version"
REQUEST_FILE = "custom-job.json"

JOIN_SECONDS = 3600.0
LEASE_SECONDS = 120.0
_RESERVATION_KEY = "compute.googleapis.com/reservation-name"
_STRATEGIES = {
    "on-demand": "STANDARD",
    "reservation": "STANDARD",
    "spot": "SPOT",
    "flex-start": "FLEX_START",
}
_BOOT_DISKS = ("pd-ssd", "hyperdisk-balanced")
"""Boot disks of machines.yaml that Vertex AI has too (and pd-standard)."""

_SPEC = "google.cloud.aiplatform.v1.CustomJobSpec"
_SCHEDULING = "google.cloud.aiplatform.v1.Scheduling"
_SERVICE = "https://cloud.google.com/vertex-ai/docs/training/understanding-training-service"
_FUSE = "https://cloud.google.com/storage/docs/cloud-storage-fuse/caching"
_OURS = "drillyard"
_Entry = tuple[str, Any, str, str]
"""A value of the request: its dotted path, the value, reason and source."""


def plan_of(request: LaunchRequest) -> Plan:
    """The plan of a request. Pure. Raises UserError for a broken rule of the service or of the
    run."""
    cluster = request.cluster
    assert cluster.location is not None
    output = output_of(request.run.output, cluster)
    paths = ClusterPaths(project_of(cluster), output, cluster.python or "python3")
    prepared = prepare(request, checks=[findings], paths=paths, settings=_job_settings(request))
    machine = machine_of(cluster, request.facts)
    require_own_cloud(cluster, request.facts)
    launch = uri_of(prepared.job.launch_directory)
    body, fields = custom_job(prepared, cluster, machine)
    files = (*prepared.files, PlanFile(REQUEST_FILE, json.dumps(body, indent=2) + "\n"))
    upload = Call(
        "put the run's files into the bucket",
        "upload",
        f"{launch}/",
        {},
        tuple(file.path for file in files),
    )
    address = f"{service_of(cluster)}/v1/{parent_of(cluster)}/customJobs"
    return replace(
        prepared,
        code=f"in the image {prepared.image}",
        steps=(upload, Call("create the custom job", "POST", address, body)),
        files=files,
        fields=(*fields, *prepared.fields),
        warnings=(*prepared.warnings, *_warnings(cluster, prepared, launch)),
    )


def service_of(cluster: ClusterConfig) -> str:
    """Address of the service: jobs are created and found in their region alone."""
    assert cluster.location is not None
    endpoint = cluster.section_as(VertexConfig).endpoint
    address = (endpoint or f"{cluster.location.region}-aiplatform.googleapis.com").rstrip("/")
    return address if "://" in address else f"https://{address}"


def parent_of(cluster: ClusterConfig) -> str:
    """The resource below which the cluster's jobs are."""
    assert cluster.location is not None
    return f"projects/{cluster.location.project}/locations/{cluster.location.region}"


def label_of(name: str) -> str:
    """A run's name as a label's value: as it is where it can be, else changed and with a digest of
    it.

    Labels have no dots, and at most 63 letters
    (https://cloud.google.com/resource-manager/docs/labels-overview).
    """
    if re.fullmatch(r"[a-z0-9_-]{1,63}", name):
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{re.sub('[^a-z0-9_-]', '_', name)[: MAX_LABEL_LETTERS - 9]}-{digest}"


def custom_job(
    prepared: Plan, cluster: ClusterConfig, machine: Machine
) -> tuple[dict[str, Any], list[ExplainedField]]:
    """The CustomJob, and why each of its fields has its value."""
    entries = list(_job_entries(prepared, cluster))
    pool = list(_pool_entries(prepared, cluster, machine))
    body, shared = _assembled(entries), _assembled(pool)
    counts = [("1", "the chief, which is node 0: exactly one", _SPEC)]
    if cluster.nodes > 1:
        why = "all other nodes: node K is replica K-1 of this pool"
        counts.append((str(cluster.nodes - 1), why, "cluster.yaml: nodes"))
    replicas = [
        ExplainedField(f"workerPoolSpecs[{number}].replicaCount", *each)
        for number, each in enumerate(counts)
    ]
    pools = [{**shared, "replicaCount": count} for count, _, _ in counts]
    body["jobSpec"] = {"workerPoolSpecs": pools, **body["jobSpec"]}
    assert len(body["displayName"]) <= MAX_DISPLAY_NAME
    job_fields = [explained(path.removeprefix("jobSpec."), *why) for path, *why in entries]
    return body, [
        *job_fields,
        *replicas,
        *(explained(f"workerPoolSpecs[*].{path}", *why) for path, *why in pool),
    ]


def _assembled(entries: list[_Entry]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for path, value, _, _ in entries:
        *parents, last = path.split(".")
        place = made
        for part in parents:
            place = place.setdefault(part, {})
        place[last] = value
    return made


def _fact(path: str, machine: Machine, key: str, reason: str) -> _Entry:
    """A value of the machine's row, with its source."""
    return path, getattr(machine, key), reason, cited(machine, key)


def _set(path: str, value: Any, setting: str) -> _Entry:
    return path, value, "as set", f"cluster.yaml: vertex.{setting}"


_SETTINGS = {
    "serviceAccount": "service_account",
    "network": "network",
    "reservedIpRanges": "reserved_ip_ranges",
    "tensorboard": "tensorboard",
    "enableWebAccess": "web_access",
}
"""Fields of the job spec by the settings that they are copied from, where those are given."""


def _job_entries(prepared: Plan, cluster: ClusterConfig) -> Iterator[_Entry]:
    """All of the request but the worker pools."""
    job, vertex = prepared.job, cluster.section_as(VertexConfig)
    bought, where = cluster.consumption or "", "jobSpec.scheduling"
    found_by = "by which `drillyard runs` finds it again, from any machine"
    version = re.sub("[^a-z0-9_-]", "-", __version__)
    yield "displayName", job.run, "the run's name", "run.yaml: name"
    yield f"labels.{RUN_LABEL}", label_of(job.run), f"the run's name, {found_by}", _OURS
    yield f"labels.{CLUSTER_LABEL}", label_of(job.cluster), f"the cluster's name, {found_by}", _OURS
    yield f"labels.{VERSION_LABEL}", version, "what submitted it", _OURS
    for key, value in vertex.labels.items():
        yield _set(f"labels.{key}", value, "labels")
    yield (
        f"{where}.strategy",
        _STRATEGIES[bought],
        f"consumption {bought}",
        "cluster.yaml: consumption",
    )
    reason = "the longest time that the job may run; then it has failed: time limit"
    yield (
        f"{where}.timeout",
        _duration(vertex.timeout_hours),
        reason,
        "cluster.yaml: vertex.timeout_hours",
    )
    reason = (
        "a worker that the service restarts joins the other nodes again, and all continue from the"
        " checkpoint"
    )
    yield f"{where}.restartJobOnWorkerRestart", False, reason, _SCHEDULING
    reason = (
        "the service replaces lost and preempted nodes; the agent of a run that is over exits at"
        " once"
    )
    yield f"{where}.disableRetries", False, reason, _SERVICE
    if bought == "flex-start":
        then = "without limit" if not vertex.max_wait_hours else "then it has expired: no capacity"
        reason, source = (
            f"the longest wait for capacity, {then}",
            "cluster.yaml: vertex.max_wait_hours",
        )
        yield f"{where}.maxWaitDuration", _duration(vertex.max_wait_hours), reason, source
    for field, setting in _SETTINGS.items():
        if value := getattr(vertex, setting):
            yield _set(f"jobSpec.{field}", value, setting)
    output = uri_of(job.run_directory) + "/"
    reason = "AIP_TENSORBOARD_LOG_DIR and the like point into the run's directory"
    yield "jobSpec.baseOutputDirectory.outputUriPrefix", output, reason, _SPEC


def _pool_entries(prepared: Plan, cluster: ClusterConfig, machine: Machine) -> Iterator[_Entry]:
    """Yield the fields that all worker pools have in common."""
    assert cluster.location is not None
    vertex, launch = cluster.section_as(VertexConfig), prepared.job.launch_directory
    yield "machineSpec.machineType", machine.name, "as set", "cluster.yaml: machine"
    yield _fact(
        "machineSpec.acceleratorType",
        machine,
        "vertex_accelerator_type",
        f"the GPU of {machine.name}",
    )
    yield _fact(
        "machineSpec.acceleratorCount", machine, "num_accelerators", f"GPUs of one {machine.name}"
    )
    where, source = "machineSpec.reservationAffinity", "cluster.yaml: reservation"
    kind = f"{where}.reservationAffinityType"
    if cluster.consumption == "reservation":
        name = cluster.reservation or ""
        if "/" not in name:
            name = f"projects/{cluster.location.project}/zones/{cluster.location.zone}/reservations/{name}"  # noqa: E501
        yield kind, "SPECIFIC_RESERVATION", "only the named reservation", source
        reason = "a reservation is found by its name"
        yield f"{where}.key", _RESERVATION_KEY, reason, "google.cloud.aiplatform.v1"
        yield f"{where}.values", [name], "its full name", source
    else:
        reason = f"consumption {cluster.consumption} uses no reservation"
        yield kind, "NO_RESERVATION", reason, "cluster.yaml: consumption"
    if vertex.boot_disk_type is not None:
        yield _set("diskSpec.bootDiskType", vertex.boot_disk_type, "boot_disk_type")
    elif machine.boot_disk in _BOOT_DISKS:
        yield _fact(
            "diskSpec.bootDiskType", machine, "boot_disk", f"what {machine.name} boots from"
        )
    source = "cluster.yaml: vertex.boot_disk_gb"
    yield "diskSpec.bootDiskSizeGb", vertex.boot_disk_gb, "holds the image and caches", source
    image = "run.yaml: workload.image or cluster.yaml: image"
    yield "containerSpec.imageUri", prepared.image, "the run's image", image
    command = ["python3", "-B", f"{launch}/agent", "run", "--job", f"{launch}/job.json"]
    reason = (
        "the agent: it takes its rank and the chief's address from CLUSTER_SPEC, waits for the"
        " other nodes, sets the environment of job.json and runs the command; -B: writes no"
        " bytecode into the bucket"
    )
    yield "containerSpec.command", command, reason, _OURS


def _job_settings(request: LaunchRequest) -> JobSettings:
    """Settings of the job that the service and its mounts need."""
    lease = (
        "a bucket's mount may show another node's file 60 s late; a lease that is renewed must not"
        " look expired"
    )
    settings: dict[str, tuple[Any, str, str]] = {
        "join_seconds": (
            JOIN_SECONDS,
            "replicas start when each has its machine and image",
            _SERVICE,
        ),
        "lease_seconds": (LEASE_SECONDS, lease, _FUSE),
        "log_parts": (True, "a bucket shows what is appended once the file is closed", _FUSE),
    }
    if not (request.workload and request.workload.working_directory):
        settings["working_directory"] = (
            None,
            "the code is in the image: where the image starts",
            _OURS,
        )
    return settings


def _warnings(cluster: ClusterConfig, prepared: Plan, launch: str) -> list[str]:
    warnings = []
    if secret_names(prepared.files):
        warnings.append(
            f"secrets of the run go to {launch}/secrets.json: everybody who may read the bucket can"
            " read them (a bucket has no file modes)"
        )
    if cluster.consumption == "spot":
        warnings.append(
            "spot: the service replaces preempted machines a limited number of times; "
            "then the run fails, and `drillyard runs resume` continues from its checkpoint"
        )
    return warnings


def _duration(hours: float) -> str:
    return f"{round(hours * 3600)}s"
