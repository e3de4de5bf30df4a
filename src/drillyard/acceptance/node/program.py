"""The verbs of the node side: `run`, one per node of a job, and `probe`, one process of a probe."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from .coordinator import FORMAT, Coordinator, write_evidence
from .worker import NodePlace, join, python_with_torch, work

EVIDENCE = "acceptance/evidence.json"
"""Path in the run directory."""


def main(words: list[str] | None = None) -> int:
    """Run a verb; returns the exit code."""
    parser = argparse.ArgumentParser(prog="drillyard-acceptance")
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run")
    run.add_argument("--schedule", required=True, help="JSON: level, join_seconds, steps")
    run.add_argument("--run-directory", required=True, type=Path)
    run.add_argument("--python", action="append", default=[], help="may have PyTorch")
    probe = verbs.add_parser("probe")
    probe.add_argument("name")
    options = parser.parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return run_node(options) if options.verb == "run" else run_probe(options.name)


def run_probe(name: str) -> int:
    """One probe: its arguments as JSON on standard input, what it found on standard output."""
    arguments = json.loads(sys.stdin.read() or "{}")
    module = importlib.import_module(f".probe_{name}", __package__)
    print(json.dumps(module.probe(arguments)), flush=True)
    return 0


def run_node(options: argparse.Namespace) -> int:
    """This node's part of the job; node 0 writes the evidence."""
    schedule = json.loads(options.schedule)
    place = NodePlace(
        rank=int(os.environ["NODE_RANK"]),
        nodes=int(os.environ["NNODES"]),
        processes=int(os.environ["NPROC_PER_NODE"]),
        master_addr=os.environ["MASTER_ADDR"],
        master_port=int(os.environ["MASTER_PORT"]),
    )
    torch_python = python_with_torch([*options.python, sys.executable, "python3"])
    if place.rank == 0:
        listener = socket.create_server(("", place.master_port), backlog=1024)
        threading.Thread(
            target=_coordinate, args=(place, schedule, listener, options.run_directory), daemon=True
        ).start()
    try:
        connection = join(place, float(schedule["join_seconds"]))
    except OSError as error:
        print(
            f"error: node {place.rank} cannot reach node 0 at"
            f" {place.master_addr}:{place.master_port}: {error}",
            file=sys.stderr,
        )
        return 1
    return work(place, connection, torch_python)


def _coordinate(
    place: NodePlace, schedule: dict[str, Any], listener: socket.socket, run_directory: Path
) -> None:
    began = time.time()
    code, coordinator = 1, Coordinator(place.nodes, place.processes, listener)
    try:
        missing = coordinator.wait_for_nodes(float(schedule["join_seconds"]))
        coordinator.run(schedule["steps"], lambda text: print(f"check: {text}", flush=True))
        identities = [coordinator.identities[rank] for rank in sorted(coordinator.identities)]
        evidence = {
            "format": FORMAT,
            "level": schedule["level"],
            "started_at": began,
            "ended_at": time.time(),
            "expected_nodes": place.nodes,
            "processes_per_node": place.processes,
            "nodes": identities,
            "missing": missing,
            "observations": coordinator.observations,
        }
        write_evidence(run_directory / EVIDENCE, evidence)
        code = 0
    finally:
        coordinator.end(code)
