"""Ranks that stand by: the next attempt is made of them, they never outlive the run, and a lost one
is only slower."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from tests.integration.supervised import Start, Supervised, until

from drillyard.supervise import rank_process

# The driver's supervisor keeps ranks ready; ranks prepare by leaving their process id.
WITH_STANDBY = """
import functools
from drillyard.supervise import supervisor
supervisor.supervise = functools.partial(supervisor.supervise, standby=True)
"""
STANDS_BY = """
    from drillyard.supervise.rank_process import STANDBY, await_turn
    def prepare():
        with open(f"{directory}/ready-{rank}-{os.getpid()}", "w"):
            pass
    if STANDBY in os.environ:
        await_turn(prepare)
    attempt = int(os.environ["DRILLYARD_ROUND"])
    print(f"attempt {attempt} rank {rank} pid {os.getpid()} port {os.environ['MASTER_PORT']}")
    print(f"rank {rank} has its log", file=sys.stderr)
    step(attempt + 1)
"""


def ready(supervised: Supervised) -> dict[int, int]:
    """The processes that have prepared so far, by rank."""
    names = [path.name.split("-") for path in supervised.directory.glob("ready-*")]
    return {int(rank): int(pid) for _, rank, pid in names}


def test_a_restart_takes_the_ranks_that_stood_by(start: Start) -> None:
    script = f"""
    {STANDS_BY.strip()}
    if attempt == 0:
        wait_for("go")
        os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(forever)
    wait_for("end")
    """
    supervised = start(script, prelude=WITH_STANDBY)
    until(lambda: len(ready(supervised)) == 2)
    stood_by = ready(supervised)
    (supervised.directory / "go").touch()
    until(lambda: "attempt 1 rank 1" in supervised.log(1))
    # The attempt after this one gets processes of its own, which end with the run.
    until(lambda: len(list(supervised.directory.glob("ready-*"))) == 4)
    (supervised.directory / "end").touch()
    code, out, _ = supervised.end()
    assert code == 0
    lines = [
        line
        for line in (out + supervised.log(1)).splitlines()
        if line.startswith("attempt ") and "pid" in line
    ]
    message = {(words[1], words[3]): (int(words[5]), words[7]) for words in map(str.split, lines)}
    assert {rank: message["1", str(rank)][0] for rank in (0, 1)} == stood_by
    assert (
        message["0", "0"][1] == message["0", "1"][1] != message["1", "0"][1] == message["1", "1"][1]
    ), "a port for each attempt"
    assert (
        supervised.log(0).count("rank 0 has its log")
        == supervised.log(1).count("rank 1 has its log")
        == 2
    )
    assert not supervised.left_running()


def test_one_that_died_while_it_waited_is_replaced_by_an_ordinary_start(start: Start) -> None:
    script = f"""
    {STANDS_BY.strip()}
    if attempt == 0:
        wait_for("go")
        sys.exit(3)
    """
    supervised = start(script, prelude=WITH_STANDBY)
    until(lambda: len(ready(supervised)) == 2)
    lost = ready(supervised)[0]
    os.kill(lost, signal.SIGKILL)
    until(lambda: not alive(lost))
    (supervised.directory / "go").touch()
    code, out, _ = supervised.end()
    assert code == 0
    assert "attempt 1 rank 0" in out
    assert str(lost) not in re.findall(r"pid (\d+)", out)


def test_one_that_sigkill_does_not_end_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr(rank_process.os, "killpg", lambda group, number: killed.append(group))
    monkeypatch.setattr(rank_process, "_SECONDS_TO_END", 0.2)
    sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
    with rank_process.Standby(sleep, [{**os.environ, "RANK": "0"}]) as ready:
        assert ready.start() is None
        (pid,) = ready.pids
    assert killed == [pid]
    os.kill(pid, signal.SIGKILL)


def test_they_end_with_a_supervisor_that_is_killed(start: Start) -> None:
    supervised = start(f"{STANDS_BY}\n    time.sleep(forever)\n", prelude=WITH_STANDBY)
    until(lambda: len(ready(supervised)) == 2)
    supervised.process.kill()
    until(lambda: not supervised.left_running())


def alive(pid: int) -> bool:
    """Whether a process runs (a dead one that its parent has not reaped does not)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
