"""Rules of Vertex AI's custom jobs, checked before anything is sent. Each has its source and the
fix.

Where no other source is named, it is Google's description of the type in google.cloud.aiplatform.v1
(https://cloud.google.com/vertex-ai/docs/reference/rest/v1/CustomJobSpec). Whether image, bucket,
quota and capacity exist is reported by the service, at submission or at the job's end (service.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from drillyard.config.cluster import ClusterConfig
from drillyard.hardware.machines import Machine
from drillyard.launch.request import LaunchFinding, LaunchRequest, error
from drillyard.launch.vertex.config import VertexConfig

MAX_DISPLAY_NAME = 128
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
_IMAGE = re.compile(
    r"[a-z0-9]([a-z0-9._:-]*[a-z0-9])?(/[A-Za-z0-9._-]+)*(:[\w][\w.-]{0,127})?(@sha256:[0-9a-f]{64})?"
)
_HYPERDISK_ONLY = ("h200", "b200", "gb200", "gb300")
"""Accelerators whose machines boot from Hyperdisk alone."""


def findings(request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
    """Every rule that the request breaks."""
    cluster = request.cluster
    if machine is None or machine.cloud not in (None, cluster.cloud):
        # Refused before, or by planning.
        return
    vertex = cluster.section_as(VertexConfig)
    for key, message in setting_problems(cluster, vertex, machine):
        yield error("cluster", key, message)
    if request.image is None:
        message = (
            "missing: jobs need an image, by the address of its registry:"
            f" {_image_address(cluster)}"
        )
        yield error(*request.image_setting, message)
    elif not _IMAGE.fullmatch(request.image):
        message = (
            f"'{request.image}' is not an image's address as Vertex AI reads it: write"
            " REGION-docker.pkg.dev/PROJECT/REPOSITORY/NAME:TAG, without https:// or docker://"
            f" ({_SPEC}#ContainerSpec)"
        )
        yield error(*request.image_setting, message)


def setting_problems(
    cluster: ClusterConfig, vertex: VertexConfig, machine: Machine
) -> Iterator[tuple[str, str]]:
    """Every rule that the cluster config breaks: the key, dotted, and the message."""
    yield from _bought(cluster, vertex, machine)
    yield from _settings(cluster, vertex, machine)
    yield from _labels(vertex)


def _image_address(cluster: ClusterConfig) -> str:
    """The address that an image has in the repository of a cluster made by `drillyard cluster`."""
    assert cluster.location is not None
    place = cluster.location
    return f"{place.region}-docker.pkg.dev/{place.project}/{cluster.name}/NAME:TAG"


def _bought(
    cluster: ClusterConfig, vertex: VertexConfig, machine: Machine
) -> Iterator[tuple[str, str]]:
    """Broken rules about the machine, its place, and how it is bought: key and message."""
    assert cluster.location is not None
    region, zone = cluster.location.region or "", cluster.location.zone
    if machine.vertex_accelerator_type is None:
        yield (
            "machine",
            (
                f"{machine.name} cannot be had for Vertex AI's custom jobs: no accelerator type of"
                f" its interface is known for it ({_SPEC}#AcceleratorType). Take another machine,"
                " or another platform."
            ),
        )
    if not _REGION.fullmatch(region):
        yield (
            "location.region",
            f"'{region}' is not a region, such as us-central1 (Vertex AI's jobs are regional)",
        )
    if zone is not None and not zone.startswith(f"{region}-"):
        yield (
            "location.zone",
            f"{zone} is not in region {region}; a zone is its region and a letter: {region}-a",
        )
    if cluster.consumption == "flex-start" and vertex.timeout_hours > MAX_FLEX_START_HOURS:
        yield (
            "vertex.timeout_hours",
            (
                f"{vertex.timeout_hours:g} hours are more than the 7 days ({MAX_FLEX_START_HOURS:g}"
                f" hours) that flex-start gives ({_FLEX}). Set it to {MAX_FLEX_START_HOURS:g} or"
                " less; afterwards `drillyard runs resume` continues from the checkpoint."
            ),
        )
    default_wait = VertexConfig.model_fields["max_wait_hours"].get_default()
    if cluster.consumption != "flex-start" and vertex.max_wait_hours != default_wait:
        yield (
            "vertex.max_wait_hours",
            (
                f"only flex-start jobs wait for capacity ({_SPEC}#Scheduling); consumption is"
                f" {cluster.consumption}: remove it, or set consumption: flex-start"
            ),
        )
    if cluster.consumption != "reservation":
        return
    name = cluster.reservation or ""
    whole = _RESERVATION_NAME.fullmatch(name)
    if whole is None and "/" in name:
        message = (
            f"'{name}' is neither a name nor projects/PROJECT/zones/ZONE/reservations/NAME"
            f" ({_RESERVATION})"
        )
        yield "reservation", message
    elif whole is None and zone is None:
        yield (
            "location.zone",
            (
                "missing: Vertex AI finds a reservation by its full name, which holds the zone"
                f" ({_RESERVATION}). Add the zone of {name} to `location`."
            ),
        )
    elif whole is not None and not whole["zone"].startswith(f"{region}-"):
        message = (
            f"its zone {whole['zone']} is not in location.region {region}; a job uses its own"
            " region's"
        )
        yield "reservation", message
    elif whole is not None and zone is not None and whole["zone"] != zone:
        yield (
            "reservation",
            f"its zone is {whole['zone']}, but location.zone is {zone}; remove one of them",
        )


def _settings(
    cluster: ClusterConfig, vertex: VertexConfig, machine: Machine
) -> Iterator[tuple[str, str]]:
    """Broken rules about network, accounts and disks: key and message."""
    assert cluster.location is not None
    if vertex.network is not None and not _NETWORK.fullmatch(vertex.network):
        yield (
            "vertex.network",
            (
                f"'{vertex.network}' is not projects/NUMBER/global/networks/NAME; the number, not"
                f" the id, of the project is wanted ({_SPEC}): gcloud projects describe PROJECT"
                " --format='value(projectNumber)'"
            ),
        )
    if vertex.reserved_ip_ranges and vertex.network is None:
        yield (
            "vertex.reserved_ip_ranges",
            f"are ranges of vertex.network, which is not set ({_SPEC})",
        )
    account = vertex.service_account
    if account is not None and not _SERVICE_ACCOUNT.fullmatch(account):
        message = (
            f"'{account}' is not the address of one, such as NAME@PROJECT.iam.gserviceaccount.com"
        )
        yield "vertex.service_account", message
    board = _TENSORBOARD_NAME.fullmatch(vertex.tensorboard or "")
    if vertex.tensorboard is not None and board is None:
        message = (
            f"'{vertex.tensorboard}' is not projects/NUMBER/locations/REGION/tensorboards/ID"
            f" ({_SPEC})"
        )
        yield "vertex.tensorboard", message
    if board is not None and board["region"] != cluster.location.region:
        yield (
            "vertex.tensorboard",
            (
                f"is in {board['region']}, the job in {cluster.location.region}: both must be in"
                f" one region ({_TENSORBOARD})"
            ),
        )
    if vertex.tensorboard is not None and account is None:
        yield (
            "vertex.service_account",
            (
                f"missing: a job that writes to a Tensorboard instance needs one ({_TENSORBOARD})."
                " Name a service account with the roles Storage Admin and Vertex AI User."
            ),
        )
    disk = vertex.boot_disk_type
    if disk not in (None, "hyperdisk-balanced") and machine.accelerator in _HYPERDISK_ONLY:
        message = (
            f"{machine.name} boots from hyperdisk-balanced only, not from {disk} ({_HYPERDISK});"
            " remove it"
        )
        yield "vertex.boot_disk_type", message


def _labels(vertex: VertexConfig) -> Iterator[tuple[str, str]]:
    rule = (
        f"labels are at most {MAX_LABEL_LETTERS} lower case letters, digits, '-' and '_', and keys"
        f" begin with a letter ({_LABELS})"
    )
    if len(vertex.labels) > MAX_LABELS - 3:
        many = (
            f"{len(vertex.labels)} are too many: a job may have {MAX_LABELS}, 3 are ours"
            f" ({_LABELS})"
        )
        yield "vertex.labels", many
    for key, value in vertex.labels.items():
        if key.startswith(OUR_LABELS):
            yield (
                "vertex.labels",
                f"'{key}': labels that begin with {OUR_LABELS} are reserved; rename it",
            )
        if not key or not key[0].isalpha() or not _is_label(key):
            yield "vertex.labels", f"key '{key}': {rule}"
        if not _is_label(value):
            yield "vertex.labels", f"value of {key} '{value}': {rule}"


def _is_label(text: str) -> bool:
    return (
        re.fullmatch(rf"[\w-]{{0,{MAX_LABEL_LETTERS}}}", text) is not None and text == text.lower()
    )
