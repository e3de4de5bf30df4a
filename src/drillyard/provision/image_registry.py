"""The digest of an image's tag, from the registry that has it.

One request for the manifest, without credentials; a registry that wants a token, as Docker Hub and
Google's do for public images, too, names the address that gives one to anybody. The token goes to
the registry alone: not along with a redirect to another host. Redirects lead to encrypted addresses
of other machines only. Every answer is bounded in size, and all of them together in time.

https://distribution.github.io/distribution/spec/api and .../spec/auth/token; names without a host
are Docker Hub's (https://docs.docker.com/reference/cli/docker/image/tag).
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import ssl
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlencode, urljoin, urlsplit

from drillyard.bounded_http import AnswerTooLargeError, bounded, is_local_host
from drillyard.errors import UnreachableError, UserError
from drillyard.launch.agent.state_file import json_object

REQUEST_SECONDS = 10.0
ALL_SECONDS = 45.0
_MANIFEST_BYTES, _TOKEN_BYTES = 4 << 20, 64 << 10
"""A registry takes manifests of up to 4 MiB."""
_REDIRECTS = 5
_PAUSES = (0.5, 2.0)
"""Seconds before each further attempt, where the registry is busy."""
_MANIFESTS = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_PART = r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*"
_IMAGE = re.compile(
    r"(?:(?P<host>localhost(?::\d+)?|[^/\s]*[.:][^/\s]*)/)?"
    rf"(?P<path>{_PART}(?:/{_PART})*)(?::(?P<tag>[\w][\w.-]{{0,127}}))?"
)
_CHALLENGE = re.compile(r'([a-z_]+)="([^"]*)"')
_TOKEN = re.compile(r"[\x21-\x7e]+")
_MISSING = (401, 403, 404)


@dataclass(frozen=True)
class ImageTag:
    """Where an image's tag is: the address of the registry, the repository and the tag."""

    registry: str
    path: str
    name: str

    @property
    def manifest(self) -> str:
        return f"{self.registry}/v2/{self.path}/manifests/{self.name}"


def tag_of(image: str) -> ImageTag:
    """The place of HOST/PATH:TAG. Raises UserError for what is not the name of an image."""
    found = _IMAGE.fullmatch(image)
    if found is None:
        raise UserError(f"{image}: is not the name of an image, such as registry.example.com/a/b:1")
    host, path = found["host"], found["path"]
    if host in (None, "docker.io"):
        host, path = "registry-1.docker.io", path if "/" in path else f"library/{path}"
    # Docker's own rule: a registry on this machine needs no certificate.
    scheme = "http" if _is_here(urlsplit(f"//{host}").hostname or "") else "https"
    return ImageTag(f"{scheme}://{host}", path, found["tag"] or "latest")


def image_digest(image: str) -> str:
    """The digest that the tag of an image names now, `sha256:...`, of all its platforms together.

    Raises UnreachableError where the registry does not answer or is busy, UserError where it does
    not give the image to anybody, or answers something else.
    """
    tag = tag_of(image)
    registry = _Registry(tag, time.monotonic() + ALL_SECONDS)
    found = registry.manifest("HEAD")
    digest = found.headers.get("docker-content-digest")
    if digest is None:
        found = registry.manifest("GET")
        digest = f"sha256:{hashlib.sha256(found.body).hexdigest()}"
        stated = found.headers.get("docker-content-digest", digest)
        if stated != digest:
            raise UserError(f"{tag.manifest}: its content is {digest}, and not {stated[:80]}")
    kind = found.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in _MANIFESTS or (found.body and json_object(found.body).get("schemaVersion") != 2):
        raise UserError(f"{tag.manifest}: is not an image, but {kind[:80] or 'of no type'}")
    if _DIGEST.fullmatch(digest) is None:
        raise UserError(f"{tag.manifest}: has the digest {digest[:80]}, which is not one of sha256")
    return digest


@dataclass(frozen=True)
class _Answer:
    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes


