"""What a Slurm cluster that is to be made may not be, and the commands that do not make one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.facts import says
from tests.unit.provision import clusters
from tests.unit.provision.clusters import GOOGLE_MACHINES
from tests.unit.provision.slurm_clusters import MODES, OFFERS, config, plan
from typer.testing import CliRunner

from drillyard.cli.main import app
from drillyard.errors import UserError

LOCATION = {"project": "my-project", "region": "us-central1", "zone": "us-central1-b"}


def creation(**settings: Any) -> dict[str, Any]:
    return {"cluster": settings}


def slurm(**settings: Any) -> dict[str, Any]:
    return creation(head=settings)


def refusal(directory: Path, content: Any) -> list[str]:
    with pytest.raises(UserError) as refused:
        plan(directory, content)
    return str(refused.value).splitlines()


RULES: list[tuple[dict[str, Any], str]] = [
    ({"name": "default"}, "name"),
    ({"name": "a-name-of-21-characters"}, "name"),
    ({"location": {**LOCATION, "project": "My Project"}}, "location.project"),
    ({"location": {**LOCATION, "zone": "us-east5-a"}}, "location.zone"),
    ({"machine": "p5.48xlarge"}, "machine"),
    ({"machine": "a3-highgpu-8g"}, "machine"),
    ({"machine": "a4x-highgpu-4g", "consumption": "reservation", "reservation": "r"}, "machine"),
    ({"network_stack": "tcpxo"}, "network_stack"),
    ({"consumption": "on-demand"}, "consumption"),
    ({"consumption": "flex-start-queued"}, "consumption"),
    ({"consumption": "reservation", "reservation": "a/b"}, "reservation"),
    ({"consumption": "reservation", "reservation": None}, "reservation"),
    ({"reservation": "mine"}, "reservation"),
    ({"storage": {"bucket": "team-runs"}}, "storage.bucket"),
    ({"storage": {"directory": "/scratch"}}, "storage.directory"),
    ({"slurm": {"directory": "/opt/project"}}, "slurm.directory"),
    ({"slurm": {"partition": "a,b"}}, "slurm.partition"),
    ({"slurm": {"partition": "GPU"}}, "slurm.partition"),
    (slurm(home="filestore", home_gib=1024), "cluster.head.home_gib"),
    (slurm(home="lustre", home_gib=9000), "cluster.head.home_gib"),
    (slurm(home="nfs"), "cluster.head.home"),
    (slurm(controller="a4-highgpu-8g"), "cluster.head.controller"),
    (slurm(login="nothing-4"), "cluster.head.login"),
    (creation(head={"home": "lustre"}, deletion_protection=True), "cluster.deletion_protection"),
    (creation(pools=[{"consumption": "spot", "nodes": 2}]), "cluster.pools"),
    (creation(registry=True), "cluster.registry"),
    (creation(version="1.34"), "cluster.version"),
    (creation(cpu_pool={"nodes": 2}), "cluster.cpu_pool"),
    (creation(existing_bucket=True), "cluster.existing_bucket"),
    (creation(bucket_location="US"), "cluster.bucket_location"),
    (creation(private_nodes=False), "cluster.authorized_networks"),
    (creation(authorized_networks=["203.0.113.0/24"]), "cluster.authorized_networks"),
    (creation(disk_gib=9), "cluster.disk_gib"),
    (creation(labels={"goog-a": "x"}), "cluster.labels.goog-a"),
    (creation(state_bucket="goog-state"), "cluster.state_bucket"),
    (creation(ranges={"pods": "100.64.0.0/14"}), "cluster.ranges.pods"),
    (creation(ranges={"nodes": "10.0.0.0/30"}), "cluster.ranges.nodes"),
    (creation(ranges={"data": "192.168.0.0/29"}), "cluster.ranges.data"),
    (
        {
            "machine": "a3-megagpu-8g",
            "consumption": "flex-start",
            **creation(compact_placement=True),
        },
        "cluster.compact_placement",
    ),
    (
        {"consumption": "reservation", "reservation": "r", **creation(compact_placement=True)},
        "cluster.compact_placement",
    ),
]


@pytest.mark.parametrize(
    ("settings", "key"), RULES, ids=[f"{number}-{key}" for number, (_, key) in enumerate(RULES)]
)
def test_a_broken_rule_is_one_line_at_its_key(
    settings: dict[str, Any], key: str, tmp_path: Path
) -> None:
    lines = refusal(tmp_path, config(**settings))
    assert len(lines) == 1, lines
    assert f": {key}" in lines[0]
    assert "cluster.yaml" in lines[0]


def test_what_the_errors_ask_for_is_accepted(tmp_path: Path) -> None:
    """The remedies of the rules above, typed."""
    plan(tmp_path, config(name="a-name-of-21-charact"))
    plan(tmp_path, config(storage={"directory": "/home/runs"}))
    plan(tmp_path, config(slurm={"directory": "/home/ann/project", "partition": "train-1"}))
    plan(tmp_path, config(**slurm(home="filestore", home_gib=10240)))
    plan(tmp_path, config(**slurm(home="lustre", home_gib=18000)))
    plan(tmp_path, config(**slurm(controller="n2-standard-16", login="n2-standard-8")))
    plan(tmp_path, config(cluster={"private_nodes": False, "authorized_networks": ["10.0.0.0/8"]}))


@pytest.mark.parametrize(
    ("machine", "mode"),
    [
        (each.name, mode)
        for each in GOOGLE_MACHINES
        for mode in MODES
        if (each.name, mode) not in OFFERS
    ],
)
def test_a_machine_or_way_of_buying_that_is_not_offered_is_refused(
    machine: str, mode: str, tmp_path: Path
) -> None:
    lines = refusal(tmp_path, config(machine, mode))
    assert {line.split(": ")[1] for line in lines} <= {"consumption", "machine"}


def test_another_platform_has_no_controller_of_slurm(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        clusters.plan(tmp_path, clusters.config(cluster={"head": {"home": "lustre"}}))
    assert ": cluster.head" in str(refused.value)


def run(directory: Path, *words: str) -> Any:
    return CliRunner().invoke(app, ["cluster", *words], env={"COLUMNS": "200"})


def test_the_plan_is_printed_explained_priced_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cluster.yaml").write_text(yaml.safe_dump(config("a3-megagpu-8g", "flex-start")))
    shown = run(tmp_path, "plan", "cluster.yaml", "--price", "40")
    assert shown.exit_code == 0, shown.output
    assert says(shown.stdout, "team-flex-start ... 40.00 ... controller ... next: ... cluster up")
    assert (
        "controller: slurm_conf_template"
        in run(tmp_path, "plan", "cluster.yaml", "--explain").stdout
    )
    assert '"blueprint.yaml"' in run(tmp_path, "plan", "cluster.yaml", "--json").stdout
    written = run(tmp_path, "plan", "cluster.yaml", "--output", "out")
    assert written.exit_code == 0, written.output
    assert Path("out/apply.sh").stat().st_mode & 0o111
    assert run(tmp_path, "plan", "cluster.yaml", "--output", "out", "--overwrite").exit_code == 0


def test_a_slurm_cluster_that_exists_is_not_planned(tmp_path: Path) -> None:
    lines = refusal(tmp_path, {"name": "lab", "platform": "slurm", "slurm": {"partition": "gpu"}})
    assert says(lines[0], "cluster status ... launch ... location ... machine ... consumption")
