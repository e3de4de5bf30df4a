"""Runs in real pods, as a user with rights in one `restricted` namespace: disturbed, read and
resumed, they end with the losses of an undisturbed one.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from tests.integration.kubernetes.cluster import Cluster
from tests.integration.kubernetes.node_processes import bucket_on_nodes
from tests.integration.kubernetes.team import Team, until
from tests.integration.kubernetes.team_runs import (
    EVERY,
    SETTINGS,
    STEPS,
    checkpoints,
    ended,
    handle,
    kill_a_rank,
    launch,
    losses,
    restarts,
    status,
)
from tests.integration.kubernetes.team_runs import rights as rights
from tests.integration.tiny_run import write_rows

from drillyard.telemetry.jsonlines import decode


@pytest.fixture(scope="module")
def undisturbed(team: Team, rights: None) -> dict[int, str]:
    """Losses by step of a run that nothing disturbs."""
    launch(team, team.run_config("undisturbed", **SETTINGS))
    assert ended(team, "undisturbed") == "succeeded"
    assert restarts(team, "undisturbed") == (0, 0)
    found = losses(team, "undisturbed")
    assert sorted(found) == list(range(1, STEPS + 1))
    return found


def delete(team: Team, pod: dict[str, Any]) -> None:
    team.cluster.kubectl(
        "--namespace", team.name, "delete", "pod", pod["metadata"]["name"], "--wait=false"
    )


def evict(team: Team, pod: dict[str, Any]) -> None:
    place = {"name": pod["metadata"]["name"], "namespace": team.name}
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": place}
    path = f"/api/v1/namespaces/{team.name}/pods/{place['name']}/eviction"
    team.cluster.kubectl("create", "--raw", path, "--filename", "-", stdin=json.dumps(eviction))


def drain(team: Team, pod: dict[str, Any]) -> None:
    node = pod["spec"]["nodeName"]
    try:
        only = f"jobset.sigs.k8s.io/jobset-name={pod['metadata']['labels']['jobset.sigs.k8s.io/jobset-name']}"  # noqa: E501
        team.cluster.kubectl(
            "drain", node, "--force", "--delete-emptydir-data", "--pod-selector", only
        )
    finally:
        team.cluster.kubectl("uncordon", node)


@pytest.mark.parametrize(
    ("name", "disturb", "counted"),
    [
        ("killed", kill_a_rank, 1),
        ("deleted", delete, 0),
        ("evicted", evict, 0),
        ("drained", drain, 0),
    ],
)
def test_a_disturbed_run_resumes_and_its_losses_are_those_of_an_undisturbed_one(
    team: Team, undisturbed: dict[int, str], name: str, disturb: Any, counted: int
) -> None:
    launch(team, team.run_config(name, **SETTINGS))
    until(lambda: checkpoints(team, name))
    disturb(team, random.choice(team.pods(name)))
    assert ended(team, name) == "succeeded"
    assert restarts(team, name) == (1, counted)
    assert losses(team, name) == undisturbed
    events = [
        decode(line)
        for line in (team.shared / "runs" / name / "events.jsonl").read_bytes().splitlines()
    ]
    resumed = [event["step"] for event in events if event.get("event") == "resume"]
    assert len(resumed) == 1 and resumed[0] >= EVERY


def test_a_killed_run_on_a_bucket_resumes_with_the_same_bits(
    team: Team, cluster: Cluster, undisturbed: dict[int, str]
) -> None:
    name = "bucket"
    with bucket_on_nodes(cluster, team.directory / name) as bucket:
        team.add_volume(name, {"path": str(bucket.place)})
        write_rows(bucket.place / "rows.jsonl")
        launch(team, team.run_config(name, **SETTINGS), volume_claim=name)
        until(lambda: checkpoints(team, name, bucket.place))
        kill_a_rank(team, random.choice(team.pods(name)))
        assert ended(team, name) == "succeeded"
        assert restarts(team, name) == (1, 1)
        assert losses(team, name, bucket.place) == undisturbed
        team.drillyard("runs", "forget", handle(team, name))


def test_a_cancelled_run_is_read_and_resumed(team: Team, undisturbed: dict[int, str]) -> None:
    name = "resumed"
    launch(team, team.run_config(name, **SETTINGS))
    until(lambda: checkpoints(team, name))
    team.drillyard("runs", "cancel", handle(team, name))
    assert status(team, name)["state"] == "cancelled"
    assert "metrics.jsonl" in team.drillyard("runs", "artifacts", handle(team, name)).stdout
    assert not reading_pods(team)
    team.drillyard("runs", "resume", handle(team, name))
    assert ended(team, name) == "succeeded"
    assert losses(team, name) == undisturbed


def test_a_finished_run_is_read_and_watched(team: Team, undisturbed: dict[int, str]) -> None:
    assert (
        "final/model.safetensors"
        in team.drillyard("runs", "artifacts", handle(team, "undisturbed")).stdout
    )
    watched = team.drillyard("runs", "watch", handle(team, "undisturbed")).stdout
    assert str(STEPS) in watched
    own = (team.shared / "runs/undisturbed/logs/rank-1.log").read_text().splitlines()
    read = team.drillyard(
        "runs", "logs", handle(team, "undisturbed"), "--rank", "1"
    ).stdout.splitlines()
    assert own and read == own
    assert not reading_pods(team)


def reading_pods(team: Team) -> list[Any]:
    """Pods that were made to read run directories and do not end."""
    found = team.cluster.get("--namespace", team.name, "pods", "--selector", "drillyard/reads")[
        "items"
    ]
    return [each for each in found if not each["metadata"].get("deletionTimestamp")]
