"""What every node does: it joins node 0, runs the probes that node 0 asks for, and answers."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .messages import NodeConnection
from .probe_process import HERE, Ended, ProbeProcesses, probe_command


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


def join(place: NodePlace, seconds: float) -> NodeConnection:
    """A connection to node 0. Raises OSError where it does not listen within `seconds`."""
    deadline = time.monotonic() + seconds
    address = "127.0.0.1" if place.rank == 0 else place.master_addr
    while True:
        try:
            connected = socket.create_connection((address, place.master_port), timeout=5.0)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
    connected.settimeout(None)
    connection = NodeConnection(connected)
    connection.send(
        {"joins": place.rank, "name": place.name, "address": connected.getsockname()[0]}
    )
    return connection


def work(place: NodePlace, connection: NodeConnection, torch_python: str | None) -> int:
    """Run what node 0 asks for, several at once where it asks so, until it ends the job. Returns
    the exit code."""
    running: dict[int, ProbeProcesses] = {}
    try:
        while True:
            try:
                message = connection.receive()
            except (OSError, ValueError) as error:
                print(f"error: the connection to node 0 is lost: {error}", file=sys.stderr)
                return 1
            if message is None:
                print("error: node 0 is gone", file=sys.stderr)
                return 1
            if "end" in message:
                return int(message["end"])
            if "stop" in message:
                if (stopped := running.get(message["stop"])) is not None:
                    stopped.stop(str(message["why"]))
                continue
            started = _start(place, message, torch_python)
            if isinstance(started, str):
                connection.send({"task": message["task"], "ended": [[None, started]]})
                continue
            running[message["task"]] = started
            threading.Thread(
                target=_answer, args=(connection, message, started, running), daemon=True
            ).start()
    finally:
        for each in list(running.values()):
            each.stop("the job ended")


def _start(
    place: NodePlace, task: dict[str, Any], torch_python: str | None
) -> ProbeProcesses | str:
    """The probe's processes, or why there are none."""
    name, ranks = str(task["probe"]), task.get("ranks")
    if not name.replace("_", "").isalnum():
        return "is not a probe"
    asked = json.dumps(task.get("arguments") or {})
    if ranks is None:
        return ProbeProcesses([probe_command(name)], [{}], asked)
    if torch_python is None:
        return "PyTorch is not installed for the nodes' Python"
    script = HERE / f"torch_{name}.py"
    if not script.is_file():
        return "is not a probe"
    environments = [
        {
            "RANK": str(ranks["first"] + local),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(ranks["world"]),
            "LOCAL_WORLD_SIZE": str(place.processes),
            "MASTER_ADDR": str(ranks["master_addr"]),
            "MASTER_PORT": str(ranks["master_port"]),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        for local in range(place.processes)
    ]
    return ProbeProcesses([[torch_python, str(script)]] * place.processes, environments, asked)


def _answer(
    connection: NodeConnection,
    task: dict[str, Any],
    processes: ProbeProcesses,
    running: dict[int, ProbeProcesses],
) -> None:
    ended: list[Ended] = processes.wait(float(task["seconds"]))
    running.pop(task["task"], None)
    with contextlib.suppress(OSError):
        connection.send(
            {"task": task["task"], "ended": [[each.values, each.error] for each in ended]}
        )


def python_with_torch(candidates: list[str]) -> str | None:
    """The first of these interpreters that has PyTorch; None where none has."""
    import subprocess

    for python in candidates:
        if "/" in python and not Path(python).exists():
            continue
        command = [
            python,
            "-c",
            "import importlib.util as u, sys; sys.exit(not u.find_spec('torch'))",
        ]
        try:
            if (
                subprocess.run(command, check=False, timeout=60, capture_output=True).returncode
                == 0
            ):
                return python
        except (OSError, subprocess.TimeoutExpired):
            continue
    return None
