"""Who holds a run directory, how long others wait for it, and what they print meanwhile."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.module_time import set_time

from drillyard.errors import UserError
from drillyard.supervise import run_lock
from drillyard.supervise.launch_contract import EXIT_RECORD
from drillyard.supervise.process_identity import (
    Process,
    fields_of_stat,
    running_process,
    this_process,
)
from drillyard.supervise.run_lock import TRAINS, exclusive_run_lock, is_exiting, lock_owner


@pytest.fixture(params=[False, True], ids=["by hand", "launched"])
def launched(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> bool:
    """No wait for a holder that lives; as always for one that nobody here can see, or that was
    killed."""
    monkeypatch.setattr(run_lock, "_WAIT_SECONDS", -1.0)
    monkeypatch.delenv(EXIT_RECORD, raising=False)
    if request.param:
        monkeypatch.setenv(EXIT_RECORD, str(tmp_path / "record"))
    return bool(request.param)


@contextmanager
def held(run_directory: Path, by: Process | None, does: str = TRAINS) -> Iterator[int]:
    """The lock, held by the process that has the descriptor, and written down as `by`."""
    (run_directory / "logs").mkdir()
    descriptor = os.open(run_directory / "logs", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    if by is not None:
        message = {**by.as_json(), "since": time.time(), "does": does}
        (run_directory / "logs" / ".holder.json").write_text(json.dumps(message))
    yield descriptor


def _let_go(lock: int, said: list[str]) -> Callable[[str], None]:
    """A waiting process says so; then the lock is released. Without a grace period it would be
    refused at once."""

    def say(text: str) -> None:
        said.append(text)
        os.close(lock)

    return say


def far() -> Process:
    return dataclasses.replace(this_process(), machine="another boot", host="far")


def test_a_live_process_of_this_machine_is_named_and_not_waited_for(
    tmp_path: Path, launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    set_time(monkeypatch, run_lock.__name__, sleep=lambda seconds: pytest.fail("is waited for"))
    with (
        held(tmp_path, this_process()),
        pytest.raises(UserError) as refused,
        exclusive_run_lock(tmp_path, said.append),
    ):
        pass
    assert f"a run is active in it (process {os.getpid()} on {this_process().host} since " in str(
        refused.value
    )
    assert len(said) == 1 and f"process {os.getpid()}" in said[0] and " UTC at most" in said[0]


@pytest.mark.parametrize("known", [True, False])
def test_a_launched_run_outwaits_the_lock_of_a_host_that_died_and_says_so(
    tmp_path: Path, launched: bool, known: bool
) -> None:
    said: list[str] = []
    with held(tmp_path, far() if known else None) as lock:
        if not launched:
            with (
                pytest.raises(UserError, match="on far" if known else "not known"),
                exclusive_run_lock(tmp_path),
            ):
                pass
            return
        with exclusive_run_lock(tmp_path, _let_go(lock, said)):
            assert len(said) == 1 and str(tmp_path) in said[0]
            assert (
                f"process {os.getpid()} on far since " if known else "by whom is not known"
            ) in said[0]


def test_what_a_killed_process_has_left_gets_time_to_end(tmp_path: Path, launched: bool) -> None:
    sleeper = subprocess.Popen(["sleep", "600"])
    holder = running_process(sleeper.pid)
    sleeper.kill()
    sleeper.wait()
    said: list[str] = []
    with held(tmp_path, holder) as lock, exclusive_run_lock(tmp_path, _let_go(lock, said)):
        assert (
            len(said) == 1 and f"process {sleeper.pid}" in said[0] and "which was killed" in said[0]
        )


@pytest.mark.parametrize("here", [True, False], ids=["here", "far"])
def test_a_launched_run_outwaits_what_does_not_train_and_says_what_it_is(
    tmp_path: Path, launched: bool, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "_WAIT_SECONDS_LAUNCHED", -1.0)
    said: list[str] = []
    with held(tmp_path, this_process() if here else far(), "prunes its checkpoints") as lock:
        if not launched:
            words = r"is held \(process .*, which prunes its checkpoints\); wait for its end"
            with pytest.raises(UserError, match=words), exclusive_run_lock(tmp_path):
                pass
            return
        with exclusive_run_lock(tmp_path, _let_go(lock, said)):
            assert (
                len(said) == 1 and ", which prunes its checkpoints); waits for it until " in said[0]
            )


def test_each_holder_is_waited_for_in_its_own_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that has waited long does not refuse one that comes in between."""
    now = 1000.0
    monkeypatch.setattr(run_lock, "_SECONDS_BETWEEN_LOOKS", 1.0)

    def sleep(seconds: float) -> None:
        nonlocal now
        now += 1.0

    set_time(monkeypatch, run_lock.__name__, monotonic=lambda: now, sleep=sleep)
    monkeypatch.setenv(EXIT_RECORD, str(tmp_path / "record"))
    record = tmp_path / "logs" / ".holder.json"
    said: list[str] = []
    with held(tmp_path, this_process(), "prunes its checkpoints") as lock:

        def say(text: str) -> None:
            nonlocal now
            said.append(text)
            if len(said) == 1:
                now += run_lock._WAIT_SECONDS_LAUNCHED_WITH_WORK - 10
                record.unlink()
            else:
                os.close(lock)

        with exclusive_run_lock(tmp_path, say):
            assert "prunes" in said[0] and "by whom is not known" in said[1]


