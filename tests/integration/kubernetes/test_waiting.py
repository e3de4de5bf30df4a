"""Runs that do not start, are refused or make no progress, on a real API server: each reason is
shown, and each remedy works."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from tests.integration.kubernetes.cluster import IMAGE, ROOT, Cluster, tool
from tests.integration.kubernetes.team import USER, Team, until
from tests.integration.kubernetes.team_runs import (
    command_run,
    ended,
    handle,
    launch,
    rights,  # noqa: F401
    status,
)

AT_ONCE = {"grace_seconds": 1}
"""`sleep` as the first process of a container takes no notice of SIGTERM."""


@contextlib.contextmanager
def quota(team: Team, **hard: str) -> Iterator[None]:
    """A quota of the team's namespace."""
    place = {"name": "q", "namespace": team.name}
    amounts = {name.replace("_", "."): amount for name, amount in hard.items()}
    team.cluster.apply(
        {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": place, "spec": {"hard": amounts}}
    )
    shown = ("--namespace", team.name, "resourcequota/q")
    until(lambda: team.cluster.get(*shown).get("status", {}).get("used") is not None)
    try:
        yield
    finally:
        team.cluster.kubectl("--namespace", team.name, "delete", "resourcequota", "q")


def refused(team: Team, run: Path, **section: Any) -> str:
    """What a launch says that is refused as the user's mistake."""
    done = team.drillyard("launch", run, "--cluster", team.cluster_config(**section), check=False)
    assert done.returncode == 2, done.stderr
    return done.stderr


def comes_to(team: Team, name: str, state: str, words: str = "") -> str:
    """The reason of a run once it is in `state` and its reason has these words."""
    found: dict[str, Any] = {}

    def there() -> bool:
        found.update(status(team, name))
        return found["state"] == state and words in str(found["reason"])

    try:
        until(there, seconds=60)
    except TimeoutError:
        raise AssertionError(f"not {state} ({words}): {found}") from None
    return str(found["reason"])


def cancel(team: Team, name: str) -> None:
    team.drillyard("runs", "cancel", handle(team, name))


def run_advice(team: Team, text: str) -> str:
    """Run the kubectl command that a message ends with; what it prints."""
    command = re.search(r"kubectl (.*)$", text, re.MULTILINE)
    assert command is not None, text
    return team.cluster.kubectl(*shlex.split(command[1]))


def test_a_namespace_whose_quota_counts_cpus_takes_a_run_that_states_them(team: Team) -> None:
    path = command_run(team, "counted", command=["true"])
    asked = {"requests": {"cpu": "100m"}}
    with quota(team, requests_cpu="2"):
        said = refused(team, path, queue=None)
        assert "must specify requests.cpu for: train" in said
        assert "kubernetes.resources" in said and "--explain" not in said
        launch(team, path, queue=None, resources=asked)
        assert ended(team, "counted") == "succeeded"
        # The pod that reads for a run that is over is one of the namespace, too.
        team.drillyard("runs", "artifacts", handle(team, "counted"))
    team.drillyard("runs", "forget", handle(team, "counted"))


def test_a_quota_that_stops_the_second_pod_or_the_next_run_says_so(team: Team) -> None:
    with quota(team, pods="1"):
        launch(team, command_run(team, "half"), queue=None, **AT_ONCE)
        comes_to(team, "half", "starting", "exceeded quota: q")
        assert len(team.pods("half")) == 1
        said = refused(team, command_run(team, "next"), queue=None)
        assert "exceeded quota: q" in said and "--explain" not in said
        assert "pods" in run_advice(team, said)
        cancel(team, "half")


def test_a_missing_service_account_is_named_and_is_no_missing_right(team: Team) -> None:
    said = refused(team, command_run(team, "unknown"), service_account="nobody")
    assert 'serviceaccount "nobody" not found' in said and "--explain" not in said
    assert "alice" in run_advice(team, said)


def test_a_missing_right_is_answered_with_the_role(team: Team) -> None:
    config = team.cluster_config(namespace="default")
    done = team.drillyard("runs", "list", "--cluster", config, check=False)
    assert "cannot list resource" in done.stderr and "--explain" in done.stderr


def test_a_priority_class_that_does_not_exist_is_named(team: Team) -> None:
    path = command_run(team, "urgent")
    section = {"priority_class": "no-such-class"}
    launched = team.drillyard("launch", path, "--cluster", team.cluster_config(**section))
    assert "not checked: whether there is a WorkloadPriorityClass no-such-class" in launched.stderr
    run_advice(team, comes_to(team, "urgent", "queued", "WorkloadPriorityClass no-such-class"))
    cancel(team, "urgent")
    own = team.environment["KUBECONFIG"]
    team.environment["KUBECONFIG"] = str(team.cluster.kubeconfig)
    try:
        said = refused(team, command_run(team, "urgent-too"), **section)
    finally:
        team.environment["KUBECONFIG"] = own
    assert "kubernetes.priority_class" in said and "no-such-class" in said


def test_a_run_that_was_suspended_by_hand_says_so_and_how_it_goes_on(team: Team) -> None:
    launch(team, command_run(team, "halted"), queue=None, **AT_ONCE)
    comes_to(team, "halted", "running")
    patch = ("--type", "merge", "--patch", '{"spec":{"suspend":true}}')
    team.cluster.kubectl("--namespace", team.name, "patch", "jobset", "halted", *patch)
    run_advice(team, comes_to(team, "halted", "queued", "suspended by hand"))
    comes_to(team, "halted", "running")
    cancel(team, "halted")


def test_the_cause_of_exit_code_2_is_the_end_of_the_log(team: Team) -> None:
    script = "echo the file is missing >&2; exit 2"
    launch(team, command_run(team, "explains", command=["sh", "-c", script]))
    assert ended(team, "explains") == "failed"
    failure = status(team, "explains")["failure"]
    assert (failure["exit_code"], failure["lines"]) == (2, ["the file is missing"])


def test_an_image_with_the_tag_latest_is_pulled_for_every_pod(team: Team) -> None:
    for name, image, policy in (
        ("newest", "localhost/none:latest", "Always"),
        ("untagged", "localhost/none", "Always"),
        ("tagged", IMAGE, "IfNotPresent"),
    ):
        launch(team, command_run(team, name, image=image), queue=None, **AT_ONCE)
        pods = until(lambda name=name: team.pods(name))
        assert {pod["spec"]["containers"][0]["imagePullPolicy"] for pod in pods} == {policy}
        cancel(team, name)


def test_a_run_of_helm_alone_runs_and_its_notes_are_commands_that_work(
    team: Team, cluster: Cluster
) -> None:
    name = "by-hand"
    values = {
        "nodes": 2,
        "image": IMAGE,
        "command": ["sh", "-c", 'test "$NNODES" = 2; echo "rank $NODE_RANK"; sleep 600'],
        "securityContext": {"runAsUser": USER, "fsGroup": 0},
        "gracePeriodSeconds": 1,
    }
    file = team.directory / "by-hand.yaml"
    file.write_text(yaml.safe_dump(values))
    chart = str(ROOT / "charts/drillyard-run")
    where = ("--namespace", team.name, "--kubeconfig", str(cluster.kubeconfig))
    install = cluster.enter(tool("helm"), "install", name, chart, "--values", str(file), *where)
    environment = {**os.environ, **team.environment}
    done = subprocess.run(install, capture_output=True, text=True, env=environment, check=True)
    until(lambda: [pod["status"]["phase"] for pod in team.pods(name)] == ["Running"] * 2)
    commands = [line.partition(":")[2].strip() for line in done.stdout.splitlines() if ": " in line]
    kubectl = [shlex.split(each)[1:] for each in commands if each.startswith("kubectl ")]
    assert len(kubectl) == 4

    def logs_of_both_are_printed() -> bool:
        # A running pod need not have printed anything yet.
        printed = [cluster.kubectl(*each) for each in kubectl]
        return any("rank 0" in text and "rank 1" in text for text in printed)

    until(logs_of_both_are_printed)
    (uninstall,) = [shlex.split(each)[1:] for each in commands if each.startswith("helm ")]
    kubeconfig = ("--kubeconfig", str(cluster.kubeconfig))
    subprocess.run(
        cluster.enter(tool("helm"), *uninstall, *kubeconfig), check=True, env=environment
    )
    until(lambda: not team.pods(name))
