"""`drillyard accept --node-rank R`: this machine's part of an acceptance that nobody submits. The
same command is given on every node, in a container too, and node 0 judges.

The node side runs as in a job: with its variables, in its network settings, as a program of its
own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from drillyard.acceptance.accept_command import EVIDENCE, Acceptance, on_nodes, unjudged
from drillyard.acceptance.evidence import parse_evidence
from drillyard.acceptance.job import DIRECTORY, SCHEDULE
from drillyard.acceptance.judgement import Outcome, judge
from drillyard.acceptance.node.messages import listen
from drillyard.errors import UserError
from drillyard.guarded_files import read_bytes
from drillyard.launch.network import network_of
from drillyard.launch.prepared_run import processes_per_node
from drillyard.plan_files import PlanFile
from drillyard.safe_files import require_replaceable

MASTER_PORT = 29400
_END_SECONDS = 15.0
"""For the program to end its probes after SIGTERM."""


@dataclass(frozen=True)
class NodePart:
    """A node's place among those that take part."""

    rank: int
    nodes: int
    master_addr: str
    master_port: int = MASTER_PORT


def node_part(
    rank: int, nodes: int | None, master_addr: str | None, master_port: int | None
) -> NodePart:
    """The place that options give. Raises UserError."""
    if nodes is None or master_addr is None:
        raise UserError(
            "--node-rank: needs --nnodes and --master-addr, the same on every node; such as"
            f" --node-rank {rank} --nnodes 2 --master-addr NODE-0"
        )
    if rank >= nodes:
        raise UserError(f"--node-rank {rank}: --nnodes {nodes} are 0 to {nodes - 1}")
    return NodePart(rank, nodes, master_addr, master_port or MASTER_PORT)


def run_node_part(acceptance: Acceptance, part: NodePart, output: Path) -> Outcome | None:
    """Take part to the end. `output`: directory of node 0 for the evidence. The outcome is node
    0's; None on another node that took part to the end. Raises UserError where one could not."""
    acceptance = on_nodes(acceptance, part.nodes, ())
    cluster = acceptance.request.cluster
    configured = cluster.environment
    network = network_of(cluster, acceptance.expected.catalog, image=None, configured=configured)
    files = [*acceptance.request.files, *([network.file] if network.file else [])]
    if part.rank == 0:
        _require_free(part.master_port)
        require_replaceable(output / EVIDENCE, _is_evidence, "move it away, or give --output")
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="drillyard-") as directory:
        # As in a launch directory.
        _write(files, Path(directory, "files"))
        here = Path(directory, "files", DIRECTORY)
        command = [sys.executable, str(here), "run", "--schedule", str(here / SCHEDULE)]
        command += ["--run-directory", str(output.resolve())]
        command += ["--python", cluster.python or sys.executable]
        if network.file is not None:
            script = str(Path(directory, "files", network.file.path))
            command = ["bash", "-c", '. "$0" && exec "$@"', script, *command]
        environment = {
            **os.environ,
            **network.environment,
            **configured,
            "NODE_RANK": str(part.rank),
            "NNODES": str(part.nodes),
            "NPROC_PER_NODE": str(processes_per_node(acceptance.request)),
            "MASTER_ADDR": part.master_addr,
            "MASTER_PORT": str(part.master_port),
        }
        code = _run(command, environment)
    if part.rank > 0:
        if code != 0:
            raise UserError(f"node {part.rank}: did not take part to the end (exit code {code})")
        return None
    return _outcome(acceptance, part, output / EVIDENCE, code)


def _require_free(port: int) -> None:
    """Raise UserError where node 0 could not listen."""
    try:
        listen(port).close()
    except OSError as error:
        raise UserError(
            f"--master-port {port}: {error.strerror}; end the program that has it, or give another"
            " port, the same on every node"
        ) from None


def _is_evidence(content: bytes) -> bool:
    """Whether content is what node 0 of some acceptance observed."""
    try:
        parse_evidence(content, EVIDENCE)
    except UserError:
        return False
    return True


def _outcome(acceptance: Acceptance, part: NodePart, path: Path, code: int) -> Outcome:
    try:
        evidence = parse_evidence(read_bytes(path), str(path))
    except (OSError, UserError) as error:
        return unjudged(acceptance, f"node 0 ended with exit code {code}: {error}")
    if evidence.submission != acceptance.submission:
        return unjudged(acceptance, f"node 0 ended with exit code {code} and wrote no evidence")
    variables = acceptance.request.cluster.environment.items()
    expected = replace(
        acceptance.expected,
        environment={name: text for name, text in variables if name.startswith("NCCL_")},
    )
    return judge(evidence, expected)


def _write(files: list[PlanFile], directory: Path) -> None:
    for file in files:
        path = directory / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.content, encoding="utf-8")


def _run(command: list[str], environment: dict[str, str]) -> int:
    """Run the program to its end; Ctrl-C, SIGTERM (of a container that is stopped) and SIGHUP end
    it and its probes."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, end) for number in numbers}
    # In a session of its own: what ends this process reaches it as SIGTERM alone.
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        code = process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
        return code
    except BaseException:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        raise