@dataclass
class _Registry:
    tag: ImageTag
    until: float
    """Of time.monotonic()."""
    authorization: dict[str, str] = field(default_factory=dict)

    def manifest(self, method: str) -> _Answer:
        """The answer about the tag's manifest. Raises UserError where there is none."""
        headers = {"Accept": ", ".join(_MANIFESTS)}
        place = self.tag.manifest
        found = self._patient(method, place, headers, _MANIFEST_BYTES)
        if found.status == 401 and not self.authorization:
            self.authorization = {"Authorization": f"Bearer {self._token(found)}"}
            found = self._patient(method, place, headers, _MANIFEST_BYTES)
        if found.status in _MISSING:
            raise UserError(f"{place}: {found.status}: the registry does not give it to anybody")
        if found.status != 200:
            raise UnreachableError(f"{place}: the registry answers {found.status}")
        return found

    def _token(self, refusal: _Answer) -> str:
        """A token that lets anybody read the repository."""
        challenge = refusal.headers.get("www-authenticate", "")
        scheme, _, rest = challenge.partition(" ")
        named = dict(_CHALLENGE.findall(rest))
        realm = named.get("realm", "")
        if scheme.lower() != "bearer" or not self._is_allowed(realm):
            raise UserError(f"{self.tag.manifest}: the registry gives it only after a login")
        query = {"scope": f"repository:{self.tag.path}:pull"}
        query |= {"service": named["service"]} if "service" in named else {}
        place = f"{realm}{'&' if '?' in realm else '?'}{urlencode(query)}"
        found = self._patient("GET", place, {}, _TOKEN_BYTES)
        if found.status != 200:
            raise UserError(f"{realm}: gives no token for it ({found.status})")
        content = json_object(found.body)
        token = content.get("token") or content.get("access_token")
        if not isinstance(token, str) or _TOKEN.fullmatch(token) is None:
            raise UserError(f"{realm}: gives no token")
        return token

    def _patient(self, method: str, url: str, headers: Mapping[str, str], most: int) -> _Answer:
        """The answer, asked for again where the registry is busy or cannot be reached."""
        for pause in (*_PAUSES, None):
            try:
                found = self._followed(method, url, headers, most)
            except UnreachableError:
                if pause is None or time.monotonic() + pause > self.until:
                    raise
            else:
                if pause is None or (found.status != 429 and found.status < 500):
                    return found
            time.sleep(pause)
        raise AssertionError

    def _followed(self, method: str, url: str, headers: Mapping[str, str], most: int) -> _Answer:
        for _ in range(_REDIRECTS):
            own = urlsplit(url)[:2] == urlsplit(self.tag.registry)[:2]
            sent = {**headers, **(self.authorization if own else {})}
            found = self._asked(method, url, sent, most)
            if found.status not in (301, 302, 303, 307, 308):
                return found
            url = urljoin(url, found.headers.get("location", ""))
            if not self._is_allowed(url):
                raise UserError(
                    f"{self.tag.manifest}: leads to {url[:200]}, which is not an https:// address"
                    " of another machine"
                )
        raise UserError(f"{self.tag.manifest}: redirects more than {_REDIRECTS} times")

    def _is_allowed(self, url: str) -> bool:
        """Whether an address that the registry names may be asked: encrypted and not of this
        machine or its link, or of a registry of this machine on this machine. A certificate is of a
        name, so a name that leads to such an address gets no further than its handshake."""
        parts = urlsplit(url)
        host = parts.hostname or ""
        if self.tag.registry.startswith("http:") and _is_here(host):
            return parts.scheme in ("https", "http")
        return bool(host) and parts.scheme == "https" and not is_local_host(host)

    def _asked(self, method: str, url: str, headers: Mapping[str, str], most: int) -> _Answer:
        place = url.partition("?")[0]
        left = self.until - time.monotonic()
        if left <= 0:
            raise UnreachableError(f"{place}: no answer in {ALL_SECONDS:.0f} s")
        # It follows no redirect, and an error is an answer.
        opener = urllib.request.OpenerDirector()
        for handler in (urllib.request.ProxyHandler(), _Http(most, left), _Https(most, left)):
            opener.add_handler(handler)
        try:
            request = urllib.request.Request(url, method=method, headers=dict(headers))  # noqa: S310
            with opener.open(request, timeout=min(left, REQUEST_SECONDS)) as answer:
                found = {name.lower(): value for name, value in answer.headers.items()}
                return _Answer(answer.status, found, answer.read())
        except AnswerTooLargeError as error:
            raise UserError(f"{place}: {error}") from None
        except (OSError, HTTPException, ValueError) as error:
            cause = getattr(error, "reason", error)
            first = (str(cause).splitlines() or [type(error).__name__])[0][:200]
            raise UnreachableError(f"{place}: cannot be reached ({first})") from None


class _Http(urllib.request.HTTPHandler):
    """Opens http:// addresses, with limits of the answer in bytes and seconds."""

    def __init__(self, most: int, seconds: float) -> None:
        super().__init__()
        self._connection = bounded(HTTPConnection, most, seconds)

    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(self._connection, req)


class _Https(urllib.request.HTTPSHandler):
    """The same for https://."""

    def __init__(self, most: int, seconds: float) -> None:
        self._trusted = ssl.create_default_context()
        super().__init__(context=self._trusted)
        self._connection = bounded(HTTPSConnection, most, seconds)

    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(self._connection, req, context=self._trusted)


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
