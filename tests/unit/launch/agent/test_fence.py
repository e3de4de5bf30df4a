"""The fence: epochs, leases, and what a new start waits for."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
from tests.module_time import set_time

from drillyard.launch.agent.fence import Epochs, Lease, Predecessors
from drillyard.supervise.process_identity import Process, process_of, running_process, this_process

ME = {"leader": {"pid": os.getpid()}}


def lease_of(epochs: Epochs, agent: Process, epoch: int, node: int = 0) -> Path:
    path = epochs.lease(epoch, node)
    path.write_text(json.dumps({"agent": agent.as_json(), "token": "nobody", "count": 1}))
    return path


def elsewhere() -> Process:
    return dataclasses.replace(this_process(), machine="another boot", host="far")


def waiting(epochs: Epochs, epoch: int, lease_seconds: float = 20) -> Predecessors:
    return Predecessors(lambda: epochs.leases_before(epoch), lease_seconds)


def test_epochs_are_taken_once(tmp_path: Path) -> None:
    epochs = Epochs(tmp_path)
    assert epochs.newest() == 0
    taken: list[int] = []
    threads = [threading.Thread(target=lambda: taken.append(epochs.open(ME))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(1, 9)) and epochs.newest() == 8
    assert all(epochs.leader_of(number) == ME for number in taken)
    assert len(os.listdir(tmp_path / "epochs")) == 8


def test_a_lease_of_another_machine_is_waited_for_until_it_is_silent(tmp_path: Path) -> None:
    epochs = Epochs(tmp_path)
    epoch = epochs.open(ME) + 1
    path = lease_of(epochs, elsewhere(), 1)
    earlier = waiting(epochs, epoch)
    assert earlier.waiting_for(100.0) == ["0001.node-0 on far"]
    assert earlier.waiting_for(119.0)
    path.write_text(path.read_text().replace('"count": 1', '"count": 2'))
    assert earlier.waiting_for(121.0)
    assert earlier.waiting_for(140.0)
    assert not earlier.waiting_for(141.5)


def test_a_lease_that_is_removed_is_not_waited_for(tmp_path: Path) -> None:
    epochs = Epochs(tmp_path)
    epochs.open(ME)
    path = lease_of(epochs, elsewhere(), 1, node=3)
    earlier = waiting(epochs, 2)
    assert earlier.waiting_for(0.0)
    path.unlink()
    assert not earlier.waiting_for(0.0)


def test_leases_of_the_own_epoch_are_not_waited_for(tmp_path: Path) -> None:
    epochs = Epochs(tmp_path)
    epochs.open(ME)
    lease_of(epochs, elsewhere(), 1)
    assert not waiting(epochs, 1).waiting_for(0.0)


def test_an_agent_of_this_machine_is_waited_for_while_it_lives(tmp_path: Path) -> None:
    epochs = Epochs(tmp_path)
    epochs.open(ME)
    sleeper = subprocess.Popen(["sleep", "600"])
    agent = running_process(sleeper.pid)
    lease_of(epochs, agent, 1)
    earlier = waiting(epochs, 2)
    assert earlier.waiting_for(0.0)
    sleeper.kill()
    sleeper.wait()
    assert not earlier.waiting_for(0.1)


def test_an_unreadable_lease_is_waited_for(tmp_path: Path) -> None:
    epochs = Epochs(tmp_path)
    epochs.open(ME)
    epochs.lease(1, 0).write_text("{")
    earlier = waiting(epochs, 2)
    assert earlier.waiting_for(0.0) == ["0001.node-0 on an unknown host"]
    assert not earlier.waiting_for(21.0)


def test_a_claim_is_written_and_sees_a_newer_epoch(tmp_path: Path) -> None:
    epochs = Epochs(tmp_path)
    first = epochs.open(ME)
    renewals: list[int] = []
    lease = Lease(epochs, 2, this_process(), "token", 1000.0, lambda: renewals.append(1))
    assert not lease.fresh
    lease.claim(first)
    assert lease.fresh and lease.fenced_by is None and renewals == [1]
    document = json.loads(epochs.lease(first, 2).read_text())
    assert process_of(document["agent"]) == this_process() and document["token"] == "token"
    second = epochs.open(ME)
    lease.claim(first)
    assert lease.fenced_by == second
    lease.claim(second)
    assert lease.fenced_by is None and epochs.leases_before(second + 1) == [epochs.lease(second, 2)]
    lease.release()
    assert not lease.fresh and epochs.leases_before(second + 1) == []


def test_tidying_keeps_the_epochs(tmp_path: Path) -> None:
    epochs = Epochs(tmp_path)
    epochs.open(ME)
    epochs.open(ME)
    lease_of(epochs, elsewhere(), 1)
    own = lease_of(epochs, elsewhere(), 2)
    epochs.tidy(2)
    assert sorted(os.listdir(tmp_path / "epochs")) == ["0001", "0002", own.name]


def claimed(directory: Path, submission: str, seconds: float = 1000.0) -> tuple[Lease, list[int]]:
    """The lease of a leader that was just started, and its renewals."""
    epochs = Epochs(directory)
    renewals: list[int] = []
    lease = Lease(epochs, 0, this_process(), submission, seconds, lambda: renewals.append(1))
    lease.claim(epochs.open({**ME, "submission": submission}))
    return lease, renewals


@pytest.mark.parametrize("epochs_before", [0, 1], ids=["same epoch", "higher epoch"])
def test_a_directory_recreated_is_another_starts_and_left_alone(
    tmp_path: Path, epochs_before: int
) -> None:
    for _ in range(epochs_before):
        Epochs(tmp_path).open(ME)
    old, renewals = claimed(tmp_path, "old")
    assert not old.directory_gone and not old.superseded
    shutil.rmtree(tmp_path / "epochs")
    new, _ = claimed(tmp_path, "new")
    leases = {path: path.read_bytes() for path in (tmp_path / "epochs").iterdir()}
    old._look_for_directory()
    old._look()
    assert old.superseded and renewals == [1]
    assert old.directory_gone == (epochs_before == 0)
    old.release()
    assert {path: path.read_bytes() for path in (tmp_path / "epochs").iterdir()} == leases
    assert not new.superseded and not new.directory_gone


def test_a_renewal_into_a_directory_that_was_just_recreated_does_not_count_and_writes_nothing(
    tmp_path: Path,
) -> None:
    old, renewals = claimed(tmp_path, "old")
    shutil.rmtree(tmp_path / "epochs")
    claimed(tmp_path, "new")
    leases = {path: path.read_bytes() for path in (tmp_path / "epochs").iterdir()}
    with pytest.raises(OSError, match="Errno 116"):
        old._renew()
    assert renewals == [1] and old.directory_gone
    assert {path: path.read_bytes() for path in (tmp_path / "epochs").iterdir()} == leases


def test_a_directory_that_is_recreated_during_a_renewal_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, renewals = claimed(tmp_path, "old")
    replace = os.replace

    def recreated_before_the_rename(draft: Path, lease: Path) -> None:
        monkeypatch.undo()
        (tmp_path / "epochs" / "0001").write_text(json.dumps(ME | {"submission": "new"}) + "\n")
        replace(draft, lease)

    monkeypatch.setattr(os, "replace", recreated_before_the_rename)
    with pytest.raises(OSError, match="Errno 116"):
        old._renew()
    assert renewals == [1] and old.directory_gone


def test_a_higher_epoch_that_is_missing_for_long_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Epochs(tmp_path).open(ME)
    old, _ = claimed(tmp_path, "old")
    shutil.rmtree(tmp_path / "epochs")
    claimed(tmp_path, "new")
    now = time.monotonic()
    set_time(monkeypatch, "drillyard.launch.agent.fence", monotonic=lambda: now)
    old._look_for_directory()
    assert not old.directory_gone
    now += 1001
    assert old.directory_gone


def test_an_epoch_that_is_not_seen_yet_is_no_other(tmp_path: Path) -> None:
    epochs = Epochs(tmp_path)
    (tmp_path / "epochs").mkdir()
    lease = Lease(epochs, 1, this_process(), "token", 1000.0, lambda: None)
    lease.claim(7)
    assert lease.fresh and not lease.superseded
    # Half a line is no word.
    (tmp_path / "epochs" / "0007").write_text('{"lea')
    assert not lease.superseded
    (tmp_path / "epochs" / "0007").write_text('{"leader": {}}\n')
    lease._look_for_directory()
    assert not lease.superseded and not lease.directory_gone
    (tmp_path / "epochs" / "0007").write_text('{"leader": {"pid": 2}}\n')
    assert lease.superseded and lease.directory_gone


def test_a_full_disk_takes_no_epoch(tmp_path: Path) -> None:
    epochs = Epochs(tmp_path)
    assert epochs.open(ME) == 1
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            epochs.open(ME)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not epochs.has(2) and os.listdir(epochs.directory) == ["0001"]
