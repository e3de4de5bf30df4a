"""The file system of objects at https:// and http://: fsspec's, with two limits.

- A range is read up to its length and no further, whatever the server sends.
- A redirect from a public address to a loopback or link-local one is refused: what listens there
  (the metadata service of a cloud, a port of this host) answers to this machine alone. An address
  that is such a one itself may redirect to others. Names are checked as they are resolved for the
  connection, so a name that resolves otherwise a moment later is refused too. Behind a proxy, which
  resolves names itself, only addresses and localhost are checked.

Needs fsspec and aiohttp, so it is imported where such an address is opened.
"""

from __future__ import annotations

import ipaddress
import socket
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import aiohttp
from aiohttp.abc import AbstractResolver
from aiohttp.resolver import DefaultResolver
from fsspec.implementations.http import HTTPFileSystem
from yarl import URL

from drillyard.bounded_http import is_local_address
from drillyard.errors import UserError


class RedirectGuard(AbstractResolver):
    """Resolves names for the objects of one host, and refuses redirects to local addresses from a
    public one."""

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self._origin_is_local: bool | None = None
        if _is_address(origin):
            self._origin_is_local = is_local_address(origin)
        self._resolver = DefaultResolver()
        self._proxies = {urlsplit(proxy).hostname for proxy in getproxies().values()}

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> Any:
        """The addresses of a name. Raises UserError for local ones, unless the origin is local."""
        found = await self._resolver.resolve(host, port, family)
        are_local = [is_local_address(each["host"]) for each in found]
        if host == self._origin and self._origin_is_local is None:
            self._origin_is_local = all(are_local)
        if any(are_local) and not self._origin_is_local and host not in self._proxies:
            raise self._refusal(host)
        return found

    async def close(self) -> None:
        await self._resolver.close()

    async def check_redirect(
        self, session: aiohttp.ClientSession, context: Any, redirect: Any
    ) -> None:
        """Refuse the target of a redirect whose host is no name to resolve. Called by aiohttp."""
        response = redirect.response
        location = response.headers.get("Location") or response.headers.get("URI") or ""
        host = response.url.join(URL(location)).host or ""
        is_local = is_local_address(host) or host.rstrip(".").endswith("localhost")
        if is_local and not self._origin_is_local:
            response.close()
            raise self._refusal(host)

    def _refusal(self, host: str) -> UserError:
        return UserError(
            f"{self._origin}: leads to {host}, an address of this machine or of its link, which"
            " nothing from outside may lead to. Download the file and give its path."
        )


class BoundedHttpFiles(HTTPFileSystem):  # type: ignore[misc]  # fsspec has no types
    """fsspec's file system of web servers with the limits of this module, for objects of one
    host."""

    async def _cat_file(
        self, url: str, start: int | None = None, end: int | None = None, **options: Any
    ) -> bytes:
        """The bytes [start, end) of an object; one byte more where the server sends more."""
        assert start is not None and end is not None
        options = {**self.kwargs, **options}
        headers = {**options.pop("headers", {}), "Range": f"bytes={start}-{end - 1}"}
        session = await self.set_session()
        data = bytearray()
        async with session.get(self.encode_url(url), headers=headers, **options) as response:
            self._raise_not_found_for_status(response, url)
            while len(data) <= end - start:
                part = await response.content.read(end - start + 1 - len(data))
                if not part:
                    break
                data += part
        return bytes(data)


@lru_cache
def http_files(host: str) -> BoundedHttpFiles:
    """The file system for objects of one host."""

    async def make_session(**options: Any) -> aiohttp.ClientSession:
        guard = RedirectGuard(host)
        trace = aiohttp.TraceConfig()
        trace.on_request_redirect.append(guard.check_redirect)
        connector = aiohttp.TCPConnector(resolver=guard)
        return aiohttp.ClientSession(connector=connector, trace_configs=[trace], **options)

    return BoundedHttpFiles(
        get_client=make_session,
        # Other encodings would change the bytes that a range counts.
        headers={"Accept-Encoding": "identity"},
        client_kwargs={"trust_env": True, "auto_decompress": False},
        skip_instance_cache=True,
        use_listings_cache=False,
    )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
