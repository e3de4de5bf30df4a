"""The plan of a Slurm cluster: its blueprint against the settings of Cluster Toolkit's modules, and
what of it a launch relies on."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.provision.slurm_clusters import (
    OFFERS,
    blueprint_problems,
    config,
    document,
    fits,
    modules,
    plan,
    settings_of,
    texts,
)

from drillyard.config.load import load_cluster_config
from drillyard.errors import UserError
from drillyard.hardware import catalog, load_catalog
from drillyard.launch.slurm.partition_check import parse_config, settings_findings
from drillyard.provision.plan_directory import plan_directory
from drillyard.provision.toolkit import scripts
from drillyard.provision.toolkit.slurm_conf import slurm_conf
from drillyard.provision.toolkit.toolkit_rules import nodeset_conflicts

LUSTRE = {"cluster": {"head": {"home": "lustre"}}}
PUBLIC = {"cluster": {"private_nodes": False, "authorized_networks": ["203.0.113.0/24"]}}
VARIANTS: list[dict[str, Any]] = [
    {},
    LUSTRE,
    PUBLIC,
    {"network_stack": "ethernet"},
    {"cluster": {"ranges": {"nodes": "10.1.0.0/16", "data": "10.192.0.0/12"}}},
    {"nodes": 1000},
    {"cluster": {"deletion_protection": True, "labels": {"team": "a"}, "disk_gib": 300}},
]


@pytest.mark.parametrize(("machine", "mode"), OFFERS)
@pytest.mark.parametrize("number", range(len(VARIANTS)))
def test_the_toolkit_has_every_module_setting_and_reference(
    machine: str, mode: str, number: int, tmp_path: Path
) -> None:
    found = plan(tmp_path, config(machine, mode, **VARIANTS[number]))
    assert list(blueprint_problems(found)) == []
    nodes = settings_of(found, "nodes")
    assert list(nodeset_conflicts(nodes, machine)) == []
    again = plan(tmp_path, config(machine, mode, **VARIANTS[number]))
    assert found == again


def test_the_check_of_blueprints_finds_what_the_toolkit_refuses() -> None:
    assert fits("a", "string") and not fits(1, "string") and not fits(True, "number")
    assert fits({"a": 1}, "object({a=number,b=optional(string)})")
    assert not fits({"b": "x"}, "object({a=number,b=optional(string)})")
    assert not fits({"a": 1, "c": 1}, "object({a=number})")
    assert not fits([{"a": "x"}], "list(object({a=number}))")


def test_each_way_of_buying_has_its_own_setting(tmp_path: Path) -> None:
    def nodes(mode: str, **settings: Any) -> dict[str, Any]:
        return settings_of(plan(tmp_path, config("a3-ultragpu-8g", mode, **settings)), "nodes")

    def bought(mode: str, **settings: Any) -> dict[str, Any]:
        keys = {"enable_spot_vm", "dws_flex", "reservation_name", "future_reservation", "zones"}
        return {key: each for key, each in nodes(mode, **settings).items() if key in keys}

    assert bought("on-demand") == {}
    assert bought("spot") == {"enable_spot_vm": True}
    assert bought("reservation", reservation="mine") == {"reservation_name": "mine"}
    assert bought("calendar", reservation="mine") == {"reservation_name": "mine"}
    shared = "projects/other-1/reservations/r/reservationBlocks/b"
    assert bought("reservation", reservation=shared) == {"reservation_name": shared}
    flex = bought("flex-start")["dws_flex"]
    assert flex == {"enabled": True, "max_run_duration": 604800, "use_job_duration": True}
    counts = ("node_count_static", "node_count_dynamic_max")
    assert [nodes("flex-start")[key] for key in counts] == [0, 2]
    assert [nodes("spot")[key] for key in counts] == [2, 0]
    placed = {mode: nodes(mode)["enable_placement"] for mode in ("on-demand", "flex-start", "spot")}
    assert placed == {"on-demand": True, "flex-start": True, "spot": False}
    assert not settings_of(plan(tmp_path, config("a3-megagpu-8g", "flex-start")), "nodes")[
        "enable_placement"
    ]


def test_the_rules_of_nodesets_are_the_toolkits() -> None:
    flex = {"enabled": True}
    refused: list[dict[str, Any]] = [
        {"reservation_name": "r", "dws_flex": flex},
        {"reservation_name": "r", "enable_spot_vm": True},
        {"reservation_name": "r", "future_reservation": "f"},
        {"reservation_name": "r", "zones": ["a"]},
        {"future_reservation": "f", "dws_flex": flex},
        {"future_reservation": "f", "enable_spot_vm": True},
        {"future_reservation": "f", "enable_placement": True},
        {"future_reservation": "f", "zones": ["a"]},
        {"dws_flex": flex, "enable_spot_vm": True},
        {"dws_flex": flex, "zones": ["a"]},
        {"dws_flex": flex, "enable_placement": True},
    ]
    for nodeset in refused:
        assert list(nodeset_conflicts(nodeset, "a3-megagpu-8g")), nodeset
    allowed: list[tuple[dict[str, Any], str]] = [
        ({"dws_flex": flex, "enable_placement": True}, "a4-highgpu-8g"),
        ({"dws_flex": flex, "enable_placement": True}, "a3-ultragpu-8g"),
        ({"dws_flex": {"enabled": False}, "enable_spot_vm": True}, "a3-megagpu-8g"),
        ({"reservation_name": "r", "enable_placement": True}, "a3-megagpu-8g"),
        ({"reservation_name": "", "enable_spot_vm": True}, "a3-megagpu-8g"),
    ]
    for nodeset, machine in allowed:
        assert not list(nodeset_conflicts(nodeset, machine)), nodeset


def test_data_networks_are_those_of_the_machines_nics(tmp_path: Path) -> None:
    mega = plan(tmp_path, config("a3-megagpu-8g", "on-demand"))
    gpu = settings_of(mega, "gpu-networks")
    assert (gpu["network_count"], gpu["mtu"]) == (8, 8244)
    assert "gpu-networks" in modules(mega)["nodes"]["use"]
    a4 = plan(tmp_path, config())
    rdma = settings_of(a4, "rdma-network")
    assert rdma["network_profile"].endswith("/networkProfiles/us-central1-b-vpc-roce")
    assert rdma["subnetworks_template"]["count"] == 8
    assert settings_of(a4, "host-network")["mtu"] == 8896
    networks = settings_of(a4, "nodes")["additional_networks"]
    assert networks.index("host-network.subnetwork_self_link") < networks.index("rdma-network.")
    plain = plan(tmp_path, config(network_stack="ethernet"))
    assert not {"rdma-network", "host-network"} & modules(plain).keys()


def test_ranges_do_not_overlap_and_hold_all_nodes(tmp_path: Path) -> None:
    from ipaddress import IPv4Network

    for machine in ("a3-megagpu-8g", "a4-highgpu-8g"):
        found = plan(tmp_path, config(machine, "spot", nodes=3000))
        assert found.toolkit is not None
        ranges = {name: IPv4Network(each) for name, each in found.toolkit.ranges.items()}
        names = list(ranges)
        for number, name in enumerate(names):
            assert not any(ranges[name].overlaps(ranges[each]) for each in names[number + 1 :])
        assert ranges["team"].num_addresses >= 3000 + 2 + 4
        assert ranges["team-data"].num_addresses // 8 >= 3000 + 4


def test_the_prolog_starts_the_daemon_that_fits_the_plugin(tmp_path: Path) -> None:
    stack = catalog().network_stacks["tcpxo"]
    found = plan(tmp_path, config("a3-megagpu-8g", "spot"))
    controller = settings_of(found, "controller")
    [prolog], [epilog] = controller["prolog_scripts"], controller["epilog_scripts"]
    pair = {"plugin": stack.versions["plugin"], "rxdm": stack.versions["rxdm"]}
    assert pair in stack.coupled_versions
    assert f":v{pair['rxdm']} --num_hops=2" in prolog["content"]
    assert "--num_nics" not in prolog["content"]
    assert scripts.DAEMON in epilog["content"]
    [install] = settings_of(found, "node-startup")["runners"]
    assert f":v{pair['plugin']} install" in install["content"]
    assert f"test -d {stack.host_library_path}" in install["content"]
    for other in (config(), config("a3-megagpu-8g", "spot", network_stack="ethernet")):
        assert "prolog_scripts" not in settings_of(plan(tmp_path, other), "controller")


@pytest.mark.parametrize(
    ("logs", "nodes", "code"),
    [
        ("Buffer manager initialization complete", "2", 0),
        ("starting", "2", 1),
        ("starting", "1", 0),
    ],
)
def test_the_prolog_fails_where_the_daemon_is_not_ready(
    logs: str, nodes: str, code: int, tmp_path: Path
) -> None:
    """Run with stand-ins for docker, modprobe and sleep; the log is long, and ends late."""
    more = "for i in $(seq 20000); do echo more; done" if code == 0 else "true"
    docker = f'case "$1" in logs) echo "{logs}"; {more};; run) echo "$@" >>"{tmp_path}/ran";; esac'
    for name, text in (("docker", docker), ("modprobe", "true"), ("sleep", "true")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NUM_NODES": nodes}
    text = scripts.daemon_prolog(catalog().network_stacks["tcpxo"])
    ended = subprocess.run(
        ["bash", "-c", text], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == code, ended.stderr
    assert (tmp_path / "ran").exists() == (nodes == "2")
    if code:
        assert scripts.DAEMON in ended.stderr


@pytest.mark.parametrize("machine", ["a3-megagpu-8g", "a4-highgpu-8g"])
def test_scripts_have_no_expression_of_the_toolkit(machine: str, tmp_path: Path) -> None:
    found = plan(tmp_path, config(machine, "spot"))
    every = [
        text
        for module in modules(found).values()
        for text in texts(module.get("settings", {}))
        if text.startswith("#!/bin/bash")
    ]
    assert len(every) >= 3
    for text in every:
        assert "$(" not in text and "((" not in text


def test_slurm_conf_is_what_a_launch_relies_on() -> None:
    """The template with the controller's values; `partition_check` then has nothing to note."""
    names = ("name", "control_host", "control_addr", "control_host_port", "auth_key", "state_save")
    more = ("mpi_default", "slurmlog", "accounting_storage_host")
    text = slurm_conf().format(**dict.fromkeys((*names, *more), "x"))
    settings = parse_config(text)
    assert settings["PreemptMode"] == "REQUEUE" and settings["JobRequeue"] == "1"
    assert settings["ProctrackType"] == "proctrack/cgroup"
    assert settings["AccountingStorageType"] == "accounting_storage/slurmdbd"
    assert settings["ReturnToService"] == "2"
    assert settings["AuthInfo"] == "cred_expire=120"
    assert settings["AccountingStoreFlags"] == "job_comment"
    assert [each.result for each in settings_findings(settings)] == ["ok"]
    keys = [line.partition("=")[0] for line in text.splitlines() if "=" in line and line[0] != "#"]
    assert len(keys) == len(set(keys))


