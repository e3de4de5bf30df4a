"""Path MTU to another node: the largest IP packet that arrives whole, with fragmentation forbidden.

Packets are sent at the interface's own size first, whatever the kernel has learnt
(IP_PMTUDISC_PROBE). Where those do not arrive and no router said so, TCP connections hang once they
carry data: the kernel's own value, IP_MTU, tells which.
"""

from __future__ import annotations

import errno
import socket
import time
from typing import Any

from .interfaces import interface_of
from .mesh_server import ANSWER, QUESTION

# Numbers of linux/in.h and linux/in6.h.
_DISCOVER = {socket.AF_INET: (socket.IPPROTO_IP, 10), socket.AF_INET6: (socket.IPPROTO_IPV6, 23)}
_MTU = {socket.AF_INET: (socket.IPPROTO_IP, 14), socket.AF_INET6: (socket.IPPROTO_IPV6, 24)}
_PROBE = 3
_HEADERS = {socket.AF_INET: 28, socket.AF_INET6: 48}
"""Of IP and UDP, without options."""
_LEAST = {socket.AF_INET: 576, socket.AF_INET6: 1280}
"""What every host must take (RFC 791, RFC 8200)."""
_MOST_PACKET = 65535
_TRIES = 3
_SHORT_SECONDS, _LONG_SECONDS = 0.02, 0.1


def path_mtu(address: str, port: int, likely: int | None = None) -> dict[str, Any]:
    """`path`, `interface` and `kernel` MTU in bytes towards a node's mesh server, and `local`, the
    address that packets leave from. `likely`: the path MTU to another node, tried first. `path` is
    null where no packet at all arrives."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(*_DISCOVER[family], _PROBE)
        sock.connect((address, port))
        local = sock.getsockname()[0]
        found = interface_of(local) or {}
        own = found.get("mtu") or sock.getsockopt(*_MTU[family])
        path = _largest(sock, min(own, _MOST_PACKET), family, likely)
        kernel = sock.getsockopt(*_MTU[family])
    if path is not None and path == min(own, _MOST_PACKET):
        path = own
    return {"path": path, "interface": own, "kernel": kernel, "local": local}


def _largest(
    sock: socket.socket, most: int, family: socket.AddressFamily, likely: int | None
) -> int | None:
    least = _LEAST[family]
    began = time.monotonic()
    if not _arrives(sock, least, family, _LONG_SECONDS):
        return None
    wait = min(_LONG_SECONDS, max(_SHORT_SECONDS, 8 * (time.monotonic() - began)))
    if most <= least or _arrives(sock, most, family, wait):
        return most
    above = most
    if likely is not None and least < likely < most and _arrives(sock, likely, family, wait):
        least = likely
        above = likely + 1 if not _arrives(sock, likely + 1, family, wait) else most
    while above - least > 1:
        middle = (least + above) // 2
        if _arrives(sock, middle, family, wait):
            least = middle
        else:
            above = middle
    # What was lost for another reason, on a busy host say, arrives now.
    return most if _arrives(sock, most, family, _LONG_SECONDS) else least


def _arrives(
    sock: socket.socket, packet: int, family: socket.AddressFamily, seconds: float
) -> bool:
    """Whether one of three packets is answered, each within twice the time of the one before."""
    size = packet - _HEADERS[family]
    for attempt in range(_TRIES):
        number = time.monotonic_ns()
        sock.settimeout(seconds * 2**attempt)
        try:
            sock.send(QUESTION.pack(b"size", number).ljust(size, b"\0"))
            while True:
                answer = sock.recv(ANSWER.size)
                if len(answer) == ANSWER.size and ANSWER.unpack(answer)[1:3] == (number, size):
                    return True
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                return False
    return False