def _status(pending: str = "0000000000000000", shared: str = "0000000000000000") -> str:
    return (
        "Name:\tsleep\nState:\tD (disk"
        f" sleep)\nSigPnd:\t{pending}\nShdPnd:\t{shared}\nSigBlk:\tfffffffffffffeff\n"
    )


def _stat(flags: int, name: str = "sleep") -> list[str]:
    return fields_of_stat(
        f"4242 ({name}) D 1 4242 4242 0 -1 {flags} 107 0 0 0 0 0 0 0 20 0 1 0 880 2703360 218\n"
    )


@pytest.mark.parametrize("name", ["sleep", "a b", "x) D 1 1 1 0 -1 4 (", ""])
def test_a_process_lives_until_sigkill_waits_for_it_or_it_has_begun_to_end(name: str) -> None:
    others = "fffffffffffffeff"
    assert not is_exiting(_status(), _stat(0x400000, name))
    assert not is_exiting(_status(others, others), _stat(0x400143, name))
    assert is_exiting(_status(pending="0000000000000100"), _stat(0x400000, name))
    assert is_exiting(_status(shared="0000000000000100"), _stat(0x400000, name))
    assert is_exiting(_status(), _stat(0x400004, name))


def test_a_process_that_is_being_killed_does_not_live() -> None:
    assert not run_lock._is_being_killed(os.getpid())
    sleeper = subprocess.Popen(["sleep", "600"])
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert Path(f"/proc/{sleeper.pid}").exists() and run_lock._is_being_killed(sleeper.pid)
    sleeper.wait()
    assert run_lock._is_being_killed(sleeper.pid)


def test_a_holder_is_written_down_while_it_holds(tmp_path: Path) -> None:
    with exclusive_run_lock(tmp_path):
        found = lock_owner(tmp_path)
        assert (
            found is not None
            and found.process == this_process()
            and found.is_seen_to_live
            and found.trains
        )
    assert lock_owner(tmp_path) is None
    with exclusive_run_lock(tmp_path, does="repairs it"):
        found = lock_owner(tmp_path)
        assert (
            found is not None
            and found.process == this_process()
            and found.does == "repairs it"
            and not found.trains
        )
    assert lock_owner(tmp_path) is None and list((tmp_path / "logs").iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pid": 1}', '{"pid": "x", "since": "y"}'])
def test_a_torn_record_names_nobody(tmp_path: Path, text: str) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / ".holder.json").write_text(text)
    assert lock_owner(tmp_path) is None


def test_what_is_free_is_taken_without_a_word(tmp_path: Path) -> None:
    said: list[str] = []
    with exclusive_run_lock(tmp_path, said.append):
        pass
    assert said == []


def test_the_record_of_another_run_stays_when_this_one_ends(tmp_path: Path) -> None:
    record = tmp_path / "logs" / ".holder.json"
    other = dataclasses.replace(this_process(), pid=1)
    theirs = json.dumps({**other.as_json(), "since": 1.0, "does": "trains"})
    with exclusive_run_lock(tmp_path):
        # A file system without locks lets both in.
        record.write_text(theirs)
    assert record.read_text() == theirs
    with exclusive_run_lock(tmp_path):
        assert lock_owner(tmp_path) is not None
    assert not record.exists()
