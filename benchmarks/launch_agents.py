"""The agents of a run on the network: how fast 1,000 of them join their leader, and what a flood of
strangers costs it.

    python benchmarks/launch_agents.py joins [--nodes 1000] [--repeats 5]
    python benchmarks/launch_agents.py flood [--connections 10000] [--greetings 1000]

`joins`: the leader is a real agent; the others are threads of four processes that call the agent's
own `join`, all at the same moment, and report at once that their commands ended. Printed: seconds
until the attempt begins, the slowest handshake, and the leader's CPU seconds and memory, to its
end. `flood`: two nodes train a small model with `drillyard train`, undisturbed and then while
strangers connect and send 1 MB each; printed: whether losses, gradient norms and exported weights
are equal to the bit, and the leader's descriptors, memory and CPU time during the flood.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import resource
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.workload import llama_run
from tests.integration.launch.agents import Agents, wait_until

from drillyard.launch.agent import protocol
from drillyard.launch.agent.exit_report import make_report

PROCESSES = 4
GREETING_BYTES = 1_000_000


def joins(nodes: int, directory: Path) -> tuple[float, float, float, float]:
    """Seconds to the first attempt and of the slowest handshake, CPU seconds and MiB of the
    leader."""
    agents = Agents(directory, "true", nodes + 1)
    (agents.launch / "secret").write_text("known")
    leader = agents.run(0, "--submission", "a")
    wait_until(lambda: "nodes are here" in (agents.state.get("reason") or ""))
    port = json.loads(agents.job.read_text())["port"]
    context = multiprocessing.get_context("fork")
    ready, go, slowest = context.Semaphore(0), context.Event(), context.Queue()
    for first in range(PROCESSES):
        ranks = range(1 + first, nodes + 1, PROCESSES)
        context.Process(
            target=follow_all, args=(port, ranks, ready, go, slowest), daemon=True
        ).start()
    for _ in range(nodes):
        ready.acquire()
    released_at = time.time()
    go.set()
    _, status, used = os.wait4(leader.pid, 0)
    leader.returncode = os.waitstatus_to_exitcode(status)
    if leader.returncode != 0:
        raise SystemExit(f"the leader failed: {agents.state.get('reason')}")
    begun_at = float(agents.state["started_at"])
    handshake = max(slowest.get(timeout=60) for _ in range(PROCESSES))
    return begun_at - released_at, handshake, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def follow_all(port: int, ranks: range, ready: Any, go: Any, slowest: Any) -> None:
    """The nodes of one process, each in a thread."""
    seconds: list[float] = []

    def follow(node: int) -> None:
        described = {"submission": "a", "attempt": "0", "node": node, "host": f"n{node}"}
        ready.release()
        go.wait()
        while True:
            began = time.monotonic()
            try:
                connection, _ = protocol.join("127.0.0.1", port, b"known", described, 60.0)
                break
            except protocol.ConnectionLost:
                time.sleep(0.5)
        seconds.append(time.monotonic() - began)
        connection.send(ready=1)
        with contextlib.suppress(protocol.ConnectionLost):
            while True:
                time.sleep(0.2)
                connection.beat()
                for message in connection.receive():
                    if "start" in message:
                        report = make_report(node, f"n{node}", 0, {}, "", asked=False, why=None)
                        connection.send(exited={**report, "left": []})

    threads = [threading.Thread(target=follow, args=(node,)) for node in ranks]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    slowest.put(max(seconds))


def train(directory: Path, arguments: argparse.Namespace | None) -> dict[str, Any]:
    """Train on two nodes, in a flood if `arguments` has one; returns what must be equal, and the
    leader's use."""
    (directory / "launch").mkdir(parents=True)
    settings = llama_run(
        directory,
        "flood",
        hidden=64,
        layers=2,
        heads=4,
        kv_heads=4,
        sequence_length=64,
        micro_batch_size=2,
        vocab_size=512,
        documents=200,
        words=100,
        training={"steps": 300, "precision": "fp32", "compile": False},
    )
    (directory / "launch" / "run.yaml").write_text(yaml.safe_dump(settings))
    command = [
        sys.executable,
        "-m",
        "drillyard",
        "train",
        "{launch_directory}/run.yaml",
        "--console",
        "none",
    ]
    command += [
        "--nproc-per-node",
        "1",
        "--max-restarts",
        "0",
        "--nnodes",
        "{nodes}",
        "--node-rank",
        "{node_rank}",
    ]
    command += ["--master-addr", "{master_addr}", "--master-port", "{master_port}"]
    agents = Agents(directory, "", 2, command=command)
    leader = agents.run(0)
    wait_until(lambda: agents.state)
    used: dict[str, float] = {}
    if arguments is not None:
        flooding = threading.Thread(target=flood, args=(agents, arguments, used))
        flooding.start()
    follower = agents.run(1)
    codes = [leader.wait(), follower.wait()]
    if arguments is not None:
        flooding.join()
    run = directory / "runs" / "flood"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [
        (each["step"], each["loss"], each.get("grad_norm")) for each in lines if "loss" in each
    ]
    weights = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(run.glob("final/*.safetensors"))
    }
    agents.close()
    return {
        "codes": codes,
        "round": agents.state["round"],
        "steps": steps,
        "weights": weights,
        "used": used,
    }


