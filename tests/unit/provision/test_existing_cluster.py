"""A cluster that somebody else has made (platform kubernetes): charts, and nothing of a cloud."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drillyard.cli.main import main
from drillyard.errors import UserError
from drillyard.provision.cluster_session import Request
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


def test_up_installs_the_charts_and_asks_no_cloud(config: Path) -> None:
    installed: list[Any] = []
    stages = SimpleNamespace(
        require_programs=lambda plan: None,
        install_releases=lambda plan, context: installed.append(context),
    )
    made = bring_up(request(config), stages)  # type: ignore[arg-type]
    assert (installed, made.context, made.secrets) == (["ours"], "ours", {})


def test_a_secret_is_refused_with_what_to_do(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "t")
    with pytest.raises(UserError, match="kubectl create secret generic"):
        bring_up(request(config), SimpleNamespace(), ["TOKEN"])  # type: ignore[arg-type]


@pytest.mark.parametrize("command", ["down --yes", "leaks", "plan --check"])
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
