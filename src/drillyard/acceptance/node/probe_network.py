"""This node's clock, and what it finds of other nodes: the difference of their clocks, their names
both ways, the path MTU, and whether their ports can be reached."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from .interfaces import interface_of
from .mesh_server import ANSWER, QUESTION, greeting
from .path_mtu import path_mtu

_THREADS = 8
_CONNECT_SECONDS = 2.0
_TRIES, _PASSES = 8, 8
_ANSWER_SECONDS = 0.25
_GOOD_ROUND_TRIP = 0.004
"""An offset is wrong by half of its round trip at most."""
_CLOCK_SECONDS = 20.0
_NAME_SECONDS = 10.0
_UNSYNCHRONIZED = 5
"""TIME_ERROR of ntp_gettime(3)."""


def probe(arguments: dict[str, Any]) -> dict[str, Any]:
    """Asks every one of `peers`, about all or only about what `measures` lists; `watched` is what
    this node's program has seen of its clock. Times in seconds; an offset is the other clock minus
    this one, wrong by half of its round trip at most."""
    peers = arguments["peers"]
    wanted = arguments.get("measures") or ["ports", "clock", "mtu", "names"]
    found: list[dict[str, Any]] = [{"node": peer["rank"]} for peer in peers]

    def each(measure: Callable[[dict[str, Any]], Any], key: str, seconds: float) -> None:
        _together([functools.partial(measure, peer) for peer in peers], found, key, seconds)

    if "ports" in wanted:
        each(_ports, "ports", 40.0)
    if "clock" in wanted:
        _offsets(peers, found)
    if "mtu" in wanted:
        likely: list[int | None] = [None]
        each(lambda peer: _path_mtu(peer, likely), "mtu", 40.0)
    if "names" in wanted:
        resolved: dict[str, Any] = {}
        each(lambda peer: _name(peer, resolved), "name", _NAME_SECONDS)
        each(_reverse, "reverse", _NAME_SECONDS)
    locals_ = {str(mtu["local"]) for entry in found if "local" in (mtu := entry.get("mtu") or {})}
    return {
        "peers": found,
        "interfaces": [each for each in map(interface_of, sorted(locals_)) if each is not None],
        "clock": {
            "watched": arguments["watched"],
            "synchronized": _synchronized(),
            "storage": _storage_clock(os.environ.get("ACCEPTANCE_DIRECTORY")),
        },
    }


def _together(
    calls: list[Callable[[], Any]], found: list[dict[str, Any]], key: str, seconds: float
) -> None:
    """Make calls by several threads; what has not ended in time is null. Threads that still wait,
    for a name server say, are left behind and end with the process."""
    left = iter(range(len(calls)))
    results: dict[int, Any] = {}
    lock = threading.Lock()

    def take() -> None:
        while True:
            with lock:
                at = next(left, None)
            if at is None:
                return
            results[at] = calls[at]()

    threads = [threading.Thread(target=take, daemon=True) for _ in range(min(_THREADS, len(calls)))]
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    for at, entry in enumerate(found):
        entry[key] = results.get(at)


def _node_at(address: str, port: int, seconds: float = _CONNECT_SECONDS) -> Any:
    """The rank that the program at a port says it is. Raises OSError, and ValueError for another
    program."""
    with socket.create_connection((address, port), timeout=seconds) as connected:
        return greeting(connected, seconds).get("node")


def _ports(peer: dict[str, Any]) -> list[dict[str, Any]]:
    """`rendezvous` (the job's own port, unless another program of that host has it) and `high` (one
    that the kernel chose)."""
    found = []
    for kind in ("rendezvous", "high"):
        port = peer["rendezvous_port" if kind == "rendezvous" else "mesh_port"]
        if port is None:
            continue
        began, error = time.monotonic(), None
        try:
            said = _node_at(peer["address"], port)
            if said != peer["rank"]:
                error = f"answers as node {said}"
        except (OSError, ValueError) as failed:
            error = str(failed)
        seconds = time.monotonic() - began
        found.append({"kind": kind, "port": port, "seconds": seconds, "error": error})
    return found


def _offsets(peers: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    """The clocks of all peers. Where answers took long, as on a busy host, peers are asked again:
    the shortest round trip of all passes counts."""
    deadline = time.monotonic() + _CLOCK_SECONDS
    for entry in found:
        entry["clock"] = None
    for number in range(_PASSES):
        for peer, entry in zip(peers, found):
            before = entry["clock"]
            if before is not None and before["round_trip"] < _GOOD_ROUND_TRIP:
                continue
            if time.monotonic() > deadline or (before is None and number > 2):
                continue
            again = _offset(peer)
            if again is not None and (before is None or again["round_trip"] < before["round_trip"]):
                entry["clock"] = again


def _offset(peer: dict[str, Any]) -> dict[str, Any] | None:
    """((t1 - t0) + (t2 - t3)) / 2 of RFC 5905, section 8, of the round trip that took least. t3 is
    t0 plus the monotonic clock's difference, so a step between the two is in no offset."""
    family = socket.AF_INET6 if ":" in peer["address"] else socket.AF_INET
    best: tuple[float, float] | None = None
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.settimeout(_ANSWER_SECONDS)
        try:
            sock.connect((peer["address"], peer["mesh_port"]))
        except OSError:
            return None
        for number in range(_TRIES):
            if number >= _TRIES // 2 and best is None:
                return None
            sent_at, began = time.time(), time.monotonic()
            try:
                sock.send(QUESTION.pack(b"time", number))
                answer = sock.recv(ANSWER.size)
            except OSError:
                continue
            took = time.monotonic() - began
            if len(answer) != ANSWER.size:
                continue
            _, answered, rank, read_at, answered_at = ANSWER.unpack(answer)
            if answered != number or rank != peer["rank"]:
                continue
            round_trip = took - (answered_at - read_at)
            offset = ((read_at - sent_at) + (answered_at - (sent_at + took))) / 2
            if round_trip >= 0 and (best is None or round_trip < best[0]):
                best = round_trip, offset
    return None if best is None else {"offset": best[1], "round_trip": best[0]}


