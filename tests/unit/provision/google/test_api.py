"""Google's client as we use it: what is repeated, what is kept apart, and what is never sent."""

from __future__ import annotations

import contextlib
import http.server
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from google.auth import exceptions
from google.auth.credentials import AnonymousCredentials
from tests.unit.provision.google.google_cloud import (
    DISABLED,
    DROP,
    NUMBER,
    PROJECT,
    GoogleCloud,
)

from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.google import api
from drillyard.provision.google.api import ApiError, CredentialsError, GoogleApis, google_apis
from drillyard.provision.google.leaks import find_leaks
from drillyard.provision.google.listings import LISTINGS

ZONE = "zones/us-central1-b"


def networks(apis: GoogleApis) -> list[str]:
    pages = apis.pages("compute", "networks.list", project=PROJECT)
    return [each["name"] for page in pages for each in page.get("items", [])]


def test_pages_are_joined(cloud: GoogleCloud, apis: GoogleApis) -> None:
    names = [f"n{number}" for number in range(8)]
    for name in names:
        cloud.add("compute", f"global/networks/{name}")
    assert networks(apis) == names
    assert len(cloud.requests) == 3


@pytest.mark.parametrize(
    ("status", "reason"),
    [(429, "RATE"), (500, "OOPS"), (502, "X"), (503, "X"), (504, "X"), (0, DROP)],
)
def test_what_may_pass_is_repeated(
    cloud: GoogleCloud, apis: GoogleApis, status: int, reason: str
) -> None:
    cloud.add("compute", "global/networks/n")
    cloud.refuse("compute", status=status, reason=reason, times=3)
    assert networks(apis) == ["n"]
    # httplib2 itself opens a dropped connection again once.
    assert len(cloud.requests) in (4, 5)


def test_a_limit_of_speed_is_no_refusal(cloud: GoogleCloud, apis: GoogleApis) -> None:
    cloud.refuse("compute", status=403, reason="RATE_LIMIT_EXCEEDED", times=2)
    assert networks(apis) == []


def test_it_ends_where_the_service_does_not_come_back(
    cloud: GoogleCloud, apis: GoogleApis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "RETRY_SECONDS", 0.2)
    cloud.refuse("compute", status=503)
    with pytest.raises(ApiError) as caught:
        networks(apis)
    assert caught.value.refusal == "unreachable"


def test_a_service_that_does_not_answer_is_not_asked_for_every_list(
    cloud: GoogleCloud, apis: GoogleApis, plan: ClusterPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "RETRY_SECONDS", 0.3)
    monkeypatch.setattr(api, "FIRST_PAUSE_SECONDS", 0.2)
    cloud.refuse("compute", reason=DROP)
    report = find_leaks(plan, apis)
    lists = [each for each in LISTINGS if each.service == "compute"]
    assert len(report.unknown) == len(lists) and report.exit_code == 3
    assert len([each for each in cloud.requests if " compute/" in each]) < 2 * len(lists)


@pytest.mark.parametrize(
    ("reason", "consumer", "refusal"),
    [
        (DISABLED, f"projects/{NUMBER}", "disabled"),
        (DISABLED, f"projects/{PROJECT}", "disabled"),
        (DISABLED, "projects/999", "denied"),
        ("IAM_PERMISSION_DENIED", f"projects/{NUMBER}", "denied"),
    ],
)
def test_a_disabled_service_differs_from_a_missing_right(
    cloud: GoogleCloud, apis: GoogleApis, reason: str, consumer: str, refusal: str
) -> None:
    cloud.refuse("compute", reason=reason, consumer=consumer)
    with pytest.raises(ApiError) as caught:
        networks(apis)
    assert caught.value.refusal == refusal


def test_without_the_projects_number_a_disabled_service_is_not_believed(
    cloud: GoogleCloud, apis: GoogleApis
) -> None:
    cloud.refuse("compute", reason=DISABLED)
    cloud.refuse("cloudresourcemanager", reason=DISABLED)
    with pytest.raises(ApiError) as caught:
        networks(apis)
    assert caught.value.refusal == "denied"


def test_an_absent_thing_is_no_missing_right(cloud: GoogleCloud, apis: GoogleApis) -> None:
    with pytest.raises(ApiError) as caught:
        apis.call("storage", "buckets.get", bucket="none")
    assert caught.value.refusal == "absent"


class Token(AnonymousCredentials):
    """Credentials whose token must not be seen."""

    def before_request(self, request: Any, method: str, url: str, headers: Any) -> None:
        headers["Authorization"] = "Bearer ya29.secret"


