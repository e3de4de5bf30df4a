"""The settings of Soperator's recipe, and what `launch` needs of the Slurm cluster that it makes."""  # noqa: E501

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.facts import says
from tests.unit.ended_command import run_command
from tests.unit.provision.nebius_clusters import OFFERS, RESERVED, config, plan
from tests.unit.provision.vm_clusters import KEY

from drillyard.config.load import load_cluster_config
from drillyard.errors import UserError
from drillyard.hardware import catalog
from drillyard.launch.slurm.rules import gpus_of_gres
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.plan_directory import plan_directory, write_cluster_plan
from drillyard.provision.plan_document import ClusterPlanDocument, plan_document
from drillyard.provision.plan_text import plan_text

OWN = {"orchestrator": "soperator", "identity_file": "key", "filesystem_gib": 4096}
GRES = {
    "h100": "nvidia_h100_80gb_hbm3",
    "h200": "nvidia_h200",
    "b200": "nvidia_b200",
}
"""soperator/modules/available_resources/gres.tf of the recipe."""


def soperator(
    machine: str = "gpu-h100-sxm", mode: str = "on-demand", **settings: Any
) -> dict[str, Any]:
    return config(machine, mode, **{"nebius": OWN, "cluster": {}, **settings})


def variables(found: ClusterPlan) -> dict[str, Any]:
    text, _ = plan_directory(found, ())["drillyard.auto.tfvars.json"]
    content: dict[str, Any] = json.loads(text)
    return content


@pytest.mark.parametrize(("machine", "mode"), OFFERS)
def test_the_workers_are_what_machine_and_way_of_buying_demand(
    machine: str, mode: str, tmp_path: Path
) -> None:
    found, facts = plan(tmp_path, soperator(machine, mode)), catalog().machine(machine)
    made = variables(found)
    (workers,) = made["slurm_nodeset_workers"]
    assert workers["size"] == 2
    assert workers["resource"] == {"platform": machine.split("_")[0], "preset": facts.preset}
    first = {"h100": "fabric-2", "h200": "fabric-7", "b200": "us-central1-b"}
    joined = facts.num_accelerators == 8
    fabric = {"infiniband_fabric": first[facts.accelerator]}
    assert workers["gpu_cluster"] == (fabric if joined else None)
    assert workers["preemptible"] == ({} if mode == "spot" else None)
    held = {"policy": "STRICT", "reservation_ids": [RESERVED]}
    assert workers["reservation_policy"] == (held if mode == "reservation" else None)
    main, hidden = made["slurm_nodesets_partitions"]
    assert (main["name"], main["topology"]) == ("main", "tree-ib" if joined else "flat")
    assert "Default=YES" in main["config"] and "Hidden=YES" in hidden["config"]
    assert made["slurm_login_ssh_root_public_keys"] == [KEY]
    gres = f"gpu:{GRES[facts.accelerator]}:{facts.num_accelerators}"
    assert found.launch_settings is not None
    assert found.launch_settings["slurm"]["gres"] == gres
    assert gpus_of_gres(gres) == facts.num_accelerators
    ClusterPlanDocument.model_validate(plan_document(found, ()).model_dump(), strict=False)


def test_the_jail_is_always_new_and_data_may_be_on_a_file_system_that_exists(
    tmp_path: Path,
) -> None:
    """The recipe overwrites what it gets as the jail."""
    made = variables(plan(tmp_path, soperator(nebius={**OWN, "jail_gib": 1024})))
    spec = {"type": "NETWORK_SSD", "block_size_kibibytes": 4, "forbid_deletion": True}
    assert made["filesystem_jail"] == {"spec": {**spec, "size_gibibytes": 1024}}
    (data,) = made["filesystem_jail_submounts"]
    assert data["mount_path"] == "/mnt/shared" and data["spec"]["size_gibibytes"] == 4096
    own = {"filesystem_gib": None, "filesystem": "computefilesystem-e00abc"}
    made = variables(plan(tmp_path, soperator(nebius={**OWN, **own})))
    (data,) = made["filesystem_jail_submounts"]
    assert data["existing"] == {"id": "computefilesystem-e00abc"} and "spec" not in data
    assert made["filesystem_jail"]["spec"]["size_gibibytes"] == 2048


