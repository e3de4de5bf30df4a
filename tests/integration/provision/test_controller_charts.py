"""JobSet and Kueue by their own projects' charts, with the values of a plan, on a cluster without
either. Their images are not there, so their programs do not run: that is said."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.integration.kubernetes.cluster import TOOLS, started, tool
from tests.integration.provision.kubernetes_admin import Admin
from tests.unit.provision.chart_plans import plan

from drillyard.provision.cluster_chart import JOBSET_VERSION, KUEUE_VERSION

CHARTS = {
    "jobset": TOOLS / f"jobset-chart-v{JOBSET_VERSION}.tgz",
    "kueue": TOOLS / f"recent-kueue-chart-v{KUEUE_VERSION}.tgz",
}
FILE = """
name: c
platform: gke
location: {project: p, region: us-central1, zone: us-central1-b}
machine: a3-ultragpu-8g
nodes: 2
consumption: spot
storage: {bucket: my-bucket}
"""


@pytest.fixture(scope="module")
def admin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Admin]:
    with started(tmp_path_factory.mktemp("bare"), kueue="") as cluster:
        made = Admin(cluster, tmp_path_factory.mktemp("admin"))
        yield made
        made.close()


def install(admin: Admin, name: str) -> str:
    """The expression that installs one release of the plan, by the chart of its project's module;
    the registry is not reached. Its objects are there when its programs are waited for."""
    path = admin.directory / "cluster.yaml"
    path.write_text(FILE)
    part = (
        "dataclasses.replace(plan, releases=tuple(dataclasses.replace(each,"
        f" chart={str(CHARTS[name])!r}) for each in plan.releases if each.name == {name!r}))"
    )
    return f"stage.install_releases({part}, context, ready_seconds=3, notice=said.append)"


@pytest.mark.parametrize("name", CHARTS)
def test_a_controller_is_installed_and_why_it_does_not_run_is_said(name: str, admin: Admin) -> None:
    refused = admin.stage(install(admin, name), admin.directory / "cluster.yaml")["refused"]
    assert f"release {name} is not ready" in refused
    assert f"Deployment {name}-system/" in refused and "pod " in refused
    groups = {"jobset": "jobset.x-k8s.io/v1alpha2", "kueue": "kueue.x-k8s.io/v1beta2"}
    served = admin.cluster.kubectl("api-versions").split()
    assert groups[name] in served
    (deployment,) = admin.cluster.get("--namespace", f"{name}-system", "deployments")["items"]
    assert deployment["spec"]["replicas"] == 1


def test_kueue_has_the_configuration_of_the_plan(admin: Admin) -> None:
    found = admin.cluster.get("--namespace", "kueue-system", "configmaps")["items"]
    key = "controller_manager_config.yaml"
    (text,) = [each["data"][key] for each in found if key in each.get("data", {})]
    release = plan("a3-ultragpu-8g", "spot").releases[1]
    given = release.values["managerConfig"]["controllerManagerConfigYaml"]
    # The chart adds what it knows itself, such as the names of its certificates.
    assert yaml.safe_load(given).items() <= yaml.safe_load(text).items()


def test_kueue_accepts_the_configuration_of_the_plan(admin: Admin, tmp_path: Path) -> None:
    """It decodes strictly: an unknown field stops it before it looks for a cluster."""
    release = plan("a3-ultragpu-8g", "spot").releases[1]
    given = yaml.safe_load(release.values["managerConfig"]["controllerManagerConfigYaml"])
    said = {}
    for title, more in (("given", {}), ("unknown", {"unknownField": True})):
        file = tmp_path / f"{title}.yaml"
        file.write_text(yaml.safe_dump({**given, **more}))
        process = subprocess.Popen(
            [tool("recent-kueue"), "--config", str(file)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={"KUBECONFIG": str(tmp_path / "none")},
        )
        said[title] = process.communicate(timeout=60)[1]
    assert "unknownField" in said["unknown"]
    assert "unable to load the configuration" not in said["given"].lower()


def test_a_release_whose_record_is_lost_is_installed_again(admin: Admin) -> None:
    """A command of ours has begun it, so it is not taken for somebody else's."""
    path = admin.directory / "cluster.yaml"
    admin.cluster.kubectl("--namespace", "jobset-system", "delete", "secrets", "--all")
    states = admin.value("stage.cluster_objects_status(plan, context)", path)["releases"]
    assert {each["name"]: each["state"] for each in states}["jobset"] == "missing"
    again = admin.stage(install(admin, "jobset"), path)
    assert "release jobset is not ready" in again["refused"]
