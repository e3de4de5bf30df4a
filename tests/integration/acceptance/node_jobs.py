"""Acceptance jobs without a scheduler: a test starts the nodes' programs, as a launcher does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drillyard.acceptance.check import Expected
from drillyard.acceptance.evidence import AcceptanceEvidence, parse_evidence
from drillyard.acceptance.job import DIRECTORY, node_files
from drillyard.acceptance.judgement import Outcome, judge
from drillyard.hardware import load_catalog
from drillyard.supervise.sockets import free_port

SILENT_SECONDS = 4.0
"""Of a node side with probes of a test."""
ENDS_WITHIN = 60.0


class NodeJob:
    """The programs of one job. `prefixes` go before a node's command, `environments` over its
    environment, by rank."""

    def __init__(
        self,
        directory: Path,
        steps: Sequence[Mapping[str, Any]],
        nodes: int,
        *,
        start: Sequence[int] | None = None,
        master_addr: str = "127.0.0.1",
        prefixes: Mapping[int, Sequence[str]] = {},
        environments: Mapping[int, Mapping[str, str]] = {},
        join_seconds: float = 30.0,
        python: str = sys.executable,
        node_side: Path | None = None,
        port: int | None = None,
    ) -> None:
        self.directory = directory
        side = node_side or write_node_side(directory.with_name(f"{directory.name}-launch"))
        self.port = port or free_port(set())
        schedule = {"level": "quick", "join_seconds": join_seconds, "steps": list(steps)}
        self.programs: dict[int, subprocess.Popen[str]] = {}
        for rank in range(nodes) if start is None else start:
            command = [*prefixes.get(rank, ()), python, str(side), "run"]
            command += ["--schedule", json.dumps(schedule), "--run-directory", str(directory)]
            contract = {
                "NODE_RANK": str(rank),
                "NNODES": str(nodes),
                "NPROC_PER_NODE": "1",
                "MASTER_ADDR": master_addr,
                "MASTER_PORT": str(self.port),
                # Names of their own, as nodes of a scheduler have.
                "SLURMD_NODENAME": f"n{rank}",
            }
            self.programs[rank] = subprocess.Popen(
                command,
                env={**os.environ, **contract, **environments.get(rank, {})},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def wait(self, seconds: float = ENDS_WITHIN) -> AcceptanceEvidence:
        """Wait for node 0's program; what it wrote."""
        output, _ = self.programs[0].communicate(timeout=seconds)
        assert self.path.is_file(), output
        return self.evidence()

    @property
    def path(self) -> Path:
        return self.directory / "acceptance" / "evidence.json"

    def evidence(self) -> AcceptanceEvidence:
        """The document as it is now."""
        return parse_evidence(self.path.read_bytes(), str(self.path))

    def end(self) -> None:
        """Kill what still runs."""
        for program in self.programs.values():
            if program.poll() is None:
                program.kill()
            program.wait()


def write_node_side(launch_directory: Path) -> Path:
    """Write the node side as a launcher does; returns its directory."""
    for file in node_files():
        path = launch_directory / "files" / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.content)
    return launch_directory / "files" / DIRECTORY


def node_side_with(directory: Path, **probes: str) -> Path:
    """The node side with more files, which notices silent nodes sooner."""
    side = write_node_side(directory / "launch")
    for name, text in probes.items():
        (side / f"{name}.py").write_text(text)
    messages = side / "messages.py"
    text = messages.read_text()
    assert text.count("\nSILENT_SECONDS = 20.0\n") == 1
    messages.write_text(text.replace("= 20.0\n", f"= {SILENT_SECONDS}\n"))
    return side


def judged(evidence: AcceptanceEvidence, **more: Any) -> Outcome:
    """The outcome of evidence from nodes of which nothing is known."""
    facts = load_catalog(None)
    return judge(evidence, Expected(facts, None, None, None, **more))
