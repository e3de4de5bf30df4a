"""What the errors of Terraform and its providers mean, and what to do about them: a table for each
cloud, of which that of Google Cloud is here.

Texts are those of Google's APIs as the provider passes them on (error codes of Compute Engine:
https://cloud.google.com/compute/docs/troubleshooting/troubleshooting-resource-availability, of
APIs that are off: https://cloud.google.com/apis/design/errors) and of Terraform itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from drillyard.errors import UnreachableError, UserError
from drillyard.programs import shown_text

CONSOLE_QUOTAS = "https://console.cloud.google.com/iam-admin/quotas?project={project}"


@dataclass(frozen=True)
class Diagnostic:
    """One error of Terraform. `address`: the resource, empty where it concerns none."""

    summary: str
    detail: str = ""
    address: str = ""

    @property
    def text(self) -> str:
        return f"{self.summary} {self.detail}".strip()


@dataclass(frozen=True)
class ErrorKind:
    """A kind of error: the texts by which it is recognised, and the advice, in which the project,
    the command to repeat, the API and the role are filled in."""

    name: str
    pattern: re.Pattern[str]
    advice: str
    can_pass: bool = False
    """Whether the same command may succeed a little later, without any change."""
    unreachable: bool = False


def error_kind(name: str, pattern: str, advice: str, **flags: bool) -> ErrorKind:
    return ErrorKind(name, re.compile(pattern, re.IGNORECASE | re.DOTALL), advice, **flags)


KINDS = (
    error_kind(
        "credentials",
        r"invalid_grant|invalid_rapt|reauth|could not find default credentials|expired or revoked"
        r"|UNAUTHENTICATED|Error 401|no credentials loaded|private key should be a PEM",
        "Log in again: gcloud auth application-default login",
    ),
    error_kind(
        "api-disabled",
        r"SERVICE_DISABLED|accessNotConfigured|has not been used in project"
        r"|API has not been enabled",
        "Enable it: gcloud services enable {service} --project {project}",
        can_pass=True,
    ),
    error_kind(
        "quota",
        r"QUOTA_EXCEEDED|quotaExceeded|Quota '[A-Z0-9_]+' exceeded"
        r"|Insufficient (?:regional |project )?quota|RESOURCE_EXHAUSTED[^\n]*quota",
        "Ask for a higher quota, or for fewer nodes: " + CONSOLE_QUOTAS,
    ),
    error_kind(
        "stockout",
        r"GCE_STOCKOUT|ZONE_RESOURCE_POOL_EXHAUSTED|resource_pool_exhausted"
        r"|does not have enough resources available|STOCKOUT",
        "The zone has no machines left now. Repeat {command} later, set another location.zone, or"
        " consumption: flex-start, which waits for machines.",
        can_pass=True,
    ),
    error_kind(
        "permission",
        r"Required ['\"][\w.]+['\"] permission|Permission ['\"]?[\w.]+['\"]? denied"
        r"|does not have [\w.]+ (?:access|permission)|PERMISSION_DENIED|Error 403",
        "Grant it: gcloud projects add-iam-policy-binding {project} --member user:YOUR_ACCOUNT"
        " --role {role}",
    ),
    error_kind(
        "protected",
        r"deletion_protection",
        "Set cluster.deletion_protection: false, run drillyard cluster up, then this again.",
    ),
    error_kind(
        "in-use",
        r"resourceInUseByAnotherResource|RESOURCE_IN_USE|is already being used by"
        r"|resourceNotReady|is not empty|Producer services .{0,80}still using this connection",
        "Something outside of Terraform's state uses it: drillyard cluster leaks lists what is"
        " attached, with the commands that delete it.",
        can_pass=True,
    ),
    error_kind(
        "exists",
        r"alreadyExists|ALREADY_EXISTS|already exists|already own it|Error 409",
        "It was not made by this cluster's state. Delete it, or change the cluster's name.",
    ),
    error_kind(
        "stale-plan",
        r"saved plan is stale",
        "The cluster was changed meanwhile. Repeat {command}, which plans again.",
    ),
    error_kind(
        "too-old",
        r"Unsupported Terraform Core version|no available releases match"
        r"|Inconsistent dependency lock file|state snapshot was created by Terraform v"
        r"|Resource instance managed by newer provider version",
        "Install a newer Terraform: https://developer.hashicorp.com/terraform/install",
    ),
    error_kind(
        "network",
        r"dial tcp|no such host|i/o timeout|connection re(?:fused|set)|TLS handshake timeout"
        r"|could not connect to registry|backendError|Error 50[0234]|context deadline exceeded",
        "Check the network, then repeat {command}.",
        can_pass=True,
        unreachable=True,
    ),
)
"""Earlier rows win: a refusal by a quota is an Error 403 too."""

_PERMISSION = re.compile(r"\b([a-z]+\.[a-zA-Z]+\.[a-zA-Z]+)['\"]? (?:permission|denied|access)")
_API = re.compile(r"\b([a-z]+\.googleapis\.com)\b(?!/v)")
ROLES = {
    "artifactregistry": "roles/artifactregistry.admin",
    "compute": "roles/compute.admin",
    "container": "roles/container.admin",
    "iam": "roles/iam.serviceAccountAdmin",
    "resourcemanager": "roles/resourcemanager.projectIamAdmin",
    "servicenetworking": "roles/servicenetworking.networksAdmin",
    "serviceusage": "roles/serviceusage.serviceUsageAdmin",
    "storage": "roles/storage.admin",
}
"""The role that has the permissions of a service, by the permission's first word
(https://cloud.google.com/iam/docs/roles-permissions)."""

_SERVICES = {
    "google_artifact_registry": "artifactregistry",
    "google_compute": "compute",
    "google_container": "container",
    "google_project_iam": "resourcemanager",
    "google_project_service": "serviceusage",
    "google_service_account": "iam",
    "google_service_networking": "servicenetworking",
    "google_storage": "storage",
}
"""The service of a resource, by the beginning of its kind."""


def kind_of(text: str, kinds: Sequence[ErrorKind] = KINDS) -> ErrorKind | None:
    """The kind of an error's text; None: an unknown one. `kinds`: those of its cloud."""
    return next((kind for kind in kinds if kind.pattern.search(text)), None)


def provider_error(
    diagnostics: Sequence[Diagnostic],
    *,
    project: str,
    command: str,
    doing: str,
    kinds: Sequence[ErrorKind] = KINDS,
) -> UserError:
    """One error for all diagnostics of a command: the first that the table knows, else the first.

    `doing`: what failed (`terraform apply`); `command`: what the user repeats.
    """
    if not diagnostics:
        return UserError(f"{doing}: failed without a message\nRepeat {command}")
    known = [(each, kind_of(each.text, kinds)) for each in diagnostics]
    # All others wait for what it needs, so an error that names its resource comes first.
    first, kind = min(known, key=lambda row: (row[1] is None, not row[0].address))
    lines = [f"{first.address or doing}: {shown_text(first.text)}"]
    if len(diagnostics) > 1:
        others = [each.address for each in diagnostics if each is not first and each.address]
        named = f": {', '.join(dict.fromkeys(others))}" if others else ""
        lines.append(f"{len(diagnostics) - 1} more of the kind or following it{named}")
    lines.append(_advice(first, kind, project, command))
    return (UnreachableError if kind and kind.unreachable else UserError)("\n".join(lines))


def _advice(found: Diagnostic, kind: ErrorKind | None, project: str, command: str) -> str:
    if kind is None:
        return f"What exists is in the state: fix the cause, then repeat {command}"
    service = next(
        (name for prefix, name in _SERVICES.items() if found.address.startswith(prefix)), "compute"
    )
    permission = _PERMISSION.search(found.text)
    named = permission[1].split(".")[0] if permission else service
    api = _API.search(found.text)
    return kind.advice.format(
        project=project,
        command=command,
        service=api[1] if api else f"{service}.googleapis.com",
        role=ROLES.get(named, f"(one that has {permission[1] if permission else named})"),
    )
