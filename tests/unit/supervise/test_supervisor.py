"""What each rank learns about its place, and how free ports are found."""

from __future__ import annotations

import socket
from pathlib import Path

from drillyard.supervise.nodes import rank_environments
from drillyard.supervise.ports import free_port


def test_each_rank_knows_its_place() -> None:
    first, second = rank_environments({"MASTER_PORT": "20000", "HOME": "/home"}, 2, 3)
    assert (first["RANK"], second["RANK"]) == ("0", "1")
    assert (first["LOCAL_RANK"], second["LOCAL_RANK"]) == ("0", "1")
    shared = {name: value for name, value in first.items() if name not in ("RANK", "LOCAL_RANK")}
    assert shared == {name: value for name, value in second.items() if name not in ("RANK", "LOCAL_RANK")}
    assert shared["WORLD_SIZE"] == shared["LOCAL_WORLD_SIZE"] == "2"
    assert shared["DRILLYARD_ROUND"] == "3" and shared["MASTER_PORT"] == "20000" and shared["HOME"] == "/home"


def test_ports_are_never_used_twice_and_lie_below_those_of_outgoing_connections() -> None:
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports: list[int] = []
    for _ in range(20):
        ports.append(free_port(ports))
    assert len(set(ports)) == 20 and max(ports) < first_outgoing
    with socket.create_server(("127.0.0.1", ports[0])) as taken:
        assert taken.getsockname()[1] == ports[0]
