"""The supervisor over real processes: tiny ranks that crash, spew, stop, and leave children
behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import pytest
from tests.facts import says
from tests.integration.supervised import Start, until

from drillyard.supervise.stop_requests import SECONDS_OF_ONE_REQUEST


def test_ranks_get_their_place_and_rank_0_speaks_on_the_console(start: Start) -> None:
    run = start("""
        names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR DRILLYARD_SUPERVISED FROM_CALLER".split()
        print(*(os.environ[name] for name in names))
        print("to stderr", file=sys.stderr)
        """)  # noqa: E501
    code, out, err = run.end()
    assert (code, out, err) == (0, "0 2 0 2 127.0.0.1 1 yes\n", "")
    assert run.log(1).splitlines()[1:] in (
        ["1 2 1 2 127.0.0.1 1 yes", "to stderr"],
        ["to stderr", "1 2 1 2 127.0.0.1 1 yes"],
    )
    assert "0 2 0 2 127.0.0.1 1 yes" in run.log(0) and "to stderr" in run.log(0)
    assert run.log(0).startswith("=== attempt 0 | ")


def test_a_crash_is_reported_and_a_fresh_attempt_on_a_new_port_ends_the_run(start: Start) -> None:
    run = start("""
        print("port", os.environ["MASTER_PORT"])
        if attempt == 0:
            if rank == 0:
                touch("stopped")
            if rank == 1:
                wait_for("stopped")
                step(3)
                raise ValueError("the cause")
            time.sleep(forever)
        """)
    code, out, err = run.end()
    assert code == 0
    first, second = re.findall(r"port (\d+)", out)
    assert first != second
    assert says(err, "attempt 0 ... step 3: rank 1: exit code 1; ValueError: the cause")
    assert says(err, "attempt 1 ... 1 of 3 restarts")
    assert [line for line in run.log(1).splitlines() if line.startswith("=== attempt")][
        1
    ].startswith("=== attempt 1 |")
    events = [event["event"] for event in run.events()]
    assert events == ["run_start", "failure", "restart"]
    failure = run.events()[1]
    assert (failure["failed_rank"], failure["exit_code"], failure["step"], failure["round"]) == (
        1,
        1,
        3,
        0,
    )


def test_a_rank_killed_from_outside_is_reported_as_killed(start: Start) -> None:
    run = start("""
        if attempt == 0:
            step(1)
            if rank == 0:
                print("step 1 went well", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(forever)
        """)
    code, _, err = run.end()
    assert code == 0
    assert says(err, "rank 0: ... SIGKILL (exit code 137) ... out of memory")
    assert "went well" not in err


@pytest.mark.parametrize("settle", [30.0, 0.0], ids=["before SIGTERM", "after SIGTERM"])
def test_the_rank_that_lost_its_peer_is_not_the_cause(
    start: Start, settle: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SETTLE", str(settle))
    run = start(
        """
        if rank == 0:
            wait_for("ready")
            print("RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:29500", file=sys.stderr)
            touch("gone")
            sys.exit(1)
        signal.signal(signal.SIGTERM, lambda *_: touch("stopped"))
        touch("ready")
        wait_for("gone" if os.environ["SETTLE"] != "0.0" else "stopped")
        raise KeyError("the cause")
        """,  # noqa: E501
        max_restarts=0,
        settle=settle,
    )
    code, _, err = run.end()
    assert code == 1
    assert "rank 1: exit code 1; KeyError: 'the cause'" in err


def test_survivors_that_ignore_sigterm_are_killed_and_their_children_too(start: Start) -> None:
    run = start(
        """
        if rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
            touch("ready")
            time.sleep(forever)
        wait_for("ready")
        os._exit(7)
        """,  # noqa: E501
        max_restarts=0,
        terminate=1.0,
    )
    code, _, err = run.end()
    assert code == 7 and "exit code 7" in err
    assert run.left_running() == []


def test_a_supervisor_that_is_killed_leaves_nothing_and_frees_the_run_directory(
    start: Start,
) -> None:
    script = """
        if os.path.exists(directory + "/second"):
            sys.exit(0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
        touch(f"ready-{rank}")
        time.sleep(forever)
        """  # noqa: E501
    run = start(script)
    run.wait_for("ready-0")
    run.wait_for("ready-1")
    run.process.kill()
    run.process.wait()
    (run.directory / "second").touch()
    assert start(script).end()[0] == 0
    until(lambda: not run.left_running())


def test_two_supervisors_never_share_a_run_directory(start: Start, tmp_path: Path) -> None:
    first = start("touch('ready'); wait_for('go on')")
    first.wait_for("ready")
    second = start("raise AssertionError('it must not start')")
    code, _, err = second.end()
    assert code == 1 and says(err, f"{tmp_path} ... active")
    (first.directory / "go on").touch()
    assert first.end()[0] == 0


def test_a_users_mistake_is_shown_once_and_not_repeated(start: Start) -> None:
    run = start("""
        print("error: data.jsonl: line 3 is not JSON\\nmend the line", file=sys.stderr)
        sys.exit(2)
        """)
    code, _, err = run.end()
    assert (code, err) == (2, "error: data.jsonl: line 3 is not JSON\nmend the line\n")
    assert run.log(0).count("=== attempt") == 1


def test_a_users_mistake_found_by_one_rank_ends_the_others(start: Start) -> None:
    run = start(
        "time.sleep(forever * rank); print('error: no such file', file=sys.stderr); sys.exit(2)"
    )
    code, _, err = run.end()
    assert (code, err) == (2, "error: no such file\n")


def test_a_run_whose_summary_is_written_has_succeeded_whatever_its_ranks_say(start: Start) -> None:
    code, _, err = start(
        "if rank == 0: summary()\nelse: wait_for('summary.json')\nos.abort()"
    ).end()
    assert (code, err) == (0, "")


def test_a_run_that_is_ended_at_once_after_its_summary_has_succeeded(start: Start) -> None:
    script = (
        "signal.signal(signal.SIGTERM, lambda *_: touch(f'stopped-{rank}')); summary();"
        " touch(f'ready-{rank}')"
    )
    run = start(f"{script}\nwait_for('never')")
    run.wait_for("ready-0")
    run.wait_for("ready-1")
    run.process.terminate()
    run.wait_for("stopped-0")
    time.sleep(SECONDS_OF_ONE_REQUEST + 0.1)
    run.process.terminate()
    assert run.end()[0] == 0
    assert run.left_running() == []


def test_a_summary_of_an_earlier_run_is_no_success(start: Start, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text("{}")
    assert start("sys.exit(3)", max_restarts=0).end()[0] == 3


UNKILLABLE = """
import os
from drillyard.supervise import rank_process, reaper
kill_group = rank_process.Rank.kill_group
rank_process.Rank.kill_group = lambda self: kill_group(self) if self.number == 0 else None
reaper.SECONDS_TO_END = 0.2
reaper.marked_processes = lambda token, mark: []
"""
"""A supervisor whose SIGKILL does nothing to rank 1, as if that were in a call of the kernel that
does not return."""


@pytest.mark.parametrize(
    "failing", ["raise RuntimeError('gone wrong')", "os.kill(os.getpid(), signal.SIGKILL)"]
)
def test_a_rank_that_sigkill_does_not_end_is_named_and_left_and_no_attempt_follows(
    start: Start, failing: str
) -> None:
    run = start(
        f"""
        if rank == 0:
            wait_for("ready")
            {failing}
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(directory + "/pid", "w").write(str(os.getpid()))
        touch("ready")
        time.sleep(forever)
        """,
        terminate=1.0,
        kill=4.0,
        prelude=UNKILLABLE,
    )
    code, _, err = run.end()
    pid = int((run.directory / "pid").read_text())
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    assert code == (137 if "SIGKILL" in failing else 1)
    assert says(err, f"rank 1: process {pid} ... SIGKILL ... left behind; ... state S")
    assert says(err, "no further attempt: rank 1: ... restart this host")
    assert run.log(0).count("=== attempt") == 1
    assert run.events()[-1]["status"] == "failed"


def test_a_rank_that_nccl_aborted_for_waiting_is_asked_whom_it_waited_for(start: Start) -> None:
    run = start(
        """
        import faulthandler
        faulthandler.enable()
        if rank == 0:
            faulthandler.register(signal.SIGUSR2)
            touch("ready")
            time.sleep(forever)
        wait_for("ready")
        os.write(2, b"terminate called after throwing an instance of 'c10::DistBackendError'\\n"
            b"  what():  [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9) ran for 9 ms\\n")
        os.abort()
        """,  # noqa: E501
        max_restarts=0,
    )
    code, _, err = run.end()
    assert code == 128 + signal.SIGABRT
    assert says(
        err,
        "rank 1: ... SIGABRT (exit code 134); DistBackendError: [Rank 1] Watchdog ... waited for"
        " rank 0",
    )
    assert re.search(r"rank 0.*; at <string>:\d+ in <module>", err), err
    assert "most recent call first" in run.log(0), "the stacks of the rank that was waited for"


def test_attempts_that_never_reach_a_step_stop_after_three(start: Start) -> None:
    run = start("raise RuntimeError('no start')", max_restarts=100)
    code, _, err = run.end()
    assert code == 1 and says(err, "3 attempts ... first step")
    assert run.log(0).count("=== attempt") == 3
    assert run.events()[-1]["event"] == "end" and run.events()[-1]["status"] == "failed"


def test_a_crash_that_repeats_at_the_same_step_is_not_repeated_forever(start: Start) -> None:
    script = "step(7)\nif rank == 1: raise RuntimeError(f'at {time.time()}')\ntime.sleep(forever)"
    run = start(script, max_restarts=100)
    code, _, err = run.end()
    assert code == 1 and says(err, "same step 7 ... same error")
    assert run.log(1).count("=== attempt") == 3


def test_a_rank_that_prints_100_000_lines_loses_none(start: Start) -> None:
    run = start("for i in range(100_000): print('line', i)", ranks=1)
    code, out, _ = run.end()
    expected = "".join(f"line {i}\n" for i in range(100_000))
    assert code == 0 and out == expected
    assert run.log(0).partition("\n")[2] == expected


def test_a_last_line_without_an_end_is_not_lost(start: Start) -> None:
    code, out, _ = start("sys.stdout.write('one\\ntwo')", ranks=1).end()
    assert (code, out) == (0, "one\ntwo\n")