RULES: list[tuple[dict[str, Any], str]] = [
    ({"nebius": {**OWN, "identity_file": None}}, "nebius.identity_file"),
    ({"nebius": {**OWN, "user": "ann"}}, "nebius.user"),
    ({"nebius": {**OWN, "boot_image": "ubuntu24.04-cuda13.0"}}, "nebius.boot_image"),
    ({"nebius": {**OWN, "fabric": "fabric-7"}}, "nebius.fabric"),
    ({"nebius": {**OWN, "orchestrator": "kubernetes", "jail_gib": 1}}, "nebius.jail_gib"),
    ({"machine": "gpu-b200-sxm", "location": {"project": "project-a", "region": "eu-north1"}},
     "location.region"),
    ({"network_stack": "infiniband", "machine": "gpu-h100-sxm_1gpu-16vcpu-200gb"},
     "network_stack"),
    ({"storage": {}, "nebius": {"orchestrator": "soperator", "identity_file": "key"}},
     "storage.directory"),
    ({"storage": {"directory": "/home"}}, "storage.directory"),
    ({"cluster": {"version": "1.36"}}, "cluster.version"),
    ({"cluster": {"authorized_networks": ["10.0.0.0/8"]}}, "cluster.authorized_networks"),
    ({"cluster": {"ranges": {"nodes": "10.1.0.0/16"}}}, "cluster.ranges.nodes"),
    ({"cluster": {"private_nodes": False}}, "cluster.private_nodes"),
    ({"cluster": {"disk_gib": 100}}, "cluster.disk_gib"),
    ({"name": "a" * 33}, "name"),
    ({"kubernetes": {"run_as_user": 1}}, "kubernetes"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "key"), RULES, ids=[f"{number}-{key}" for number, (_, key) in enumerate(RULES)]
)
def test_a_broken_rule_is_a_line_at_its_key(
    settings: dict[str, Any], key: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as refused:
        plan(tmp_path, soperator(**settings))
    lines = str(refused.value).splitlines()
    assert any(f": {key}:" in line and "cluster.yaml" in line for line in lines), lines
    assert len(lines) == 1 or settings["nebius"]["orchestrator"] == "kubernetes"


@pytest.mark.parametrize(
    "words", [("up", "--yes"), ("down", "--yes"), ("status",), ("leaks",), ("plan", "--check")]
)
def test_what_the_recipe_does_itself_is_refused_with_the_commands(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key.pub").write_text(KEY)
    file = tmp_path / "lab.yaml"
    file.write_text(yaml.safe_dump(soperator()))
    verb, *options = words
    ended = run_command(capsys, "cluster", verb, str(file), *options)
    assert ended.code == 2
    assert says(ended.err, "Soperator 4.1.13 ... plan CLUSTER --output team ... apply.sh")


def test_the_plan_says_how_it_is_made_and_what_its_prices_lack(tmp_path: Path) -> None:
    text = plan_text(plan(tmp_path, soperator()), (), "lab.yaml")
    assert "next: drillyard cluster plan lab.yaml --output team" in text
    assert "23.60" in text and "Soperator's own" in " ".join(text.split())
    assert "will exist" not in text


_GIT = """\
#!/bin/sh
echo "git $*" >>"$LOG"
for each; do out=$each; done
mkdir -p "$out/soperator/installations/example"
echo 'echo "envrc $NEBIUS_TENANT_ID $NEBIUS_PROJECT_ID $NEBIUS_REGION" >>"$LOG"; false' \\
    >"$out/soperator/installations/example/.envrc"
"""
_TERRAFORM = """\
#!/bin/sh
echo "terraform $* in $(basename "$PWD") with $(ls *.tfvars.json)" >>"$LOG"
[ "$1" != state ] || printf 'resource {\\n    input  = "198.51.100.7"\\n}\\n'
"""


def test_the_script_carries_the_recipe_out_and_writes_the_file_for_launch(tmp_path: Path) -> None:
    out, programs, log = tmp_path / "team", tmp_path / "bin", tmp_path / "log"
    write_cluster_plan(plan(tmp_path, soperator(image="i:1")), (), out)
    programs.mkdir()
    for name, text in (("git", _GIT), ("terraform", _TERRAFORM)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o700)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "LOG": str(log)}
    command = [shutil.which("bash") or "bash", str(out / "apply.sh")]
    refused = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert refused.returncode != 0 and "NEBIUS_TENANT_ID: is not set" in refused.stderr
    environment["NEBIUS_TENANT_ID"] = "tenant-e00t"
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    lines = log.read_text().splitlines()
    assert sum(line.startswith("git clone") for line in lines) == 1
    assert "soperator-4.1.13" in lines[0]
    assert lines[1] == "envrc tenant-e00t project-e00abc eu-north1"
    assert [line.split()[1] for line in lines[2:5]] == ["init", "apply", "state"]
    assert all(
        " in team with drillyard.auto.tfvars.json" in line
        for line in lines
        if line.startswith("terraform")
    )
    made = load_cluster_config(out / "team-slurm.yaml", resolve_environment=False)
    assert (made.platform, made.nodes, made.machine, made.image) == (
        *("slurm", 2, "gpu-h100-sxm", "i:1"),
    )
    assert made.storage.directory == "/mnt/shared"
    section = made.section.model_dump()
    assert section["login_host"] == "root@198.51.100.7" and section["partition"] == "main"
    assert section["gres"] == "gpu:nvidia_h100_80gb_hbm3:8"
    # Without an address there is no file for launch.
    (programs / "terraform").write_text("#!/bin/sh\n")
    (out / "team-slurm.yaml").unlink()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "has no address yet" in done.stderr
    assert not (out / "team-slurm.yaml").exists()
    # A new plan of the directory is written over it, and the checkout stays.
    write_cluster_plan(plan(tmp_path, soperator(nodes=4)), (), out, overwrite=True)
    assert (out / "recipe").is_dir()
