"""Nodes of an acceptance job as processes on loopback, and the faults that a test gives to one of
their ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from drillyard.acceptance import node
from drillyard.acceptance.check import Expected, Level
from drillyard.acceptance.evidence import AcceptanceEvidence, parse_evidence
from drillyard.acceptance.schedule import JOIN_SECONDS, schedule
from drillyard.hardware import load_catalog

PROGRAM = Path(node.__file__).parent
NODES, RANKS = 2, 2


def expected(baseline: AcceptanceEvidence | None = None) -> Expected:
    """What is known of a machine that the cluster config does not name."""
    return Expected(load_catalog(None), None, None, None, baseline=baseline)


def torch_steps() -> list[dict[str, Any]]:
    """The steps of the quick level that start ranks."""
    steps = schedule(Level.quick, expected(), NODES)["steps"]
    return [step for step in steps if step.get("ranks")]


def observe(
    directory: Path, steps: Sequence[dict[str, Any]], environment: dict[str, str] | None = None
) -> AcceptanceEvidence:
    """Run the node program once per node and return what node 0 wrote."""
    port = _free_ports()
    planned = {"level": "quick", "join_seconds": JOIN_SECONDS[Level.quick], "steps": list(steps)}
    started = []
    for rank in range(NODES):
        place = {
            "NODE_RANK": str(rank),
            "NNODES": str(NODES),
            "NPROC_PER_NODE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        command = [sys.executable, str(PROGRAM), "run", "--schedule", json.dumps(planned)]
        command += ["--run-directory", str(directory), "--python", sys.executable]
        started.append(
            subprocess.Popen(command, env={**os.environ, **place, **(environment or {})})
        )
    try:
        codes = [each.wait(400) for each in started]
    finally:
        for each in started:
            if each.poll() is None:
                each.kill()
                each.wait()
    assert codes == [0] * NODES
    return parse_evidence((directory / "acceptance/evidence.json").read_bytes(), "evidence.json")


def _free_ports() -> int:
    """A port that is free now, with some free ones above it."""
    for _ in range(100):
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
        try:
            for above in range(4):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port + above))
        except OSError:
            continue
        return port
    raise AssertionError("no free ports")


@contextmanager
def slowed(node_rank: int, local_rank: int, directory: Path) -> Iterator[None]:
    """Stop every process of one rank for half of the time, in turns of 50 ms, from outside."""
    over = threading.Event()
    rank = str(node_rank * RANKS + local_rank)

    def stop_and_go() -> None:
        known: dict[int, bool] = {}
        looked = 0.0
        while not over.is_set():
            if time.monotonic() - looked > 0.2:
                known, looked = {pid: True for pid in _ranks(rank, directory)}, time.monotonic()
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for pid in known:
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)
                time.sleep(0.05)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _ranks(rank: str, directory: Path) -> Iterator[int]:
    """Processes of torch probes of this test with this rank and more than one rank in all."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
                words = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            of_test = f"ACCEPTANCE_TEST={directory}".encode() in words
            probe = len(command) > 1 and b"/torch_" in command[1]
            own = b"WORLD_SIZE=4" in words and f"RANK={rank}".encode() in words
            if of_test and probe and own:
                yield int(entry.name)
