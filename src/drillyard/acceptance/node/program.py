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

from drillyard.supervise.sockets import allow_open_files

from .coordinator import Coordinator
from .evidence_file import FORMAT, UNFINISHED, add_loss_of_node_0, write_evidence
from .members import JobMembers
from .mesh_server import MeshServer
from .messages import listen, shared_secret
from .probe_process import HERE
from .probe_storage import remove_leftovers
from .worker import NodePlace, NotJoined, TorchPython, Worker, join

EVIDENCE = "acceptance/evidence.json"
"""Path in the run directory."""
_FINISH_SECONDS = 10.0
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LAUNCHED = "DRILLYARD_LAUNCH_ROUND"
"""Every launcher sets it for a command."""
_SEGMENT_BYTES = 536
"""Of connections to node 0, both ways: a path that loses large packets without a word must be
reported, and not end the node's connection. Every IPv4 path carries so much (RFC 9293, 3.7.1)."""
_SIGNAL_SECONDS = 0.5
"""Waits are cut in pieces: a signal between the interpreter's last look and the start of an endless
wait would be seen only when that wait ends."""


def main(words: list[str] | None = None) -> int:
    """Run a verb; returns the exit code."""
    parser = argparse.ArgumentParser(prog="drillyard-acceptance")
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run")
    run.add_argument(
        "--schedule", required=True, help="JSON or its file: level, submission, join_seconds, steps"
    )
    run.add_argument("--run-directory", required=True, type=Path)
    run.add_argument("--python", action="append", default=[], help="may have PyTorch")
    probe = verbs.add_parser("probe")
    probe.add_argument("name")
    options = parser.parse_args(words)
    if options.verb == "probe":
        return run_probe(options.name)
    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGTERM:
            signal.signal(number, _end)
    return run_node(options)


class EndedBySignal(BaseException):
    """A signal asks this node's program to end."""

    def __init__(self, number: int) -> None:
        super().__init__(f"{signal.Signals(number).name} ended it")
        self.exit_code = 128 + number


def _end(number: int, _: object) -> None:
    _ignore_signals()
    raise EndedBySignal(number)


def _ignore_signals() -> None:
    """A second signal must not end the end: evidence is written, probes are killed."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)


def run_probe(name: str) -> int:
    """One probe: its arguments as JSON on standard input, what it found on standard output."""
    arguments = json.loads(sys.stdin.read() or "{}")
    module = importlib.import_module(f".probe_{name}", __package__)
    try:
        print(json.dumps(module.probe(arguments)), flush=True)
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def read_schedule(given: str) -> dict[str, Any]:
    """The schedule: `given`, or the content of the file of that name."""
    text = given if given.startswith("{") else Path(given).read_text(encoding="utf-8")
    schedule: dict[str, Any] = json.loads(text)
    return schedule


def run_node(options: argparse.Namespace) -> int:
    """This node's part of the job; node 0 writes the evidence."""
    schedule = read_schedule(options.schedule)
    place = NodePlace(
        rank=int(os.environ["NODE_RANK"]),
        nodes=int(os.environ["NNODES"]),
        processes=int(os.environ["NPROC_PER_NODE"]),
        master_addr=os.environ["MASTER_ADDR"],
        master_port=int(os.environ["MASTER_PORT"]),
    )
    evidence = options.run_directory / EVIDENCE
    secret = shared_secret(HERE.parent.parent) if place.nodes > 1 else b""
    job: NodeZero | None = None
    why = "this node's program ended"
    try:
        if place.rank == 0:
            try:
                listener = listen(place.master_port)
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT_BYTES)
            except OSError as error:
                print(f"error: node 0 cannot listen: {error}", file=sys.stderr)
                return 1
            job = NodeZero(place, schedule, listener, secret, evidence)
        torch_python = TorchPython([*options.python, sys.executable, "python3"], schedule["steps"])
        return _take_part(place, schedule, secret, evidence.parent, torch_python, job)
    except EndedBySignal as error:
        why = str(error)
        return error.exit_code
    finally:
        if job is not None:
            _ignore_signals()
            job.finish(why)


