"""Whole dry runs as files: one per machine and launcher, and one per recipe. What is sent changes
on purpose only.

    DRILLYARD_UPDATE_GOLDEN=1 pytest tests/unit/launch/test_golden.py     # rewrites them; then read the difference

What belongs to the version and not to the plan is left out: the agent's files and their number.
"""  # noqa: E501

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.launch.requests import TRAINING, cluster, request

from drillyard.config.load import load_cluster_config, load_launch_config
from drillyard.hardware import catalog, load_catalog
from drillyard.launch.launcher import launcher_for
from drillyard.launch.plan import Plan
from drillyard.launch.plan_output import plan_text
from drillyard.launch.request import LaunchRequest

ROOT = Path(__file__).parents[3]
GOLDEN = Path(__file__).with_name("golden")
UPDATE = bool(os.environ.get("DRILLYARD_UPDATE_GOLDEN"))
RECIPES = sorted(path.parent for path in (ROOT / "recipes").glob("*/run.yaml"))

SHARED = {"storage": "{directory: /shared}"}
IMAGE = {"image": "nvcr.io/nvidia/pytorch:25.12-py3"}
SOPERATOR = {
    "slurm": '{partition: main, gres: "gpu:nvidia_h100_80gb_hbm3:8", time_limit: "1-00:00:00"}',
    **SHARED,
}
ZONED = {"location": "{project: p, region: us-central1, zone: us-central1-a}"}
FLEX = {
    "consumption": "flex-start",
    "vertex": "{timeout_hours: 24, max_wait_hours: 12, labels: {team: research}}",
}
RESERVED = {"consumption": "reservation", "reservation": "mine", **ZONED}

VOLUME = {
    "kubernetes": "{namespace: team, queue: gpus, volume_claim: shared}",
    **IMAGE,
    "storage": "{directory: /data}",
}


def gke(machine: str, consumption: str, section: str = "", **more: str) -> str:
    """A cluster of platform gke, with more of its section."""
    section = ", ".join(filter(None, ["queue: gpus", section]))
    bucket = {"storage": "{bucket: my-bucket}", "kubernetes": f"{{{section}}}", **ZONED, **IMAGE}
    return cluster("gke", machine, consumption=consumption, **{**bucket, **more})


CASES = {
    "slurm-a3-megagpu-8g": cluster(**SHARED, slurm="{partition: a3mega}"),
    "slurm-a3-megagpu-8g-image": cluster(**SHARED, **IMAGE, mounts="[/data, /raw:/raw:ro]"),
    "slurm-a3-ultragpu-8g": cluster(
        machine="a3-ultragpu-8g", **SHARED, **IMAGE, slurm="{partition: a3ultra}"
    ),
    "slurm-a4-highgpu-8g": cluster(
        machine="a4-highgpu-8g", **SHARED, **IMAGE, slurm="{partition: a4high}"
    ),
    "slurm-gpu-h100-sxm": cluster(machine="gpu-h100-sxm", **SOPERATOR),
    "slurm-p5.48xlarge": cluster(machine="p5.48xlarge", nodes=4, **SHARED, **IMAGE),
    "slurm-login-host": cluster(
        machine="gpu-h100-sxm",
        **SHARED,
        slurm="{login_host: login.example, directory: /shared/project, exclude: [n7]}",
    ),
    "vertex-a3-megagpu-8g-on-demand": cluster("vertex"),
    "vertex-a3-megagpu-8g-spot": cluster("vertex", consumption="spot", nodes=1),
    "vertex-a3-ultragpu-8g-flex-start": cluster("vertex", "a3-ultragpu-8g", **FLEX),
    "vertex-a4-highgpu-8g-reservation": cluster("vertex", "a4-highgpu-8g", 4, **RESERVED),
    "ssh-a3-megagpu-8g": cluster("ssh", **SHARED),
    "ssh-gpu-h100-sxm-image": cluster("ssh", "gpu-h100-sxm", **SHARED, **IMAGE),
    "gke-a3-highgpu-8g": gke("a3-highgpu-8g", "spot"),
    "gke-a3-megagpu-8g": gke(
        "a3-megagpu-8g", "reservation", reservation="mine", mounts="[/mnt/ssd:/ssd]"
    ),
    "gke-a3-ultragpu-8g-dranet": gke(
        "a3-ultragpu-8g", "flex-start", "pod_network: dranet, network_libraries: image"
    ),
    "gke-a4-highgpu-8g-flex-start-queued": gke(
        "a4-highgpu-8g", "flex-start-queued", "max_run_hours: 24"
    ),
    "gke-a4-highgpu-8g-host": gke("a4-highgpu-8g", "spot", "pod_network: host"),
    "gke-a4x-highgpu-4g": gke("a4x-highgpu-4g", "reservation", reservation="mine"),
    "gke-a4x-maxgpu-4g-metal": gke("a4x-maxgpu-4g-metal", "reservation", reservation="mine"),
    "kubernetes-gpu-h100-sxm": cluster("kubernetes", "gpu-h100-sxm", **VOLUME),
    "kubernetes-p5.48xlarge": cluster("kubernetes", "p5.48xlarge", **VOLUME),
    "local": cluster("local", None, 1, processes_per_node=2),
}


