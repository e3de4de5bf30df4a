"""Vertex AI's JobService, through Google's own client: jobs of one cluster created, found, read and
cancelled.

The REST transport works through proxies and with forks. An endpoint that begins with http:// (a
server for tests) gets no credentials. Importing the client takes about a second, so this module is
imported only to contact the service. Transient errors (a connection, 5xx) are retried for
`RETRY_SECONDS`; creating a job is repeated only after a search for it, since a lost answer may
belong to a job that exists.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import Any

from drillyard.config.cluster import ClusterConfig
from drillyard.errors import MissingExtraError, UnreachableError, UserError
from drillyard.hardware.capacity import quota_needed
from drillyard.launch.vertex.config import NO_CLIENT, VertexConfig
from drillyard.launch.vertex.custom_job import (
    CLUSTER_LABEL,
    RUN_LABEL,
    label_of,
    parent_of,
    service_of,
)

try:
    import google.auth.exceptions
    import requests
    from google.api_core import exceptions, retry
    from google.auth.credentials import AnonymousCredentials
    from google.cloud.aiplatform_v1.services.job_service import JobServiceClient
    from google.cloud.aiplatform_v1.types import (
        CreateCustomJobRequest,
        CustomJob,
        ListCustomJobsRequest,
    )
    from google.protobuf import json_format
except ImportError as _error:
    raise MissingExtraError(NO_CLIENT.format(_error.name)) from None

RETRY_SECONDS = 60.0
_PAGE = 100
_CREATE_ATTEMPTS = 3

_TRANSIENT = (
    exceptions.ServiceUnavailable,
    exceptions.InternalServerError,
    exceptions.BadGateway,
    exceptions.GatewayTimeout,
    exceptions.RetryError,
    # What the REST transport lets through as it is.
    requests.exceptions.ConnectionError,
    requests.exceptions.Timeout,
    requests.exceptions.ChunkedEncodingError,
    google.auth.exceptions.TransportError,
)

_RETRY = retry.Retry(
    predicate=retry.if_exception_type(*_TRANSIENT), initial=0.5, maximum=8.0, timeout=RETRY_SECONDS
)
_LIMITS: dict[str, Any] = {"retry": _RETRY, "timeout": 60.0}
"""Of each call that may be repeated."""


class ServiceDisabledError(UserError):
    """A project does not use Vertex AI: `consumer` is its id or number, empty where it is not
    said. Where it is the cluster's own, there are no jobs."""

    def __init__(self, message: str, consumer: str) -> None:
        super().__init__(message)
        self.consumer = consumer


class Service:
    """The jobs of one cluster."""

    def __init__(self, cluster: ClusterConfig) -> None:
        self._cluster = cluster
        self._parent = parent_of(cluster)
        self._label = f"labels.{CLUSTER_LABEL}={label_of(cluster.name)}"
        endpoint = service_of(cluster)
        plain = endpoint.startswith("http://")
        credentials = AnonymousCredentials() if plain else None  # type: ignore[no-untyped-call]
        with self._words("connect"):
            self._client = JobServiceClient(
                credentials=credentials, transport="rest", client_options={"api_endpoint": endpoint}
            )

    def create(self, body: dict[str, Any]) -> dict[str, Any]:
        """Create the job of a plan. Raises UserError; then, as far as is known, no job was
        created."""
        request = CreateCustomJobRequest(parent=self._parent, custom_job=parse_request(body))
        run = body["labels"][RUN_LABEL]
        before = {job["name"] for job in self.jobs(run)}
        for attempt in range(_CREATE_ATTEMPTS):
            try:
                with self._words("create the job"):
                    return _plain(
                        self._client.create_custom_job(request, timeout=_LIMITS["timeout"])
                    )
            except UnreachableError:
                # One that another launch has made meanwhile writes elsewhere, or is refused.
                place = body["jobSpec"]["baseOutputDirectory"]
                if made := [
                    job
                    for job in self.jobs(run)
                    if job["name"] not in before
                    and job.get("jobSpec", {}).get("baseOutputDirectory") == place
                ]:
                    return made[0]
                if attempt == _CREATE_ATTEMPTS - 1:
                    raise
                time.sleep(2.0**attempt)
        raise AssertionError("unreachable")

    def jobs(self, run: str | None = None) -> list[dict[str, Any]]:
        """The cluster's jobs, newest first: all, or those of one run, named as it is or as its
        label."""
        wanted = (
            self._label if run is None else f"{self._label} AND labels.{RUN_LABEL}={label_of(run)}"
        )
        request = ListCustomJobsRequest(parent=self._parent, filter=wanted, page_size=_PAGE)
        with self._words("list the jobs"):
            listed = self._client.list_custom_jobs(request, **_LIMITS)
            return sorted(
                map(_plain, listed), key=lambda job: str(job.get("createTime", "")), reverse=True
            )

    def job(self, name: str) -> dict[str, Any]:
        """One job by its resource name."""
        with self._words("read the job"):
            return _plain(self._client.get_custom_job(name=name, **_LIMITS))

    def cancel(self, name: str) -> None:
        """Cancel a job; does nothing to one that is over."""
        with self._words("cancel the job"):
            try:
                self._client.cancel_custom_job(name=name, **_LIMITS)
            except exceptions.BadRequest as error:
                # It has ended in the meantime.
                if _body(error).get("status") != "FAILED_PRECONDITION":
                    raise

    @contextmanager
    def _words(self, doing: str) -> Iterator[None]:
        """Raise the client's errors as UserErrors."""
        try:
            yield
        except exceptions.GoogleAPICallError as error:
            words = words_of(doing, error, self._cluster)
            if (consumer := _disabled_in(error)) is not None:
                raise ServiceDisabledError(words, consumer) from None
            raise (UnreachableError if isinstance(error, _TRANSIENT) else UserError)(
                words
            ) from None
        except google.auth.exceptions.DefaultCredentialsError:
            raise UserError(
                "Google Cloud: this machine has no credentials; run `gcloud auth"
                " application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to the key file"
                " of a service account"
            ) from None
        except google.auth.exceptions.RefreshError as error:
            raise UserError(
                f"Google Cloud: the credentials of this machine are not accepted ({_first(error)});"
                " run `gcloud auth application-default login`"
            ) from None
        except _TRANSIENT as error:
            raise UnreachableError(
                f"{service_of(self._cluster)}: no answer ({_first(error)}) when asked to {doing};"
                " check the network, location.region and vertex.endpoint of the cluster config"
            ) from None


