"""Every recipes/*/smoke.yaml trains on two ranks to its end; each recipe that trains with Drillyard
has one."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from tests.integration.tiny_run import DRILLYARD, TIMEOUT_SECONDS

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SMOKE = sorted(RECIPES.glob("*/smoke.yaml"))


def test_every_recipe_that_trains_has_one() -> None:
    trained = {
        path.parent
        for path in RECIPES.glob("*/run.yaml")
        if "workload" not in yaml.safe_load(path.read_text())
    }
    assert {path.parent for path in SMOKE} == trained


@pytest.mark.parametrize("recipe", SMOKE, ids=[path.parent.name for path in SMOKE])
def test_a_recipe_trains_on_two_ranks_to_its_end(recipe: Path, tmp_path: Path) -> None:
    """By the commands at its head, typed where the repository is."""
    (tmp_path / "recipes").symlink_to(RECIPES)
    changes = [f"output={tmp_path}/runs", f"data.cache_directory={tmp_path}/cache"]
    words = [word for change in changes for word in ("--set", change)]
    commands = re.findall(r"^# drillyard (.+)$", recipe.read_text(), re.MULTILINE)
    assert commands[-1] == f"train recipes/{recipe.parent.name}/smoke.yaml --nproc-per-node 2"
    for command in commands:
        done = subprocess.run(
            [*DRILLYARD, *command.split(), *words],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    settings = yaml.safe_load(recipe.read_text())
    directory = tmp_path / "runs" / settings["name"]
    steps = [
        json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps[-1] == settings["training"]["steps"]
    assert (directory / "final" / "model.safetensors").is_file()
    evaluated = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    measured = {
        name
        for each in evaluated
        if each["event"] == "evaluation"
        for part in each["results"].values()
        for name in part
    }
    assert {metric.replace("-", "_") for metric in settings["evaluation"]["metrics"]} <= measured