def _path_mtu(peer: dict[str, Any], likely: list[int | None]) -> dict[str, Any]:
    try:
        found = path_mtu(peer["address"], peer["mesh_port"], likely[0])
    except OSError as error:
        return {"error": str(error)}
    if found["path"] is not None and found["path"] < found["interface"]:
        likely[0] = found["path"]
    return found


def _name(peer: dict[str, Any], resolved: dict[str, Any]) -> dict[str, Any]:
    """`addresses` of the peer's name, and which node answers there."""
    name, began = peer["host"], time.monotonic()
    found: dict[str, Any] = {"name": name, "addresses": [], "reaches": None, "error": None}
    try:
        if name not in resolved:
            listed = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            resolved[name] = sorted({str(each[4][0]) for each in listed})
        found["addresses"] = resolved[name]
    except OSError as error:
        found["error"] = error.strerror or str(error)
    found["seconds"] = time.monotonic() - began
    if peer["address"] in found["addresses"]:
        found["reaches"] = peer["rank"]
    for address in found["addresses"][:2]:
        if found["reaches"] is None:
            with contextlib.suppress(OSError, ValueError):
                found["reaches"] = _node_at(address, peer["mesh_port"], 1.0)
    return found


def _reverse(peer: dict[str, Any]) -> dict[str, Any]:
    try:
        name, aliases, _ = socket.gethostbyaddr(peer["address"])
    except OSError as error:
        return {"names": [], "error": error.strerror or str(error)}
    return {"names": [name, *aliases], "error": None}


def _synchronized() -> bool | None:
    """Whether the kernel says that something keeps its clock right."""
    try:
        state = ctypes.CDLL(None).ntp_gettime(ctypes.create_string_buffer(1024))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _UNSYNCHRONIZED


def _storage_clock(directory: str | None) -> dict[str, float] | None:
    """The clock of the run directory's file system minus this one, and how wrong that may be. On a
    network file system it is a third clock; on a disk it is the kernel's own."""
    if directory is None:
        return None
    try:
        os.makedirs(directory, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".clock-") as file:
            began = time.time()
            file.write(b"1")
            file.flush()
            os.fsync(file.fileno())
            ended = time.time()
            changed = os.stat(file.name).st_mtime_ns
    except OSError:
        return None
    # Whole seconds: a file system that keeps no more. Else the kernel's tick.
    least = 1.0 if changed % 1_000_000_000 == 0 else 0.02
    return {
        "offset": changed / 1e9 - (began + ended) / 2,
        "uncertain": abs(ended - began) / 2 + least,
    }