def test_a_node_that_does_not_come_is_given_up_and_can_be_asked_for_again(tmp_path: Path) -> None:
    found = plan(tmp_path, config())
    conf = settings_of(found, "partition")["partition_conf"]
    cloud = settings_of(found, "controller")["cloud_parameters"]
    assert conf["ResumeTimeout"] == str(cloud["resume_timeout"]) == "1200"
    assert int(conf["SuspendTimeout"]) == cloud["suspend_timeout"] > 0
    assert conf["OverSubscribe"] == "EXCLUSIVE"
    assert cloud["prolog_flags"] == "Alloc,Contain"
    assert "nohold_on_prolog_fail" in cloud["scheduler_parameters"]


def test_home_is_shared_by_all_nodes(tmp_path: Path) -> None:
    home = settings_of(plan(tmp_path, config(cluster={"deletion_protection": True})), "home")
    assert (home["local_mount"], home["size_gb"]) == ("/home", 10240)
    assert home["deletion_protection"]["enabled"] is True
    found = plan(tmp_path, config(cluster={"head": {"home": "lustre", "home_gib": 72000}}))
    assert settings_of(found, "home")["size_gib"] == 72000
    assert '"install_managed_lustre": true' in str(settings_of(found, "image-script")["runners"])
    assert "lustre.googleapis.com" in found.services
    assert "home" in modules(found)["controller"]["use"]