def flood(agents: Agents, arguments: argparse.Namespace, used: dict[str, float]) -> None:
    """Connect and greet from here at the same time; the leader's greatest use of resources."""
    port = json.loads(agents.job.read_text())["port"]
    leader = agents.started[0].pid
    # For this process alone: the leader keeps the limit that it was started with.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    over = threading.Event()
    watching = threading.Thread(target=watch, args=(leader, over, used))
    watching.start()
    began = time.monotonic()
    cpu = cpu_seconds(leader)
    held = []
    for number in range(arguments.connections):
        with contextlib.suppress(OSError):
            held.append(socket.create_connection(("127.0.0.1", port), timeout=5))
        if number % (arguments.connections // arguments.greetings) == 0:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), timeout=5) as greeting,
            ):
                greeting.sendall(b"x" * GREETING_BYTES)
    used["connections"] = len(held)
    used["seconds"] = time.monotonic() - began
    used["leader CPU seconds"] = cpu_seconds(leader) - cpu
    # Held to the end of the run: closing them is no part of the attack.
    agents.started[0].wait()
    over.set()
    watching.join()
    for each in held:
        each.close()


def watch(pid: int, over: threading.Event, used: dict[str, float]) -> None:
    """Note the most descriptors and memory of a process until `over`."""
    while not over.wait(0.02):
        with contextlib.suppress(OSError):
            used["descriptors"] = max(
                used.get("descriptors", 0), len(os.listdir(f"/proc/{pid}/fd"))
            )
            # A process that has ended has no such line.
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmHWM"):
                    used["MiB"] = int(line.split()[1]) / 1024


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used; 0 when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["joins", "flood"])
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--greetings", type=int, default=1_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if arguments.what == "joins":
            rows = [
                joins(arguments.nodes, Path(directory) / str(number))
                for number in range(arguments.repeats)
            ]
            names = (
                "seconds to the attempt",
                "slowest handshake",
                "leader CPU seconds",
                "leader MiB",
            )
            for name, values in zip(names, zip(*rows, strict=True), strict=True):
                print(
                    f"{name}: {statistics.median(values):.2f} ({min(values):.2f} to"
                    f" {max(values):.2f})"
                )
            return
        quiet = train(Path(directory) / "quiet", None)
        flooded = train(Path(directory) / "flooded", arguments)
        print(
            f"exit codes {flooded['codes']}, rounds {flooded['round'] + 1}, steps"
            f" {len(flooded['steps'])}"
        )
        print(
            "losses and gradient norms equal to the bit:"
            f" {quiet['steps'] == flooded['steps'] != []}"
        )
        print(f"exported weights equal: {quiet['weights'] == flooded['weights'] != {}}")
        for name, value in flooded["used"].items():
            print(f"{name}: {value:.1f}")


if __name__ == "__main__":
    main()
