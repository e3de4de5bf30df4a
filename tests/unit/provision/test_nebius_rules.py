"""What a cluster of Nebius may not be: every rule names the key and what to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.facts import says
from tests.unit.provision.nebius_clusters import ACCESS, RESERVED, config, plan

from drillyard.errors import UserError
from drillyard.provision.cluster_plan import ClusterPlan

PROJECT = "project-e00abc"
SMALL = "gpu-h100-sxm_1gpu-16vcpu-200gb"
OWN: dict[str, Any] = {"identity_file": "key", "filesystem_gib": 2048}


def place(region: str = "eu-north1", **further: Any) -> dict[str, Any]:
    return {"location": {"project": PROJECT, "region": region, **further}}


def section(**settings: Any) -> dict[str, Any]:
    return {"nebius": {**OWN, **settings}}


def creation(**settings: Any) -> dict[str, Any]:
    return {"cluster": {**ACCESS, **settings}}


def refusal(directory: Path, **settings: Any) -> list[str]:
    with pytest.raises(UserError) as refused:
        plan(directory, config(**settings))
    return str(refused.value).splitlines()


RULES: list[tuple[dict[str, Any], str]] = [
    (place() | {"location": {"project": "my-project", "region": "eu-north1"}}, "location.project"),
    (place(zone="eu-north1-a"), "location.zone"),
    (place("eu-north9"), "location.region"),
    (place("us-central1"), "location.region"),
    ({"machine": "gpu-b200-sxm", **place("eu-north1")}, "location.region"),
    ({"machine": "p5.48xlarge"}, "machine"),
    ({"machine": "gpu-h100-sxm_4gpu-64vcpu-800gb"}, "machine"),
    ({"network_stack": "gib"}, "network_stack"),
    ({"machine": SMALL, "network_stack": "infiniband"}, "network_stack"),
    ({"machine": SMALL, **section(fabric="fabric-2")}, "nebius.fabric"),
    (section(fabric="fabric-7"), "nebius.fabric"),
    (section(fabric="fabric-77"), "nebius.fabric"),
    ({"nodes": 1, **section(fabric="fabric-2")}, "nebius.fabric"),
    ({"network_stack": "ethernet", **section(fabric="fabric-2")}, "nebius.fabric"),
    ({"consumption": "flex-start"}, "consumption"),
    ({"consumption": "reservation", "reservation": "mine"}, "reservation"),
    ({"consumption": "reservation", "reservation": None}, "reservation"),
    ({"reservation": RESERVED}, "reservation"),
    ({"storage": {"directory": "/mnt/shared", "bucket": "runs"}}, "storage.bucket"),
    ({"storage": {}}, "storage.directory"),
    ({"storage": {"directory": "shared"}}, "storage.directory"),
    ({"storage": {"directory": "/mnt/a; reboot"}}, "storage.directory"),
    (section(filesystem_gib=None), "nebius.filesystem_gib"),
    (section(filesystem="computefilesystem-e00abc"), "nebius.filesystem_gib"),
    (section(filesystem="lab"), "nebius.filesystem"),
    (section(boot_image="Ubuntu 24"), "nebius.boot_image"),
    (section(identity_file=None), "nebius.identity_file"),
    (section(identity_file="none"), "nebius.identity_file"),
    (section(identity_file="nowhere"), "nebius.identity_file"),
    (section(user="Ann"), "nebius.user"),
    (section(startup_script="none.sh"), "nebius.startup_script"),
    (section(startup_script="words.sh"), "nebius.startup_script"),
    ({"cluster": None}, "cluster.private_nodes"),
    ({"cluster": {"private_nodes": False}}, "cluster.authorized_networks"),
    (creation(version="1.34"), "cluster.version"),
    (creation(registry=False), "cluster.registry"),
    (creation(existing_bucket=True), "cluster.existing_bucket"),
    (creation(deletion_protection=True), "cluster.deletion_protection"),
    (creation(ranges={"pods": "100.64.0.0/14"}), "cluster.ranges.pods"),
    (creation(pools=[{"consumption": "spot", "nodes": 2}]), "cluster.pools"),
    (creation(labels={"drillyard-cluster": "x"}), "cluster.labels.drillyard-cluster"),
    ({"gce": {"os_login": True}}, "gce"),
]


@pytest.mark.parametrize(
    ("settings", "key"), RULES, ids=[f"{number}-{key}" for number, (_, key) in enumerate(RULES)]
)
def test_a_broken_rule_is_one_line_at_its_key(
    settings: dict[str, Any], key: str, tmp_path: Path
) -> None:
    (tmp_path / "words.sh").write_text("echo words\n")
    lines = refusal(tmp_path, **settings)
    assert len(lines) == 1, lines
    assert f": {key}" in lines[0]
    assert "cluster.yaml" in lines[0]


def test_all_mistakes_of_a_file_are_one_error(tmp_path: Path) -> None:
    lines = refusal(
        tmp_path,
        location={"project": "mine", "region": "us-central1", "zone": "z"},
        nebius={},
        cluster={"version": "1.30"},
    )
    assert {line.split(": ")[1] for line in lines} == {
        *("location.project", "location.region", "location.zone"),
        *("nebius.identity_file", "nebius.filesystem_gib"),
        *("cluster.private_nodes", "cluster.version"),
    }


def accepted(directory: Path, **settings: Any) -> ClusterPlan:
    return plan(directory, config(**settings))


def test_what_the_errors_ask_for_is_accepted(tmp_path: Path) -> None:
    """The remedies of the rules above, typed."""
    accepted(tmp_path, **section(fabric="fabric-4"))
    accepted(tmp_path, machine=SMALL, network_stack="ethernet")
    accepted(tmp_path, machine="gpu-b200-sxm", **place("us-central1"))
    accepted(tmp_path, storage={}, **section(filesystem_gib=None))
    accepted(tmp_path, **section(filesystem_gib=None, filesystem="computefilesystem-e00abc"))
    accepted(tmp_path, consumption="reservation", reservation=RESERVED)


def test_the_errors_name_the_regions_and_fabrics_that_there_are(tmp_path: Path) -> None:
    (line,) = refusal(tmp_path, **place("us-central1"))
    assert says(line, "us-central1 has no gpu-h100-sxm ... eu-north1")
    (line,) = refusal(tmp_path, **section(fabric="fabric-5"))
    assert says(line, "'fabric-5' ... eu-north1 ... fabric-2 or fabric-3 or fabric-4 or fabric-6")
    (line,) = refusal(tmp_path, machine=SMALL, network_stack="infiniband")
    assert says(line, "1 GPU ... 8 ... machine: gpu-h100-sxm ... network_stack: ethernet")