def test_the_state_is_in_the_clusters_bucket_and_all_is_labelled(tmp_path: Path) -> None:
    found = plan(tmp_path, config(cluster={"labels": {"team": "a"}}))
    made = document(found, "deployment.yaml")
    backend = made["terraform_backend_defaults"]
    assert backend == {"type": "gcs", "configuration": {"bucket": "my-project-team-tfstate"}}
    assert made["vars"]["labels"] == {"drillyard-cluster": "team", "team": "a"}
    assert made["vars"]["zone"] == "us-central1-b"


def test_every_setting_is_explained(tmp_path: Path) -> None:
    for machine in ("a3-megagpu-8g", "a4-highgpu-8g"):
        found = plan(tmp_path, config(machine, "spot"))
        explained = {each.place for each in found.fields}
        for name, module in modules(found).items():
            for key in module.get("settings", {}):
                assert f"{name}: {key}" in explained
        assert all(each.reason and each.source for each in found.fields)


def test_the_section_for_launch_makes_the_file_one_that_launch_takes(tmp_path: Path) -> None:
    content = config(slurm={"partition": "train", "time_limit": "1-00:00:00"})
    found = plan(tmp_path, content)
    assert found.launch_settings is not None
    section = found.launch_settings["slurm"]
    assert section["partition"] == "train" == settings_of(found, "partition")["partition_name"]
    assert section["login_host"] == "USER@team-login-001"
    assert section["time_limit"] == "1-00:00:00"
    (tmp_path / "ssh_config").write_text("")
    path = tmp_path / "full.yaml"
    path.write_text(yaml.safe_dump({**content, **found.launch_settings}))
    assert load_cluster_config(path, resolve_environment=False).section.head_host


