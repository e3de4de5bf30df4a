"""Ranks that get no further: noticed, shown with their stacks, ended and started again, whatever
they print or do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from tests.facts import says
from tests.integration.supervised import TIMEOUT_SECONDS, Start

HANG = """
    import faulthandler, threading
    faulthandler.register(signal.SIGUSR2)
    def chatter():
        while True:
            print("I am busy", flush=True)
            time.sleep(0.05)
    if attempt == 0:
        threading.Thread(target=chatter, daemon=True).start()
        step(1)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        def stuck(): time.sleep(forever)
        stuck()
    """


def test_a_hung_attempt_is_reported_with_all_its_stacks_and_started_again(start: Start) -> None:
    run = start(HANG, watchdog=6.0)
    code, _, err = run.end()
    assert code == 0
    assert says(err, "no progress ... any rank")
    assert says(err, "rank 1: ... SIGSTOP") and "in stuck" in err
    assert all("most recent call first" in run.log(rank) for rank in (0, 1))
    failure = next(event for event in run.events() if event["event"] == "failure")
    assert "failed_rank" not in failure and failure["step"] == 1


def test_signs_of_life_keep_an_attempt_that_logs_nothing(start: Start) -> None:
    run = start(
        """
        from drillyard.supervise.heartbeat import heartbeat_writer
        signs = heartbeat_writer(os.environ)
        for number in range(80):
            time.sleep(0.1)
            if rank == 1:
                signs.step(number, 80)
        """,
        watchdog=5.0,
    )
    assert run.end()[0] == 0
    assert [event["event"] for event in run.events()] == ["run_start"]


def test_the_rank_that_others_gave_up_waiting_for_is_named(start: Start) -> None:
    run = start(
        """
        import faulthandler
        faulthandler.register(signal.SIGUSR2)
        if rank == 1:
            def read_forever():
                touch("ready")
                time.sleep(forever)
            read_forever()
        wait_for("ready")
        raise RuntimeError("[gloo] Timed out waiting 600000ms for recv operation to complete")
        """,
        max_restarts=0,
    )
    code, _, err = run.end()
    assert code == 1 and says(err, "waited for rank 1") and "in read_forever" in err
    assert "most recent call first" in run.log(1)


def test_what_becomes_of_a_rank_that_is_asked_for_its_stacks_is_not_the_cause(start: Start) -> None:
    run = start(
        """
        if rank == 1:
            signal.signal(signal.SIGUSR2, lambda *_: os.kill(os.getpid(), signal.SIGSEGV))
            touch("ready")
            time.sleep(forever)
        wait_for("ready")
        raise RuntimeError("[gloo] Timed out waiting 600000ms for recv operation to complete")
        """,
        max_restarts=0,
    )
    code, _, err = run.end()
    assert code == 1 and "rank 0: exit code 1" in err and says(err, "waited for rank 1")
    assert "SIGSEGV" not in err


def test_a_rank_whose_interpreter_is_held_tells_its_stacks_when_asked_again(start: Start) -> None:
    run = start(
        """
        from pathlib import Path
        from drillyard.supervise.rank_supervision import RankSupervision
        side = RankSupervision(Path(directory), 0, attempt=0, is_claimed=True)
        step(1)
        def hold_the_lock(): sum(range(10**14))  # in C, without a look at signals or other threads
        def wait(): time.sleep(forever)
        hold_the_lock() if rank == 1 else wait()
        """,
        max_restarts=0,
        watchdog=6.0,
        terminate=1.0,
    )
    code, _, err = run.end()
    assert code == 1 and "in hold_the_lock" in err and "in wait" in err


RANK = """
import hashlib, os, signal, sys, threading, time
from pathlib import Path
from drillyard.supervise.rank_supervision import RankSupervision
side = RankSupervision(Path(sys.argv[1]), 0, attempt=0, is_claimed=True)
def deaf():
    # In C for minutes, so that no handler of Python's runs in the main thread.
    print("deaf", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""


def a_rank(
    directory: Path, script: str, stderr: int | IO[bytes] = subprocess.PIPE
) -> subprocess.Popen[str]:
    """A rank without a supervisor."""
    return subprocess.Popen(
        [sys.executable, "-c", RANK + script, str(directory)],
        env={**os.environ, "RANK": "0", "WORLD_SIZE": "1"},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


def event_names(directory: Path) -> list[str]:
    lines = (directory / "events.jsonl").read_text().splitlines()
    return [json.loads(line)["event"] for line in lines]


TELLS_WHAT_IT_NOTES = """
def tell():
    while side.received is None: time.sleep(0.01)
    print("noted", flush=True)
threading.Thread(target=tell, daemon=True).start()
"""


def test_a_rank_hears_stop_signals_while_its_main_thread_cannot(tmp_path: Path) -> None:
    before = a_rank(tmp_path / "before", "deaf()")
    training = a_rank(tmp_path / "training", f"{TELLS_WHAT_IT_NOTES}\nside.answer('note'); deaf()")
    saved = a_rank(tmp_path / "saved", "side.answer('ignore'); deaf()")
    (tmp_path / "before").mkdir(exist_ok=True)
    for rank in (before, training, saved):
        assert rank.stdout is not None and rank.stdout.readline() == "deaf\n"
    before.send_signal(signal.SIGUSR1)
    saved.send_signal(signal.SIGUSR1)
    # Two seconds on, it is another request; before that the same one, delivered twice. It hears
    # both when it goes on.
    for number in (signal.SIGSTOP, signal.SIGUSR1, signal.SIGTERM, signal.SIGCONT):
        training.send_signal(number)
    assert before.wait(timeout=TIMEOUT_SECONDS) == 85 and event_names(tmp_path / "before") == [
        "signal",
        "end",
    ]
    assert training.stdout is not None and training.stdout.readline() == "noted\n"
    try:
        training.wait(timeout=2.5)
    except subprocess.TimeoutExpired:
        training.send_signal(signal.SIGTERM)
    else:
        raise AssertionError("one request ended a rank that had something to save")
    assert training.wait(timeout=TIMEOUT_SECONDS) == 128 + signal.SIGTERM
    assert saved.poll() is None
    saved.kill()
    saved.wait()


def test_a_forked_child_of_a_rank_has_signals_of_its_own(tmp_path: Path) -> None:
    rank = a_rank(
        tmp_path,
        """
ready, there = os.pipe()
child = os.fork()
if not child:
    os.write(there, b".")
    time.sleep(60)
os.read(ready, 1)
os.kill(child, signal.SIGTERM)
print(os.waitpid(child, 0)[1], flush=True)
time.sleep(0.2)
os._exit(3)
""",
    )
    said, _ = rank.communicate(timeout=TIMEOUT_SECONDS)
    assert (said, rank.returncode) == (f"{signal.SIGTERM.value}\n", 3)


def test_a_rank_can_be_asked_for_its_stacks_while_all_its_threads_run(tmp_path: Path) -> None:
    with open(tmp_path / "stderr", "wb") as stderr:
        rank = a_rank(
            tmp_path,
            """
def descend(depth): return depth and descend(depth - 1)
def busy():
    while True: descend(300)
for _ in range(4): threading.Thread(target=busy, daemon=True).start()
print("busy", flush=True)
time.sleep(100)
""",
            stderr,
        )
    assert rank.stdout is not None and rank.stdout.readline() == "busy\n"
    for _ in range(200):
        rank.send_signal(signal.SIGUSR2)
        time.sleep(0.003)
    rank.send_signal(signal.SIGTERM)
    assert rank.wait(timeout=TIMEOUT_SECONDS) == 85
    assert (tmp_path / "stderr").read_text().count("in descend") > 100