def _take_part(
    place: NodePlace,
    schedule: dict[str, Any],
    secret: bytes,
    directory: Path,
    torch_python: TorchPython,
    job: NodeZero | None,
) -> int:
    """Join node 0 and work for it; returns the exit code. `job`: on node 0, which directs the
    others also where it has left itself out."""
    try:
        server = MeshServer(place.rank)
        connection = join(place, float(schedule["join_seconds"]), secret, server)
        code = Worker(place, schedule["steps"], connection, directory, torch_python).work()
        if job is not None:
            return job.wait()
        if code != 0:
            submission = schedule.get("submission", "")
            evidence = directory / Path(EVIDENCE).name
            add_loss_of_node_0(evidence, submission, place.master_addr, place.master_port)
        return code
    except NotJoined as error:
        why = f"cannot take part: {error}"
    except OSError as error:
        where = f"{place.master_addr}:{place.master_port}"
        why = f"cannot reach node 0 at {where}: {error}"
    print(f"error: node {place.rank} {why}", file=sys.stderr, flush=True)
    return _left_out() if job is None else job.wait()


def _left_out() -> int:
    """What a node does without which node 0 goes on; returns the exit code.

    Under a launcher it waits to be ended with the others: a command that ends, well or not, makes a
    launcher stop those of the other nodes soon. Node 0 ends with an error, and with it the job.
    """
    while _LAUNCHED in os.environ:
        time.sleep(_SIGNAL_SECONDS)
    return 1


class NodeZero:
    """What node 0 does beside its own work: it runs the schedule in a thread, and writes what was
    observed after each step and at the end, also an early one."""

    def __init__(
        self,
        place: NodePlace,
        schedule: dict[str, Any],
        listener: socket.socket,
        secret: bytes,
        evidence: Path,
    ) -> None:
        self._schedule, self._evidence, self._began = schedule, evidence, time.time()
        self._place, self._missing = place, list[int]()
        self._members = JobMembers(place.nodes, listener, secret)
        self._coordinator = Coordinator(self._members, place.processes, schedule["steps"])
        self._code = 1
        # A connection per node, and as many while they join.
        allow_open_files(2 * place.nodes + 512)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self) -> int:
        """Wait for the last step; returns the exit code."""
        while self._thread.is_alive():
            self._thread.join(_SIGNAL_SECONDS)
        return self._code

    def finish(self, why: str) -> None:
        """Wait for the thread; a job that still runs ends early, for the reason given."""
        if self._thread.is_alive():
            self._coordinator.interrupt(_reason_of_launcher() or why)
        self._thread.join(_FINISH_SECONDS)

    def _run(self) -> None:
        remove_leftovers(self._evidence.parent)
        try:
            self._missing = self._members.wait(float(self._schedule["join_seconds"]))
            self._write(UNFINISHED)
            self._coordinator.run(
                lambda text: print(f"check: {text}", flush=True), lambda: self._write(UNFINISHED)
            )
            ended = self._coordinator.interrupted
            complete = self._write(ended) and ended is None
            # Nodes that are lost may hang: with an error of node 0 a launcher ends them, too.
            self._code = 0 if complete and not self._missing and not self._members.lost else 1
            self._members.end(0 if complete else 1)
        finally:
            self._members.end(1)

    def _write(self, interrupted: str | None) -> bool:
        """Write the document; returns whether that worked."""
        members = self._members
        fields = ("rank", "name", "address", "host", "rack")
        document = {
            "format": FORMAT,
            "level": self._schedule["level"],
            "submission": self._schedule.get("submission", ""),
            "started_at": self._began,
            "ended_at": time.time(),
            "expected_nodes": self._place.nodes,
            "processes_per_node": self._place.processes,
            "nodes": [
                {key: members.identities[rank][key] for key in fields}
                for rank in sorted(members.identities)
            ],
            "missing": self._missing,
            "interrupted": interrupted,
            "observations": self._coordinator.observations,
        }
        try:
            write_evidence(self._evidence, document)
        except OSError as error:
            print(f"error: {self._evidence}: {error}", file=sys.stderr, flush=True)
            return False
        return True


def _reason_of_launcher() -> str | None:
    """Why the launcher ends this command, where it is for another node's failure: it says so beside
    the exit record before its signal."""
    record = os.environ.get("DRILLYARD_EXIT_RECORD")
    if not record:
        return None
    try:
        with open(f"{record}.stop", "rb") as file:
            said = json.loads(file.read(1 << 16))
        return str(said["reason"])[:1000]
    except (OSError, ValueError, KeyError, TypeError):
        return None
