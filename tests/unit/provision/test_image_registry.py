"""The digest of a tag, from a registry that wants a token, redirects, lies or is busy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.unit.provision.registry_server import INDEX, RegistryServer

from drillyard.errors import UnreachableError, UserError
from drillyard.provision import image_registry
from drillyard.provision.image_registry import image_digest, tag_of

NAME = "team/installer:v1"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[RegistryServer]:
    monkeypatch.setattr(image_registry, "_PAUSES", (0.0, 0.0))
    made = RegistryServer()
    yield made
    made.close()


@pytest.fixture
def other() -> Iterator[RegistryServer]:
    """A server of somebody else."""
    made = RegistryServer()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("image", "manifest"),
    [
        ("ubuntu:24.04", "https://registry-1.docker.io/v2/library/ubuntu/manifests/24.04"),
        ("docker.io/team/a", "https://registry-1.docker.io/v2/team/a/manifests/latest"),
        ("team/a:1", "https://registry-1.docker.io/v2/team/a/manifests/1"),
        ("us-docker.pkg.dev/p/r/a.b:v1.1", "https://us-docker.pkg.dev/v2/p/r/a.b/manifests/v1.1"),
        ("r.example.com:5000/a:1", "https://r.example.com:5000/v2/a/manifests/1"),
        ("localhost:5000/a:1", "http://localhost:5000/v2/a/manifests/1"),
        ("[::1]:5000/a:1", "http://[::1]:5000/v2/a/manifests/1"),
    ],
)
def test_a_name_says_where_its_registry_is(image: str, manifest: str) -> None:
    assert tag_of(image).manifest == manifest


@pytest.mark.parametrize("image", ["", "A/b", "a b", "a:", "https://r.example.com/a", "r.e/../a:1"])
def test_what_is_not_the_name_of_an_image_is_refused(image: str) -> None:
    with pytest.raises(UserError, match="is not the name of an image"):
        tag_of(image)


def test_a_token_is_asked_for_once_and_the_digest_of_a_moved_tag_is_the_new_one(
    registry: RegistryServer,
) -> None:
    first = registry.push(NAME, "one")
    assert image_digest(f"{registry.address}/{NAME}") == first
    assert [(method, path) for method, path, _ in registry.log] == [
        ("HEAD", "/v2/team/installer/manifests/v1"),
        ("GET", "/token"),
        ("HEAD", "/v2/team/installer/manifests/v1"),
    ]
    assert registry.push(NAME, "two") == image_digest(f"{registry.address}/{NAME}") != first


def test_without_a_digest_in_the_answer_that_of_the_content_counts(
    registry: RegistryServer,
) -> None:
    def without(request: Any, status: int, headers: dict[str, str], body: bytes) -> Any:
        return status, {k: v for k, v in headers.items() if k != "Docker-Content-Digest"}, body

    registry.changed = without
    assert registry.push(NAME, "one") == image_digest(f"{registry.address}/{NAME}")


def test_a_redirect_is_followed_and_the_token_stays_at_home(
    registry: RegistryServer, other: RegistryServer
) -> None:
    digest = other.push(NAME, "one")
    registry.push(NAME, "one")
    other.tokens[""] = "team/installer"

    def elsewhere(request: Any, status: int, headers: dict[str, str], body: bytes) -> Any:
        if status != 200 or "/manifests/" not in request.path:
            return status, headers, body
        return 307, {"Location": f"http://{other.address}{request.path}"}, b""

    registry.changed = elsewhere
    assert image_digest(f"{registry.address}/{NAME}") == digest
    assert [sent for *_, sent in other.log] == [None]
    assert [sent for *_, sent in registry.log if sent] == ["Bearer token-0"]


@pytest.mark.parametrize(
    "place", ["http://192.0.2.1/x", "ftp://127.0.0.1/x", "file:///etc/passwd", "//192.0.2.1/x", ""]
)
def test_what_leads_to_an_address_that_is_not_encrypted_or_nowhere_is_refused(
    registry: RegistryServer, place: str
) -> None:
    registry.push(NAME, "one")
    registry.changed = lambda request, *answer: (302, {"Location": place}, b"")
    with pytest.raises(UserError, match=r"leads|redirects"):
        image_digest(f"{registry.address}/{NAME}")


WRONG = {
    "is not an image, but text/html": (200, {"Content-Type": "text/html"}, b"<html>login</html>"),
    "is not an image, but of no type": (200, {}, b"{}"),
    "not one of sha256": (200, {"Content-Type": INDEX, "Docker-Content-Digest": "md5:0"}, b""),
    "404": (404, {}, b""),
    "403": (403, {}, b""),
    "gives it only after a login": (401, {"WWW-Authenticate": 'Basic realm="r"'}, b""),
    "only after a login": (401, {"WWW-Authenticate": 'Bearer realm="http://192.0.2.1/t"'}, b""),
    "after a login": (401, {}, b""),
}


@pytest.mark.parametrize("said", WRONG)
def test_an_answer_that_is_not_an_image_is_refused(registry: RegistryServer, said: str) -> None:
    wrong = WRONG[said]
    registry.push(NAME, "one")

    def answer(request: Any, *own: Any) -> Any:
        is_last = own[0] == 200 or wrong[0] == 401
        return wrong if is_last and "/manifests/" in request.path else own

    registry.changed = answer
    with pytest.raises(UserError, match=said) as refused:
        image_digest(f"{registry.address}/{NAME}")
    assert f"http://{registry.address}/v2/team/installer/manifests/v1" in str(refused.value)


@pytest.mark.parametrize("body", [b"{}", b"[]", b"{", b'{"schemaVersion": 1}', b"[" * 100_000])
def test_content_without_a_digest_that_is_not_a_manifest_is_refused(
    registry: RegistryServer, body: bytes
) -> None:
    registry.push(NAME, "one")

    def wrong(request: Any, status: int, headers: dict[str, str], found: bytes) -> Any:
        if status != 200 or "/manifests/" not in request.path:
            return status, headers, found
        return status, {"Content-Type": headers["Content-Type"]}, body

    registry.changed = wrong
    with pytest.raises(UserError, match="is not an image"):
        image_digest(f"{registry.address}/{NAME}")


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"token": 3}', b'{"token": "a\\r\\nX: y"}', b"[" * 50_000]
)
def test_a_token_that_is_not_one_is_refused(registry: RegistryServer, body: bytes) -> None:
    registry.push(NAME, "one")
    registry.changed = lambda request, *answer: (
        (200, {}, body) if request.path.startswith("/token") else answer
    )
    with pytest.raises(UserError, match="gives no token"):
        image_digest(f"{registry.address}/{NAME}")


def test_a_busy_registry_is_asked_again_and_one_that_stays_so_is_named(
    registry: RegistryServer,
) -> None:
    digest = registry.push(NAME, "one")
    left = [429, 503]
    registry.changed = lambda request, *answer: (left.pop(), {}, b"") if left else answer
    assert image_digest(f"{registry.address}/{NAME}") == digest
    registry.changed = lambda request, *answer: (503, {}, b"")
    with pytest.raises(UnreachableError, match="503"):
        image_digest(f"{registry.address}/{NAME}")


def test_more_than_a_manifest_and_half_an_answer_are_refused(
    registry: RegistryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.push(NAME, "one")

    def cut(request: Any, status: int, headers: dict[str, str], body: bytes) -> Any:
        if status != 200 or "/manifests/" not in request.path:
            return status, headers, body
        return status, {"Content-Type": headers["Content-Type"], "Content-Length": "999"}, body

    registry.changed = cut
    monkeypatch.setattr(image_registry, "REQUEST_SECONDS", 0.5)
    with pytest.raises(UnreachableError):
        image_digest(f"{registry.address}/{NAME}")
    monkeypatch.setattr(image_registry, "_MANIFEST_BYTES", 8)
    registry.changed = lambda request, status, headers, body: (
        status,
        {k: v for k, v in headers.items() if k != "Docker-Content-Digest"},
        body,
    )
    with pytest.raises(UserError, match="more than 8 bytes"):
        image_digest(f"{registry.address}/{NAME}")


@pytest.mark.parametrize(
    "place",
    [
        "https://169.254.169.254/computeMetadata/v1/",
        "https://127.0.0.1:6443/",
        "https://localhost/",
        "https://[::1]/",
        "https://[::ffff:169.254.169.254]/",
        "https://0.0.0.0/",
        "https://x.localhost/",
        "http://r.example.com/",
    ],
)
@pytest.mark.parametrize("by", ["redirect", "realm"])
def test_no_registry_leads_to_this_machine_or_its_link(
    place: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def answer(_: Any, method: str, url: str, *others: Any) -> Any:
        asked.append(url)
        headers = {"location": place, "www-authenticate": f'Bearer realm="{place}"'}
        return image_registry._Answer(302 if by == "redirect" else 401, headers, b"")

    monkeypatch.setattr(image_registry._Registry, "_asked", answer)
    with pytest.raises(UserError):
        image_digest(f"r.example.com/{NAME}")
    assert asked == ["https://r.example.com/v2/team/installer/manifests/v1"]


@pytest.mark.parametrize("part", ["headers", "body"])
def test_an_answer_in_drops_is_given_up(
    registry: RegistryServer, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes in time, and all of them never."""

    def drip(request: Any, status: int, headers: dict[str, str], body: bytes) -> Any:
        if part == "body":
            request.send_response(200)
            request.send_header("Content-Length", "10000")
            request.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(60):
                request.wfile.write(b"x")
                time.sleep(0.1)
        return status, headers, body

    registry.changed = drip
    monkeypatch.setattr(image_registry, "ALL_SECONDS", 1.0)
    begun = time.monotonic()
    with pytest.raises(UnreachableError):
        image_registry._Registry(
            tag_of(f"{registry.address}/{NAME}"), time.monotonic() + 1.0
        )._patient("GET", f"http://{registry.address}/v2/", {}, 1 << 20)
    assert time.monotonic() - begun < 3


def test_a_registry_that_does_not_answer_is_given_up(
    registry: RegistryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(request: Any, *answer: Any) -> Any:
        time.sleep(5)
        return answer

    registry.changed = silent
    monkeypatch.setattr(image_registry, "REQUEST_SECONDS", 0.2)
    monkeypatch.setattr(image_registry, "ALL_SECONDS", 0.3)
    begun = time.monotonic()
    with pytest.raises(UnreachableError, match=registry.address):
        image_digest(f"{registry.address}/{NAME}")
    assert time.monotonic() - begun < 3
