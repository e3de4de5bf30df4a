"""Options of a node, and the lines about a rank that is silent or cannot be killed."""

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
from drillyard.supervise.rank_process import silence, unkillable


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--nnodes", "2"], "--master-addr and --master-port"),
        (
            ["--nnodes", "2", "--node-rank", "2", "--master-addr", "a", "--master-port", "1"],
            "--node-rank 2",
        ),
        (["--node-rank", "1"], "--nnodes N"),
        (["--master-port", "2000"], "--nnodes N"),
        (
            ["--nnodes", "2", "--master-addr", "a", "--master-port", "1", "--max-restarts", "1"],
            "--max-restarts",
        ),
    ],
)
def test_options_of_nodes_that_do_not_fit_together_are_refused(
    options: list[str], said: str
) -> None:
    ended = CliRunner().invoke(app, ["train", "run.yaml", *options])
    assert isinstance(ended.exception, UserError) and said in str(ended.exception)


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
        f"rank 3: process {process.pid} did not end after SIGKILL and is left behind; it is in"
        " state S"
    )
    place = re.search(r", in (\w+) of the kernel$", line)
    assert place is None or "nanosleep" in place[1]
    assert unkillable(3, process.pid).endswith("; it is gone now")
