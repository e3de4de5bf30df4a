"""What every node does: it joins node 0, runs the probes that node 0 asks for, and answers.

Node 0 names a step of the schedule, which every node has from the job itself: a stranger in its
place could start nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .clock_watch import ClockWatch
from .mesh_server import MeshServer
from .messages import (
    BEAT_SECONDS,
    MOST_BYTES,
    NodeConnection,
    is_proof,
    lost_reason,
    pause,
    proof,
)
from .probe_process import HERE, Ended, ProbeProcesses, probe_command
from .probe_storage import scratch_name

LEFT_BEHIND_SECONDS = 60.0
"""Without a message of node 0 for so long, a node ends."""
_NAME_SECONDS = 2.0


@dataclass(frozen=True)
class NodePlace:
    """This node's place in the job, as every launcher's environment gives it."""

    rank: int
    nodes: int
    processes: int
    master_addr: str
    master_port: int

    @property
    def name(self) -> str:
        """What the node calls itself; the launcher may know a better name."""
        return os.environ.get("SLURMD_NODENAME") or socket.gethostname()

    @property
    def rack(self) -> str:
        """The switch that the node hangs on, where the scheduler says (srun(1),
        SLURM_TOPOLOGY_ADDR); empty elsewhere."""
        names = os.environ.get("SLURM_TOPOLOGY_ADDR", "").split(".")
        kinds = os.environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
        return names[-2] if len(names) == len(kinds) > 1 and kinds[-2] == "switch" else ""


class NotJoined(Exception):
    """Node 0 refuses this node, or is not node 0, or goes on without this node."""


def join(place: NodePlace, seconds: float, secret: bytes, server: MeshServer) -> NodeConnection:
    """A connection to node 0. Raises OSError where it does not listen within `seconds`, NotJoined
    where it refuses."""
    deadline = time.monotonic() + seconds
    address = "127.0.0.1" if place.rank == 0 else place.master_addr
    host = _own_host()
    while True:
        try:
            connected = socket.create_connection((address, place.master_port), timeout=5.0)
            connection = NodeConnection(connected, LEFT_BEHIND_SECONDS)
            _shake_hands(place, connection, secret, host, server)
            return connection
        except (OSError, ValueError) as error:
            if time.monotonic() > deadline:
                raise OSError(str(error)) from None
            pause(0.2)


def _shake_hands(
    place: NodePlace, connection: NodeConnection, secret: bytes, host: str, server: MeshServer
) -> None:
    nonce = os.urandom(16).hex()
    greeting = connection.receive()
    if place.rank != 0:
        # Not earlier: node 0 may be on this host, and would find its port taken.
        server.listen_also(place.master_port)
    hello = {
        "joins": place.rank,
        "name": place.name,
        "host": host,
        "rack": place.rack,
        "nonce": nonce,
        "mesh_port": server.port,
        "rendezvous_port": place.master_port if place.rank == 0 else server.rendezvous_port,
    }
    if secret:
        hello["proof"] = proof(secret, f"node {place.rank}", str(greeting.get("nonce")))
    connection.send(hello)
    answer = connection.receive()
    if "refused" in answer:
        raise NotJoined(str(answer["refused"]))
    if secret and not is_proof(answer.get("proof"), secret, "node 0", nonce):
        raise NotJoined("the program that answers does not know the secret of this run")
    connection.joined(LEFT_BEHIND_SECONDS)


def _own_host() -> str:
    """This host's name as others look it up: in full where this host knows that at once."""
    found = [socket.gethostname()]

    def look() -> None:
        with contextlib.suppress(OSError, UnicodeError):
            listed = socket.getaddrinfo(found[0], None, flags=socket.AI_CANONNAME)
            found.append(listed[0][3])

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(_NAME_SECONDS)
    return (found[-1] if found[-1].startswith(f"{found[0]}.") else found[0])[:255]


