"""Two torchrun agents, as on two hosts: a rank that is killed costs a restart and no bit, whichever
way they meet.

Each agent counts its own restarts and keeps its store; nothing that the dead attempt left there may
be met again.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.conftest import Reference
from tests.integration.held import Holds
from tests.integration.tiny_run import STEPS, TIMEOUT_SECONDS, Run, wait_until, write_config

from drillyard.supervise.sockets import free_port

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]


def meeting(how: str) -> list[list[str]]:
    """torchrun's options for each of the two nodes."""
    port = free_port(set())
    if how == "static":
        place = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        return [[*place, "--node-rank", str(node)] for node in (0, 1)]
    place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "test"]
    return [
        [*place, "--rdzv-conf", f"is_host={int(node == 0)}", "--local-addr", "127.0.0.1"]
        for node in (0, 1)
    ]


@pytest.mark.parametrize(("how", "killed"), [("c10d", 1), ("static", 0)])
def test_a_killed_rank_of_two_nodes_costs_one_restart_and_no_bit(
    workplace: Path, reference: Reference, how: str, killed: int, tmp_path: Path
) -> None:
    run = Run(write_config(workplace, f"nodes-{how}", checkpoint={"every_steps": 5}))
    last = f"attempt-0-step-{STEPS}"
    holds = Holds(tmp_path, last)
    _, *program = holds.program
    train = [*program, "train", str(run.config), "--console", "none"]
    nodes = [
        subprocess.Popen(
            [*TORCHRUN, *options, "--max-restarts", "3", *train],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for options in meeting(how)
    ]
    try:
        wait_until(lambda: bool(run.events("checkpoint")) and run.last_step() >= 8, nodes[0])
        run.send(signal.SIGKILL, killed)
        holds.release(last)
        said = [node.communicate(timeout=TIMEOUT_SECONDS)[0] for node in nodes]
    finally:
        for node in nodes:
            node.terminate()
            node.communicate()
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(said)
    starts = run.events("round_start")
    assert len(run.events("run_start")) == 1 and len(starts) >= 2
    assert [start["round"] for start in starts] == sorted({start["round"] for start in starts})
    assert len(run.events("resume")) >= 1 and run.events("resume")[0]["step"] >= 5
    undisturbed = reference.run.figures()
    assert {step for step, _, _ in run.figures()} == set(range(1, STEPS + 1))
    assert all(figures == undisturbed[figures[0] - 1] for figures in run.figures())
    assert run.weights() == reference.run.weights()
