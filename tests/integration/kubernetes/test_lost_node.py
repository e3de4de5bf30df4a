"""A node whose kubelet is gone while its pods run: it is named, and what is done about it never
gives two writers.

The command that status prints releases the node, so its pods are deleted by force although they
still run.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integration.kubernetes.cluster import Cluster, started
from tests.integration.kubernetes.node_processes import bucket_on_nodes, kubelet_of, processes
from tests.integration.kubernetes.team import Team, until
from tests.integration.tiny_run import write_rows

from drillyard.supervise.scheduler_restarts import CLAIM_SECONDS
from drillyard.telemetry.jsonlines import decode

STEPS, EVERY = 120, 20
ONE_POD = {"cpu": "100m"}
"""What the pods of the queue that preempts ask for, and all that it has."""
SETTINGS: dict[str, Any] = {
    "training__steps": STEPS,
    "checkpoint": {"every_steps": EVERY},
    "logging": {"every_steps": 1, "tensorboard": False},
}


@pytest.fixture(scope="module")
def own_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Not the one of the other tests: a node of it is lost for good, and soon, while its run is
    still at work."""
    with started(tmp_path_factory.mktemp("lost"), grace_seconds=24) as made:
        yield made


@pytest.fixture(scope="module")
def team(own_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Team:
    """Its user has all rights: the other tests are about fewer."""
    team = Team(own_cluster, "lost-node", tmp_path_factory.mktemp("team"))
    team.environment["KUBECONFIG"] = str(own_cluster.kubeconfig)
    return team


def named(team: Team, name: str, node: str) -> str:
    """The reason that status shows, once it names the lost node: within a minute."""

    def reason() -> str | None:
        status = yaml.safe_load(
            team.drillyard("runs", "status", f"kubernetes://{team.name}/{name}", "--json").stdout
        )
        return str(status["reason"]) if f"lost node {node}" in str(status["reason"]) else None

    found: str = until(reason, seconds=60)
    return found


def release(cluster: Cluster, reason: str) -> None:
    """Run the command that status prints for a node that is switched off. Its pods are deleted by
    force."""
    command = re.search(r"kubectl taint nodes .*", reason)
    assert command is not None
    cluster.kubectl(*shlex.split(command[0])[1:])


def require_one_writer(directory: Path) -> None:
    """Each step's loss is the same in all attempts, and once a later one began, no earlier one
    saved."""
    losses: dict[int, str] = {}
    for line in (directory / "metrics.jsonl").read_bytes().splitlines():
        record = decode(line)
        if "loss" in record:
            assert losses.setdefault(record["step"], repr(record["loss"])) == repr(record["loss"])
    assert sorted(losses) == list(range(1, STEPS + 1))
    attempts = rounds_that_saved(directory)
    assert attempts == sorted(attempts) and set(attempts) == {0, 1}


def rounds_that_saved(directory: Path) -> list[int]:
    """The round of each checkpoint that is saved and logged."""
    return [event["round"] for event in events_of(directory) if event.get("event") == "checkpoint"]


def events_of(directory: Path) -> list[dict[str, Any]]:
    path = directory / "events.jsonl"
    return [decode(line) for line in path.read_bytes().splitlines()] if path.exists() else []


@contextlib.contextmanager
def paused(pod: dict[str, Any]) -> Iterator[None]:
    """Its processes stand still, so that none is done before the loss of its node is noticed."""
    found = processes(pod)
    assert found
    for each in found:
        os.kill(each, signal.SIGSTOP)
    try:
        yield
    finally:
        for each in found:
            os.kill(each, signal.SIGCONT)


def test_a_pod_that_runs_on_after_its_node_was_released_ends_before_it_writes_again(
    own_cluster: Cluster, team: Team
) -> None:
    """On a bucket, where no lock holds; the run is one pod, so that nothing else ends it."""
    name = "forced"
    with bucket_on_nodes(own_cluster, team.directory / name) as bucket:
        directory = bucket.place / "runs" / name
        team.add_volume(name, {"path": str(bucket.place)})
        write_rows(bucket.place / "rows.jsonl")
        config = team.cluster_config(volume_claim=name)
        team.drillyard(
            "launch", team.run_config(name, **SETTINGS), "--cluster", config, "--nodes", 1
        )
        until(lambda: rounds_that_saved(directory))
        (pod,) = team.pods(name)
        node = pod["spec"]["nodeName"]
        kubelet = kubelet_of(own_cluster, node)
        with paused(pod):
            os.kill(kubelet, signal.SIGSTOP)
            named(team, name, node)
            place = ["--namespace", team.name, pod["metadata"]["name"]]
            own_cluster.kubectl(
                "delete", "pod", *place, "--force", "--grace-period=0", "--wait=false"
            )
            reason = named(team, name, node)
            assert [each["metadata"]["uid"] for each in team.pods(name)] == [
                pod["metadata"]["uid"]
            ], "no other pod yet"
            release(own_cluster, reason)
            until(lambda: any(event.get("round") == 1 for event in events_of(directory)))
        until(lambda: not processes(pod))
        os.kill(kubelet, signal.SIGCONT)
        own_cluster.kubectl("taint", "nodes", node, "node.kubernetes.io/out-of-service-")
        team.drillyard("runs", "wait", f"kubernetes://{team.name}/{name}")
        require_one_writer(directory)


def queue_that_preempts(team: Team, name: str) -> dict[str, Any]:
    """Make a queue with room for one pod; a Workload of a higher priority, which takes that room
    for as long as it is there."""
    kueue = "kueue.x-k8s.io/v1beta1"

    def made(kind: str, **spec: Any) -> dict[str, Any]:
        place = {} if kind in ("ResourceFlavor", "ClusterQueue") else {"namespace": team.name}
        return {
            "apiVersion": kueue,
            "kind": kind,
            "metadata": {"name": name, **place},
            **({"spec": spec} if spec else {}),
        }

    quota = {"name": name, "resources": [{"name": "cpu", "nominalQuota": ONE_POD["cpu"]}]}
    team.cluster.apply(
        made("ResourceFlavor"),
        made(
            "ClusterQueue",
            namespaceSelector={},
            resourceGroups=[{"coveredResources": ["cpu"], "flavors": [quota]}],
            preemption={"withinClusterQueue": "LowerPriority"},
        ),
        made("LocalQueue", clusterQueue=name),
    )
    container = {"name": "c", "image": "none", "resources": {"requests": ONE_POD}}
    pod = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    sets = [{"name": "main", "count": 1, "template": pod}]
    return made("Workload", queueName=name, priority=100, podSets=sets)


@contextlib.contextmanager
def hung(cluster: Cluster, node: str) -> Iterator[None]:
    """Its kubelet stands still, and no pods are placed there."""
    kubelet = kubelet_of(cluster, node)
    cluster.kubectl("cordon", node)
    os.kill(kubelet, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(kubelet, signal.SIGCONT)
        cluster.kubectl("uncordon", node)


def test_a_preempted_pod_that_runs_on_writes_nothing_beside_the_readmitted_run(
    own_cluster: Cluster, team: Team
) -> None:
    """Its node hangs while Kueue preempts the run, and is back once the run goes on elsewhere: by
    JobSet's uid and count of restarts both are the same attempt. On a bucket no lock holds."""
    name = "preempted"
    urgent = queue_that_preempts(team, name)
    place = ["--namespace", team.name]
    with bucket_on_nodes(own_cluster, team.directory / name) as bucket:
        directory, handle = bucket.place / "runs" / name, f"kubernetes://{team.name}/{name}"
        team.add_volume(name, {"path": str(bucket.place)})
        bound = ["--for", "jsonpath={.status.phase}=Bound", f"pvc/{name}", "--timeout", "60s"]
        own_cluster.kubectl("wait", *place, *bound)
        write_rows(bucket.place / "rows.jsonl")
        config = team.cluster_config(volume_claim=name, queue=name, resources={"requests": ONE_POD})
        team.drillyard(
            "launch", team.run_config(name, **SETTINGS), "--cluster", config, "--nodes", 1
        )
        try:
            until(lambda: rounds_that_saved(directory))
        except TimeoutError:
            raise AssertionError(team.drillyard("runs", "status", handle).stdout) from None
        (pod,) = team.pods(name)
        old_claims = claims(directory)
        with hung(own_cluster, pod["spec"]["nodeName"]):
            with paused(pod):
                own_cluster.apply(urgent)
                until(lambda: team.pods(name)[0]["metadata"].get("deletionTimestamp"))
                assert team.jobset(name)["spec"]["suspend"] is True
                own_cluster.kubectl(
                    *("delete", "pod", *place, pod["metadata"]["name"]),
                    *("--force", "--grace-period=0", "--wait=false"),
                )
                own_cluster.kubectl("delete", "workload", *place, name)
                until(lambda: claims(directory) != old_claims)
                claimed_at = datetime.now(UTC).isoformat()
                # A shorter pause leaves the last look at the claims good for lines, and the new
                # start still waits.
                time.sleep(CLAIM_SECONDS)
            until(lambda: not processes(pod))
            said = "".join(path.read_text() for path in container_logs(own_cluster, pod))
        team.drillyard("runs", "wait", handle)
        assert team.jobset(name).get("status", {}).get("restarts", 0) == 0
        assert "has claimed the run directory" in said
        require_no_other_writer(directory, claimed_at)


def require_no_other_writer(directory: Path, claimed_at: str) -> None:
    """After a moment, every event, logged step and save is of one start, from its resume on; but
    for the line that the other one was writing when it was stopped."""
    later = [each for each in events_of(directory) if each["time"] > claimed_at]
    kinds = Counter(each["event"] for each in later)
    assert kinds["run_start"] == kinds["resume"] == kinds["end"] == 1
    assert not kinds.keys() & {"failure", "signal", "restart"}
    (begun,) = [each["step"] for each in later if each["event"] == "resume"]
    steps = list(range(begun + 1, STEPS + 1))
    reported = [each["step"] for each in later if each["event"] == "step"]
    assert reported[-len(steps) :] == steps and len(reported) <= len(steps) + 1
    saved = [each["step"] for each in later if each["event"] == "checkpoint"]
    assert saved == [step for step in steps if step % EVERY == 0]
    logged = [decode(line) for line in (directory / "metrics.jsonl").read_bytes().splitlines()]
    found = [each["step"] for each in logged if each["time"] > claimed_at]
    assert found[-len(steps) :] == steps and len(found) <= len(steps) + 1


def claims(directory: Path) -> list[str]:
    """The numbers of the claims on a run directory."""
    return sorted(path.name for path in directory.glob("launch/claims/[0-9]*"))


def container_logs(cluster: Cluster, pod: dict[str, Any]) -> list[Path]:
    """What a pod's containers have printed, as its node keeps it."""
    logs = cluster.directory / pod["spec"]["nodeName"] / "logs"
    return sorted(logs.glob(f"*_{pod['metadata']['uid']}/*/*.log"))


def test_a_lost_node_is_named_and_the_run_goes_on_without_two_writers(
    own_cluster: Cluster, team: Team
) -> None:
    handle, directory = f"kubernetes://{team.name}/lost", team.shared / "runs/lost"
    team.drillyard(
        "launch", team.run_config("lost", **SETTINGS), "--cluster", team.cluster_config()
    )
    until(lambda: rounds_that_saved(directory))
    pods = team.pods("lost")
    assert len({pod["spec"]["nodeName"] for pod in pods}) == 2, "a pod on each node"
    lost = pods[1]
    node = lost["spec"]["nodeName"]
    with paused(lost):
        os.kill(kubelet_of(own_cluster, node), signal.SIGKILL)
        reason = named(team, "lost", node)
        read = team.drillyard("runs", "logs", handle)
        assert f"lost node {node}" in read.stderr and "step" in read.stdout.lower()
        release(own_cluster, reason)
        # The other pod is asked to stop, so that all is started again.
        until(lambda: all(pod["metadata"].get("deletionTimestamp") for pod in team.pods("lost")))
    team.drillyard("runs", "wait", handle, check=False)
    assert (
        yaml.safe_load(team.drillyard("runs", "status", handle, "--json").stdout)["state"]
        == "succeeded"
    )
    require_one_writer(directory)
    assert {pod["spec"]["nodeName"] for pod in team.pods("lost")} == {pods[0]["spec"]["nodeName"]}