def normalised(plan: Plan) -> str:
    """The plan's text without what belongs to the version: the chart is the same for every plan."""
    plan = replace(
        plan, files=tuple(file for file in plan.files if not file.path.startswith("chart/"))
    )
    text = re.sub(
        r"^# \d+ files in ", "# files in ", plan_text(plan, whole_files=True), flags=re.MULTILINE
    )
    text = re.sub(r"by drillyard \d[\w.]*", "by drillyard VERSION", text)
    text = re.sub(r'(drillyard-version(?:"|\\"): (?:"|\\"))[\w-]+', r"\1VERSION", text)
    text = re.sub(r"^# \d+ files more in ", "# files more in ", text, flags=re.MULTILINE)
    return re.sub(
        r"^ *\d+  \d+  (.*/)?(agent/.*|run.yaml|cluster.yaml|job.json|custom-job.json)\n",
        "",
        text,
        flags=re.MULTILINE,
    )


def compare(name: str, text: str) -> None:
    """`text` against its golden file, or into it."""
    path = GOLDEN / f"{name}.txt"
    if UPDATE:
        path.write_text(text, encoding="utf-8")
    assert path.exists(), (
        f"no golden file {path.name}: run with DRILLYARD_UPDATE_GOLDEN=1 and read what it writes"
    )
    assert text == path.read_text(encoding="utf-8")


def recipe(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """The plan of a recipe, launched from the repository's root as its first lines say."""
    monkeypatch.chdir(ROOT)
    here = directory.relative_to(ROOT)
    config = load_cluster_config(here / "cluster.yaml", resolve_environment=False)
    asked = LaunchRequest(
        run=load_launch_config(here / "run.yaml", resolve_environment=False),
        cluster=config,
        facts=load_catalog(config.hardware),
        here=str(ROOT),
        python="/usr/bin/python3",
    )
    return launcher_for(config).plan(asked)


@pytest.mark.parametrize("name", CASES)
def test_the_dry_run_of_each_machine_and_launcher_is_as_it_was(name):
    asked = request(CASES[name], TRAINING)
    compare(name, normalised(launcher_for(asked.cluster).plan(asked)))


@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_the_same_twice(name):
    first, second = request(CASES[name]), request(CASES[name])
    assert launcher_for(first.cluster).plan(first) == launcher_for(second.cluster).plan(second)


@pytest.mark.parametrize("directory", RECIPES, ids=lambda path: path.name)
def test_the_dry_run_of_each_recipe_is_as_it_was(directory, monkeypatch):
    text = normalised(recipe(directory, monkeypatch))
    assert str(ROOT) not in text
    compare(f"recipe-{directory.name}", text)


@pytest.mark.parametrize("directory", RECIPES, ids=lambda path: path.name)
def test_a_recipe_is_headed_by_the_command_that_runs_it(directory):
    head = (directory / "run.yaml").read_text(encoding="utf-8")
    command = re.sub(r"\s*\\\n#\s*", " ", head[: head.index("\n#\n")])
    assert re.search(
        rf"drillyard \w+ recipes/{directory.name}/run.yaml --cluster recipes/{directory.name}/",
        command,
    )


def test_no_golden_file_is_left_over():
    wanted = {f"{name}.txt" for name in CASES} | {f"recipe-{path.name}.txt" for path in RECIPES}
    assert {path.name for path in GOLDEN.iterdir()} == wanted


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("slurm")])
def test_what_bash_is_to_read_it_can_read(name):
    asked = request(CASES[name])
    for file in launcher_for(asked.cluster).plan(asked).files:
        if file.path.endswith((".sh", ".sbatch")):
            checked = subprocess.run(
                ["bash", "-n"], input=file.content, text=True, capture_output=True
            )
            assert checked.returncode == 0, f"{file.path}: {checked.stderr}"


def test_every_stack_with_facts_of_hosts_has_a_golden_file():
    machines = catalog().machines
    named = {
        machines[match[0]].network_stack
        for name in CASES
        if (
            match := re.findall(
                r"(?:a3|a4|gpu|p5)[\w.-]+?(?=-image|-on|-spot|-flex|-res|-dranet|-host|$)", name
            )
        )
    }
    assert {"tcpxo", "gib", "infiniband", "efa"} <= named
