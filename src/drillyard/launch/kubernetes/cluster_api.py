"""The API server of a cluster, through the official client: objects as it returns them, plain JSON.

Everything is read with the user's own kubeconfig. Kueue is optional: a path that the server does
not know gives an empty list.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shlex
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from drillyard.config.cluster import ClusterConfig
from drillyard.errors import MissingExtraError, UnreachableError, UserError
from drillyard.launch.kubernetes.config import NO_CLIENT, KubernetesConfig

try:
    from kubernetes import client, config
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError
except ImportError as _error:
    raise MissingExtraError(NO_CLIENT.format(_error.name)) from None

JOBSETS, JOBS = "/apis/jobset.x-k8s.io/v1alpha2", "/apis/batch/v1"
_KUEUE = "/apis/kueue.x-k8s.io"
_KUEUE_VERSIONS = ("v1beta2", "v1beta1")
"""Versions whose fields are read here, the newest first: Kueue drops the second."""
CORE = "/api/v1"
_SECONDS = 30.0
_ABSENT, _CONFLICT = 404, 409
_FORBIDDEN, _UNAUTHORIZED, _SERVER_ERROR = 403, 401, 500
_NOBODY = "system:anonymous"
"""Who asks without credentials: their program has given none."""
_MERGE = "application/merge-patch+json"
_ONLY_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


class ApiServer:
    """A cluster's API server, as a context of the kubeconfig reaches it."""

    def __init__(self, context: str | None) -> None:
        settings = client.Configuration()
        self._kubectl = f"kubectl --context {shlex.quote(context)}" if context else "kubectl"
        try:
            with _logged_errors() as logged:
                config.load_kube_config(context=context, client_configuration=settings)
        except config.ConfigException as error:
            raise UserError(f"kubeconfig: {error}\n{_context_advice(context)}") from None
        self.title = str(settings.host)
        if logged:
            raise UserError(
                f"{self.title}: its login has failed: {logged[0]}\n{self._login_advice()}"
            )
        self._client = client.ApiClient(settings)

    @cached_property
    def kueue(self) -> str:
        """The path of Kueue's objects in the version that this cluster has."""
        served = {each["version"] for each in (self.one(_KUEUE) or {}).get("versions", ())}
        version = next((each for each in _KUEUE_VERSIONS if each in served), _KUEUE_VERSIONS[-1])
        return f"{_KUEUE}/{version}"

    def items(
        self, path: str, selector: str = "", *, metadata: bool = False, needed: bool = True
    ) -> list[dict[str, Any]]:
        """The objects of the list at a path of the server whose labels match; none where the
        cluster does not have their kind. `metadata`: that of each object alone, without its
        content. Not `needed`: none, too, where this user may not list them."""
        query = [("labelSelector", selector)] if selector else []
        accept = _ONLY_METADATA if metadata else "application/json"
        absent = (_ABSENT,) if needed else (_ABSENT, _FORBIDDEN)
        found = self._ask("GET", path, query, accept=accept, absent=absent)
        items: list[dict[str, Any]] = json.loads(found or b"{}").get("items") or []
        return items

    def one(self, path: str) -> dict[str, Any] | None:
        """The object at a path of the server; None where it is not there."""
        found = self._ask("GET", path, [], absent=(_ABSENT,))
        answer: dict[str, Any] | None = None if found is None else json.loads(found)
        return answer

    def created_at(self, path: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """The object that this has created in the list at a path; None where one of its name is
        there."""
        made = self._ask("POST", path, [], body, absent=(_CONFLICT,))
        answer: dict[str, Any] | None = None if made is None else json.loads(made)
        return answer

    def merge_at(self, path: str, changes: Mapping[str, Any]) -> None:
        """Change fields of the object at a path (RFC 7386)."""
        self._ask("PATCH", path, [], changes, absent=(_ABSENT,), sent=_MERGE)

    def delete_at(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        """Delete the object at a path; one that is not there, or has changed where `body` says what
        it must be, is left alone."""
        self._ask("DELETE", path, [], body, absent=(_ABSENT, _CONFLICT))

    def _ask(
        self,
        method: str,
        path: str,
        query: list[tuple[str, str]],
        body: Mapping[str, Any] | None = None,
        *,
        accept: str = "application/json",
        absent: tuple[int, ...] = (),
        sent: str = "application/json",
    ) -> bytes | None:
        """The answer's bytes; None for an answer of a code in `absent`."""
        headers = {"Accept": accept, "Content-Type": sent}
        try:
            answer = self._client.call_api(
                path,
                method,
                query_params=query,
                path_params={},
                header_params=headers,
                body=body,
                auth_settings=["BearerToken"],
                _preload_content=False,
                _return_http_data_only=True,
                _request_timeout=_SECONDS,
            )
            content: bytes = answer.data
            return content
        except ApiException as error:
            if error.status in absent:
                return None
            raise UserError(self._words(error, method, path)) from None
        except (HTTPError, OSError) as error:
            cause = getattr(error, "reason", error)
            first = (str(cause).splitlines() or [type(error).__name__])[0][:200]
            raise UnreachableError(
                f"{self.title}: cannot be reached ({first})\nCheck the network and the cluster:"
                f" {self._kubectl} cluster-info"
            ) from None

    def _words(self, error: ApiException, method: str, path: str) -> str:
        try:
            said = json.loads(error.body).get("message") or error.reason
        except (ValueError, TypeError, AttributeError):
            said = error.reason
        advice = None
        if error.status == _UNAUTHORIZED or (error.status == _FORBIDDEN and _NOBODY in str(said)):
            advice = self._login_advice()
        elif error.status == _FORBIDDEN:
            advice = self._forbidden_advice(said)
        elif error.status >= _SERVER_ERROR:
            advice = f"Try again; whether the API server works: {self._kubectl} get --raw /readyz"
        text = f"{self.title}: {method} {path.rpartition('/')[2]}: {said}"
        return f"{text}\n{advice}" if advice else text

    def _login_advice(self) -> str:
        return f"Log in to the cluster again, until this works: {self._kubectl} get namespaces"

    def _forbidden_advice(self, said: str) -> str | None:
        """What to do about an answer 403."""
        return "Log in as an administrator of the cluster." if _NO_RIGHT.search(said) else None


class ClusterApi(ApiServer):
    """One namespace of a cluster."""

    def __init__(self, context: str | None, namespace: str) -> None:
        super().__init__(context)
        self.namespace = namespace
        self.title = f"{self.title}, namespace {self.namespace}"

    @classmethod
    def of(cls, cluster: ClusterConfig) -> ClusterApi:
        """The namespace of a cluster config's runs."""
        section = cluster.section_as(KubernetesConfig)
        return cls(section.context, section.namespace)

    def listed(
        self,
        group: str,
        kind: str,
        selector: str = "",
        *,
        metadata: bool = False,
        needed: bool = True,
    ) -> list[dict[str, Any]]:
        """`items` of a kind in the namespace."""
        path = self.place(kind, group)
        return self.items(path, selector, metadata=metadata, needed=needed)

    def place(self, kind: str, group: str = CORE) -> str:
        """The path of the namespace's objects of a kind."""
        return f"{group}/namespaces/{self.namespace}/{kind}"

    def may(self, verb: str, group: str, resource: str, *, cluster_wide: bool = False) -> bool:
        """Whether this user may do `verb` with a resource of the namespace, or with one that is in
        no namespace."""
        wanted = {"verb": verb, "group": group, "resource": resource}
        if not cluster_wide:
            wanted["namespace"] = self.namespace
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        answer = self._ask("POST", path, [], {**body, "spec": {"resourceAttributes": wanted}})
        return bool(json.loads(answer or b"{}").get("status", {}).get("allowed"))

    def dry_run(self, group: str, kind: str, body: Mapping[str, Any]) -> None:
        """Ask the server whether it would create an object. Raises UserError with its reason where
        it would not."""
        self._ask("POST", self.place(kind, group), [("dryRun", "All")], body)

    def created(self, kind: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """The object of the core API that this has created; None where one of its name is there."""
        return self.created_at(self.place(kind), body)

    def delete(self, kind: str, name: str, uid: str) -> None:
        """Delete an object of the core API, unless another one has its name now."""
        self.delete_at(f"{self.place(kind)}/{name}", {"preconditions": {"uid": uid}})

    def create_pod(self, body: Mapping[str, Any]) -> str:
        """Create a pod; its name."""
        made = self._ask("POST", self.place("pods"), [], body)
        return str(json.loads(made or b"{}")["metadata"]["name"])

    def delete_pod(self, name: str, grace_seconds: int) -> None:
        query = [("gracePeriodSeconds", str(grace_seconds))]
        self._ask("DELETE", f"{self.place('pods')}/{name}", query, absent=(_ABSENT,))

    def log(self, pod: str, since: str | None = None) -> bytes:
        """The lines of a pod's log, each with its time stamp; `since`: from that time on, in whole
        seconds."""
        query = [
            ("timestamps", "true"),
            ("container", "train"),
            *([("sinceTime", since)] if since else []),
        ]
        return (
            self._ask("GET", f"{self.place('pods')}/{pod}/log", query, absent=(400, _ABSENT)) or b""
        )

    def _forbidden_advice(self, said: str) -> str | None:
        return forbidden_advice(said, self.namespace)


@contextlib.contextmanager
def _logged_errors() -> Iterator[list[str]]:
    """The errors that the client logs: that is all it does where a program which a kubeconfig
    names for the login fails, and it asks without credentials then."""
    found: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines = record.getMessage().strip().splitlines()
            found.append(" ".join(lines)[:300])

    handler = Kept(logging.ERROR)
    logging.getLogger().addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger().removeHandler(handler)


def _context_advice(context: str | None) -> str:
    gke = re.fullmatch(r"gke_([^_]+)_([^_]+)_([^_]+)", context or "")
    if gke is not None:
        project, place, name = gke.groups()
        return (
            f"make it: gcloud container clusters get-credentials {name} --location {place}"
            f" --project {project}"
        )
    return "set KUBECONFIG, or name an existing kubernetes.context: kubectl config get-contexts"


_NO_RIGHT = re.compile(r"User .* cannot [a-z]+ (resource|path) ")
"""What the API server says of a missing right; all other refusals are those of admission."""


def forbidden_advice(said: str, namespace: str) -> str | None:
    """What to do about an answer 403, by its message; None where the message says it all.

    Kubernetes answers 403 for a missing right, and for whatever an admission plugin refuses.
    """
    if "violates PodSecurity" in said:
        label = "pod-security.kubernetes.io/enforce=privileged --overwrite"
        return (
            "Set kubernetes.run_as_user of the cluster config where that is all; else the"
            f" namespace must allow such pods: kubectl label namespace {namespace} {label}"
        )
    if "exceeded quota" in said:
        return (
            "The namespace's quota has no room for the run: wait until other pods have ended, ask"
            " for less in the cluster config, or have the quota raised. What it allows and what is"
            f" used: kubectl -n {namespace} describe resourcequotas"
        )
    if "failed quota" in said:
        return (
            "The namespace's quota counts what containers ask for: set kubernetes.resources of the"
            " cluster config, and kubernetes.daemon_resources for a daemon beside the ranks."
        )
    if "error looking up service account" in said:
        return (
            "Set kubernetes.service_account of the cluster config to one of the namespace's: "
            f"kubectl -n {namespace} get serviceaccounts"
        )
    if _NO_RIGHT.search(said):
        return "Ask for the Role that `drillyard launch ... --explain` prints."
    return None


def by_run(objects: list[dict[str, Any]], label: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects with the run that their label names."""
    for each in objects:
        name = each.get("metadata", {}).get("labels", {}).get(label)
        if name:
            yield name, each
