"""The real stages of `up` and `down` get the plan's own facts and namespaces."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from drillyard.cli.main import main
from drillyard.errors import UserError
from drillyard.provision import helm_releases, kubernetes_stage, up
from drillyard.provision.cluster_plan import ChartRelease
from drillyard.provision.cluster_session import real_stages
from drillyard.provision.google import api, leaks, preflight
from drillyard.provision.provisioner import plan_file

CONFIG = """\
name: lab
platform: gke
location: {project: my-project, region: us-central1, zone: us-central1-b}
machine: a4-highgpu-8g
nodes: 2
consumption: spot
kubernetes: {namespace: team}
cluster: {cpu_pool: {machine: c3-standard-8}}
"""
POOLS = "[{name: more, consumption: on-demand, machine: a3-highgpu-8g, nodes: 3}]"
HARDWARE = "cpu_machines: [{name: c3-standard-8, cloud: gcp, vcpus: 8, cpu_quota: C3_CPUS}]\n"


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    config, hardware = tmp_path / "cluster.yaml", tmp_path / "hardware.yaml"
    config.write_text(CONFIG, encoding="utf-8")
    hardware.write_text(HARDWARE, encoding="utf-8")
    return config, hardware


def test_stages_use_the_facts_and_namespaces_of_the_plan(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = plan_file(files[0], hardware=files[1])
    stages, called = real_stages(planned), dict[str, Any]()
    monkeypatch.setattr(api, "google_apis", lambda project: project)
    monkeypatch.setattr(preflight, "check_project", lambda plan, apis: called.update(check=plan))
    monkeypatch.setattr(
        leaks, "find_leaks", lambda plan, apis, owned, facts: called.update(leaks=facts)
    )
    monkeypatch.setattr(
        kubernetes_stage,
        "write_secret",
        lambda context, namespaces, name: called.update(namespaces=namespaces) or "s/k",
    )
    stages.check_project(planned.plan)
    stages.find_leaks(planned.plan, frozenset())
    assert stages.write_secret("context", "TOKEN") == "s/k"
    assert called["check"] is planned.plan and called["leaks"] is planned.facts
    assert "team" in called["namespaces"]


@pytest.mark.parametrize(("command", "code"), [("status", 3), ("down --yes", 2)])
def test_commands_after_up_take_its_hardware(
    files: tuple[Path, Path],
    command: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(files[0].parent))
    monkeypatch.setenv("KUBECONFIG", str(files[0].parent / "none"))
    name, *options = command.split()
    with pytest.raises(SystemExit) as ended:
        main(["cluster", name, str(files[0]), "--hardware", str(files[1]), *options])
    printed = "".join(capsys.readouterr())
    assert ended.value.code == code, printed
    assert "c3-standard-8" not in printed
    assert "terraform" in printed or "Kubernetes" in printed


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("flow", [False, True])
def test_the_file_for_launch_has_what_set_gave(
    files: tuple[Path, Path],
    written: bool,
    flow: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = files[0]
    path.write_text(CONFIG.replace("cluster: {cpu_pool: {machine: c3-standard-8}}\n", ""))
    if flow:
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()), default_flow_style=True))
    monkeypatch.setattr(up, "bring_up", lambda *_: up.MadeCluster("context", {}))
    words = ["--set", "nodes=16", "--set", f"cluster.pools={POOLS}"]
    with pytest.raises(SystemExit) as ended:
        main(["cluster", "up", str(path), "--yes", *words, *(["--write"] if written else [])])
    printed, errors = capsys.readouterr()
    assert ended.value.code in (0, None), errors
    found = yaml.safe_load(path.read_text() if written else printed)
    assert found["nodes"] == 16 and found["cluster"]["pools"] == yaml.safe_load(POOLS)
    assert found["kubernetes"]["namespace"] == "team"
    assert found["kubernetes"]["queue"] == "lab-spot"
    assert yaml.safe_load(path.read_text())["nodes"] == (16 if written else 2)


def test_a_release_of_another_config_is_not_replaced() -> None:
    name = "drillyard-cluster"
    release = ChartRelease(name, "system", name, "1", {"cluster": "b"})

    def helm(values: dict[str, str] | None) -> Any:
        result = SimpleNamespace(returncode=0, printed_json=lambda: values)
        return SimpleNamespace(run=lambda *words: result)

    for values in (None, {}, {"cluster": "b"}):
        helm_releases.require_own_cluster(helm(values), release)
    with pytest.raises(UserError, match=r"helm uninstall drillyard-cluster --namespace system"):
        helm_releases.require_own_cluster(helm({"cluster": "a"}), release)
