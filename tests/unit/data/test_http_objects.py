"""Redirects to this machine's own addresses, and bodies longer than what was asked for."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from importlib.util import find_spec
from typing import Any

import pytest
from aiohttp.resolver import DefaultResolver
from tests.unit.data.object_server import ObjectServer, serving

from drillyard.data import remote_objects
from drillyard.errors import UserError

PUBLIC = "127.0.0.2"
"""Counts as a public address here: no test leaves this machine."""


class Redirecting(ObjectServer):
    """Redirects /there to `target`; sends without end for /endless."""

    target = ""
    sent_bytes = 0

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        if handler.path == "/there.jsonl":
            handler.send_response(302)
            handler.send_header("Location", self.target)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
        elif handler.path == "/endless.jsonl" and handler.command == "GET":
            handler.send_response(200)
            handler.send_header("Transfer-Encoding", "chunked")
            handler.send_header("ETag", '"x"')
            handler.end_headers()
            piece = b"10000\r\n" + b"x" * 65536 + b"\r\n"
            while self.sent_bytes < 1 << 28:
                try:
                    self.sent_bytes += handler.wfile.write(piece)
                except OSError:
                    break
            handler.close_connection = True
        else:
            super().answer(handler)


@pytest.fixture(autouse=True)
def public_address(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(remote_objects, "FIRST_PAUSE_SECONDS", 1e-4)
    if find_spec("drillyard.data.http_objects") is None:  # on an earlier commit (fails_on.py)
        yield
        return
    from drillyard.data import http_objects

    known = http_objects.is_local_address
    monkeypatch.setattr(
        http_objects, "is_local_address", lambda host: host != PUBLIC and known(host)
    )
    http_objects.http_files.cache_clear()
    yield
    http_objects.http_files.cache_clear()


def read(address: str) -> bytes:
    (found,) = remote_objects.list_objects(address, lambda path: True)
    return found.open().read()


def resolving_to(host: str) -> Callable[..., Any]:
    """In place of `DefaultResolver.resolve`: every name has this address."""

    async def resolve(resolver: Any, name: str, port: int = 0, *_: Any, **__: Any) -> Any:
        each = {"hostname": name, "host": host, "port": port, "proto": 0, "flags": 0}
        return [{**each, "family": socket.AF_INET}]

    return resolve


@pytest.fixture
def own() -> Iterator[ObjectServer]:
    """A server of this machine that answers to it alone."""
    with serving({"/docs.jsonl": b"secret"}) as server:
        yield server


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.1.2.3",
        "localhost",
        "LOCALHOST.",
        "name.localhost",
        "0.0.0.0",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[::ffff:169.254.169.254]",
        "169.254.169.254",
        "169.254.0.9",
        "[fe80::1]",
        "[fd00:ec2::254]",
        "leads-here.test",
    ],
)
def test_a_public_address_may_not_redirect_to_this_machine(
    host: str, own: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DefaultResolver, "resolve", resolving_to("127.0.0.1"))
    port = own.url.rpartition(":")[2]
    with serving({}, Redirecting, PUBLIC) as public:
        public.target = f"http://{host}:{port}/docs.jsonl"
        with pytest.raises(UserError, match=f"{PUBLIC}: leads to "):
            read(f"{public.url}/there.jsonl")
    assert own.ranges == []


def test_a_name_that_turns_from_public_to_local_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from drillyard.data.http_objects import RedirectGuard

    async def resolve_twice() -> None:
        guard = RedirectGuard("turns.test")
        monkeypatch.setattr(DefaultResolver, "resolve", resolving_to(PUBLIC))
        await guard.resolve("turns.test")
        monkeypatch.setattr(DefaultResolver, "resolve", resolving_to("::1"))
        with pytest.raises(UserError):
            await guard.resolve("turns.test")

    asyncio.run(resolve_twice())


def test_a_local_server_and_a_public_one_may_redirect_to_their_like(own: ObjectServer) -> None:
    with serving({}, Redirecting) as local, serving({}, Redirecting, PUBLIC) as public:
        local.target = f"{own.url}/docs.jsonl"
        assert read(f"{local.url}/there.jsonl") == b"secret"
        public.objects["/docs.jsonl"] = b"rows"
        public.target = "/docs.jsonl"
        assert read(f"{public.url}/there.jsonl") == b"rows"


def test_no_more_is_read_than_the_server_announced() -> None:
    with serving({"/endless.jsonl": b"0123456789"}, Redirecting) as server:
        with pytest.raises(UserError, match=r"endless\.jsonl"):
            read(f"{server.url}/endless.jsonl")
        assert server.sent_bytes < 1 << 26


def test_a_name_that_resolves_to_this_machine_later_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without any redirect: what is checked is each address that a connection goes to."""
    from drillyard.data.http_objects import RedirectGuard

    async def resolve_twice() -> None:
        guard = RedirectGuard("rebinding.test")
        monkeypatch.setattr(DefaultResolver, "resolve", resolving_to("192.0.2.1"))
        assert len(await guard.resolve("rebinding.test", 80)) == 1
        monkeypatch.setattr(DefaultResolver, "resolve", resolving_to("169.254.169.254"))
        with pytest.raises(UserError, match=r"leads to rebinding\.test"):
            await guard.resolve("rebinding.test", 80)
        await guard.close()

    asyncio.run(resolve_twice())
