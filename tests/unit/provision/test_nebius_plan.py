"""What is rendered for Nebius: each machine and way of buying against the provider's names, and
field by field."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.provision.clusters import bodies
from tests.unit.provision.nebius_clusters import ACCESS, OFFERS, RESERVED, config, plan
from tests.unit.provision.nebius_schema import document_problems
from tests.unit.provision.offers import every_plan
from tests.unit.provision.test_schema import leaves
from tests.unit.provision.vm_clusters import KEY

from drillyard.config.load import load_cluster_config
from drillyard.hardware import catalog
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.plan_directory import plan_directory
from drillyard.provision.plan_document import ClusterPlanDocument, plan_document

VM, DISK = "nebius_compute_v1_instance", "nebius_compute_v1_disk"
CLUSTER, FILES = "nebius_compute_v1_gpu_cluster", "nebius_compute_v1_filesystem"
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"network_stack": "ethernet", "nebius": {"identity_file": "key"}, "storage": {}},
    {
        "nebius": {
            "identity_file": "key",
            "user": "ann",
            "filesystem": "computefilesystem-e00abc",
            "boot_image": "ubuntu22.04-cuda12",
            "startup_script": "start.sh",
        },
        "cluster": {**ACCESS, "ranges": {"nodes": "10.1.0.0/16"}, "labels": {"team": "a"}},
    },
    {"nodes": 1},
)
EVERY = every_plan(OFFERS, len(WAYS))


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, int], ClusterPlan]:
    directory = tmp_path_factory.mktemp("nebius")
    (directory / "start.sh").write_text("#!/bin/sh\necho ${HOME} %{x}\n")
    return {
        (machine, mode, way): plan(directory, config(machine, mode, **WAYS[way]))
        for machine, mode, way in EVERY
    }


Plans = dict[tuple[str, str, int], ClusterPlan]


def test_every_rendered_resource_is_one_of_the_provider(plans: Plans) -> None:
    wrong = {
        each: problems
        for each, found in plans.items()
        if (problems := document_problems(dict(found.terraform)))
    }
    assert not wrong, next(iter(wrong.items()))


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (VM, {"gpu_clusters": {}}),
        (VM, {"boot_disk": {"attach_mode": "READ_WRITE", "existing_disk": {"name": "x"}}}),
        (VM, {"network_interfaces": {"name": "eth0"}}),
        (DISK, {"size_gibibytes": "200"}),
        (CLUSTER, {"infiniband_fabric": None}),
    ],
)
def test_the_check_of_names_finds_what_terraform_drops(
    plans: Plans, kind: str, change: dict[str, Any]
) -> None:
    document = json.loads(json.dumps(plans["gpu-h100-sxm", "on-demand", 0].terraform))
    next(iter(document["resource"][kind].values())).update(change)
    assert document_problems(document)


def test_every_reference_is_to_a_resource_that_is_there(plans: Plans) -> None:
    for found in plans.values():
        resources = found.terraform["resource"]
        known = {f"{kind}.{label}" for kind, named in resources.items() for label in named}
        text = re.sub(r"\$\$\{", "", json.dumps(found.terraform))
        references = re.findall(r"\$\{(?:split\(\\\"/\\\", )?([a-z0-9_]+\.[a-z0-9_]+)\.", text)
        assert text.count("${") == len(references) and set(references) <= known


def test_the_plan_names_each_resource_once_and_explains_each_value(plans: Plans) -> None:
    for found in plans.values():
        resources = found.terraform["resource"]
        assert {each.address for each in found.made_by_terraform} == {
            f"{kind}.{label}" for kind, named in resources.items() for label in named
        }
        names = Counter((each.kind, each.name) for each in found.resources)
        assert set(names.values()) == {1}
        explained = {field.place for field in found.fields}
        for kind, named in resources.items():
            for label, body in named.items():
                assert body["labels"]["drillyard-cluster"] == "team"
                for path in leaves(body):
                    ends = [match.start() for match in re.finditer(r"[.\[]|$", path)]
                    assert {f"{kind}.{label}: {path[:end]}" for end in ends} & explained, path


def test_the_same_config_gives_the_same_documents_byte_for_byte(tmp_path: Path) -> None:
    one, other = (plan(tmp_path, config()) for _ in range(2))
    assert plan_document(one, ()).as_text() == plan_document(other, ()).as_text()
    assert plan_directory(one, ()) == plan_directory(other, ())


@pytest.mark.parametrize(("machine", "mode"), OFFERS)
def test_each_node_is_what_machine_and_way_of_buying_demand(
    plans: Plans, machine: str, mode: str
) -> None:
    found, facts = plans[machine, mode, 0], catalog().machine(machine)
    nodes, disks = bodies(found, VM), bodies(found, DISK)
    assert [body["name"] for body in nodes.values()] == ["team-0", "team-1"]
    assert [body["hostname"] for body in nodes.values()] == ["team-0", "team-1"]
    assert found.login is not None
    assert found.login.hosts == (f"{VM}.team_0", f"{VM}.team_1")
    for label, body in nodes.items():
        assert body["resources"] == {"platform": machine.split("_")[0], "preset": facts.preset}
        assert body["boot_disk"]["existing_disk"]["id"] == f"${{{DISK}.{label}.id}}"
        assert disks[label]["size_gibibytes"] == 200
        assert body["stopped"] is False
        preemptible = body.get("preemptible", {}).get("on_preemption") == "STOP"
        assert preemptible == (mode == "spot") == (body.get("recovery_policy") == "FAIL")
        held = {"policy": "STRICT", "reservation_ids": [RESERVED]}
        wanted = {"on-demand": {"policy": "FORBID"}, "reservation": held}
        assert body.get("reservation_policy") == wanted.get(mode)
        joined = body.get("gpu_cluster") == {"id": f"${{{CLUSTER}.nodes.id}}"}
        assert joined == (facts.num_accelerators == 8)
    fabrics = [body["infiniband_fabric"] for body in bodies(found, CLUSTER).values()]
    first = {"h100": "fabric-2", "h200": "fabric-7", "b200": "us-central1-b"}
    assert fabrics == ([first[facts.accelerator]] if facts.num_accelerators == 8 else [])


def test_one_node_and_ethernet_need_no_gpu_cluster(plans: Plans) -> None:
    for way in (1, 3):
        found = plans["gpu-h100-sxm", "on-demand", way]
        assert not bodies(found, CLUSTER)
        assert not any("gpu_cluster" in body for body in bodies(found, VM).values())
        assert "compute.gpucluster.count" not in {each.metric for each in found.quotas}
    assert any("InfiniBand" in each for each in plans["gpu-h100-sxm", "on-demand", 1].warnings)


def test_a_fabric_of_the_config_joins_the_nodes(tmp_path: Path) -> None:
    section = {"identity_file": "key", "filesystem_gib": 2048, "fabric": "fabric-6"}
    found = plan(tmp_path, config(nebius=section))
    (cluster,) = bodies(found, CLUSTER).values()
    assert cluster["infiniband_fabric"] == "fabric-6"


def test_a_hardware_file_makes_a_newer_region_known(tmp_path: Path) -> None:
    row = {"name": "gpu-h200-sxm", "infiniband_fabrics": {"us-north1": ["us-north1-a"]}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({"machines": [row]}))
    where = {"location": {"project": "project-e00abc", "region": "us-north1"}}
    found = plan(tmp_path, config("gpu-h200-sxm", hardware="own.yaml", **where))
    (cluster,) = bodies(found, CLUSTER).values()
    assert cluster["infiniband_fabric"] == "us-north1-a"


def user_data(found: ClusterPlan) -> dict[str, Any]:
    body = bodies(found, VM)["team_0"]
    text = body["cloud_init_user_data"].replace("$${", "${").replace("%%{", "%{")
    assert text.startswith("#cloud-config\n")
    content: dict[str, Any] = yaml.safe_load(text)
    return content


def test_a_new_file_system_is_shared_by_all_nodes_and_never_destroyed_unasked(
    plans: Plans,
) -> None:
    found = plans["gpu-h100-sxm", "on-demand", 0]
    (files,) = bodies(found, FILES).values()
    assert files["size_gibibytes"] == 2048 and files["lifecycle"] == {"prevent_destroy": True}
    for body in bodies(found, VM).values():
        (mounted,) = body["filesystems"]
        assert mounted["existing_filesystem"] == {"id": f"${{{FILES}.shared.id}}"}
        assert mounted["mount_tag"] == "shared"
    commands = [" ".join(each) for each in user_data(found)["runcmd"]]
    assert "sh -c echo 'shared /mnt/shared virtiofs rw,nofail 0 0' >>/etc/fstab" in commands
    assert commands[-1] == "chown drillyard: /mnt/shared"


def test_an_existing_file_system_is_mounted_and_stays_as_it_is(plans: Plans) -> None:
    found = plans["gpu-h100-sxm", "on-demand", 2]
    assert not bodies(found, FILES)
    (mounted,) = bodies(found, VM)["team_0"]["filesystems"]
    assert mounted["existing_filesystem"] == {"id": "computefilesystem-e00abc"}
    content = user_data(found)
    assert not any("chown" in command for command in content["runcmd"])
    assert content["runcmd"][-1] == [content["write_files"][0]["path"]]
    assert content["write_files"][0]["content"] == "#!/bin/sh\necho ${HOME} %{x}\n"
    assert content["users"][0]["name"] == "ann"
    assert content["users"][0]["ssh_authorized_keys"] == [KEY]
    assert bodies(found, DISK)["team_0"]["source_image_family"] == {
        "image_family": "ubuntu22.04-cuda12"
    }
    assert "filesystems" not in bodies(plans["gpu-h100-sxm", "on-demand", 1], VM)["team_0"]


def test_logins_come_from_the_configs_ranges_and_the_nodes_reach_each_other(plans: Plans) -> None:
    rules = bodies(plans["gpu-h100-sxm", "on-demand", 2], "nebius_vpc_v1_security_rule")
    ports = {"source_cidrs": ["203.0.113.0/24"], "destination_ports": [22]}
    assert rules["ssh"]["ingress"] == ports and rules["ssh"]["protocol"] == "TCP"
    group = "${nebius_vpc_v1_security_group.nodes.id}"
    assert rules["internal"]["ingress"] == {"source_security_group_id": group}
    opened = [body.get("ingress", {}).get("source_cidrs") for body in rules.values()]
    assert ["0.0.0.0/0"] not in opened
    (subnet,) = bodies(plans["gpu-h100-sxm", "on-demand", 2], "nebius_vpc_v1_subnet").values()
    assert subnet["ipv4_private_pools"]["pools"] == [{"cidrs": [{"cidr": "10.1.0.0/16"}]}]


@pytest.mark.parametrize(("machine", "mode"), OFFERS)
def test_every_offer_has_a_price_or_says_what_to_give_and_counts_its_quotas(
    plans: Plans, machine: str, mode: str
) -> None:
    found = plans[machine, mode, 0]
    ClusterPlanDocument.model_validate(plan_document(found, ()).model_dump(), strict=False)
    nodes, disks, files = found.prices
    assert nodes.usd_per_hour is None or nodes.usd_per_hour.value > 0
    assert (nodes.usd_per_hour is None) == ("--price team" in nodes.missing)
    for line in (disks, files):
        assert line.usd_per_hour is None and "part_prices: " in line.missing
    quotas = {quota.metric: quota.amount for quota in found.quotas}
    kinds = Counter(each.kind for each in found.resources)
    assert quotas["compute.instance.count"] == kinds[VM] == 2
    assert quotas["compute.disk.count"] == kinds[DISK]
    assert quotas.get("compute.gpucluster.count", 0) == kinds[CLUSTER]


def test_the_prices_that_a_plan_asks_for_are_taken(tmp_path: Path) -> None:
    """The rows of `plan`, typed into a hardware file."""
    asked = [line.missing for line in plan(tmp_path, config()).prices if line.missing]
    rows = [re.search(r"part_prices: (\[.*\])", each) for each in asked]
    listed = [yaml.safe_load(row[1].replace("USD", "0.1"))[0] for row in rows if row]
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({"part_prices": listed}))
    found = plan(tmp_path, config(hardware="own.yaml"))
    _, disks, files = [line.usd_per_hour for line in found.prices]
    assert disks is not None and disks.value == pytest.approx(2 * 200 * 0.1 / 730)
    assert files is not None and files.value == pytest.approx(2048 * 0.1 / 730)


def test_the_output_is_a_config_for_launch_once_the_addresses_are_known(tmp_path: Path) -> None:
    text = plan(
        tmp_path, config(environment={"WHERE": "${HOME}"}, mounts=["/data"], image="example/i:1")
    ).terraform["output"]["launch"]["value"]
    addresses = {
        f"{VM}.team_0.status.network_interfaces[0].public_ip_address.address": "198.51.100.7/32",
        f"{VM}.team_1.status.network_interfaces[0].public_ip_address.address": "198.51.100.8/32",
        f"{VM}.team_0.status.network_interfaces[0].ip_address.address": "10.0.0.4/32",
    }
    for where, address in addresses.items():
        expression = f'${{split("/", {where})[0]}}'
        assert expression in text
        text = text.replace(expression, address.split("/")[0])
    assert text.count("${") == text.count("$${") == 1
    file = tmp_path / "team-ssh.yaml"
    file.write_text(text.replace("$${", "${"))
    made = load_cluster_config(file, resolve_environment=False)
    assert (made.platform, made.nodes, made.machine) == ("ssh", 2, "gpu-h100-sxm")
    assert made.section.model_dump(exclude_none=True) == {
        "hosts": ["198.51.100.7", "198.51.100.8"],
        "user": "drillyard",
        "identity_file": str(tmp_path / "key"),
        "rendezvous_host": "10.0.0.4",
    }
    assert made.storage.directory == "/mnt/shared" and made.environment == {"WHERE": "${HOME}"}
    assert made.mounts == ["/data"] and made.image == "example/i:1"


def test_the_directory_makes_it_with_nebius_own_programs(tmp_path: Path) -> None:
    found = plan(tmp_path, config())
    files = plan_directory(found, ())
    assert set(files) == {"main.tf.json", "backend.tf.json", "README.md", "apply.sh"}
    (s3,) = json.loads(files["backend.tf.json"][0])["terraform"]["backend"].values()
    assert s3["bucket"] == found.state_bucket == "project-e00abc-team-tfstate"
    assert s3["key"] == "team/default.tfstate" and s3["use_lockfile"] is True
    assert s3["endpoints"] == {"s3": "https://storage.eu-north1.nebius.cloud:443"}
    for text, _ in files.values():
        assert "gcloud" not in text and "gs://" not in text
    assert f"terraform state rm {FILES}.shared" in files["README.md"][0]
    without = plan_directory(plan(tmp_path, config(**WAYS[1])), ())
    assert "state rm" not in without["README.md"][0]


_TERRAFORM = """\
#!/bin/sh
echo "terraform $* $NEBIUS_IAM_TOKEN" >>"$LOG"
[ "$1" != output ] || echo 'platform: ssh'
"""
_NEBIUS = """\
#!/bin/sh
echo "nebius $*" >>"$LOG"
case "$*" in
*get-access-token) echo token;;
*get-by-name*) exit "$FOUND";;
esac
"""


@pytest.mark.parametrize("found", ["0", "1"])
def test_the_script_makes_the_bucket_once_and_writes_the_file_for_launch(
    found: str, tmp_path: Path
) -> None:
    out, programs, log = tmp_path / "out", tmp_path / "bin", tmp_path / "log"
    for path, (text, _) in plan_directory(plan(tmp_path, config()), ()).items():
        out.mkdir(exist_ok=True)
        (out / path).write_text(text)
    programs.mkdir()
    for name, text in (("terraform", _TERRAFORM), ("nebius", _NEBIUS)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o700)
    path = f"{programs}:/usr/bin:/bin"
    environment = {"PATH": path, "LOG": str(log), "FOUND": found}
    command = [shutil.which("sh") or "sh", str(out / "apply.sh")]
    refused = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert refused.returncode != 0 and "AWS_ACCESS_KEY_ID: is not set" in refused.stderr
    assert not log.exists()
    key = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    subprocess.run(command, env={**environment, **key}, check=True, capture_output=True)
    said = log.read_text().splitlines()
    made = [line for line in said if "bucket create" in line]
    labels = "--versioning-policy enabled --labels drillyard-cluster=team"
    assert len(made) == int(found) and all(line.endswith(labels) for line in made)
    steps = ["init -input=false", "apply", "output -raw launch"]
    assert said[-3:] == [f"terraform {each} token" for each in steps]
    assert (out / "team-ssh.yaml").read_text() == "platform: ssh\n"


def test_every_node_is_planned_and_named(tmp_path: Path) -> None:
    found = plan(tmp_path, config(nodes=100))
    assert found.login is not None and found.login.hosts[-1] == f"{VM}.team_99"
