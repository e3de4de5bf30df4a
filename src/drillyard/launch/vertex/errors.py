"""What Vertex AI refuses, in words that say what to do. Pure: an answer of the service in, a text out."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

from drillyard.config.cluster import ClusterConfig
from drillyard.errors import UserError
from drillyard.hardware.capacity import quota_needed
from drillyard.launch.vertex.config import vertex_of

_QUOTAS = "https://console.cloud.google.com/iam-admin/quotas"
_DISABLED = "SERVICE_DISABLED"


@dataclass(frozen=True)
class Refusal:
    """An error of the service: HTTP status, message, and what google.rpc details held."""

    status: int
    message: str
    fields: tuple[str, ...] = ()
    """`path: what is wrong` of each field (google.rpc.BadRequest)."""
    quotas: tuple[str, ...] = ()
    """What was exceeded (google.rpc.QuotaFailure)."""
    reason: str = ""
    """google.rpc.ErrorInfo."""


def words_of(doing: str, refusal: Refusal, cluster: ClusterConfig) -> str:
    """What was asked, what the service said, and what to do about it."""
    assert cluster.location is not None
    project, region = cluster.location.project, cluster.location.region
    said = f"Vertex AI ({project}, {region}) was asked to {doing} and said {refusal.status}: {refusal.message.strip()}"
    lines = [said, *(f"  {each}" for each in (*refusal.fields, *refusal.quotas) if each not in refusal.message)]
    return "\n".join([*lines, *_advice(refusal, cluster)])


def quota_words(cluster: ClusterConfig) -> str:
    """The quotas that the cluster counts against, with what it needs; empty where none is known."""
    try:
        needed = quota_needed(cluster)
    except UserError:
        return ""
    return "; ".join(f"{quota.metric}: {quota.amount} {quota.unit} in {quota.region}" for quota in needed)


def _advice(refusal: Refusal, cluster: ClusterConfig) -> list[str]:
    assert cluster.location is not None
    project, region = cluster.location.project, cluster.location.region
    match refusal.status:
        case HTTPStatus.FORBIDDEN if refusal.reason == _DISABLED or "has not been used in project" in refusal.message:
            return [f"Enable it: gcloud services enable aiplatform.googleapis.com --project {project}"]
        case HTTPStatus.FORBIDDEN:
            account = vertex_of(cluster).service_account
            act_as = f", and roles/iam.serviceAccountUser on {account}" if account else ""
            return [f"You need roles/aiplatform.user in project {project}{act_as}: ask its owner."]
        case HTTPStatus.UNAUTHORIZED:
            return ["Log in: gcloud auth application-default login"]
        case HTTPStatus.NOT_FOUND:
            return [
                f"Check location.project ({project}) and location.region ({region}), and that resources named under "
                "`vertex` are there: gcloud projects list; gcloud ai custom-jobs list --region REGION"
            ]
        case HTTPStatus.TOO_MANY_REQUESTS:
            needed = quota_words(cluster)
            return [
                *([f"The job needs {needed}."] if needed else []),
                f"Ask for more at {_QUOTAS}?project={project}, take fewer `nodes`, or buy otherwise (`consumption`).",
            ]
        case HTTPStatus.BAD_REQUEST:
            return ["What was sent: drillyard launch ... --dry-run; where each value comes from: --explain"]
        case _:
            return ["The service has a fault of its own; try again, or see https://status.cloud.google.com"]
