"""What a place for jobs of Vertex AI may not be: every rule names the key and its line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.provision.clusters import plan
from tests.unit.provision.job_clusters import NETWORK, NUMBER, REFUSED, config

from drillyard.errors import UserError


def located(**changes: Any) -> dict[str, Any]:
    place = {"project": "my-project", "region": "us-central1", **changes}
    return {"location": {key: value for key, value in place.items() if value is not None}}


def creation(**settings: Any) -> dict[str, Any]:
    return {"cluster": settings}


def vertex(**settings: Any) -> dict[str, Any]:
    return {"vertex": settings}


RULES: list[tuple[dict[str, Any], str]] = [
    (located(project="My Project"), "location.project"),
    (located(region="us-central1-a"), "location.region"),
    (located(region="us-centrl1"), "location.region"),
    (located(region=None), "location.region"),
    (located(zone="us-east5-a"), "location.zone"),
    ({"machine": "p5.48xlarge"}, "machine"),
    ({"machine": "a3-megagpu-9g"}, "machine"),
    ({"network_stack": "gib"}, "network_stack"),
    ({"consumption": "calendar", "reservation": "mine"}, "consumption"),
    ({"consumption": "flex-start-queued"}, "consumption"),
    ({"consumption": "reservation", "reservation": None}, "reservation"),
    ({"consumption": "reservation", "reservation": "mine", **located()}, "location.zone"),
    ({"consumption": "reservation", "reservation": "a/b"}, "reservation"),
    ({"storage": {}}, "storage.bucket"),
    ({"storage": {"bucket": "Runs"}}, "storage.bucket"),
    ({"storage": {"bucket": "my-project-team-tfstate"}}, "storage.bucket"),
    ({"consumption": "flex-start", **vertex(timeout_hours=200)}, "vertex.timeout_hours"),
    (vertex(max_wait_hours=3), "vertex.max_wait_hours"),
    (vertex(service_account="me"), "vertex.service_account"),
    (vertex(network="team"), "vertex.network"),
    (vertex(network=NETWORK, reserved_ip_ranges=["x"]), "vertex.reserved_ip_ranges"),
    (vertex(labels={"Team": "a"}), "vertex.labels"),
    ({"name": "default", **vertex(network=NETWORK.replace("team", "default"))}, "name"),
    (creation(labels={"drillyard-cluster": "x"}), "cluster.labels.drillyard-cluster"),
    (creation(disk_gib=500), "cluster.disk_gib"),
    (creation(version="1.34"), "cluster.version"),
    (creation(private_nodes=False), "cluster.private_nodes"),
    (creation(compact_placement=True), "cluster.compact_placement"),
    (creation(deletion_protection=True), "cluster.deletion_protection"),
    (creation(pools=[{"consumption": "spot", "name": "other", "nodes": 2}]), "cluster.pools"),
    (creation(ranges={"nodes": "10.0.0.0/20"}), "cluster.ranges.nodes"),
    (creation(ranges={"data": "10.0.0.0/16"}), "cluster.ranges.data"),
    (
        {**vertex(network=NETWORK), **creation(ranges={"data": "10.0.0.0/28"})},
        "cluster.ranges.data",
    ),
    ({**vertex(network=NETWORK), **creation(ranges={"data": "8.8.0.0/16"})}, "cluster.ranges.data"),
    (creation(existing_bucket=True, bucket_keep_versions=2), "cluster.bucket_keep_versions"),
]


def refusal(directory: Path, content: dict[str, Any]) -> list[str]:
    with pytest.raises(UserError) as refused:
        plan(directory, content)
    return str(refused.value).splitlines()


@pytest.mark.parametrize(("settings", "key"), RULES)
def test_each_rule_names_its_key_once_with_its_place(
    tmp_path: Path, settings: dict[str, Any], key: str
) -> None:
    content = config(**settings)
    lines = refusal(tmp_path, content)
    assert [line.split(": ")[1] for line in lines] == [key], lines
    number = int(lines[0].split(":")[1])
    last = key.rpartition(".")[2]
    text = yaml.safe_dump(content, sort_keys=False).splitlines()
    written = [index for index, line in enumerate(text, 1) if f"{last}:" in line]
    assert number in written or not written


@pytest.mark.parametrize(("machine", "mode"), REFUSED)
def test_what_the_service_does_not_sell_is_refused_before_rendering(
    tmp_path: Path, machine: str, mode: str
) -> None:
    lines = refusal(tmp_path, config(machine, mode))
    keys = {line.split(": ")[1] for line in lines}
    assert keys <= {"machine", "consumption"} and keys


def test_a_network_by_name_says_how_to_find_the_number(tmp_path: Path) -> None:
    [line] = refusal(tmp_path, config(vertex={"network": "team"}))
    assert "projectNumber" in line and NUMBER not in line
