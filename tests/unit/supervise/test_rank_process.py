"""A rank's place and environment, and the lines about a rank that is silent or cannot be killed."""

from __future__ import annotations

import os
import re
import subprocess
import time

import pytest
from typer.testing import CliRunner

from drillyard.cli.main import app
from drillyard.errors import UserError
from drillyard.supervise.heartbeat import Heartbeat
from drillyard.supervise.process_identity import process_state
from drillyard.supervise.rank_process import NodePlacement, rank_environments, silence, unkillable


def test_a_second_node_has_the_ranks_after_those_of_the_first() -> None:
    node = NodePlacement(count=3, rank=1, master_addr="n0", master_port=2000)
    ranks = rank_environments({"MASTER_PORT": "2000"}, 2, 0, node)
    assert [(rank["RANK"], rank["LOCAL_RANK"]) for rank in ranks] == [("2", "0"), ("3", "1")]
    assert {(rank["WORLD_SIZE"], rank["LOCAL_WORLD_SIZE"], rank["MASTER_ADDR"]) for rank in ranks} == {("6", "2", "n0")}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--nnodes", "2"], "--master-addr and --master-port"),
        (["--nnodes", "2", "--node-rank", "2", "--master-addr", "a", "--master-port", "1"], "--node-rank 2"),
        (["--node-rank", "1"], "--nnodes N"),
        (["--master-port", "2000"], "--nnodes N"),
        (
            ["--nnodes", "2", "--master-addr", "a", "--master-port", "1", "--max-restarts", "1"],
            "--max-restarts",
        ),
    ],
)
def test_options_of_nodes_that_do_not_fit_together_are_refused(options: list[str], said: str) -> None:
    ended = CliRunner().invoke(app, ["train", "run.yaml", *options])
    assert isinstance(ended.exception, UserError) and said in str(ended.exception)


def test_each_rank_knows_its_place() -> None:
    first, second = rank_environments({"MASTER_PORT": "20000", "HOME": "/home"}, 2, 3)
    assert (first["RANK"], second["RANK"]) == ("0", "1")
    assert (first["LOCAL_RANK"], second["LOCAL_RANK"]) == ("0", "1")
    shared = {name: value for name, value in first.items() if name not in ("RANK", "LOCAL_RANK")}
    assert shared == {name: value for name, value in second.items() if name not in ("RANK", "LOCAL_RANK")}
    assert shared["WORLD_SIZE"] == shared["LOCAL_WORLD_SIZE"] == "2"
    assert shared["DRILLYARD_ROUND"] == "3" and shared["MASTER_PORT"] == "20000" and shared["HOME"] == "/home"


def test_the_state_of_a_process_is_read_and_a_gone_one_has_none() -> None:
    assert process_state(os.getpid()) == "R"
    assert process_state(2**22 + 1) == ""


def test_a_line_tells_where_a_rank_was_and_for_how_long() -> None:
    line = silence(3, os.getpid(), Heartbeat(100.0, 7, 40, "training"), 112.34)
    assert line == "rank 3: training after step 7, last heartbeat 12.3 s ago"
    assert silence(3, os.getpid(), Heartbeat(100.0, None, None, "data"), 101.0).startswith(
        "rank 3: data, last heartbeat"
    )
    assert silence(0, os.getpid(), Heartbeat(0.0, None, None, ""), 112.0) == "rank 0"


def test_an_unkillable_rank_is_reported_by_process_state_and_place_in_the_kernel() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        while process_state(process.pid) != "S":
            time.sleep(0.01)
        line = unkillable(3, process.pid)
        process.kill()
    assert line.startswith(
        f"rank 3: process {process.pid} did not end after SIGKILL and is left behind; it is in state S"
    )
    place = re.search(r", in (\w+) of the kernel$", line)
    assert place is None or "nanosleep" in place[1]
    assert unkillable(3, process.pid).endswith("; it is gone now")
