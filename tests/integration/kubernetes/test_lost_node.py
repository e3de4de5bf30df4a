"""A node whose kubelet is gone while its pods still run: it is named, released by the printed command, and replaced."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integration.kubernetes.cluster import Cluster, started
from tests.integration.kubernetes.team import Team, until

from drillyard.telemetry.jsonlines import decode

STEPS, EVERY = 400, 20
SETTINGS: dict[str, Any] = {
    "training__steps": STEPS,
    # So long that the run goes on for minutes: a node is lost after one.
    "training__gradient_accumulation": 8,
    "checkpoint": {"every_steps": EVERY},
    "logging": {"every_steps": 1, "tensorboard": False},
}


@pytest.fixture
def own_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Not the one of the other tests: a node of it is lost for good, and soon, while its run is still at work."""
    with started(tmp_path_factory.mktemp("lost"), grace_seconds=24) as made:
        yield made


def kubelet_of(cluster: Cluster, node: str) -> int:
    """The process of a node's kubelet."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes().split(b"\0")
            if f"{cluster.directory}/{node}/kubelet.yaml".encode() in words:
                return int(path.name)
    raise LookupError(node)


def ranks_of(pod: dict[str, Any]) -> list[int]:
    """The processes of a pod that train."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if pod["metadata"]["uid"] in (path / "cgroup").read_text() and b"train" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return found


def test_a_lost_node_is_named_and_the_run_goes_on_without_two_writers(
    own_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    team = Team(own_cluster, "lost-node", tmp_path_factory.mktemp("team"))
    team.environment["KUBECONFIG"] = str(own_cluster.kubeconfig)
    handle, directory = f"kubernetes://{team.name}/lost", team.shared / "runs/lost"
    team.drillyard("launch", team.run_config("lost", **SETTINGS), "--cluster", team.cluster_config())
    until(lambda: list(directory.glob("checkpoints/step-*/manifest.json")))
    pods = team.pods("lost")
    assert len({pod["spec"]["nodeName"] for pod in pods}) == 2, "a pod on each node"
    lost = pods[1]
    node = lost["spec"]["nodeName"]
    os.kill(kubelet_of(own_cluster, node), signal.SIGKILL)

    def named() -> str | None:
        status = yaml.safe_load(team.drillyard("runs", "status", handle, "--json").stdout)
        return str(status["reason"]) if f"lost node {node}" in str(status["reason"]) else None

    reason = until(named, 120)
    assert ranks_of(lost), "its pod still runs"
    command = re.search(r"kubectl taint nodes .*", reason)
    assert command is not None
    own_cluster.kubectl(*shlex.split(command[0])[1:])
    team.drillyard("runs", "wait", handle, check=False)
    assert yaml.safe_load(team.drillyard("runs", "status", handle, "--json").stdout)["state"] == "succeeded"
    records = [decode(line) for line in (directory / "metrics.jsonl").read_bytes().splitlines()]
    losses: dict[int, str] = {}
    for record in records:
        if "loss" in record:
            assert losses.setdefault(record["step"], repr(record["loss"])) == repr(record["loss"])
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert {pod["spec"]["nodeName"] for pod in team.pods("lost")} == {pods[0]["spec"]["nodeName"]}
    # The old attempt had no part in what was saved after the new one began.
    events = [decode(line) for line in (directory / "events.jsonl").read_bytes().splitlines()]
    attempts = [event["round"] for event in events if event.get("event") == "checkpoint"]
    assert attempts == sorted(attempts) and set(attempts) == {0, 1}
