"""Google Cloud's own client for the services that `drillyard cluster` asks.

The client is google-api-python-client with the descriptions of the services that it ships, so a
call needs no look-up first. Everything asked here only reads, or deletes what may be gone already,
and is repeated after 429, 5xx and a lost connection, with growing pauses, for RETRY_SECONDS.

Every address is the service's own, or the one of `endpoints.py`. No message contains a token:
addresses are never printed, and what is said of an answer is Google's own message, cut.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from http import HTTPStatus
from http.client import HTTPException
from typing import Any, Literal
from urllib.parse import urlsplit

from drillyard.bounded_http import AnswerTooLargeError, bounded, is_local_host
from drillyard.errors import MissingExtraError, UserError
from drillyard.provision.google.endpoints import Endpoints, endpoints

try:
    import google.auth
    import google_auth_httplib2
    import httplib2
    from google.api_core import exceptions, retry
    from google.auth import exceptions as auth_exceptions
    from google.oauth2.credentials import Credentials as PersonsCredentials
    from googleapiclient import discovery
    from googleapiclient.errors import HttpError
except ImportError as _error:
    raise MissingExtraError(
        f"package {_error.name} is missing: pip install 'drillyard[gcp]'"
    ) from None

LOGIN = "gcloud auth application-default login"
RETRY_SECONDS = 60.0
CALL_SECONDS = 60.0
ANSWER_SECONDS = 300.0
"""For one whole answer; CALL_SECONDS is for each packet of it."""
MOST_BYTES = 256 << 20
"""Of one answer: a page of a list has a few MiB, the state of a large cluster some more."""
FIRST_PAUSE_SECONDS = 0.5
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
PERMISSIONS_AT_ONCE = 100
"""The most permissions in one testIamPermissions
(https://cloud.google.com/iam/docs/testing-permissions)."""

_VERSIONS = {
    "aiplatform": "v1",
    "artifactregistry": "v1",
    "cloudasset": "v1",
    "cloudbilling": "v1",
    "cloudresourcemanager": "v3",
    "compute": "v1",
    "container": "v1",
    "dns": "v1",
    "file": "v1",
    "iam": "v1",
    "lustre": "v1",
    "oauth2": "v2",
    "oslogin": "v1",
    "parallelstore": "v1",
    "serviceusage": "v1",
    "storage": "v1",
}
"""Of each service; `serviceusage/v1beta1` is called by that name."""
_REGIONAL = {"aiplatform": "https://{region}-aiplatform.googleapis.com/"}
"""Services that answer in each region for what is there alone."""
_PATHS = {"compute": "compute/v1/", "storage": "storage/v1/"}
"""`servicePath` of the descriptions; empty for the others."""
_LIST = {
    "id": "lustre.projects.locations.instances.list",
    "httpMethod": "GET",
    "path": "v1/{+parent}/instances",
    "parameterOrder": ["parent"],
    "parameters": {
        "parent": {"location": "path", "required": True, "type": "string"},
        "pageToken": {"location": "query", "type": "string"},
    },
    "response": {"$ref": "Instances"},
}
_LUSTRE = {
    # The client ships no description: https://cloud.google.com/managed-lustre/docs/reference/rest
    "name": "lustre",
    "version": "v1",
    "rootUrl": "https://lustre.googleapis.com/",
    "servicePath": "",
    "schemas": {"Instances": {"id": "Instances", "type": "object"}},
    "resources": {
        "projects": {
            "resources": {"locations": {"resources": {"instances": {"methods": {"list": _LIST}}}}}
        }
    },
}
_TRANSIENT = (
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.INTERNAL_SERVER_ERROR,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
)
_RATE_LIMITS = ("rateLimitExceeded", "userRateLimitExceeded", "RATE_LIMIT_EXCEEDED")
"""Reasons by which a 403 is a limit of speed, not of rights."""
_LOST = (OSError, HTTPException, httplib2.HttpLib2Error, auth_exceptions.TransportError)

_BUILDING = threading.Lock()

Refusal = Literal["denied", "disabled", "absent", "unreachable", "other"]


class CredentialsError(UserError):
    """This machine has no credentials for Google Cloud, or they are not accepted."""


class ApiError(UserError):
    """A service did not give what it was asked for. `refusal` says how; `disabled` is said only of
    a service that the project itself does not use, so that nothing of it can exist there."""

    def __init__(self, service: str, refusal: Refusal, message: str) -> None:
        super().__init__(message)
        self.service = service
        self.refusal: Refusal = refusal


class _RedirectError(UserError):
    """An answer leads to an address that is not asked."""


class _TransientError(Exception):
    """Repeated until the time is up; its text is what the service said last."""


class _LostError(_TransientError):
    """There was no answer."""


def google_apis(
    project: str, *, endpoint: str | None = None, credentials: Any = None
) -> GoogleApis:
    """The services as they answer for `project`. Nothing is asked yet; the credentials of this
    machine (application default credentials) are read at the first call."""
    return GoogleApis(project, Endpoints(endpoint) if endpoint else endpoints(), credentials)


class GoogleApis:
    """Calls of Google's services; may be used from several threads."""

    def __init__(self, project: str, reached: Endpoints, credentials: Any) -> None:
        self.project = project
        self._endpoints = reached
        self._credentials = credentials
        self._numbers: dict[str, str | None] = {}
        self._silent: dict[str, float] = {}
        """When a service was last found not to answer at all."""
        self._lock = threading.RLock()
        self._number_lock = threading.RLock()
        self._thread = threading.local()
        # The client warns of each refusal itself; it is said once, by who asked.
        logging.getLogger("googleapiclient.http").setLevel(logging.ERROR)

    def of_project(self, project: str) -> GoogleApis:
        """The services as they answer for another project, with the same credentials."""
        return GoogleApis(project, self._endpoints, self._credentials)

    def call(self, service: str, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer of one method (`projects.locations.clusters.list`), as JSON.

        Raises ApiError for a refusal and CredentialsError.
        """
        answer = self._ask(service, method, parameters)
        if not answer and method.endswith((".delete", ".cancel")):
            return {}
        if not isinstance(answer, dict):
            raise ApiError(service, "other", f"{service}: {method}: the answer is not JSON")
        return answer

    def read_object(self, bucket: str, name: str) -> bytes | None:
        """An object of a bucket; None where there is none, or no bucket."""
        try:
            content = self._ask("storage", "objects.get_media", {"bucket": bucket, "object": name})
        except ApiError as error:
            if error.refusal == "absent":
                return None
            raise
        return content if isinstance(content, bytes) else str(content).encode()

    def _ask(self, service: str, method: str, parameters: Mapping[str, Any]) -> Any:
        """One request, repeated while that may help. A service that has just not answered at all is
        not asked again for as long: 60 lists of a dead network would take 10 minutes."""
        if time.monotonic() - self._silent.get(service, -RETRY_SECONDS) < RETRY_SECONDS:
            raise ApiError(
                service, "unreachable", f"{service}: {method}: {service} does not answer"
            )
        resource = self._service(service, str(parameters.get("parent", "")))
        *names, last = method.split(".")
        for name in names:
            resource = getattr(resource, name)()
        request = getattr(resource, last)(**parameters)

        def ask() -> Any:
            try:
                return request.execute(http=self._http())
            except HttpError as error:
                if _is_transient(error):
                    raise _TransientError(_said(error)) from None
                raise self._refused(service, method, error) from None
            except (AnswerTooLargeError, _RedirectError) as error:
                raise ApiError(service, "other", f"{service}: {method}: {error}") from None
            except auth_exceptions.RefreshError as error:
                raise _not_accepted(_first_line(error)) from None
            except _LOST as error:
                raise _LostError(_first_line(error)) from None

        repeated = retry.Retry(
            predicate=retry.if_exception_type(_TransientError),
            initial=FIRST_PAUSE_SECONDS,
            maximum=8.0,
            timeout=RETRY_SECONDS,
        )
        try:
            return repeated(ask)()
        except (_TransientError, exceptions.RetryError) as error:
            said = getattr(error, "cause", None) or error
            if isinstance(said, _LostError):
                self._silent[service] = time.monotonic()
            raise ApiError(
                service,
                "unreachable",
                f"{service}: {method}: no answer in {RETRY_SECONDS:g} s ({_first_line(said)});"
                " check the network, and try again",
            ) from None

    def pages(self, service: str, method: str, **parameters: Any) -> Iterator[dict[str, Any]]:
        """The answers of a list, page by page. An error after some pages is raised where it
        happens: what came before is only a part."""
        token: str | None = None
        seen: set[str] = set()
        while True:
            page = self.call(
                service, method, **parameters, **({"pageToken": token} if token else {})
            )
            yield page
            token = page.get("nextPageToken")
            if not token:
                return
            if token in seen:
                raise ApiError(service, "other", f"{service}: {method}: its pages never end")
            seen.add(token)

    def account(self) -> str | None:
        """Whose credentials are used, as IAM names them: `user:me@example.com`. None where it
        cannot be found out."""
        credentials = self._loaded_credentials()
        if (email := getattr(credentials, "service_account_email", None)) and "@" in email:
            return f"serviceAccount:{email}"
        try:
            email = self.call("oauth2", "userinfo.get").get("email")
        except UserError:
            return None
        if not email:
            return None
        robot = str(email).endswith(".gserviceaccount.com")
        return f"{'serviceAccount' if robot else 'user'}:{email}"

    def _service(self, key: str, parent: str) -> Any:
        name, _, version = key.partition("/")
        address = self._endpoints.address(name)
        if address is None and name in _REGIONAL:
            region = parent.rpartition("/locations/")[2]
            address = _REGIONAL[name].format(region=region)
        base = None if address is None else address + _PATHS.get(name, "")
        return _service(name, version or _VERSIONS[name], base)

    def _http(self) -> Any:
        """This thread's connections: those of httplib2 cannot be shared."""
        if not hasattr(self._thread, "http"):
            http = _Connections(timeout=CALL_SECONDS)
            http.redirect_codes = http.redirect_codes - {308}
            credentials = self._loaded_credentials()
            self._thread.http = (
                http
                if credentials is None
                else google_auth_httplib2.AuthorizedHttp(credentials, http=http)
            )
        return self._thread.http

    def _loaded_credentials(self) -> Any:
        if self._endpoints.is_emulated:
            return None
        with self._lock:
            if self._credentials is None:
                self._credentials = _default_credentials(self.project)
            return self._credentials

    def _refused(self, service: str, method: str, error: HttpError) -> ApiError | CredentialsError:
        status = int(error.resp.status)
        if status == HTTPStatus.UNAUTHORIZED:
            return _not_accepted(_said(error))
        refusal: Refusal = "other"
        if status == HTTPStatus.FORBIDDEN:
            refusal = "disabled" if self._is_disabled(error) else "denied"
        elif status == HTTPStatus.NOT_FOUND:
            refusal = "absent"
        return ApiError(service, refusal, f"{service}: {method}: {status}: {_said(error)}")

    def _is_disabled(self, error: HttpError) -> bool:
        """Whether the project itself does not use the service. An answer about another project
        (that of the credentials' quota) says nothing about this one."""
        answer = _body(error)
        for detail in _dicts(answer.get("details")):
            if detail.get("reason") == "SERVICE_DISABLED":
                consumer = str((detail.get("metadata") or {}).get("consumer", ""))
                return self._is_ours(consumer.removeprefix("projects/"))
        reasons = {each.get("reason") for each in _dicts(answer.get("errors"))}
        if "accessNotConfigured" in reasons:
            named = re.search(r"in project (\S+) before", str(answer.get("message")))
            return named is not None and self._is_ours(named[1])
        return False

    def _is_ours(self, project: str) -> bool:
        return project == self.project or (project.isdigit() and project == self.number())

    def number(self) -> str | None:
        """The project's number, by which some answers name it. None where it is unknown."""
        with self._number_lock:
            if self.project not in self._numbers:
                self._numbers[self.project] = None  # The answer to a refusal of this very call.
                with suppress(ApiError):
                    name = f"projects/{self.project}"
                    found = self.call("cloudresourcemanager", "projects.get", name=name)
                    self._numbers[self.project] = str(found["name"]).removeprefix("projects/")
            return self._numbers[self.project]


class _Connections(httplib2.Http):  # type: ignore[misc]  # httplib2 has no types
    """Connections whose answers are bounded, and whose redirects lead to encrypted addresses of
    other machines only. httplib2 sends no credentials along with a redirect."""

    def request(
        self,
        uri: str,
        method: str = "GET",
        body: Any = None,
        headers: Any = None,
        redirections: int = httplib2.DEFAULT_MAX_REDIRECTS,
        connection_type: Any = None,
    ) -> Any:
        parts = urlsplit(uri)
        is_redirect = redirections < httplib2.DEFAULT_MAX_REDIRECTS
        if is_redirect and (parts.scheme != "https" or is_local_host(parts.hostname or "")):
            raise _RedirectError(
                f"leads to {parts.scheme}://{parts.netloc}, which is not an https:// address of"
                " another machine"
            )
        kind = connection_type or httplib2.SCHEME_TO_CONNECTION[parts.scheme]
        limited = bounded(kind, MOST_BYTES, ANSWER_SECONDS)
        return super().request(uri, method, body, headers, redirections, limited)


def _service(name: str, version: str, base: str | None) -> Any:
    """The client of a service. Reading the description of the largest takes half a second."""
    with _BUILDING:
        return _built(name, version, base)


@cache
def _built(name: str, version: str, base: str | None) -> Any:
    options: dict[str, Any] = {
        "http": httplib2.Http(),
        "client_options": None if base is None else {"api_endpoint": base},
    }
    if name == "lustre":
        return discovery.build_from_document(_LUSTRE, **options)
    return discovery.build(name, version, static_discovery=True, cache_discovery=False, **options)


def _default_credentials(project: str) -> Any:
    try:
        with warnings.catch_warnings():
            # It warns of a login without a quota project, which is set below.
            warnings.simplefilter("ignore", UserWarning)
            credentials, _ = google.auth.default(scopes=[SCOPE])
    except auth_exceptions.DefaultCredentialsError:
        raise CredentialsError(
            f"Google Cloud: this machine has no credentials; run `{LOGIN}`, or set"
            " GOOGLE_APPLICATION_CREDENTIALS to the key file of a service account"
        ) from None
    if isinstance(credentials, PersonsCredentials) and not credentials.quota_project_id:
        # A person's login counts no calls of its own
        # (https://cloud.google.com/docs/quotas/set-quota-project).
        return credentials.with_quota_project(project)
    return credentials


def _not_accepted(said: str) -> CredentialsError:
    return CredentialsError(
        f"Google Cloud: the credentials of this machine are not accepted ({said}); run `{LOGIN}`"
    )


def _is_transient(error: HttpError) -> bool:
    if int(error.resp.status) in _TRANSIENT:
        return True
    reasons = {each.get("reason") for each in _dicts(_body(error).get("errors"))}
    reasons |= {each.get("reason") for each in _dicts(_body(error).get("details"))}
    return int(error.resp.status) == HTTPStatus.FORBIDDEN and bool(reasons & set(_RATE_LIMITS))


def _body(error: HttpError) -> Mapping[str, Any]:
    try:
        answer = json.loads(error.content)["error"]
    except (ValueError, KeyError, TypeError):
        return {}  # A proxy's page, not the service's answer.
    return answer if isinstance(answer, dict) else {}


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _said(error: HttpError) -> str:
    return _first_line(_body(error).get("message") or error.reason or error.resp.status)


def _first_line(said: object) -> str:
    return (str(said).strip().splitlines() or [type(said).__name__])[0][:200]
