"""What JobSet restarts. Both of its counters are asserted: all restarts, and those that count
towards --max-failures.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
from typing import Any

import pytest
import yaml
from tests.integration.kubernetes.cluster import Cluster, tool
from tests.integration.kubernetes.node_processes import processes
from tests.integration.kubernetes.team import Team, until
from tests.integration.kubernetes.team_runs import SETTINGS, command_run, ended, launch, restarts
from tests.integration.kubernetes.team_runs import rights as rights

from drillyard.telemetry.jsonlines import decode

ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"


@pytest.mark.parametrize(
    ("name", "script", "limit", "state", "counters"),
    [
        ("asked-again", 'test "$DRILLYARD_LAUNCH_ROUND" -ge 2 || exit 85', 0, "succeeded", (2, 0)),
        ("refused", "exit 2", 5, "failed", (0, 0)),
        ("no-command", "exec /no/such/program", 5, "failed", (0, 0)),
        ("fails", "exit 1", 5, "failed", (5, 5)),
    ],
)
def test_an_exit_code_restarts_counts_or_ends(
    team: Team, name: str, script: str, limit: int, state: str, counters: tuple[int, int]
) -> None:
    path = command_run(team, name, command=["sh", "-c", script])
    launch(team, path, "--max-failures", limit)
    assert ended(team, name) == state
    assert restarts(team, name) == counters


def test_a_chart_that_counts_85_would_end_the_run(team: Team, cluster: Cluster) -> None:
    name, script = "control", 'test "$DRILLYARD_LAUNCH_ROUND" -ge 2 || exit 85'
    path = command_run(team, name, command=["sh", "-c", script])
    written = team.directory / "control"
    team.drillyard(
        "launch", path, "--cluster", team.cluster_config(), "--max-failures", 0, "--output", written
    )
    (values,) = written.rglob("values.json")
    chart = values.parent / "chart/drillyard-run"
    template = [
        tool("helm"),
        "template",
        name,
        str(chart),
        "--namespace",
        team.name,
        "--values",
        str(values),
    ]
    text = subprocess.run(
        template, check=True, capture_output=True, text=True, env=team.environment
    ).stdout
    documents = [each for each in yaml.safe_load_all(text) if each]
    (jobset,) = [each for each in documents if each["kind"] == "JobSet"]
    rules = jobset["spec"]["failurePolicy"]["rules"]
    assert rules.pop(0)["name"] == "askedToRestart"
    for each in documents:
        each["metadata"]["namespace"] = team.name
    cluster.apply(*documents)
    until(
        lambda: (
            "Failed"
            in [each["type"] for each in team.jobset(name).get("status", {}).get("conditions", ())]
        )
    )
    assert restarts(team, name) == (0, 0)
    cluster.kubectl("--namespace", team.name, "delete", "jobset", name)


def test_term_to_one_pod_of_two_is_never_counted(team: Team) -> None:
    name, times = "termed", 20
    script = (
        f'trap "exit 85" TERM; test "$DRILLYARD_LAUNCH_ROUND" -lt {times} || exit 0; echo ready;'
        " sleep 600 & wait"
    )
    path = command_run(team, name, command=["sh", "-c", script])
    launch(team, path, "--max-failures", 0)

    def ready(number: int) -> list[dict[str, Any]]:
        """Both pods of an attempt, once their shells handle signals."""
        pods = [
            each for each in team.pods(name) if each["metadata"]["labels"][ATTEMPT] == str(number)
        ]
        logs = [
            team.cluster.kubectl(
                "--namespace", team.name, "logs", each["metadata"]["name"], check=False
            )
            for each in pods
        ]
        return pods if len(pods) == 2 and all("ready" in log for log in logs) else []

    for number in range(times):
        pods = until(lambda number=number: ready(number))
        os.kill(int(processes(random.choice(pods), b"exit 85")[0]), signal.SIGTERM)
    assert ended(team, name) == "succeeded"
    assert restarts(team, name) == (times, 0)


def test_stops_with_nothing_saved_count_from_the_second_on(team: Team) -> None:
    """A run that is asked to stop while its ranks still import, twice: there is no checkpoint
    yet."""
    name = "unsaved"
    launch(team, team.run_config(name, **SETTINGS), "--max-failures", 1)
    events = team.shared / "runs" / name / "events.jsonl"

    def started(number: int) -> list[dict[str, Any]]:
        """Node 0's pod of an attempt, once its supervisor handles signals."""
        lines = events.read_bytes().splitlines() if events.exists() else []
        begun = sum(decode(line).get("event") == "run_start" for line in lines)
        own = {ATTEMPT: str(number), "batch.kubernetes.io/job-completion-index": "0"}
        return [
            pod
            for pod in team.pods(name)
            if begun > number and own.items() <= pod["metadata"]["labels"].items()
        ]

    for number in range(2):
        (pod,) = until(lambda number=number: started(number))
        os.kill(processes(pod)[0], signal.SIGTERM)
    assert ended(team, name) == "succeeded"
    assert restarts(team, name) == (2, 1)
