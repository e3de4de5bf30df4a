"""What each rank is told about its place, and how free ports are found."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from pathlib import Path

import pytest

from drillyard.errors import UserError
from drillyard.supervise.nodes import rank_environments
from drillyard.supervise.processes import free_port
from drillyard.supervise.supervisor import hold_run_directory


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
    used: set[int] = set()
    ports = [free_port(used) for _ in range(20)]
    assert len(set(ports)) == 20 and max(ports) < first_outgoing
    with socket.create_server(("127.0.0.1", ports[0])) as taken:
        assert taken.getsockname()[1] == ports[0]


@pytest.mark.parametrize("launched", [True, False])
def test_a_launched_run_outwaits_the_lock_of_a_host_that_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launched: bool
) -> None:
    monkeypatch.setattr("drillyard.supervise.supervisor._LOCK_PATIENCE_SECONDS", 0.1)
    monkeypatch.delenv("DRILLYARD_EXIT_RECORD", raising=False)
    if launched:
        monkeypatch.setenv("DRILLYARD_EXIT_RECORD", str(tmp_path / "record"))
    (tmp_path / "logs").mkdir()
    other = os.open(tmp_path / "logs", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    threading.Timer(1.0, os.close, [other]).start()
    if launched:
        with hold_run_directory(tmp_path):
            pass
    else:
        with pytest.raises(UserError, match="a run is active in it"), hold_run_directory(tmp_path):
            pass
