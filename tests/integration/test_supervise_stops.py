"""Stop signals over real processes: passed on once, answered in order, and never taken for a
crash."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from tests.facts import says
from tests.integration.supervised import Start

from drillyard.supervise.launch_contract import (
    EXIT_RECORD,
    LAUNCH_ATTEMPT,
    SUBMISSION,
    FailureElsewhere,
    write_failure_elsewhere,
)
from drillyard.supervise.stop_requests import SECONDS_OF_ONE_REQUEST


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_stop_signal_reaches_the_ranks_once_and_exit_85_is_passed_on(
    start: Start, number: signal.Signals
) -> None:
    run = start(
        """
        def stop(number, frame):
            print("asked to stop", flush=True)
            time.sleep(0.2 * (1 + rank))
            os._exit(85)
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGUSR1, stop)
        touch(f"ready-{rank}")
        time.sleep(forever)
        """
    )
    run.wait_for("ready-0")
    run.wait_for("ready-1")
    run.process.send_signal(number)
    code, out, err = run.end()
    assert code == 85 and out == "asked to stop\n"
    assert run.log(1).count("asked to stop") == 1 and run.log(1).count("=== attempt") == 1
    assert "exit code 85" in err
    assert [event["signal"] for event in run.events() if event["event"] == "signal"] == [
        number.name
    ]


def test_ranks_that_do_not_train_are_stopped_without_a_word_of_saving(start: Start) -> None:
    run = start('touch(f"ready-{rank}"); time.sleep(forever)', trains=False)
    run.wait_for("ready-0")
    run.wait_for("ready-1")
    run.process.send_signal(signal.SIGINT)
    code, _, err = run.end()
    assert code == 128 + signal.SIGINT
    assert says(err, "SIGINT ... ranks will stop")
    assert "save" not in err and "same command" not in err
    assert not (run.directory / "events.jsonl").exists()
    assert run.left_running() == []


@pytest.mark.parametrize("code", [85, 86, 0])
def test_a_stop_because_another_node_failed_is_reported_as_that_failure(
    start: Start, tmp_path: Path, code: int
) -> None:
    record = tmp_path / "record.json"
    message = {EXIT_RECORD: str(record), LAUNCH_ATTEMPT: "4", SUBMISSION: "first"}
    run = start(
        f"""
        signal.signal(signal.SIGTERM, lambda *_: os._exit({code}))
        touch(f"ready-{{rank}}")
        time.sleep(forever)
        """,
        prelude=f"import os; os.environ.update({message!r})",
    )
    run.wait_for("ready-0")
    run.wait_for("ready-1")
    write_failure_elsewhere(record, FailureElsewhere("node 1 (n1): rank 3: exit code 7", 3, 7))
    run.process.send_signal(signal.SIGTERM)
    ended, _, err = run.end()
    assert ended == {85: 85, 86: 1, 0: 0}[code] and "node 1 (n1): rank 3: exit code 7" in err
    begun, failure, *end = run.events()
    assert (begun["event"], begun["round"], begun["launch"]) == ("run_start", 4, "first")
    assert {**failure, "time": None} == {
        "time": None,
        "event": "failure",
        "round": 4,
        "reason": "node 1 (n1): rank 3: exit code 7",
        "failed_rank": 3,
        "exit_code": 7,
    }
    assert [(event["event"], event["status"], event["exit_code"]) for event in end] == (
        [("end", "failed", ended)] if code else []
    )
    assert "=== attempt 4 |" in run.log(0)


@pytest.mark.parametrize(
    ("words", "message"),
    [("RuntimeError: [gloo] Connection closed by peer", 1), ("ValueError: own", 2)],
)
def test_a_rank_that_only_lost_its_peers_is_no_failure_beside_that_of_another_node(
    start: Start, tmp_path: Path, words: str, message: int
) -> None:
    record = tmp_path / "record.json"
    run = start(
        f"""
        def stop(number, frame):
            print({words!r}, file=sys.stderr, flush=True)
            os._exit(1)
        step(7)
        signal.signal(signal.SIGTERM, stop)
        touch("ready")
        time.sleep(forever)
        """,
        ranks=1,
        prelude=f"import os; os.environ.update({{{EXIT_RECORD!r}: {str(record)!r}}})",
    )
    run.wait_for("ready")
    write_failure_elsewhere(record, FailureElsewhere("lost node 1 (n1)", None, None))
    run.process.send_signal(signal.SIGTERM)
    assert run.end()[0] == 128 + signal.SIGTERM
    failures = [event["reason"] for event in run.events() if event["event"] == "failure"]
    assert failures[0] == "lost node 1 (n1)" and len(failures) == message


def test_a_rank_that_leaves_with_85_takes_the_others_along(start: Start) -> None:
    run = start(
        """
        if rank == 0:
            wait_for("ready")
            sys.exit(85)
        signal.signal(signal.SIGTERM, lambda *_: os._exit(85))
        touch("ready")
        time.sleep(forever)
        """
    )
    assert run.end()[0] == 85
    assert [event["event"] for event in run.events()] == ["run_start", "end"]
    assert run.events()[-1]["status"] == "interrupted"


def test_a_stop_that_could_not_be_saved_ends_with_1_and_its_words_and_is_not_repeated(
    start: Start,
) -> None:
    run = start(
        """
        if rank == 0:
            wait_for("ready")
            print("error: stopped on request after step 7\\nmend it\\n", file=sys.stderr)
            sys.exit(86)
        signal.signal(signal.SIGTERM, lambda *_: os._exit(86))
        touch("ready")
        time.sleep(forever)
        """
    )
    assert run.end() == (1, "", "error: stopped on request after step 7\nmend it\n")
    end = run.events()[-1]
    assert (end["event"], end["status"], end["exit_code"]) == ("end", "interrupted", 1)


@pytest.mark.parametrize(("script", "code"), [("", 85), ("step(3)", 128 + signal.SIGTERM)])
def test_a_stop_signal_that_a_rank_does_not_hear_is_no_crash(
    start: Start, script: str, code: int
) -> None:
    run = start(f"{script}\nif rank: os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(forever)")
    assert run.end()[0] == code
    events = [event for event in run.events() if event["event"] != "step"]
    assert [event["event"] for event in events] == ["run_start", "signal", "end"]
    assert (events[1]["signal"], events[2]["exit_code"]) == ("SIGTERM", code)


def test_an_error_on_the_way_to_a_stop_is_reported_with_its_cause(start: Start) -> None:
    run = start(
        """
        def stop(*_):
            if rank == 1:
                raise RuntimeError("no room for the state")
        signal.signal(signal.SIGTERM, stop)
        step(3)
        touch(f"ready-{rank}")
        time.sleep(forever)
        """,
        terminate=1.0,
    )
    run.wait_for("ready-0")
    run.wait_for("ready-1")
    run.process.terminate()
    code, _, err = run.end()
    assert code == 128 + signal.SIGTERM and says(err, "SIGTERM without a checkpoint")
    assert "rank 1: exit code 1; RuntimeError: no room for the state" in err
    events = [event for event in run.events() if event["event"] != "step"]
    assert [event["event"] for event in events] == ["run_start", "signal", "failure", "end"]
    assert events[2]["failed_rank"] == 1


def test_signals_that_come_together_are_one_request(start: Start) -> None:
    run = start(
        """
        def stop(*_):
            time.sleep(0.5)
            os._exit(85)
        signal.signal(signal.SIGTERM, stop)
        touch(f"ready-{rank}")
        time.sleep(forever)
        """
    )
    run.wait_for("ready-0")
    run.wait_for("ready-1")
    # It hears them together when it goes on, however long they take to send.
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGCONT):
        run.process.send_signal(number)
    assert run.end()[0] == 85
    assert [event["event"] for event in run.events()] == ["run_start", "signal", "end"]


def test_a_second_signal_ends_everything_at_once(start: Start) -> None:
    script = (
        "signal.signal(signal.SIGTERM, lambda *_: touch(f'stopped-{rank}')); touch(f'ready-{rank}')"
    )
    run = start(f"{script}\nwait_for('never')")
    run.wait_for("ready-0")
    run.wait_for("ready-1")
    run.process.terminate()
    # Forwarded, so the supervisor has heard it: what comes two seconds from here is another
    # request.
    run.wait_for("stopped-0")
    time.sleep(SECONDS_OF_ONE_REQUEST + 0.1)
    run.process.terminate()
    code, _, err = run.end()
    assert code == 128 + signal.SIGTERM and says(err, "ended at once")
    assert run.left_running() == []
