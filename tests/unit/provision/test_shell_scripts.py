"""Every shell script that a plan contains, for each machine and way of buying, by shellcheck."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tests.unit.provision import clusters, nebius_clusters, slurm_clusters, vm_clusters

from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.nebius.instances import MOUNT_TAG
from drillyard.provision.plan_directory import plan_directory

SHELLCHECK = str(Path(sys.executable).with_name("shellcheck"))


def scripts_of(plan: ClusterPlan) -> Iterator[str]:
    """The scripts of a plan's directory, and those within its blueprint. `make lint` checks those
    of charts, which are parts of others."""
    for path, (text, _) in plan_directory(plan, ()).items():
        if path.endswith(".sh") and "/" not in path:
            yield text
    if plan.toolkit is not None:
        for module in slurm_clusters.modules(plan).values():
            yield from (
                text
                for text in slurm_clusters.texts(module.get("settings", {}))
                if text.startswith("#!")
            )


@pytest.mark.slow
@pytest.mark.parametrize("kind", [clusters, slurm_clusters, vm_clusters, nebius_clusters])
def test_shellcheck_finds_nothing_in_any_script(kind: ModuleType, tmp_path: Path) -> None:
    texts: set[str] = set()
    for machine, mode in kind.OFFERS:
        texts.update(scripts_of(kind.plan(tmp_path, kind.config(machine, mode))))
    check(tmp_path, texts)


def test_shellcheck_finds_nothing_in_what_a_nebius_host_runs_first(tmp_path: Path) -> None:
    found = nebius_clusters.plan(tmp_path, nebius_clusters.config())
    commands = [
        words
        for text in slurm_clusters.texts(json.loads(json.dumps(found.terraform)))
        if text.startswith("#cloud-config\n")
        for words in json.loads(text.partition("\n")[2])["runcmd"]
    ]
    shells = {words[2] for words in commands if words[:2] == ["sh", "-c"]}
    assert any(MOUNT_TAG in text for text in shells)
    check(tmp_path, {f"#!/bin/sh\n{text}\n" for text in shells})


def check(directory: Path, texts: set[str]) -> None:
    """Write and check scripts; there is at least one."""
    assert texts
    paths = []
    for number, text in enumerate(sorted(texts)):
        paths.append(directory / f"script-{number}.sh")
        paths[-1].write_text(text)
    command = [SHELLCHECK, "--severity=warning", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
