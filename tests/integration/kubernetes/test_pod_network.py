"""What network profiles ask of a cluster, on real pods: a daemon beside the ranks, and namespaces
that forbid it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integration.kubernetes.cluster import IMAGE, ROOT, Cluster, tool
from tests.integration.kubernetes.team import Team, until
from tests.integration.kubernetes.team_runs import ended, handle, rights

__all__ = ["rights"]


def config(team: Team, **settings: Any) -> Path:
    """The team's cluster.yaml with other settings; None: without that one."""
    path = team.cluster_config()
    changed = {**yaml.safe_load(path.read_text()), **settings}
    path.write_text(
        yaml.safe_dump({name: value for name, value in changed.items() if value is not None})
    )
    return path


def workload(team: Team, name: str, **settings: Any) -> Path:
    path = team.directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"name": name, "workload": settings}))
    return path


def test_a_profile_that_the_namespace_forbids_is_refused_before_anything_is_made(
    team: Team,
) -> None:
    run = workload(team, "mega", command=["true"])
    cluster = config(team, machine="a3-megagpu-8g", network_stack=None, processes_per_node=None)
    refused = team.drillyard("launch", run, "--cluster", cluster, check=False)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert "violates PodSecurity" in refused.stderr and "hostPath" in refused.stderr
    assert "pod-security.kubernetes.io/enforce=privileged" in refused.stderr
    assert (
        team.cluster.get(
            "--namespace", team.name, "jobsets,configmaps", "-l", "drillyard/run=mega"
        )["items"]
        == []
    )


def test_a_command_per_gpu_runs_once_per_rank_and_its_lines_are_known_by_rank(team: Team) -> None:
    code = "import os; print('this is', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
    run = workload(team, "per-gpu", per="gpu", command=["python", "-c", code])
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "HOME": "/tmp",
        "USER": "trainer",
    }
    cluster = config(team, processes_per_node=2, environment=environment)
    team.drillyard("launch", run, "--cluster", cluster)
    assert ended(team, "per-gpu") == "succeeded"
    lines = team.drillyard("runs", "logs", handle(team, "per-gpu")).stdout
    assert sorted(
        line.partition("this is ")[2] for line in lines.splitlines() if "this is" in line
    ) == [f"{rank} of 4" for rank in range(4)]
    own = team.drillyard("runs", "logs", handle(team, "per-gpu"), "--rank", "3").stdout
    assert "this is 3 of 4" in own and "this is 2" not in own


@pytest.fixture
def open_namespace(cluster: Cluster) -> str:
    name = "open"
    labels = {"pod-security.kubernetes.io/enforce": "privileged"}
    cluster.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    )
    until(
        lambda: cluster.kubectl(
            "--namespace", name, "get", "serviceaccount", "default", check=False
        )
    )
    return name


def test_a_daemon_starts_before_the_ranks_and_ends_with_them(
    team: Team, cluster: Cluster, open_namespace: str
) -> None:
    shared = team.shared / "daemon"
    shared.mkdir(mode=0o777)
    host = {"name": "host", "hostPath": str(shared), "mountPath": "/host"}
    daemon = (
        "trap 'touch /host/ended-$HOSTNAME; exit 0' TERM; touch /host/ready-$HOSTNAME; sleep 600 &"
        " wait"
    )
    sidecar = {
        "name": "daemon",
        "image": IMAGE,
        "command": ["/bin/sh", "-c", daemon],
        "environment": {},
    }
    values = {
        **{"nodes": 2, "image": IMAGE, "imagePullPolicy": "Never", "gracePeriodSeconds": 60},
        "command": ["/bin/sh", "-c", "until test -e /host/ready-$HOSTNAME; do sleep 0.1; done"],
        "hostPaths": [{**host, "readOnly": True}],
        "network": {
            "sidecar": {
                **sidecar,
                "capabilities": ["NET_ADMIN"],
                "devices": ["/dev/null"],
                "hostPaths": [host],
            }
        },
    }
    file = team.directory / "values.json"
    file.write_text(json.dumps(values))
    chart = str(ROOT / "charts/drillyard-run")
    argv = [
        tool("helm"),
        "template",
        "beside",
        chart,
        "--namespace",
        open_namespace,
        "--values",
        str(file),
    ]
    text = subprocess.run(
        argv, check=True, capture_output=True, text=True, env=team.environment
    ).stdout
    documents = [each for each in yaml.safe_load_all(text) if each]
    for each in documents:
        each["metadata"]["namespace"] = open_namespace
    cluster.apply(*documents)

    def completed() -> bool:
        found = (
            cluster.get("--namespace", open_namespace, "jobset/beside")
            .get("status", {})
            .get("conditions", ())
        )
        return "Completed" in [each["type"] for each in found]

    until(completed)
    assert len(list(shared.glob("ready-*"))) == len(list(shared.glob("ended-*"))) == 2
