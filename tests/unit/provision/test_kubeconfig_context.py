"""The context of a created cluster in the user's kubeconfig."""

from __future__ import annotations

import base64
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.provision.chart_plans import plan
from tests.unit.provision.nebius_clusters import kubernetes_config
from tests.unit.provision.nebius_clusters import plan as nebius_plan

from drillyard.errors import UserError
from drillyard.provision.kubeconfig_context import remove_context, require_programs, write_context

NAME = "gke_p_us-central1_c"
PLAN = plan("g2-standard-96", "spot")
OTHER = {
    "apiVersion": "v1",
    "kind": "Config",
    "current-context": "mine",
    "clusters": [{"name": "mine", "cluster": {"server": "https://192.0.2.1"}}],
    "users": [{"name": "mine", "user": {"token": "t"}}],
    "contexts": [{"name": "mine", "context": {"cluster": "mine", "user": "mine"}}],
}


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kubeconfig that is not there yet, and the program that logs in."""
    plugin = tmp_path / "bin/gke-gcloud-auth-plugin"
    plugin.parent.mkdir()
    plugin.touch(0o755)
    monkeypatch.setenv("PATH", str(plugin.parent))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kube/config"))
    return tmp_path / "kube/config"


def cluster(endpoint: str = "192.0.2.7", authority: str = "Q0E=") -> dict[str, Any]:
    return {"endpoint": endpoint, "master_auth": [{"cluster_ca_certificate": authority}]}


def named(path: Path, key: str) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text())
    return {each["name"]: each[key.removesuffix("s")] for each in content[key]}


def test_it_is_added_and_nothing_else_changes(path: Path) -> None:
    path.parent.mkdir()
    path.write_text(yaml.safe_dump(OTHER))
    assert write_context(PLAN, cluster()) == NAME
    content = yaml.safe_load(path.read_text())
    assert content["current-context"] == "mine"
    assert named(path, "users")["mine"] == {"token": "t"}
    assert named(path, "clusters")[NAME]["server"] == "https://192.0.2.7"
    assert named(path, "users")[NAME]["exec"]["command"] == "gke-gcloud-auth-plugin"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_it_is_made_where_there_is_no_kubeconfig_and_is_replaced_for_a_new_cluster(
    path: Path,
) -> None:
    write_context(PLAN, cluster())
    write_context(PLAN, cluster("192.0.2.8"))
    assert named(path, "clusters")[NAME]["server"] == "https://192.0.2.8"
    assert len(yaml.safe_load(path.read_text())["contexts"]) == 1


def test_one_for_the_same_cluster_that_gcloud_has_written_is_kept(path: Path) -> None:
    own = {"server": "https://192.0.2.7", "certificate-authority-data": "Q0E="}
    path.parent.mkdir()
    path.write_text(
        yaml.safe_dump(
            {
                "clusters": [{"name": "x", "cluster": own}],
                "users": [],
                "contexts": [{"name": NAME, "context": {"cluster": "x", "user": "x"}}],
            }
        )
    )
    before = path.read_text()
    assert write_context(PLAN, cluster()) == NAME
    assert path.read_text() == before


def test_one_of_another_cluster_is_never_replaced(path: Path) -> None:
    path.parent.mkdir()
    foreign = yaml.safe_dump(OTHER).replace("mine", NAME)
    path.write_text(foreign)
    with pytest.raises(UserError, match=f"kubectl config rename-context {NAME}"):
        write_context(PLAN, cluster())
    assert path.read_text() == foreign


@pytest.mark.parametrize("text", ["[]", "contexts: 3", "a: b: c", "\x00"])
def test_what_is_not_a_kubeconfig_is_refused_and_left(text: str, path: Path) -> None:
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(UserError, match=str(path)):
        write_context(PLAN, cluster())
    assert path.read_text() == text


def test_it_goes_with_the_cluster_unless_somebody_else_has_written_it(path: Path) -> None:
    path.parent.mkdir()
    path.write_text(yaml.safe_dump(OTHER))
    write_context(PLAN, cluster())
    remove_context(PLAN)
    assert set(named(path, "contexts")) == {"mine"}
    foreign = yaml.safe_dump(OTHER).replace("mine", NAME)
    path.write_text(foreign)
    remove_context(PLAN)
    assert path.read_text() == foreign


OF_B = replace(PLAN, project="b")
"""A cluster of the same name and with the same context, in another project."""


def test_one_of_a_cluster_of_the_same_name_in_another_project_is_neither_replaced_nor_removed(
    path: Path,
) -> None:
    write_context(PLAN, cluster())
    before = path.read_text()
    with pytest.raises(UserError, match=r"192\.0\.2\.7.*\n.*\n.*kubernetes\.context"):
        write_context(OF_B, cluster("192.0.2.8"))
    remove_context(OF_B)
    assert path.read_text() == before
    free = {"kubernetes": {"context": "free"}}
    assert write_context(replace(OF_B, launch_settings=free), cluster("192.0.2.8")) == "free"
    remove_context(replace(OF_B, launch_settings=free))
    assert set(named(path, "contexts")) == {NAME}


def test_a_private_address_that_two_control_planes_share_does_not_make_them_one(path: Path) -> None:
    write_context(PLAN, cluster("172.16.0.2", "Q0E="))
    with pytest.raises(UserError, match="kubectl config rename-context"):
        write_context(OF_B, cluster("172.16.0.2", "Q0Ey"))


@pytest.mark.parametrize(
    ("key", "entry"), [("cluster", {"server": "https://192.0.2.1"}), ("user", {"token": "t"})]
)
def test_a_cluster_or_user_of_that_name_that_is_not_ours_is_neither_replaced_nor_removed(
    path: Path, key: str, entry: dict[str, str]
) -> None:
    path.parent.mkdir()
    others = {**OTHER, f"{key}s": [*OTHER[f"{key}s"], {"name": NAME, key: entry}]}
    path.write_text(yaml.safe_dump(others))
    with pytest.raises(UserError, match=f"{key} {NAME} .*\nSet kubernetes.context"):
        write_context(PLAN, cluster())
    remove_context(PLAN)
    assert yaml.safe_load(path.read_text()) == others


def test_what_another_context_uses_stays_after_down(path: Path) -> None:
    write_context(PLAN, cluster())
    content = yaml.safe_load(path.read_text())
    content["contexts"].append({"name": "mine", "context": {"cluster": NAME, "user": NAME}})
    path.write_text(yaml.safe_dump(content))
    remove_context(PLAN)
    assert set(named(path, "contexts")) == {"mine"}
    assert NAME in named(path, "clusters") and NAME in named(path, "users")


def test_entries_that_a_deleted_context_left_behind_are_used_again_and_removed(path: Path) -> None:
    write_context(PLAN, cluster())
    content = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**content, "contexts": []}))
    write_context(PLAN, cluster("192.0.2.8"))
    assert named(path, "clusters")[NAME]["server"] == "https://192.0.2.8"
    remove_context(PLAN)
    content = yaml.safe_load(path.read_text())
    assert content["contexts"] == content["clusters"] == content["users"] == []


def test_a_link_to_a_kubeconfig_stays_a_link(path: Path) -> None:
    path.parent.mkdir()
    real = path.with_name("real")
    real.write_text(yaml.safe_dump(OTHER))
    path.symlink_to(real)
    write_context(PLAN, cluster())
    assert path.is_symlink() and NAME in named(real, "contexts")


def test_without_the_program_that_logs_in_nothing_is_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(path.parent))
    with pytest.raises(UserError, match="helm: is not installed"):
        require_programs(PLAN)
    path.parent.mkdir(exist_ok=True)
    (path.parent / "helm").write_text("#!/bin/sh\n")
    (path.parent / "helm").chmod(0o755)
    with pytest.raises(UserError, match="gcloud components install gke-gcloud-auth-plugin"):
        require_programs(PLAN)
    assert not path.exists()


def test_a_cluster_of_nebius_is_reached_with_nebius_own_program(path: Path, tmp_path: Path) -> None:
    made = nebius_plan(tmp_path, kubernetes_config())
    authority = "-----BEGIN CERTIFICATE-----\n"
    place = {"public_endpoint": "https://pu.mk8scluster-e00.mk8s.eu-north1.nebius.cloud:443"}
    status = {"endpoints": place, "auth": {"cluster_ca_certificate": authority}}
    name = write_context(made, {"name": "team", "status": {"control_plane": status}})
    assert name == "nebius_project-e00abc_team"
    reached = named(path, "clusters")[name]
    assert reached["server"] == place["public_endpoint"]
    assert base64.b64decode(reached["certificate-authority-data"]).decode() == authority
    login = named(path, "users")[name]["exec"]
    assert [login["command"], *login["args"]] == [
        *("nebius", "mk8s", "v1", "cluster", "get-token", "--format", "json")
    ]
    # While it is being made it has no address.
    for status in (None, {"control_plane": None}):
        with pytest.raises(UserError, match="no address yet"):
            write_context(made, {"name": "team", "status": status})
    remove_context(made)
    assert yaml.safe_load(path.read_text())["contexts"] == []
