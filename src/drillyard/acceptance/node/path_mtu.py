"""Path MTU to another node: the largest IP packet that arrives whole, with fragmentation forbidden.

Packets are sent at the interface's own size first, whatever the kernel has learnt
(IP_PMTUDISC_PROBE). Where those do not arrive and no router said so, TCP connections hang once they
carry data: the kernel's own value, IP_MTU, tells which.
"""

from __future__ import annotations

import errno
import socket
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


def path_mtu(address: str, port: int, wait: float, likely: int | None = None) -> dict[str, Any]:
    """`path`, `interface` and `kernel` MTU in bytes towards a node's mesh server, and `local`, the
    address that packets leave from. `wait`: seconds for an answer. `likely`: the path MTU to
    another node, tried first. `path` is null where no packet at all arrives."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.settimeout(wait)
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


def _largest(sock: socket.socket, most: int, family: int, likely: int | None) -> int | None:
    if _arrives(sock, most, family):
        return most
    least = _LEAST[socket.AddressFamily(family)]
    if not _arrives(sock, least, family):
        return None
    if likely is not None and least < likely < most and _arrives(sock, likely, family):
        least = likely
        if not _arrives(sock, likely + 1, family):
            return likely
    while most - least > 1:
        middle = (least + most) // 2
        if _arrives(sock, middle, family):
            least = middle
        else:
            most = middle
    return least


def _arrives(sock: socket.socket, packet: int, family: int) -> bool:
    size = packet - _HEADERS[socket.AddressFamily(family)]
    for number in range(packet * _TRIES, packet * _TRIES + _TRIES):
        try:
            sock.send(QUESTION.pack(b"size", number).ljust(size, b"\0"))
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                return False
        try:
            while True:
                answer = sock.recv(ANSWER.size)
                if len(answer) == ANSWER.size and ANSWER.unpack(answer)[1:3] == (number, size):
                    return True
        except OSError:
            continue
    return False
