"""A fixed tenth of `make soak`: every kind of fault and every place once, and never another bit
than undisturbed.

A real run of two ranks per case, with the faults as close together as they go: a start of the ranks
costs seconds.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.integration.tiny_run import DRILLYARD, contents, write_config

from drillyard.faults.plan import FAULT_KINDS, INJECTION_POINTS

COUNT = 12
SEED = 0
TIMEOUT_SECONDS = 3000

pytestmark = pytest.mark.timeout(TIMEOUT_SECONDS + 60)


@pytest.fixture(scope="module")
def soaked(
    workplace: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The command's result, and the directory in which it worked."""
    config = write_config(workplace, "soak", training__steps=60, checkpoint={"every_steps": 4})
    directory = tmp_path_factory.mktemp("chaos")
    before = contents(workplace / "runs") if (workplace / "runs").exists() else {}
    command = [*DRILLYARD, "chaos", str(config), "--count", str(COUNT), "--seed", str(SEED)]
    # The default, four undisturbed starts, is less than a start when the machine gets busy.
    command += ["--watchdog", "40", "--directory", str(directory), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    after = contents(workplace / "runs") if (workplace / "runs").exists() else {}
    assert after == before, "chaos has touched the run directories of its user"
    return ended, directory


def faults_of(ended: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    faults: list[dict[str, Any]] = json.loads(ended.stdout)["faults"]
    return faults


def test_every_fault_ends_with_the_bits_of_the_undisturbed_run(
    soaked: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    ended, _ = soaked
    problems = [
        (fault["moment"], fault["problems"]) for fault in faults_of(ended) if not fault["passed"]
    ]
    assert problems == [] and ended.returncode == 0, ended.stderr


def test_every_kind_and_every_place_was_hit(
    soaked: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    faults = faults_of(soaked[0])
    assert len(faults) == COUNT and all(fault["hit"] for fault in faults)
    assert {fault["kind"] for fault in faults} == set(FAULT_KINDS)
    assert {fault["place"] for fault in faults if fault["kind"] == "kill"} == set(INJECTION_POINTS)
    assert {fault["target"] for fault in faults} == {0, 1, "supervisor"}


def test_nothing_is_left_where_it_worked(
    soaked: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    _, directory = soaked
    assert not directory.exists() or not any(directory.iterdir())
