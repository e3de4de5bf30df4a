"""Launches in a team's namespace: what keeps a run from starting is named, of two launches one
wins, and nothing is left of a run that is forgotten.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor

from tests.integration.kubernetes.cluster import Cluster
from tests.integration.kubernetes.team import Team, until
from tests.integration.kubernetes.team_runs import (
    SETTINGS,
    command_run,
    ended,
    handle,
    launch,
    least_role,
    losses,
    status,
)
from tests.integration.kubernetes.team_runs import rights as rights


def test_an_image_that_cannot_be_pulled_is_named_while_the_run_waits(team: Team) -> None:
    path = command_run(team, "no-image", image="localhost/none:1")
    launch(team, path)
    reason = until(lambda: "Pull" in (found := str(status(team, "no-image")["reason"])) and found)
    assert "no-image-w-0-" in reason and " on node" in reason and "localhost/none:1" in reason
    team.drillyard("runs", "cancel", handle(team, "no-image"))


def test_a_volume_that_a_node_cannot_mount_is_named_while_the_run_waits(team: Team) -> None:
    team.add_volume("missing", {"path": "/no/such/directory", "type": "Directory"})
    launch(team, command_run(team, "no-volume"), volume_claim="missing")
    reason = until(
        lambda: "FailedMount" in (found := str(status(team, "no-volume")["reason"])) and found
    )
    assert " on node" in reason and "/no/such/directory" in reason
    team.drillyard("runs", "cancel", handle(team, "no-volume"))


def test_a_full_volume_is_the_cause_that_status_shows(team: Team, cluster: Cluster) -> None:
    small = team.directory / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k,mode=777", "tmpfs", str(small)]
    subprocess.run(cluster.enter(*mount, into=("mount",)), check=True)
    copied = ["cp", str(team.shared / "rows.jsonl"), str(small)]
    subprocess.run(cluster.enter(*copied, into=("mount",)), check=True)
    team.add_volume("small", {"path": str(small)})
    launch(team, team.run_config("full", **SETTINGS), "--max-failures", 0, volume_claim="small")
    assert ended(team, "full") == "failed"
    assert "No space left on device" in json.dumps(status(team, "full"))


def test_after_cancel_and_forget_nothing_is_left(team: Team, cluster: Cluster) -> None:
    path = command_run(team, "waits")
    launch(team, path)
    until(lambda: status(team, "waits")["state"] == "running")
    again = team.drillyard("launch", path, "--cluster", team.cluster_config(), check=False)
    assert again.returncode == 2 and "waits" in again.stderr
    team.drillyard("runs", "cancel", handle(team, "waits"))
    until(lambda: not team.pods("waits"))
    assert status(team, "waits")["state"] == "cancelled"
    kinds = "jobsets,jobs,pods,configmaps,services,workloads"
    selector = ["--selector", "app.kubernetes.io/instance=waits"]
    assert cluster.get("--namespace", team.name, kinds, *selector)["items"] == []
    team.drillyard("runs", "forget", handle(team, "waits"))
    assert "waits" not in team.drillyard("runs", "list", "--cluster", team.cluster_config()).stdout
    secrets = cluster.get("--namespace", team.name, "secrets")["items"]
    assert not [each for each in secrets if "waits" in each["metadata"]["name"]]


def test_of_two_launches_of_a_name_at_once_one_submits_and_the_other_is_refused(
    team: Team, cluster: Cluster
) -> None:
    """A new name; one whose earlier run is over; one whose run is replaced by both while it is at
    work. First, another machine's launch was killed while it had the lock."""
    name, lock = "twice", {"name": "twice.submit-lock", "namespace": team.name}
    config = team.cluster_config()
    client = json.dumps({"host": "desk", "machine": "other", "pid": 7, "started": 1})
    cluster.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": lock, "data": {"client": client}}
    )

    def submitted(script: str, *options: str) -> list[subprocess.CompletedProcess[str]]:
        path = command_run(team, name, command=["sh", "-c", script])
        given = ("launch", path, "--cluster", config, "--nodes", 1, *options)
        with ThreadPoolExecutor() as pool:
            both = [pool.submit(team.drillyard, *given, check=False) for _ in range(2)]
            done = sorted((each.result() for each in both), key=lambda each: each.returncode)
        assert all(each.returncode == 0 or handle(team, name) in each.stderr for each in done)
        assert not any("helm" in each.stderr for each in done)
        return done

    refused = submitted("exit 0")
    assert [each.returncode for each in refused] == [2, 2]
    command = next(
        line.partition("end its lock: ")[2]
        for line in refused[0].stderr.splitlines()
        if "end its lock: " in line
    )
    subprocess.run(cluster.enter(*shlex.split(command)), env=team.environment, check=True)
    works = 'trap "exit 0" TERM; sleep 600 & wait'
    for script, options in (("exit 0", ()), (works, ()), ("exit 0", ("--replace",))):
        done = submitted(script, *options)
        assert [each.returncode for each in done] == [0, 2]
        assert done[0].stdout.strip() == handle(team, name)
        if script == "exit 0":
            assert ended(team, name) == "succeeded"
    assert not cluster.kubectl(
        "--namespace", team.name, "get", "configmap", lock["name"], "--ignore-not-found"
    )
    team.drillyard("runs", "forget", handle(team, name))


