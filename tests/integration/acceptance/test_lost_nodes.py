"""Nodes that do not join, hang, die, send something else, or join twice: each is named, the others
go on, and nothing is left running."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.integration import waiting
from tests.integration.acceptance.namespaces import NodeNetwork
from tests.integration.acceptance.node_jobs import (
    NodeJob,
    judged,
    node_side_with,
)

from drillyard.acceptance.node.messages import NodeConnection, proof
from drillyard.acceptance.results import Status

until = partial(waiting.until, seconds=30.0)

Start = Callable[..., NodeJob]

SLEEP = """
import os, subprocess, sys, time

def probe(arguments):
    mine = arguments.get("by_rank", {}).get(os.environ["NODE_RANK"], arguments)
    mark = arguments.get("mark", "none")
    command = [sys.executable, "-c", "import time; time.sleep(300)", mark]
    if mine.get("child"):
        subprocess.Popen(command)
    time.sleep(mine["sleep"])
    return {"slept": mine["sleep"]}
"""
FAIL_AT_RANK_1 = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit("no memory left")
time.sleep(300)
"""
MEET = """
import json, os, socket
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("", address[1]))
    listener.listen()
    listener.accept()[0].sendall(b"x")
else:
    for attempt in range(100):
        try:
            connected = socket.create_connection(address, timeout=5)
            break
        except ConnectionRefusedError:
            import time; time.sleep(0.05)
    assert connected.recv(1) == b"x"
print(json.dumps({"met": 1}))
"""


def sleep(seconds: float, limit: float = 60, **more: Any) -> dict[str, Any]:
    arguments = {"sleep": seconds, **more}
    return {"probe": "sleep", "scope": "node", "seconds": limit, "arguments": arguments}


