"""What recipes carry beside their configs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from drillyard.config.load import load_cluster_config, load_launch_config

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "run", sorted((ROOT / "recipes").glob("*/run.yaml")), ids=lambda path: path.parent.name
)
def test_every_recipe_loads(run):
    load_launch_config(run, resolve_environment=False)
    load_cluster_config(run.with_name("cluster.yaml"), resolve_environment=False)


@pytest.mark.parametrize(
    "script", sorted((ROOT / "recipes").glob("*/*.sh")), ids=lambda path: path.name
)
def test_scripts_are_bash(script):
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True).returncode == 0
