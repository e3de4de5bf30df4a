"""How free ports are found."""

from __future__ import annotations

import socket
from pathlib import Path

from drillyard.supervise.sockets import free_port


def test_ports_are_never_used_twice_and_lie_below_those_of_outgoing_connections() -> None:
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    used: set[int] = set()
    ports = [free_port(used) for _ in range(20)]
    assert used == set(ports) and len(used) == 20 and max(ports) < first_outgoing
    with socket.create_server(("127.0.0.1", ports[0])) as taken:
        assert taken.getsockname()[1] == ports[0]