def test_the_directory_has_all_files_and_the_login_node_is_reached_through_the_tunnel(
    tmp_path: Path,
) -> None:
    found = plan(tmp_path, config())
    files = plan_directory(found, ())
    assert {*files} == {
        *("README.md", "blueprint.yaml", "deployment.yaml", "ssh_config", "apply.sh", "destroy.sh")
    }
    assert "start-iap-tunnel team-login-001 %p" in files["ssh_config"][0]
    assert "USER@team-login-001" in files["README.md"][0]
    assert files["apply.sh"][1] == files["destroy.sh"][1] == 0o755
    destroy = files["destroy.sh"][0]
    assert destroy.index("gcluster destroy team") < destroy.index("instance-groups managed delete")
    public = plan_directory(plan(tmp_path, config(**PUBLIC)), ())
    assert "ProxyCommand" not in public["ssh_config"][0]
    assert settings_of(plan(tmp_path, config(**PUBLIC)), "network")["allowed_ssh_ip_ranges"] == [
        "203.0.113.0/24"
    ]


def test_the_bill_has_controller_login_and_home(tmp_path: Path) -> None:
    found = plan(tmp_path, config())
    lines = {each.what.partition(":")[0]: each for each in found.prices}
    assert {"team-spot", "controller", "login", "/home"} <= lines.keys()
    # Filestore: 10 TiB at $0.25 a GiB and month.
    assert lines["/home"].usd_per_hour is not None
    assert lines["/home"].usd_per_hour.value == pytest.approx(10240 * 0.25 / 730)
    assert lines["/home"].usd_per_hour.unverified
    lustre = plan(tmp_path, config(cluster={"head": {"home": "lustre"}}))
    (line,) = (each for each in lustre.prices if each.what.startswith("/home"))
    assert line.usd_per_hour is None and "part: lustre" in line.missing
    row = line.missing[line.missing.index("part_prices:") :].replace("USD", "0.2")
    (tmp_path / "own.yaml").write_text(row)
    facts = load_catalog(tmp_path / "own.yaml")
    assert facts.part_price("lustre", "us-central1", "usd_per_gib_month") is not None
    quotas = {quota.metric: quota.amount for quota in found.quotas}
    assert quotas["HDB_TOTAL_GB"] == 2 * 200


