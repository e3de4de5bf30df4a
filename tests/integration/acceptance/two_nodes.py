"""Nodes of an acceptance job as processes on loopback, and the faults that a test gives to one of
their ranks."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.integration.acceptance.node_jobs import NodeJob
from tests.integration.acceptance.places import forking_python

from drillyard.acceptance.check import Expected, Level
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.schedule import schedule
from drillyard.hardware import load_catalog

NODES, RANKS = 2, 2


def expected(baseline: AcceptanceEvidence | None = None) -> Expected:
    """What is known of a machine that the cluster config does not name."""
    return Expected(load_catalog(None), None, None, None, baseline=baseline)


def torch_steps() -> list[dict[str, Any]]:
    """The steps of the quick level that start ranks."""
    steps = schedule(Level.quick, expected(), NODES)["steps"]
    return [step for step in steps if step.get("ranks")]


def observe(
    directory: Path,
    steps: Sequence[dict[str, Any]],
    environment: Mapping[str, str] = {},
    forks: bool = True,
) -> AcceptanceEvidence:
    """Run the node program once per node and return what node 0 wrote. `forks`: its probes are
    forks, not started for real."""
    own = {**environment, "NPROC_PER_NODE": str(RANKS)}
    python = forking_python(directory) if forks else sys.executable
    environments = dict.fromkeys(range(NODES), own)
    job = NodeJob(directory, steps, NODES, environments=environments, python=python)
    try:
        return job.wait(400)
    finally:
        job.end()


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