def running_with(mark: str) -> list[int]:
    """Processes that have a word on their command line."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if mark.encode() in words:
                found.append(int(process.name))
    return found


def join_as(rank: int, port: int) -> tuple[NodeConnection, dict[str, Any]]:
    """A program of the test joins as a node; what node 0 answers."""
    for _ in range(200):
        try:
            connected = socket.create_connection(("127.0.0.1", port), timeout=10)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    connection = NodeConnection(connected)
    connection.receive()
    hello = {"joins": rank, "name": f"n{rank}", "host": f"n{rank}", "nonce": "0", "mesh_port": 9}
    connection.send(hello)
    return connection, connection.receive()


def test_every_node_that_is_lost_is_named_and_the_others_go_on(
    start: Start, tmp_path: Path
) -> None:
    side = node_side_with(tmp_path, probe_sleep=SLEEP)
    steps = [sleep(0.1), sleep(3), sleep(0.1), {"probe": "host", "scope": "node", "seconds": 30}]
    job = start(steps, 6, start=[0, 1, 2], node_side=side, join_seconds=6)
    garbage, joined = join_as(3, job.port)
    assert joined["joined"] == 3
    twice, _ = join_as(4, job.port)
    assert "refused" in join_as(4, job.port)[1]
    until(lambda: job.path.is_file() and job.evidence().of("sleep"))
    job.programs[1].send_signal(signal.SIGSTOP)
    job.programs[2].kill()
    garbage.socket.sendall(b"\x00\xff not a message\n")
    twice.close()
    evidence = job.wait()

    assert evidence.missing == (5,)
    assert evidence.interrupted is None
    silent = {rank for seen in evidence.observations for rank in seen.silent}
    assert silent == {1, 2, 3, 4}
    assert {seen.nodes[0] for seen in evidence.of("host")} == {0}
    (last,) = evidence.of("host")
    assert last.values is not None
    refused = [seen for seen in evidence.of("connection") if not seen.silent]
    assert [seen.nodes for seen in refused] == [(4,)]
    outcome = judged(evidence)
    assert outcome.verdict is Status.fail
    assert set(outcome.culprits) == {1, 2, 3, 4, 5}
    # A launcher must end what hangs.
    assert job.programs[0].returncode == 1


def test_a_probe_that_hangs_is_killed_with_its_children(start: Start, tmp_path: Path) -> None:
    side = node_side_with(tmp_path, probe_sleep=SLEEP)
    mark = f"hangs-{os.getpid()}"
    hangs = {"1": {"sleep": 300, "child": True}}
    steps = [sleep(0.1, 1.0, by_rank=hangs, mark=mark), sleep(0)]
    evidence = start(steps, 2, node_side=side).wait()
    first, second = evidence.of("sleep")[:2]
    assert first.error is None
    assert second.values is None and second.error is not None and "1 s" in second.error
    assert all(not seen.silent for seen in evidence.observations)
    assert all(seen.error is None for seen in evidence.of("sleep")[2:])
    assert running_with(mark) == []


def test_a_step_whose_node_answers_nothing_ends_after_its_own_limit(
    start: Start, tmp_path: Path
) -> None:
    side = node_side_with(tmp_path, probe_sleep=SLEEP)
    coordinator = side / "coordinator.py"
    coordinator.write_text(
        coordinator.read_text().replace("GRACE_SECONDS = 10.0", "GRACE_SECONDS = 1.0")
    )
    job = start([sleep(0, 1.0), sleep(0)], 2, start=[0], node_side=side)
    mute, _ = join_as(1, job.port)

    began = time.monotonic()
    while job.programs[0].poll() is None and time.monotonic() < began + 30:
        mute.send({"beat": 1})
        time.sleep(0.5)
        if any(seen.silent for seen in (job.evidence().observations if job.path.is_file() else ())):
            break
    evidence = job.wait()
    assert [seen.nodes for seen in evidence.of("sleep")] == [(0,), (1,), (0,)]
    assert evidence.of("sleep")[1].silent == (1,)
    assert judged(evidence).culprits == (1,)


def test_the_others_of_a_group_are_stopped_soon(start: Start, tmp_path: Path) -> None:
    side = node_side_with(tmp_path, torch_fail=FAIL_AT_RANK_1)
    step = {"probe": "fail", "scope": "all", "seconds": 60, "ranks": True}
    began = time.monotonic()
    (seen,) = start([step], 3, node_side=side).wait().observations
    assert time.monotonic() - began < 30
    assert seen.error is not None and seen.error.startswith("rank 1: ")
    assert "no memory left" in seen.error
    assert seen.silent == ()


def test_ranks_reach_node_0_at_its_own_address(
    start: Start, tmp_path: Path, network: Callable[[int], NodeNetwork]
) -> None:
    side = node_side_with(tmp_path, torch_meet=MEET)
    made = network(2)
    steps = [
        {"probe": "meet", "scope": scope, "seconds": 20, "ranks": True}
        for scope in ("pairs", "all")
    ]
    job = start(steps, 2, node_side=side, master_addr=made.address(0), prefixes=made.prefixes())
    evidence = job.wait()
    assert [node.address for node in evidence.nodes] == [made.address(0), made.address(1)]
    assert [seen.error for seen in evidence.observations] == [None, None]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing_running_and_what_was_observed(
    start: Start, tmp_path: Path, number: int
) -> None:
    side = node_side_with(tmp_path, probe_sleep=SLEEP)
    mark = f"ends-{os.getpid()}-{number}"
    steps = [sleep(0), sleep(300, 600, child=True, mark=mark)]
    job = start(steps, 2, node_side=side)
    until(lambda: len(running_with(mark)) == 2)
    job.programs[0].send_signal(number)
    evidence = job.wait(20)
    assert job.programs[0].returncode == 128 + number
    assert evidence.interrupted is not None
    assert [seen.error for seen in evidence.of("sleep")[:2]] == [None, None]
    assert all(seen.error for seen in evidence.of("sleep")[2:])
    assert judged(evidence).verdict is Status.incomplete
    job.programs[1].wait(20)
    assert running_with(mark) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_ends_when_node_0_is_gone_and_names_it(
    start: Start, tmp_path: Path, number: int
) -> None:
    side = node_side_with(tmp_path, probe_sleep=SLEEP)
    worker = side / "worker.py"
    text = worker.read_text()
    assert text.count("LEFT_BEHIND_SECONDS = 60.0") == 1
    worker.write_text(text.replace("LEFT_BEHIND_SECONDS = 60.0", "LEFT_BEHIND_SECONDS = 4.0"))
    mark = f"left-{os.getpid()}-{number}"
    steps = [sleep(300, 600, by_rank={"1": {"sleep": 300, "child": True}}, mark=mark)]
    job = start(steps, 2, node_side=side)
    until(lambda: len(running_with(mark)) == 1)
    job.programs[0].send_signal(number)
    assert job.programs[1].wait(30) == 1
    assert running_with(mark) == []
    outcome = judged(job.evidence())
    assert outcome.culprits == (0,)
    assert outcome.verdict is Status.fail
    assert outcome.results[0].check == "connection"


def test_where_the_run_has_a_secret_only_those_who_know_it_join(
    start: Start, tmp_path: Path
) -> None:
    side = node_side_with(tmp_path, probe_sleep=SLEEP)
    secret = b"0123456789abcdef"
    (side.parent.parent / "secret").write_bytes(secret)
    job = start([sleep(0)], 3, start=[0, 1], node_side=side, join_seconds=8)
    _, answer = join_as(2, job.port)
    assert "refused" in answer

    connected = socket.create_connection(("127.0.0.1", job.port), timeout=10)
    knows = NodeConnection(connected)
    nonce = str(knows.receive()["nonce"])
    hello = {"joins": 2, "nonce": "7", "mesh_port": 9}
    knows.send({**hello, "proof": proof(secret, "node 2", nonce)})
    answer = knows.receive()
    assert answer == {"joined": 2, "proof": proof(secret, "node 0", "7")}
    knows.close()
    evidence = job.wait()
    assert evidence.missing == ()
    assert [seen.values for seen in evidence.of("sleep")[:2]] == [{"slept": 0}] * 2


@pytest.mark.parametrize("launched", [True, False])
def test_a_node_that_comes_too_late_waits_for_its_launcher(
    start: Start, tmp_path: Path, launched: bool
) -> None:
    side = node_side_with(tmp_path, probe_sleep=SLEEP)
    mark = f"late-{os.getpid()}-{launched}"
    steps = [sleep(4, child=True, mark=mark)]
    job = start(steps, 2, start=[0], node_side=side, join_seconds=1)
    until(lambda: len(running_with(mark)) == 1)
    contract = {"DRILLYARD_LAUNCH_ROUND": "0"} if launched else {}
    late = start(
        *(steps, 2),
        start=[1],
        node_side=side,
        join_seconds=1,
        environments={1: contract},
        port=job.port,
    )
    evidence = job.wait()
    assert evidence.missing == (1,)
    assert evidence.of("sleep")[0].error is None
    program = late.programs[1]
    if launched:
        assert program.poll() is None
        program.terminate()
    assert program.wait(20) == (143 if launched else 1)


def test_a_port_that_is_taken_on_node_0_is_said(start: Start, tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        job = start([sleep(0)], 1, port=taken.getsockname()[1])
        output, _ = job.programs[0].communicate(timeout=30)
    assert job.programs[0].returncode == 1
    assert "cannot listen" in output


def test_strangers_do_not_keep_nodes_out(start: Start, tmp_path: Path) -> None:
    side = node_side_with(tmp_path, probe_sleep=SLEEP)
    job = start([sleep(0)], 2, start=[0], node_side=side, join_seconds=20)
    silent = []
    for text in [b"", b"x" * 10_000, b"[1]\n", json.dumps({"joins": 1}).encode() + b"\n"] * 60:
        for _ in range(100):
            try:
                connected = socket.create_connection(("127.0.0.1", job.port), timeout=5)
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        with contextlib.suppress(OSError):
            connected.sendall(text)
        silent.append(connected)
    node, answer = join_as(1, job.port)
    assert answer == {"joined": 1}
    node.close()
    evidence = job.wait()
    assert evidence.missing == ()
    for connected in silent:
        connected.close()
