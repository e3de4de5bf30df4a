"""Whether agents could meet, over real sockets of this machine; and storage that a look must not
change."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drillyard.host_probe import directory_facts
from drillyard.launch.agent import meeting
from drillyard.launch.agent.meeting import follow, lead
from drillyard.supervise.sockets import free_port

SECRET = b"of this look"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_JOIN_SECONDS", 1.0)
    monkeypatch.setattr(meeting, "_LATER_SECONDS", 0.5)


def led(port: int, others: int, meanwhile: Callable[[], list[dict[str, Any]]]) -> Any:
    """What the leader has seen, and what `meanwhile` gives."""
    results: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: results.append(lead(port, SECRET, others, 10.0)))
    thread.start()
    followed = meanwhile()
    thread.join(20)
    return results[0], followed


def test_all_join_the_one_that_leads() -> None:
    port = free_port(set())
    names = ["nobody.invalid", "127.0.0.1"]
    seen, joined = led(port, 2, lambda: [follow(names, port, SECRET) for _ in range(2)])
    assert seen == {"joined": 2, "error": None}
    assert joined == [{"joined": 1, "error": None}] * 2


def test_a_leader_does_not_wait_for_long_after_the_last() -> None:
    port = free_port(set())
    seen, _ = led(port, 3, lambda: [follow(["127.0.0.1"], port, SECRET)])
    assert seen == {"joined": 1, "error": None}


def test_others_are_not_taken_for_the_leader() -> None:
    """One with another secret, a port on which a stranger listens, and nobody at all."""
    port = free_port(set())
    _, (other, own) = led(
        port,
        1,
        lambda: [follow(["127.0.0.1"], port, b"another"), follow(["127.0.0.1"], port, SECRET)],
    )
    assert other["joined"] is None and own["joined"] == 1
    assert follow(["127.0.0.1"], port, SECRET)["error"]
    assert "nobody.invalid" in follow(["nobody.invalid"], port, SECRET)["error"]


def test_ports_that_are_all_taken() -> None:
    taken = []
    try:
        port = free_port(set())
        for number in range(port, port + 16):
            server = socket.socket()
            taken.append(server)
            try:
                server.bind(("", number))
            except OSError:
                continue
            server.listen()
        seen = lead(port, SECRET, 1, 1.0)
    finally:
        for server in taken:
            server.close()
    assert seen["joined"] is None and "all taken" in seen["error"]


def test_a_look_at_storage_makes_no_directory(tmp_path: Path) -> None:
    facts = directory_facts(tmp_path / "s" / "runs", None, None, tmp_path / "s")
    assert facts["error"] == "is not there" and facts["path"] == str(tmp_path / "s")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "s").mkdir()
    facts = directory_facts(tmp_path / "s" / "runs", None, "n", tmp_path / "s")
    assert facts["writable"] and [each.name for each in (tmp_path / "s").iterdir()] == [
        ".drillyard-n"
    ]
    # A launch makes it, and from then on it is the one that a look is at.
    assert directory_facts(tmp_path / "s" / "runs", None, None)["writable"]
    facts = directory_facts(tmp_path / "s" / "runs", None, None, tmp_path / "s")
    assert facts["path"] == str(tmp_path / "s" / "runs")
