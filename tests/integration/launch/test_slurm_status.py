"""What users of a real Slurm cluster of four nodes see while disks fail, while a run is being
submitted, and of nodes that lack what a run will need.

Mounts small file systems, which needs root.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.facts import says
from tests.integration.disks import MIB, LoopDisk, Tmpfs
from tests.integration.held import Holds
from tests.integration.launch.slurm_cluster import SlurmCluster, slurm_cluster
from tests.integration.launch.test_slurm import is_running, looking, saves, sit_down, written
from tests.integration.tiny_run import write_config
from tests.integration.waiting import until

from drillyard.launch.run_status import State

SECONDS_TO_TELL = 240.0
"""A minute when nothing else runs."""
LOOKS = 200


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    """Nodes n1 to n4."""
    with slurm_cluster() as made:
        yield made


@pytest.fixture(autouse=True)
def all_nodes_are_idle(cluster: SlurmCluster) -> Iterator[None]:
    """What a test has left is ended before the next."""
    yield
    cluster.reset()


def test_a_full_disk_at_the_export_is_the_cause_that_is_reported(
    cluster: SlurmCluster, workplace: Path, tmp_path: Path
) -> None:
    disk = Tmpfs(tmp_path / "disk", 16 * MIB)
    disk.mount()
    try:
        config = write_config(
            disk.place,
            "full-export",
            training__steps=2,
            data__source=str(workplace / "rows.jsonl"),
            data__cache_directory=str(workplace / "cache"),
        )
        holds = Holds(tmp_path, "attempt-0-forward-1")
        python = holds.interpreter(tmp_path / "python")
        desk = sit_down(
            cluster, tmp_path / "desk", python=python, environment={"GLOO_SOCKET_IFNAME": "lo"}
        )
        handle = desk.launch(config)
        until(lambda: holds.reached("attempt-0-forward-1", 0, 1), "the last evaluation")
        disk.fill()
        holds.release("attempt-0-forward-1")
        # When each look began, and when the one ended that tells the cause.
        times = [time.time()]

        def tells_the_cause(status: dict[str, Any]) -> bool:
            times.append(time.time())
            return "No space left" in f"{status['reason']} {status['failure']}"

        desk.wait_for(handle, tells_the_cause)
        status = desk.wait_for(handle, lambda status: status["over"])
        assert status["state"] == "failed", status
        state = disk.place / "runs" / "full-export" / "launch" / "state.json"
        *silent, _, reported_at = times
        assert all(began_at < state.stat().st_mtime for began_at in silent), (
            "silent although the end was written"
        )
        assert reported_at - status["ended_at"] < SECONDS_TO_TELL
        assert status["failure"]["exit_code"] == 2
        assert says(status["failure"]["reason"], "cannot export ... No space left")
        assert desk.say("runs", "status", handle).stdout.count("cannot export") <= 2, (
            "headline and last lines"
        )
    finally:
        disk.unmount()


def test_a_run_whose_directory_turns_read_only_is_not_running_any_more(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    disk = LoopDisk(tmp_path / "desk" / "runs", 16 * MIB, tmp_path)
    disk.make()
    try:
        desk = sit_down(cluster, tmp_path / "desk")
        config, directory = saves(desk, "frozen")
        handle = desk.launch(config)
        desk.wait_for(handle, is_running)
        until(lambda: {node for node, _ in written(directory, 0)} == {0, 1}, "attempt 0")
        disk.abort()
        failed_at = time.monotonic()
        # A look on the way may find its ranks ended and no cause yet; it restarts until Slurm has
        # ended the job.
        status = desk.wait_for(
            handle, lambda status: says(status["reason"] or "", f"{directory}/launch ... Read-only")
        )
        assert time.monotonic() - failed_at < SECONDS_TO_TELL
        assert status["state"] in ("restarting", "failed"), status
        cancelled = desk.say("runs", "cancel", handle)
        assert cancelled.returncode == 0, cancelled.stderr
        assert not cluster.processes(str(directory))
        refused = desk.say("launch", config)
        assert refused.returncode == 2 and "nothing was submitted" in refused.stderr, refused.stderr
    finally:
        cluster.reset()
        disk.unmount()


def test_of_many_who_look_during_a_submission_nobody_sees_a_run_that_failed(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    desk = sit_down(cluster, tmp_path / "desk")
    config, directory = saves(desk, "watched")
    sbatch, submitted, go = tmp_path / "bin" / "sbatch", tmp_path / "submitted", tmp_path / "go"
    sbatch.parent.mkdir()
    # The job is submitted, and its id is not known yet, until half of the looks are done.
    waits = f"touch {submitted}; while [ ! -e {go} ]; do sleep 0.01; done"
    sbatch.write_text(f'#!/bin/sh\n{shutil.which("sbatch")} "$@" || exit; {waits}\n')
    sbatch.chmod(0o755)
    desk.environment["PATH"] = f"{sbatch.parent}:{cluster.environment['PATH']}"
    launching = desk.start("launch", config)
    until(submitted.exists, "the submission")
    seen: Counter[State] = Counter()
    looks = 0
    with looking(desk) as look:
        while looks < LOOKS or launching.poll() is None:
            seen.update(status.state for status in look.runs() if status.handle.run == "watched")
            looks += 1
            if looks == LOOKS // 2:
                go.touch()
    assert launching.returncode == 0
    # Each look sees the run, and sees it once.
    assert seen.total() == looks and set(seen) <= {State.queued, State.starting, State.running}, (
        seen
    )
    (directory / "enough").touch()


def test_cluster_status_names_each_node_that_lacks_something(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    storage = tmp_path / "storage"
    storage.mkdir()
    desk = sit_down(cluster, tmp_path / "desk", storage={"directory": str(storage)})
    ready = desk.say("cluster", "status", "cluster.yaml")
    assert ready.returncode == 0, ready.stdout + ready.stderr
    assert ready.stdout.splitlines()[-1] == "ready: drillyard launch RUN --cluster cluster.yaml"

    cluster.change("n2", f"mount --bind {storage} {storage} && mount -o remount,ro,bind {storage}")
    path = cluster.environment["PATH"].split(":")
    found = [shutil.which("python3", path=each) for each in path]
    targets = {str(Path(each).resolve()) for each in found if each}
    cluster.change("n3", " && ".join(f"mount --bind /dev/null {each}" for each in targets))
    cluster.run("scontrol", "update", "NodeName=n4", "State=DRAIN", "Reason=a bad GPU")
    done = desk.say("cluster", "status", "cluster.yaml", "--json")
    assert done.returncode == 1, done.stdout + done.stderr
    document = json.loads(done.stdout)
    named = {
        tuple(each["nodes"]): (each["check"], each["result"], each["text"])
        for each in document["findings"]
        if each["nodes"]
    }
    assert document["proved"] == ["n1"] and document["looked_at"] == ["n1", "n2", "n3"]
    check, result, text = named[("n2",)]
    assert (check, result) == ("storage", "missing") and "Read-only file system" in text
    check, result, text = named[("n3",)]
    assert (check, result) == ("programs", "missing") and "no python3" in text
    check, result, text = named[("n4",)]
    assert (check, result) == ("nodes", "note") and "a bad GPU" in text
    # Nothing of the look is left, and what it says brings the node back.
    assert list(storage.iterdir()) == [] and cluster.run("squeue", "-h").stdout == ""
    cluster.run(*text[text.index("scontrol update") :].split())
    until(lambda: cluster.states()["n4"] == "idle", "n4 does not come back")
