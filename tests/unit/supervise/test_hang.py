"""What is said about a silent rank."""

from __future__ import annotations

import faulthandler
import os
import re
import subprocess
import time
from pathlib import Path

from drillyard.supervise.hang import innermost_frame, process_state, silence, unkillable
from drillyard.supervise.heartbeat import Heartbeat


def test_the_state_of_a_process_is_read_and_a_gone_one_has_none() -> None:
    assert process_state(os.getpid()) == "R"
    assert process_state(2**22 + 1) == ""


def test_a_line_tells_where_a_rank_was_and_for_how_long() -> None:
    line = silence(3, os.getpid(), Heartbeat(100.0, 7, 40, "training"), 112.34)
    assert line == "rank 3: training after step 7, last sign of life 12.3 s ago"
    assert silence(3, os.getpid(), Heartbeat(100.0, None, None, "data"), 101.0).startswith("rank 3: data, last sign")
    assert silence(0, os.getpid(), Heartbeat(0.0, None, None, ""), 112.0) == "rank 0"


def test_the_innermost_frame_is_that_of_the_last_stack(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as file:
        file.write("noise\n")
        file.flush()
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.write("more noise\n")
    frame = innermost_frame((tmp_path / "log").read_text())
    assert frame is not None and frame.startswith("test_hang.py:") and frame.endswith("in " + CALLER)
    assert innermost_frame("no stack here") is None


CALLER = "test_the_innermost_frame_is_that_of_the_last_stack"


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
