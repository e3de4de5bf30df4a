"""`drillyard accept` and `launch --accept` on a real Slurm cluster of three nodes, one of them
bad."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.facts import says
from tests.integration.acceptance.places import Place, slurm_place
from tests.integration.launch.slurm_cluster import SlurmCluster, slurm_cluster
from tests.integration.tiny_run import TIMEOUT_SECONDS
from tests.integration.waiting import until

BAD = "n2"
FULL = "mount -t tmpfs -o size=16m none /dev/shm && { cat /dev/zero >/dev/shm/left || true; }"


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    """Nodes n1 to n4."""
    with slurm_cluster() as made:
        yield made


@pytest.fixture
def place(cluster: SlurmCluster, tmp_path: Path) -> Iterator[Place]:
    """A user of n1 to n3."""
    yield slurm_place(cluster, tmp_path / "desk", nodes=2, ranks=1, exclude=["n4"])
    cluster.reset()


def test_a_run_starts_on_the_other_nodes_and_one_is_drained_only_where_asked(
    cluster: SlurmCluster, place: Place
) -> None:
    cluster.change(BAD, FULL)
    desk = place.desk
    run = desk.write_run("trains", {"command": ["sh", "-c", "echo on $SLURMD_NODENAME"]})

    launched = desk.say("launch", run, "--accept", "quick", "--wait")

    assert launched.returncode == 0, launched.stderr
    assert says(launched.stderr, f"{BAD}: ... /dev/shm"), launched.stderr
    logs = sorted((desk.directory / "runs/trains/launch").glob("node-*.log"))
    on = "".join(each.read_text(encoding="utf-8") for each in logs)
    assert "on n1" in on and "on n3" in on and f"on {BAD}" not in on
    assert cluster.states()[BAD] == "idle"

    drained = place.accept("--nodes", 3, "--drain", "--max-share", "0.34")

    assert drained.code == 1 and drained.culprits == [BAD], drained.output
    assert cluster.states()[BAD] == "drain"
    reason = cluster.run("sinfo", "-h", "-n", BAD, "-o", "%E").stdout
    assert reason.startswith("drillyard accept: ")
    undo = drained.output.split("to undo it: ")[1].splitlines()[0]
    cluster.run(*shlex.split(undo))
    until(lambda: cluster.states()[BAD] == "idle", "the node is not back")


def test_ctrl_c_cancels_the_job_and_a_second_one_is_refused_meanwhile(
    cluster: SlurmCluster, place: Place
) -> None:
    desk, handle = place.desk, "slurm://quad/accept-quad"
    first = desk.start("accept", "cluster.yaml", "--nodes", 2)
    until(lambda: bool(cluster.processes("/files/acceptance")), "the job does not begin")

    second = desk.say("accept", "cluster.yaml", "--nodes", 2)

    assert second.returncode == 2 and f"drillyard runs wait {handle}" in second.stderr
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=TIMEOUT_SECONDS)
    assert first.returncode == 130
    assert desk.status(handle)["state"] == "cancelled"
    assert not cluster.processes("/files/acceptance")
    assert set(cluster.states().values()) == {"idle"}


def test_nodes_with_fewer_gpus_than_the_machine_are_named_before_submission(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    place = slurm_place(cluster, tmp_path / "desk", exclude=["n3"], machine="a2-megagpu-16g")
    found = place.accept()
    assert found.code == 1 and found.culprits == ["n1", "n2", "n4"]
    assert "n1 offers 8 of 16 GPUs" in found.output
    assert cluster.run("squeue", "-h", "-a").stdout == ""
