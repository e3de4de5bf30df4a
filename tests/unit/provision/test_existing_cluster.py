"""A cluster that somebody else has made (platform kubernetes): charts, and nothing of a cloud."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drillyard.cli.main import main
from drillyard.errors import UserError
from drillyard.provision.cluster_session import Request
from drillyard.provision.existing_objects import ComparedCluster, ObjectState
from drillyard.provision.provisioner import plan_file
from drillyard.provision.up import bring_up

CONFIG = """\
name: team-a
platform: kubernetes
nodes: 2
machine: gpu-h100-sxm
storage: {directory: /data}
kubernetes: {namespace: team-a, queue: gpus, volume_claim: shared, context: ours}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(CONFIG, encoding="utf-8")
    return path


def request(config: Path) -> Request:
    return Request(plan_file(config).plan, "up", "down", yes=True)


def stages(installed: list[Any], *states: ObjectState) -> Any:
    return SimpleNamespace(
        require_programs=lambda plan: None,
        compare_existing=lambda plan, context: ComparedCluster(
            replace(plan, name="adapted"), states
        ),
        install_releases=lambda plan, context: installed.append((plan.name, context)),
    )


def test_up_installs_the_charts_as_the_cluster_needs_them_and_asks_no_cloud(config: Path) -> None:
    installed: list[Any] = []
    made = bring_up(request(config), stages(installed))
    assert (installed, made.context, made.secrets) == ([("adapted", "ours")], "ours", {})


def test_up_says_what_it_uses_and_changes_nothing_where_something_is_in_the_way(
    config: Path,
) -> None:
    installed: list[Any] = []
    said: list[str] = []
    used = ObjectState("LocalQueue", "team-a/gpus", "used", "is not ours")
    asked = replace(request(config), report=said.append)
    bring_up(asked, stages(installed, used))
    assert any("LocalQueue" in each and "team-a/gpus" in each for each in said)
    conflict = ObjectState("ClusterQueue", "gpus", "conflict", "no quota")
    missing = ObjectState("Namespace", "team-a", "missing", "kubectl create namespace team-a")
    with pytest.raises(UserError, match=r"ClusterQueue gpus: no quota\nNamespace team-a: kubectl"):
        bring_up(asked, stages(installed, conflict, missing))
    assert len(installed) == 1


@pytest.mark.parametrize(("option", "code"), [("", 0), ("--check", 3)])
def test_the_plan_has_queue_and_namespace_also_where_the_cluster_cannot_be_asked(
    config: Path,
    option: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(config.with_name("none")))
    with pytest.raises(SystemExit) as ended:
        main(["cluster", "plan", str(config), *option.split()])
    assert ended.value.code == code
    text = capsys.readouterr().out
    assert "16 nvidia.com/gpu" in text and "on the cluster: unknown" in text
    assert {("queue", "gpus"), ("namespace", "team-a")} <= {
        tuple(line.split()[:2]) for line in text.splitlines()
    }


def test_a_secret_is_refused_with_what_to_do(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "t")
    with pytest.raises(UserError, match="kubectl create secret generic"):
        bring_up(request(config), SimpleNamespace(), ["TOKEN"])  # type: ignore[arg-type]


@pytest.mark.parametrize("command", ["down --yes", "leaks"])
def test_nothing_of_a_cloud_is_removed_or_looked_for(
    config: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *options = command.split()
    with pytest.raises(SystemExit) as ended:
        main(["cluster", name, str(config), *options])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "platform: kubernetes" in error
    assert "helm uninstall drillyard-cluster --namespace drillyard-system" in error
