"""What a cluster of virtual machines may not be: every rule names the key and what to write."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.facts import says
from tests.unit.provision.clusters import GOOGLE_MACHINES
from tests.unit.provision.vm_clusters import BARE_METAL, MODES, NEEDS_DAEMON, config, plan

from drillyard.errors import UserError
from drillyard.hardware import catalog

LOCATION = {"project": "my-project", "region": "us-central1", "zone": "us-central1-b"}
DAEMON = {"machine": "a3-highgpu-8g", "network_stack": None}
BY_KEY = {"gce": {"identity_file": "key"}}
LOGIN = {"os_login": True, "user": "me"}
COMPACT = {"cluster": {"compact_placement": True}}
PUBLIC = {"private_nodes": False}


def located(**changes: Any) -> dict[str, Any]:
    return {"location": {**LOCATION, **changes}}


def creation(**settings: Any) -> dict[str, Any]:
    return {"cluster": settings}


def refusal(directory: Path, **settings: Any) -> list[str]:
    with pytest.raises(UserError) as refused:
        plan(directory, config(**settings))
    return str(refused.value).splitlines()


RULES: list[tuple[dict[str, Any], str]] = [
    ({"name": "default"}, "name"),
    (located(project="My Project"), "location.project"),
    (located(zone="us-central1"), "location.zone"),
    (located(zone="us-east5-a"), "location.zone"),
    (located(region="us"), "location.region"),
    ({"location": {"project": "my-project", "zone": "us-central9-b"}}, "location.zone"),
    ({"machine": "p5.48xlarge"}, "machine"),
    ({"machine": "a4-highgpu-9g"}, "machine"),
    ({"machine": BARE_METAL, "consumption": "reservation"}, "machine"),
    ({"network_stack": "tcpxo"}, "network_stack"),
    (DAEMON, "network_stack"),
    ({"consumption": "flex-start-queued"}, "consumption"),
    ({"gce": {**LOGIN, "max_run_hours": 24}}, "gce.max_run_hours"),
    ({"consumption": "flex-start", "gce": {**LOGIN, "max_run_hours": 169}}, "gce.max_run_hours"),
    ({"consumption": "flex-start", "gce": {**LOGIN, "max_run_hours": 0.1}}, "gce.max_run_hours"),
    (
        {"consumption": "flex-start", "cluster": {"deletion_protection": True}},
        "cluster.deletion_protection",
    ),
    ({"consumption": "flex-start", "machine": "a3-megagpu-8g", **COMPACT}, "cluster.compact"),
    ({"consumption": "on-demand"}, "consumption"),
    ({"consumption": "reservation", "reservation": "a/b"}, "reservation"),
    ({"consumption": "calendar", "reservation": None}, "reservation"),
    ({"reservation": "mine"}, "reservation"),
    ({"machine": "a4x-highgpu-4g", "consumption": "reservation", "nodes": 19}, "nodes"),
    (
        {"machine": "a3-megagpu-8g", "consumption": "on-demand", "nodes": 1501},
        "nodes",
    ),
    ({"storage": {"bucket": "Runs"}}, "storage.bucket"),
    ({"storage": {"bucket": "my-project-team-tfstate"}}, "storage.bucket"),
    (creation(state_bucket="goog-state"), "cluster.state_bucket"),
    (creation(labels={"goog-a": "x"}), "cluster.labels.goog-a"),
    (creation(disk_gib=9), "cluster.disk_gib"),
    (creation(bucket_recover_days=6), "cluster.bucket_recover_days"),
    ({"storage": {}, **creation(existing_bucket=True)}, "cluster.existing_bucket"),
    (creation(ranges={"nodes": "10.0.0.0/30"}), "cluster.ranges.nodes"),
    (creation(ranges={"pods": "100.64.0.0/14"}), "cluster.ranges.pods"),
    (creation(ranges={"services": "10.128.0.0/20"}), "cluster.ranges.services"),
    (creation(ranges={"nodes": "10.0.0.0/16", "data": "10.0.0.0/8"}), "cluster.ranges.data"),
    (creation(version="1.34"), "cluster.version"),
    (creation(release_channel="rapid"), "cluster.release_channel"),
    (creation(cpu_pool={"nodes": 2}), "cluster.cpu_pool"),
    (creation(max_pods_per_node=64), "cluster.max_pods_per_node"),
    (creation(gpu_driver="latest"), "cluster.gpu_driver"),
    (creation(images=[f"ubuntu:24.04@sha256:{'0' * 64}"]), "cluster.images"),
    (creation(pools=[{"consumption": "spot", "nodes": 2}]), "cluster.pools"),
    (creation(pools=[{"consumption": "spot", "nodes": 2, "machine": "x"}]), "cluster.pools"),
    (creation(private_nodes=False), "cluster.authorized_networks"),
    (creation(authorized_networks=["203.0.113.0/24"]), "cluster.authorized_networks"),
    (
        creation(authorized_networks=["203.0.113.1/24"], **PUBLIC),
        "cluster.authorized_networks",
    ),
    (
        {
            "machine": "a4x-highgpu-4g",
            "consumption": "reservation",
            **creation(compact_placement=True),
        },
        "cluster.compact_placement",
    ),
    ({"gce": {}}, "gce.identity_file"),
    ({"gce": {"identity_file": "none"}}, "gce.identity_file"),
    ({"gce": {"identity_file": "nowhere"}}, "gce.identity_file"),
    ({"gce": {"identity_file": "private"}}, "gce.identity_file"),
    ({"gce": {"os_login": True}}, "gce.user"),
    ({"gce": {**BY_KEY["gce"], "user": "-ann"}}, "gce.user"),
    ({"gce": {**BY_KEY["gce"], "user": "ann@example.com"}}, "gce.user"),
    ({"gce": {**BY_KEY["gce"], "user": "Ann"}}, "gce.user"),
    ({"gce": {**BY_KEY["gce"], "boot_image": "debian-12"}}, "gce.boot_image"),
    ({"gce": {**BY_KEY["gce"], "startup_script": "none.sh"}}, "gce.startup_script"),
    ({"gce": {**BY_KEY["gce"], "startup_script": "large.sh"}}, "gce.startup_script"),
    ({"gce": {**BY_KEY["gce"], "startup_script": "words.sh"}}, "gce.startup_script"),
    ({"gce": {**BY_KEY["gce"], "startup_script": "binary.sh"}}, "gce.startup_script"),
    ({"kubernetes": {"queue": "q"}}, "kubernetes"),
]


@pytest.mark.parametrize(
    ("settings", "key"), RULES, ids=[f"{number}-{key}" for number, (_, key) in enumerate(RULES)]
)
def test_a_broken_rule_is_one_line_at_its_key(
    settings: dict[str, Any], key: str, tmp_path: Path
) -> None:
    (tmp_path / "private.pub").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    (tmp_path / "large.sh").write_text("#!/bin/sh\n" + "#" * (256 * 1024))
    (tmp_path / "words.sh").write_text("echo words\n")
    (tmp_path / "binary.sh").write_bytes(b"#!/bin/sh\n\xff\xfe")
    lines = refusal(tmp_path, **settings)
    assert len(lines) == 1, lines
    assert f": {key}" in lines[0]
    assert "cluster.yaml" in lines[0]


def test_all_mistakes_of_a_file_are_one_error(tmp_path: Path) -> None:
    lines = refusal(
        tmp_path,
        **located(zone="us-east5-a"),
        storage={"bucket": "google"},
        gce={"max_run_hours": 24},
        cluster={"version": "1.30", "ranges": {"nodes": "8.8.8.0/24"}},
    )
    assert {line.split(": ")[1] for line in lines} == {
        *("location.zone", "gce.max_run_hours", "storage.bucket", "gce.identity_file"),
        *("cluster.version", "cluster.ranges.nodes"),
    }


def test_what_the_errors_ask_for_is_accepted(tmp_path: Path) -> None:
    """The remedies of the rules above, typed."""
    plan(tmp_path, config(**BY_KEY))
    plan(tmp_path, config(gce={"os_login": True, "user": "ann_example_com"}))
    plan(tmp_path, config("a3-highgpu-8g", network_stack="ethernet"))
    plan(tmp_path, config("a3-highgpu-8g", network_stack=None, nodes=1))
    plan(tmp_path, config(cluster={**PUBLIC, "authorized_networks": ["203.0.113.0/24"]}))
    many = {"nodes": 1501, **creation(compact_placement=False)}
    plan(tmp_path, config("a3-megagpu-8g", "on-demand", **many))
    plan(tmp_path, config("a3-megagpu-8g", "on-demand", nodes=1500))
    plan(tmp_path, config("a4x-highgpu-4g", "reservation", nodes=18))
    zone = {"location": {"project": "my-project", "zone": "us-central1-b"}}
    assert plan(tmp_path, config(**zone)).region == "us-central1"
    block = "projects/other-1/reservations/r/reservationBlocks/b"
    found = plan(tmp_path, config(consumption="reservation", reservation=block))
    body = found.terraform["resource"]["google_compute_instance"]["team_0"]
    [affinity] = body["reservation_affinity"][0]["specific_reservation"]
    assert affinity["values"] == [block]


def test_a_missing_key_is_made_by_the_command_that_the_error_gives(tmp_path: Path) -> None:
    [line] = refusal(tmp_path, gce={})
    assert says(line, "ssh-keygen -t ed25519 -f ~/.ssh/drillyard ... identity_file: ... os_login")
    settings = {"gce": {"identity_file": "my key"}}
    for left_out in ("my key", "my key.pub"):
        (tmp_path / "my key.pub").unlink(missing_ok=True)
        if left_out == "my key":
            (tmp_path / "my key").unlink(missing_ok=True)
        [line] = refusal(tmp_path, **settings)
        command = "ssh-keygen" + line.partition("make it: ssh-keygen")[2]
        command += " -q -N ''" if " -t " in command else ""
        subprocess.run(["sh", "-c", command], check=True)
        plan(tmp_path, config(**settings))


@pytest.mark.parametrize(
    ("machine", "mode"),
    [
        (one.name, mode)
        for one in GOOGLE_MACHINES
        for mode in ("on-demand", "reservation", "spot", "flex-start", "calendar")
        if mode not in one.consumption or mode not in MODES or one.name == BARE_METAL
    ],
)
def test_a_machine_or_way_of_buying_that_cannot_be_made_is_refused(
    machine: str, mode: str, tmp_path: Path
) -> None:
    lines = refusal(tmp_path, machine=machine, consumption=mode, **_reserved(mode))
    keys = {line.split(": ")[1] for line in lines}
    assert keys <= {"consumption", "machine", "network_stack"}
    sold = mode in catalog().machine(machine).consumption
    assert sold or any(says(line, f"consumption: {machine} ... '{mode}'") for line in lines)


def _reserved(mode: str) -> dict[str, Any]:
    return {"reservation": "mine"} if mode in ("reservation", "calendar") else {}


@pytest.mark.parametrize("machine", NEEDS_DAEMON)
def test_a_stack_that_no_run_by_ssh_could_use_is_refused_before_it_is_paid_for(
    machine: str, tmp_path: Path
) -> None:
    """`launch` would refuse it on the hosts."""
    [line] = refusal(tmp_path, machine=machine, network_stack=None)
    assert says(line, "network_stack ... tcpx ... ethernet")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"nodes": 2}, "storage.directory"),
        ({"machine": "a4-highgpu-8g"}, "local SSDs"),
        ({"consumption": "calendar", "reservation": "mine"}, "87 hours"),
        ({"consumption": "spot"}, "back"),
        ({"cluster": {"existing_bucket": True}}, "must exist"),
        ({"cluster": {**PUBLIC, "authorized_networks": ["203.0.113.0/24"]}}, "this machine"),
    ],
)
def test_what_cannot_be_undone_or_checked_is_a_warning(
    settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    quiet = {"machine": "g2-standard-12", "consumption": "on-demand", "nodes": 1}
    usual = plan(tmp_path, config(**quiet)).warnings
    found = plan(tmp_path, config(**settings)).warnings
    assert any(words in each for each in found)
    assert not any(words in each for each in usual)
