"""Rules of Vertex AI's custom jobs, checked before anything is sent. Each has its source and the fix.

Where no other source is named, it is Google's description of the type in google.cloud.aiplatform.v1
(https://cloud.google.com/vertex-ai/docs/reference/rest/v1/CustomJobSpec). Whether image, bucket, quota and capacity
exist is reported by the service, at submission or at the job's end (service.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from drillyard.config.cluster import ClusterConfig
from drillyard.config.run import WorkloadRunConfig
from drillyard.hardware.machines import Machine
from drillyard.launch.request import LaunchFinding, LaunchRequest, error
from drillyard.launch.vertex.config import VertexConfig, vertex_of

MAX_DISPLAY_NAME = 128
MAX_ENVIRONMENT = 100
MAX_FLEX_START_HOURS = 168.0
MAX_LABELS = 64
MAX_LABEL_LETTERS = 63
OUR_LABELS = "drillyard-"

_SPEC = "https://cloud.google.com/vertex-ai/docs/reference/rest/v1/CustomJobSpec"
_FLEX = "https://cloud.google.com/vertex-ai/docs/training/schedule-jobs-dws"
_RESERVATION = "https://cloud.google.com/vertex-ai/docs/training/use-reservations"
_TENSORBOARD = "https://cloud.google.com/vertex-ai/docs/experiments/tensorboard-training"
_LABELS = "https://cloud.google.com/resource-manager/docs/labels-overview#requirements"
_HYPERDISK = "https://cloud.google.com/compute/docs/disks/hyperdisks#machine-type-support"

_REGION = re.compile(r"[a-z]+-[a-z]+\d+")
_NETWORK = re.compile(r"projects/\d+/global/networks/[a-z]([a-z0-9-]*[a-z0-9])?")
_TENSORBOARD_NAME = re.compile(r"projects/[^/]+/locations/(?P<region>[^/]+)/tensorboards/[^/]+")
_RESERVATION_NAME = re.compile(r"projects/[^/]+/zones/(?P<zone>[^/]+)/reservations/[^/]+")
_SERVICE_ACCOUNT = re.compile(r"[^@\s]+@[^@\s]+\.[^@\s]+")
_IMAGE = re.compile(r"[a-z0-9]([a-z0-9._:-]*[a-z0-9])?(/[A-Za-z0-9._-]+)*(:[\w][\w.-]{0,127})?(@sha256:[0-9a-f]{64})?")
_HYPERDISK_ONLY = ("h200", "b200", "gb200", "gb300")
"""Accelerators whose machines boot from Hyperdisk alone."""


def findings(request: LaunchRequest, machine: Machine) -> Iterator[LaunchFinding]:
    """Every rule that the request breaks."""
    cluster = request.cluster
    if machine.cloud not in (None, cluster.cloud):
        # Planning refuses that.
        return
    for rule in _RULES:
        for broken in rule(cluster, vertex_of(cluster), machine):
            key, _, message = broken.partition(": ")
            yield error("cluster", key, message.replace("\n", ". "))
    if not _IMAGE.fullmatch(request.image or ""):
        message = (
            f"'{request.image}' is not an image's address as Vertex AI reads it: write REGION-docker.pkg.dev/PROJECT/"
            f"REPOSITORY/NAME:TAG, without https:// or docker:// ({_SPEC}#ContainerSpec)"
        )
        own = isinstance(request.run, WorkloadRunConfig) and request.run.workload.image is not None
        yield error("run", "workload.image", message) if own else error("cluster", "image", message)


def _accelerator(cluster: ClusterConfig, vertex: VertexConfig, machine: Machine) -> Iterator[str]:
    if machine.vertex_accelerator_type is None:
        yield (
            f"machine: {machine.name} cannot be had for Vertex AI's custom jobs: no accelerator type of its interface "
            f"is known for it ({_SPEC}#AcceleratorType)\nTake another machine, or another platform."
        )


def _place(cluster: ClusterConfig, vertex: VertexConfig, machine: Machine) -> Iterator[str]:
    location = cluster.location
    assert location is not None
    region, zone = location.region or "", location.zone
    if not _REGION.fullmatch(region):
        yield f"location.region: '{region}' is not a region, such as us-central1 (Vertex AI's jobs are regional)"
    if zone is not None and not zone.startswith(f"{region}-"):
        yield f"location.zone: {zone} is not in region {region}; a zone is its region and a letter: {region}-a"


def _flex_start(cluster: ClusterConfig, vertex: VertexConfig, machine: Machine) -> Iterator[str]:
    if cluster.consumption == "flex-start" and vertex.timeout_hours > MAX_FLEX_START_HOURS:
        yield (
            f"vertex.timeout_hours: {vertex.timeout_hours:g} hours are more than the 7 days ({MAX_FLEX_START_HOURS:g} "
            f"hours) that flex-start gives ({_FLEX})\nSet it to {MAX_FLEX_START_HOURS:g} or less; afterwards "
            "`drillyard runs resume` continues from the checkpoint."
        )
    if cluster.consumption != "flex-start" and vertex.max_wait_hours != _default("max_wait_hours"):
        yield (
            f"vertex.max_wait_hours: only flex-start jobs wait for capacity ({_SPEC}#Scheduling); consumption is "
            f"{cluster.consumption}: remove it, or set consumption: flex-start"
        )


def _reservation(cluster: ClusterConfig, vertex: VertexConfig, machine: Machine) -> Iterator[str]:
    if cluster.consumption != "reservation":
        return
    assert cluster.location is not None
    name, zone, region = cluster.reservation or "", cluster.location.zone, cluster.location.region
    whole = _RESERVATION_NAME.fullmatch(name)
    if "/" in name and whole is None:
        yield (
            f"reservation: '{name}' is neither a name nor projects/PROJECT/zones/ZONE/reservations/NAME "
            f"({_RESERVATION})"
        )
    elif whole is None and zone is None:
        yield (
            "location.zone: missing: Vertex AI finds a reservation by its full name, which holds the zone "
            f"({_RESERVATION})\nAdd the zone of {name} to `location`."
        )
    elif whole is not None and not whole["zone"].startswith(f"{region}-"):
        yield f"reservation: its zone {whole['zone']} is not in location.region {region}; a job uses its own region's"
    elif whole is not None and zone is not None and whole["zone"] != zone:
        yield f"reservation: its zone is {whole['zone']}, but location.zone is {zone}; remove one of them"


def _network(cluster: ClusterConfig, vertex: VertexConfig, machine: Machine) -> Iterator[str]:
    if vertex.network is not None and not _NETWORK.fullmatch(vertex.network):
        yield (
            f"vertex.network: '{vertex.network}' is not projects/NUMBER/global/networks/NAME; the number, not the id, "
            f"of the project is wanted ({_SPEC}): gcloud projects describe PROJECT --format='value(projectNumber)'"
        )
    if vertex.reserved_ip_ranges and vertex.network is None:
        yield f"vertex.reserved_ip_ranges: are ranges of vertex.network, which is not set ({_SPEC})"


def _accounts(cluster: ClusterConfig, vertex: VertexConfig, machine: Machine) -> Iterator[str]:
    if vertex.service_account is not None and not _SERVICE_ACCOUNT.fullmatch(vertex.service_account):
        yield (
            f"vertex.service_account: '{vertex.service_account}' is not the address of one, such as "
            "NAME@PROJECT.iam.gserviceaccount.com"
        )
    if vertex.tensorboard is None:
        return
    board = _TENSORBOARD_NAME.fullmatch(vertex.tensorboard)
    assert cluster.location is not None
    if board is None:
        yield (
            f"vertex.tensorboard: '{vertex.tensorboard}' is not projects/NUMBER/locations/REGION/tensorboards/ID "
            f"({_SPEC})"
        )
    elif board["region"] != cluster.location.region:
        yield (
            f"vertex.tensorboard: is in {board['region']}, the job in {cluster.location.region}: both must be in one "
            f"region ({_TENSORBOARD})"
        )
    if vertex.service_account is None:
        yield (
            f"vertex.service_account: missing: a job that writes to a Tensorboard instance needs one ({_TENSORBOARD})\n"
            "Name a service account with the roles Storage Admin and Vertex AI User."
        )


def _disk(cluster: ClusterConfig, vertex: VertexConfig, machine: Machine) -> Iterator[str]:
    wanted = vertex.boot_disk_type
    if wanted is not None and wanted != "hyperdisk-balanced" and machine.accelerator in _HYPERDISK_ONLY:
        yield (
            f"vertex.boot_disk_type: {machine.name} boots from hyperdisk-balanced only, not from {wanted} "
            f"({_HYPERDISK}); remove it"
        )


def _labels(cluster: ClusterConfig, vertex: VertexConfig, machine: Machine) -> Iterator[str]:
    if len(vertex.labels) > MAX_LABELS - 3:
        yield f"vertex.labels: {len(vertex.labels)} are too many: a job may have {MAX_LABELS}, 3 are ours ({_LABELS})"
    for key, value in vertex.labels.items():
        if key.startswith(OUR_LABELS):
            yield f"vertex.labels: '{key}': labels that begin with {OUR_LABELS} are reserved; rename it"
        if not key or not key[0].isalpha() or not _is_label(key):
            yield _label_rule("key", key)
        if not _is_label(value):
            yield _label_rule(f"value of {key}", value)


def _label_rule(what: str, text: str) -> str:
    return (
        f"vertex.labels: {what} '{text}': labels are at most {MAX_LABEL_LETTERS} lower case letters, digits, '-' and "
        f"'_', and keys begin with a letter ({_LABELS})"
    )


def _is_label(text: str) -> bool:
    good = all(each in "-_" or each.isdigit() or (each.isalpha() and each == each.lower()) for each in text)
    return good and len(text) <= MAX_LABEL_LETTERS


def _default(field: str) -> object:
    return VertexConfig.model_fields[field].get_default()


_Rule = Callable[[ClusterConfig, VertexConfig, Machine], Iterator[str]]
"""Yields problems, each beginning with the key of the setting: `vertex.network: ...`."""
_RULES: tuple[_Rule, ...] = (_accelerator, _place, _flex_start, _reservation, _network, _accounts, _disk, _labels)