class Worker:
    """One node's part of the job."""

    def __init__(
        self,
        place: NodePlace,
        steps: Sequence[dict[str, Any]],
        connection: NodeConnection,
        directory: Path,
        torch_python: TorchPython,
    ) -> None:
        self._place, self._steps, self._connection = place, steps, connection
        self._directory, self._torch_python = directory, torch_python
        self._watch, self._token = ClockWatch(), os.urandom(8).hex()
        self._running: dict[int, ProbeProcesses] = {}
        self._held: list[socket.socket] = []

    def work(self) -> int:
        """Run what node 0 asks for, several at once where it asks so, until it ends the job.
        Returns the exit code. Raises NotJoined where node 0 goes on without this node."""
        threading.Thread(target=self._beat, daemon=True).start()
        try:
            while True:
                try:
                    message = self._connection.receive()
                except (OSError, ValueError) as error:
                    why = lost_reason(error, LEFT_BEHIND_SECONDS)
                    print(f"error: node 0 is lost: {why}", file=sys.stderr, flush=True)
                    return 1
                if "left_out" in message:
                    raise NotJoined(f"node 0 goes on without it: it {message['left_out']}")
                try:
                    if "end" in message:
                        return int(message["end"])
                    self._follow(message)
                except (KeyError, TypeError, ValueError):
                    print("error: node 0 sent a message of unknown form", file=sys.stderr)
                    return 1
        finally:
            self.stop("the job ended")

    def stop(self, why: str) -> None:
        """Kill every probe."""
        for number, each in list(self._running.items()):
            each.stop(why)
            shutil.rmtree(self._scratch({"task": number}), ignore_errors=True)

    def _follow(self, message: dict[str, Any]) -> None:
        if "stop" in message:
            if (running := self._running.get(message["stop"])) is not None:
                threading.Thread(
                    target=running.stop, args=(str(message["why"]),), daemon=True
                ).start()
        elif "port" in message:
            self._say({"task": message["port"], "port": self._free_port()})
        elif "task" in message:
            started = self._start(message)
            if isinstance(started, str):
                self._say({"task": message["task"], "ended": [[None, started]]})
                return
            self._running[message["task"]] = started
            threading.Thread(target=self._answer, args=(message, started), daemon=True).start()

    def _start(self, task: dict[str, Any]) -> ProbeProcesses | str:
        """The processes of a step's probe, or why there are none."""
        index, ranks = task.get("step"), task.get("ranks")
        if not isinstance(index, int) or not 0 <= index < len(self._steps):
            return "is not a step of this job"
        step = self._steps[index]
        name, arguments = str(step["probe"]), dict(step.get("arguments") or {})
        if "peers" in task:
            arguments.update(peers=task["peers"], watched=self._watch.seen())
        scratch = self._scratch(task)
        shared = {
            "ACCEPTANCE_DIRECTORY": str(self._directory),
            "ACCEPTANCE_SCRATCH": str(scratch),
        }
        try:
            if ranks is None:
                return ProbeProcesses([probe_command(name)], [shared], json.dumps(arguments))
            python = self._torch_python.path()
            if python is None:
                return "PyTorch is not installed for the nodes' Python"
            environments = [
                {
                    **shared,
                    "RANK": str(ranks["first"] + local),
                    "LOCAL_RANK": str(local),
                    "WORLD_SIZE": str(ranks["world"]),
                    "LOCAL_WORLD_SIZE": str(self._place.processes),
                    "MASTER_ADDR": str(ranks["master_addr"]),
                    "MASTER_PORT": str(ranks["master_port"]),
                    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
                }
                for local in range(self._place.processes)
            ]
            command = [python, str(HERE / f"torch_{name}.py")]
            return ProbeProcesses(
                [command] * len(environments), environments, json.dumps(arguments)
            )
        except OSError as error:
            return f"could not be started: {error}"

    def _scratch(self, task: dict[str, Any]) -> Path:
        """A directory that a probe may make and fill. It is removed after it; no other program's
        has its name."""
        return self._directory / scratch_name(self._place.rank, task["task"], self._token)

    def _answer(self, task: dict[str, Any], processes: ProbeProcesses) -> None:
        ended: list[Ended] = processes.wait(float(self._steps[task["step"]]["seconds"]))
        self._running.pop(task["task"], None)
        shutil.rmtree(self._scratch(task), ignore_errors=True)
        for held in self._held if "ranks" in task else ():
            held.close()
        answer = {"task": task["task"], "ended": [[each.values, each.error] for each in ended]}
        if len(json.dumps(answer)) >= MOST_BYTES:
            why = f"printed more than {MOST_BYTES >> 20} MiB, with the others on this node"
            answer["ended"] = [[None, why]] * len(ended)
        self._say(answer)

    def _free_port(self) -> int:
        """A port for the ranks of the next task. It stays bound, without listening, so that the
        kernel gives it to nobody else; rank 0 may listen on it, as both allow its reuse."""
        held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        self._held = [each for each in self._held if each.fileno() >= 0] + [held]
        return int(held.getsockname()[1])

    def _say(self, message: dict[str, Any]) -> None:
        # A lost connection is noticed where messages are received.
        with contextlib.suppress(OSError):
            self._connection.send(message)

    def _beat(self) -> None:
        while True:
            pause(BEAT_SECONDS)
            self._say({"beat": 1})


class TorchPython:
    """The first of some interpreters that has PyTorch. It is looked for, in a thread, only where a
    step needs it."""

    def __init__(self, candidates: Sequence[str], steps: Sequence[dict[str, Any]]) -> None:
        self._candidates = candidates
        self._found: str | None = None
        self._thread = threading.Thread(target=self._look, daemon=True)
        if any(step.get("ranks") for step in steps):
            self._thread.start()

    def path(self) -> str | None:
        """None where none has it."""
        self._thread.join()
        return self._found

    def _look(self) -> None:
        looks = "import importlib.util as u, sys; sys.exit(not u.find_spec('torch'))"
        for python in self._candidates:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                command = [python, "-c", looks]
                ran = subprocess.run(command, check=False, timeout=60, capture_output=True)
                if ran.returncode == 0:
                    self._found = python
                    return