def test_http_gets_no_credentials(cloud: GoogleCloud) -> None:
    networks(google_apis(PROJECT, credentials=Token()))
    assert cloud.headers and not any("Authorization" in each for each in cloud.headers)


def test_no_message_has_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "RETRY_SECONDS", 0.1)
    closed = google_apis(PROJECT, endpoint="https://127.0.0.1:9", credentials=Token())
    with pytest.raises(ApiError) as caught:
        networks(closed)
    assert caught.value.refusal == "unreachable"
    assert "secret" not in str(caught.value)


def test_missing_credentials_are_one_error_with_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.delenv("DRILLYARD_GOOGLE_ENDPOINT", raising=False)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    with pytest.raises(CredentialsError, match="gcloud auth application-default login"):
        networks(google_apis(PROJECT))


class Expired(AnonymousCredentials):
    def before_request(self, request: Any, method: str, url: str, headers: Any) -> None:
        raise exceptions.RefreshError("invalid_grant: token has been expired")


def test_expired_credentials_are_one_error_with_the_command(
    cloud: GoogleCloud, apis: GoogleApis
) -> None:
    with pytest.raises(CredentialsError, match="gcloud auth application-default login"):
        networks(google_apis(PROJECT, endpoint="https://127.0.0.1:9", credentials=Expired()))
    cloud.refuse("compute", status=401, reason="ACCESS_TOKEN_EXPIRED")
    with pytest.raises(CredentialsError, match="gcloud auth application-default login"):
        networks(apis)


@contextlib.contextmanager
def served(answer: Callable[[http.server.BaseHTTPRequestHandler], None]) -> Iterator[GoogleApis]:
    """Services that give this answer to every request."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with contextlib.suppress(OSError):
                answer(self)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield google_apis(PROJECT, endpoint=f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    server.server_close()


def send(
    request: http.server.BaseHTTPRequestHandler, status: int, body: bytes, **headers: str
) -> None:
    request.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
        request.send_header(name, value)
    request.end_headers()
    request.wfile.write(body)


def test_an_answer_that_is_not_json_is_an_error() -> None:
    with served(lambda request: send(request, 403, b"<html>proxy</html>")) as apis:
        with pytest.raises(ApiError) as caught:
            networks(apis)
        assert caught.value.refusal == "denied"


@pytest.mark.parametrize(
    "place",
    [
        "http://127.0.0.1:PORT/elsewhere",
        "http://example.com/",
        "https://169.254.169.254/",
        "https://metadata.localhost/",
        "https://[::1]:6443/",
        "file:///etc/passwd",
    ],
)
def test_no_answer_leads_to_this_machine_its_link_or_in_the_clear(place: str) -> None:
    asked: list[str] = []

    def lead(request: http.server.BaseHTTPRequestHandler) -> None:
        asked.append(request.path)
        port = request.connection.getsockname()[1]
        if request.path == "/elsewhere":
            send(request, 200, b"{}")
        else:
            send(request, 302, b"", Location=place.replace("PORT", str(port)))

    with served(lead) as apis:
        with pytest.raises(ApiError, match="leads to") as caught:
            networks(apis)
        assert caught.value.refusal == "other" and len(asked) == 1


def test_an_answer_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "MOST_BYTES", 1 << 16, raising=False)
    with served(lambda request: send(request, 200, b" " * (1 << 17))) as apis:
        for _ in range(2):  # the connection is not used again
            with pytest.raises(ApiError, match="65536 bytes") as caught:
                networks(apis)
            assert caught.value.refusal == "other"


def test_an_answer_in_drops_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time, and all of them never."""

    def drip(request: http.server.BaseHTTPRequestHandler) -> None:
        for _ in range(60):
            request.wfile.write(b"x")
            time.sleep(0.1)

    monkeypatch.setattr(api, "ANSWER_SECONDS", 0.3, raising=False)
    monkeypatch.setattr(api, "RETRY_SECONDS", 0.5)
    begun = time.monotonic()
    with served(drip) as apis:
        with pytest.raises(ApiError) as caught:
            networks(apis)
        assert caught.value.refusal == "unreachable"
    assert time.monotonic() - begun < 4


def test_who_asks_is_named_as_iam_names_it(cloud: GoogleCloud, apis: GoogleApis) -> None:
    assert apis.account() == "user:ann@example.com"
    cloud.email = "ci@acme-ml.iam.gserviceaccount.com"
    assert apis.account() == "serviceAccount:ci@acme-ml.iam.gserviceaccount.com"
    cloud.refuse("oauth2")
    assert apis.account() is None