def test_the_slurm_cluster_of_googles_training_guide_field_by_field(tmp_path: Path) -> None:
    """A3 Mega: base with networks and Filestore home, image, cluster with controller, login node
    and partition; settings in a deployment file; TCPXO, 8 NICs and GPUs; jobs of eight nodes."""
    found = plan(tmp_path, config("a3-megagpu-8g", "reservation", nodes=8))
    groups = {each["group"]: each for each in document(found)["deployment_groups"]}
    assert [*groups] == ["base", "image", "cluster"]
    made = modules(found)
    sources = {name: each["source"].rpartition("/")[2] for name, each in made.items()}
    assert sources["network"] == "vpc" and sources["gpu-networks"] == "multivpc"
    assert sources["home"] == "filestore"
    assert (sources["slurm-image"], made["slurm-image"]["kind"]) == ("custom-image", "packer")
    assert sources["controller"] == "schedmd-slurm-gcp-v6-controller"
    assert {"login", "partition", "home"} <= {*made["controller"]["use"]}
    assert settings_of(found, "nodes")["node_count_static"] == 8
    assert settings_of(found, "gpu-networks")["network_count"] == 8
    variables = document(found, "deployment.yaml")["vars"]
    keys = {"deployment_name", "project_id", "region", "zone"}
    assert keys <= variables.keys()
    runners = settings_of(found, "image-script")["runners"]
    assert "install_tcpxo.sh" in [each["destination"] for each in runners]
    assert "tcpgpudmarxd" in settings_of(found, "controller")["prolog_scripts"][0]["content"]
    home = settings_of(found, "home")
    assert (home["local_mount"], home["filestore_tier"]) == ("/home", "HIGH_SCALE_SSD")
    # The guide's name of the partition; its other machine has a daemon that no image here starts.
    named = config("a3-megagpu-8g", "reservation", nodes=8, slurm={"partition": "a3mega"})
    assert settings_of(plan(tmp_path, named), "partition")["partition_name"] == "a3mega"
    with pytest.raises(UserError, match="a3-highgpu-8g: Slurm clusters are made of a3-megagpu-8g"):
        plan(tmp_path, config("a3-highgpu-8g", "on-demand", nodes=8))


def test_nobody_acts_as_the_projects_default_account(tmp_path: Path) -> None:
    found = plan(tmp_path, config(name="a-name-of-20-letters"))
    made = modules(found)
    accounts = {"controller": "control", "login": "login", "nodes": "nodes", "slurm-image": "nodes"}
    for module, whose in accounts.items():
        assert f"{whose}-account" in made[module]["use"]
    emails = [each.name for each in found.resources if each.kind == "google_service_account"]
    assert emails == [
        f"a-name-of-20-letters-{each}@my-project.iam.gserviceaccount.com"
        for each in ("control", "login", "nodes")
    ]
    assert all(6 <= len(each.partition("@")[0]) <= 30 for each in emails)
    for whose in ("control", "login", "nodes"):
        settings = settings_of(found, f"{whose}-account")
        assert (settings["name"], settings["grant_xpn_roles"]) == (whose, False)
        more = {"compute.instanceAdmin.v1", "iam.serviceAccountUser"} if whose == "control" else {}
        assert {*settings["project_roles"]} == {
            *("logging.logWriter", "monitoring.metricWriter", *more)
        }
        # The plan names each right that is given.
        for role in settings["project_roles"]:
            member = f"serviceAccount:a-name-of-20-letters-{whose}@my-project"
            name = f"roles/{role} {member}.iam.gserviceaccount.com"
            assert name in [each.name for each in found.resources]
    # Who starts from a script must be able to read it.
    for script in ("image-script", "node-startup"):
        viewers = settings_of(found, script)["bucket_viewers"]
        assert viewers == ["$(nodes-account.service_account_iam_email)"]


def test_another_number_of_nodes_or_partition_is_another_deployment(tmp_path: Path) -> None:
    """By it `up` deploys again, and the controller writes its slurm.conf from it: nodes and
    partitions are those of its modules."""
    found = plan(tmp_path, config("a3-megagpu-8g", nodes=2))
    more = plan(tmp_path, config("a3-megagpu-8g", nodes=5))
    renamed = plan(tmp_path, config("a3-megagpu-8g", nodes=2, slurm={"partition": "train"}))
    assert settings_of(found, "nodes")["node_count_static"] == 2
    assert settings_of(more, "nodes")["node_count_static"] == 5
    assert settings_of(found, "partition")["partition_name"] == "gpu"
    assert settings_of(renamed, "partition")["partition_name"] == "train"
    # Nothing else changes: the image, the networks and /home stay.
    for other, module, keys in (
        (more, "nodes", {"node_count_static"}),
        (renamed, "partition", {"partition_name"}),
    ):
        for name in modules(found):
            before, after = settings_of(found, name), settings_of(other, name)
            changed = {key for key in before if before[key] != after[key]}
            assert changed == (keys if name == module else set()), name
    assert "partition" in modules(found)["controller"]["use"]