def test_a_plain_job_is_never_restarted_and_says_so(team: Team, cluster: Cluster) -> None:
    """What a cluster without JobSet can run. It needs the right to make a Service, too."""
    refused = team.drillyard(
        "launch",
        team.run_config("job"),
        "--cluster",
        team.cluster_config(controller="job"),
        check=False,
    )
    assert refused.returncode == 2 and "create services" in refused.stderr
    role = least_role(team)
    try:
        cluster.apply(least_role(team, controller="job"))
        launch(
            team,
            team.run_config("job", training__steps=4, checkpoint={"every_steps": 2}),
            controller="job",
        )
        assert ended(team, "job") == "succeeded"
        assert len(losses(team, "job")) == 4
        path = command_run(team, "asked", command=["sh", "-c", "exit 85"])
        launched = team.drillyard(
            "launch", path, "--cluster", team.cluster_config(controller="job")
        )
        assert "nothing restarts the run" in launched.stderr
        assert ended(team, "asked") == "failed"
        assert "drillyard runs resume" in status(team, "asked")["reason"]
        team.drillyard("runs", "resume", handle(team, "asked"))
        assert ended(team, "asked") == "failed"
        for name in ("job", "asked"):
            team.drillyard("runs", "forget", handle(team, name))
        left = cluster.get(
            "--namespace",
            team.name,
            "jobs,pods,services",
            "--selector",
            "drillyard/run in (job, asked)",
        )
        assert left["items"] == []
    finally:
        cluster.apply(role)


def test_without_the_right_to_read_events_a_run_is_submitted_and_what_is_not_checked_is_said(
    team: Team,
) -> None:
    role = least_role(team)
    fewer = {**role, "rules": [rule for rule in role["rules"] if "events" not in rule["resources"]]}
    assert len(fewer["rules"]) == len(role["rules"]) - 1
    run = team.run_config("unread", training__steps=2, checkpoint={"every_steps": 2})
    try:
        team.cluster.apply(fewer)
        launched = team.drillyard("launch", run, "--cluster", team.cluster_config())
        assert "not checked" in launched.stderr and "list events" in launched.stderr
        assert ended(team, "unread") == "succeeded"
    finally:
        team.cluster.apply(role)
    assert (
        "not checked"
        not in team.drillyard("launch", run, "--cluster", team.cluster_config(), "--replace").stderr
    )
    team.drillyard("runs", "cancel", handle(team, "unread"))
