"""Network interfaces of this node: which one has an address, its MTU, speed and queue disciplines.
Asked of the kernel by rtnetlink(7), as containers have no `ip` and a stale /sys."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Numbers of linux/rtnetlink.h, linux/netlink.h and linux/sockios.h.
_GET_ADDRESSES, _GET_QUEUES = 22, 38
_DUMP = 0x301
_ERROR, _DONE = 2, 3
_ADDRESS, _LOCAL_ADDRESS, _QUEUE_KIND = 1, 2, 1
_READ_MTU = 0x8921
_ADDRESS_BODY = struct.Struct("=BBBBI")
_QUEUE_BODY = struct.Struct("=BxxxiIII")
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")


def interface_of(address: str) -> dict[str, Any] | None:
    """The interface that has a local address: `name`, `mtu` in bytes, `mbps` as the driver reports
    it, `queues` (kinds of its queue disciplines). None where none has it; what cannot be read is
    null."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    wanted = socket.inet_pton(family, address.partition("%")[0])
    try:
        index = next(
            _ADDRESS_BODY.unpack_from(body)[4]
            for body, attributes in _dump(_GET_ADDRESSES, _ADDRESS_BODY, bytes([family]))
            if wanted in (attributes.get(_LOCAL_ADDRESS), attributes.get(_ADDRESS))
        )
        name = socket.if_indextoname(index)
    except (OSError, StopIteration):
        return None
    return {"name": name, "mtu": _mtu(name), "mbps": _mbps(name), "queues": _queues(index)}


def _mtu(name: str) -> int | None:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            request = struct.pack("16s16x", name.encode())
            return int(struct.unpack_from("16si", fcntl.ioctl(any_socket, _READ_MTU, request))[1])
    except OSError:
        return None


def _mbps(name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        speed = int(Path("/sys/class/net", name, "speed").read_text())
        return speed if speed > 0 else None
    return None


def _queues(index: int) -> list[str] | None:
    try:
        return sorted(
            {
                attributes.get(_QUEUE_KIND, b"").rstrip(b"\0").decode(errors="replace")
                for body, attributes in _dump(_GET_QUEUES, _QUEUE_BODY, bytes(_QUEUE_BODY.size))
                if _QUEUE_BODY.unpack_from(body)[1] == index
            }
        )
    except OSError:
        return None


def _dump(kind: int, body: struct.Struct, asked: bytes) -> Iterator[tuple[bytes, dict[int, bytes]]]:
    """Every entry of a table of the kernel: its fixed part and its attributes."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as connected:
        connected.settimeout(2.0)
        asked = asked.ljust(body.size, b"\0")
        connected.send(_HEADER.pack(_HEADER.size + len(asked), kind, _DUMP, 1, 0) + asked)
        while True:
            data = connected.recv(1 << 17)
            while len(data) >= _HEADER.size:
                length, found, *_ = _HEADER.unpack_from(data)
                if found in (_ERROR, _DONE) or length < _HEADER.size:
                    return
                part = data[_HEADER.size : length]
                yield part[: body.size], _attributes(part[body.size :])
                data = data[(length + 3) & ~3 :]


def _attributes(data: bytes) -> dict[int, bytes]:
    found = {}
    while len(data) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(data)
        if length < _ATTRIBUTE.size:
            break
        found[kind] = data[_ATTRIBUTE.size : length]
        data = data[(length + 3) & ~3 :]
    return found
