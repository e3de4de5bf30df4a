"""Limits of HTTP answers from services that are not ours, and addresses that none may lead to.

`bounded` makes a connection class of http.client, on which urllib and httplib2 rest, whose answers
end with an error once they are too large or take too long, headers included: the timeout of a
socket alone is that of one packet.
"""

from __future__ import annotations

import http.client
import io
import ipaddress
import time
from typing import Any, TypeVar

from drillyard.errors import UserError

# Metadata services at addresses that are not link-local: AWS and Google Cloud over IPv6.
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-retrieval.html
# https://cloud.google.com/compute/docs/metadata/querying-metadata
_METADATA = frozenset(map(ipaddress.ip_address, ("fd00:ec2::254", "fd20:ce::254")))

Connection = TypeVar("Connection", bound=http.client.HTTPConnection)


class AnswerTooLargeError(UserError):
    """A service sends more than any answer of it has."""


def is_local_address(text: str) -> bool:
    """Whether a host is an IP address that means this machine or its link: loopback, link-local,
    unspecified, or a metadata service; also as an IPv4 address in an IPv6 one. False for names."""
    try:
        address = ipaddress.ip_address(text.strip("[]").partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    is_own = address.is_loopback or address.is_unspecified
    return is_own or address.is_link_local or address in _METADATA


def is_local_host(host: str) -> bool:
    """Whether a host is such an address, or a name that always means this machine."""
    name = host.rstrip(".").lower()
    return is_local_address(host) or name == "localhost" or name.endswith(".localhost")


def bounded(connection: type[Connection], most_bytes: int, seconds: float) -> type[Connection]:
    """The connection class with answers of at most `most_bytes`, headers included, each whole in
    `seconds`. Reading one raises AnswerTooLargeError, or TimeoutError."""

    class Answer(http.client.HTTPResponse):
        def __init__(self, sock: Any, *arguments: Any, **options: Any) -> None:
            super().__init__(sock, *arguments, **options)
            until = time.monotonic() + seconds
            self.fp = io.BufferedReader(_Limited(self.fp, sock, most_bytes, until))

    return type(connection.__name__, (connection,), {"response_class": Answer})


class _Limited(io.RawIOBase):
    """The bytes of an answer. `until`: of time.monotonic()."""

    def __init__(self, file: Any, sock: Any, most_bytes: int, until: float) -> None:
        self._file, self._sock = file, sock
        self._most, self._left, self._until = most_bytes, most_bytes, until

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("no whole answer in time")
        usual = self._sock.gettimeout()
        self._sock.settimeout(left if usual is None else min(left, usual))
        try:
            size: int = self._file.raw.readinto(buffer)
        finally:
            self._sock.settimeout(usual)
        self._left -= size
        if self._left < 0:
            raise AnswerTooLargeError(f"answers more than {self._most} bytes")
        return size

    def close(self) -> None:
        self._file.close()
        super().close()