def parse_request(body: dict[str, Any]) -> CustomJob:
    """The request as Google's type. Raises UserError for an unknown field or a wrong value."""
    try:
        return CustomJob(json_format.ParseDict(body, CustomJob.pb()(), ignore_unknown_fields=False))
    except json_format.ParseError as error:
        raise UserError(
            "the request is not a CustomJob as the installed google-cloud-aiplatform knows it:"
            f" {error}\nA newer one may: pip install --upgrade google-cloud-aiplatform"
        ) from None


def _plain(job: CustomJob) -> dict[str, Any]:
    """A CustomJob in protobuf's JSON form."""
    plain: dict[str, Any] = json.loads(json_format.MessageToJson(CustomJob.pb(job)))
    return plain


def _body(error: exceptions.GoogleAPICallError) -> dict[str, Any]:
    try:
        answer = error.response.json()["error"]
    except (AttributeError, ValueError, KeyError, TypeError):
        # A proxy's page, not the service's answer.
        return {}
    return answer if isinstance(answer, dict) else {}


def _first(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def words_of(doing: str, error: exceptions.GoogleAPICallError, cluster: ClusterConfig) -> str:
    """The request, the service's message (google.rpc.Status in JSON, with details), and what to do
    about it."""
    assert cluster.location is not None
    project, region = cluster.location.project, cluster.location.region
    answer = _body(error)
    status, message = int(error.code or 0), str(answer.get("message") or error.message)
    fields: list[str] = []
    quotas: list[str] = []
    for detail in answer.get("details", ()):
        fields += [
            f"{each.get('field')}: {each.get('description')}"
            for each in detail.get("fieldViolations", ())
        ]
        quotas += [
            str(each.get("description") or each.get("subject"))
            for each in detail.get("violations", ())
        ]
    said = (
        f"Vertex AI ({project}, {region}) was asked to {doing} and said {status}: {message.strip()}"
    )
    details = [f"  {each}" for each in (*fields, *quotas) if each not in message]
    disabled = _disabled_in(error) is not None
    return "\n".join([said, *details, _advice(status, disabled, cluster)])


def _disabled_in(error: exceptions.GoogleAPICallError) -> str | None:
    """The project that does not use the service, as the answer names it, or empty; None: the error
    is another one."""
    answer = _body(error)
    for detail in answer.get("details", ()):
        if detail.get("reason") == "SERVICE_DISABLED":
            consumer = (detail.get("metadata") or {}).get("consumer", "")
            return str(consumer).removeprefix("projects/")
    said = str(answer.get("message") or error.message)
    return "" if "has not been used in project" in said else None


def _advice(status: int, disabled: bool, cluster: ClusterConfig) -> str:
    """Advise on an HTTP status; `disabled`: the service is not enabled in the project."""
    assert cluster.location is not None
    project, region = cluster.location.project, cluster.location.region
    match status:
        case HTTPStatus.FORBIDDEN if disabled:
            return (
                f"Enable it: gcloud services enable aiplatform.googleapis.com --project {project}"
            )
        case HTTPStatus.FORBIDDEN:
            account = cluster.section_as(VertexConfig).service_account
            act_as = f", and roles/iam.serviceAccountUser on {account}" if account else ""
            return f"You need roles/aiplatform.user in project {project}{act_as}: ask its owner."
        case HTTPStatus.UNAUTHORIZED:
            return "Log in: gcloud auth application-default login"
        case HTTPStatus.NOT_FOUND:
            return (
                f"Check location.project ({project}) and location.region ({region}), and that"
                " resources named under `vertex` are there: gcloud projects list; gcloud ai"
                " custom-jobs list --region REGION"
            )
        case HTTPStatus.TOO_MANY_REQUESTS:
            quotas: list[str] = []
            with suppress(UserError):
                quotas += [
                    f"{each.metric}: {each.amount} {each.unit} in {each.region}"
                    for each in quota_needed(cluster)
                ]
            needs = f"The job needs {'; '.join(quotas)}.\n" if quotas else ""
            more = (
                "Ask for more at"
                f" https://console.cloud.google.com/iam-admin/quotas?project={project}"
            )
            return f"{needs}{more}, take fewer `nodes`, or buy otherwise (`consumption`)."
        case HTTPStatus.BAD_REQUEST:
            return (
                "What was sent: drillyard launch ... --dry-run; where each value comes from:"
                " --explain"
            )
        case _:
            return (
                "The service has an internal error; try again, or see"
                " https://status.cloud.google.com"
            )
