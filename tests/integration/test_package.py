"""What is published: an unpacked sdist is a place to work in, and an agent comes out of a wheel
that stays zipped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def build(directory: Path, kind: str) -> Path:
    words = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(directory)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    (made,) = directory.iterdir()
    return made


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unpacked sdist, with the environment of these tests as its own."""
    directory = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build(directory, "sdist")) as archive:
        archive.extractall(
            directory, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {})
        )
    (tree,) = (path for path in directory.iterdir() if path.is_dir())
    return tree


def test_an_sdist_holds_every_tracked_file(unpacked: Path) -> None:
    if (ROOT / ".git").exists():
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        tracked = set(listed.rstrip("\0").split("\0"))
    else:  # these tests run in an unpacked sdist
        tracked = {"Makefile", ".ci/setup", "docker/Dockerfile"}
    packed = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*")}
    assert tracked
    assert sorted(name for name in tracked - packed if (ROOT / name).exists()) == []


def test_targets_of_the_makefile_work_in_an_sdist(unpacked: Path) -> None:
    (unpacked / ".venv").symlink_to(Path(sys.prefix).resolve())
    make = ["make", "--no-print-directory", "-C", str(unpacked)]
    # No rule of any target names a file that is missing, and the environment is recognised as
    # ready.
    for target in ("setup", "help"):
        subprocess.run([*make, target], check=True, capture_output=True, env=ENVIRONMENT)
    planned = subprocess.run(
        [*make, "-n", "test", "bench", "demo", "soak", "gpu"], capture_output=True, text=True
    )
    assert planned.returncode == 0, planned.stderr
    for name in re.findall(
        r"(?:benchmarks|demo|\.ci|tests|tools)/[\w./]+", (unpacked / "Makefile").read_text()
    ):
        assert name.endswith("/") or (unpacked / name).exists(), name
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "tests/unit/cli/test_hardware.py",
        ],
        cwd=unpacked,
        env={**ENVIRONMENT, "PYTHONPATH": str(unpacked / "src")},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout


def test_a_launch_is_planned_from_a_zipped_wheel(tmp_path: Path) -> None:
    wheel = build(tmp_path / "dist", "wheel")
    (tmp_path / "run.yaml").write_text("name: a\nworkload: {command: [hostname]}\n")
    (tmp_path / "cluster.yaml").write_text(
        "name: here\nplatform: local\nstorage: {directory: runs}\n"
    )
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "drillyard",
            "launch",
            "run.yaml",
            "--cluster",
            "cluster.yaml",
            "--output",
            "plan",
        ],
        cwd=tmp_path,
        env={**ENVIRONMENT, "PYTHONPATH": str(wheel)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    shipped = {path.name for path in tmp_path.rglob("plan/**/agent/*.py")}
    agent = {path.name for path in (ROOT / "src/drillyard/launch/agent").glob("*.py")}
    assert agent | {"cause.py", "reaper.py"} <= shipped


def test_constraints_name_versions_and_nothing_else() -> None:
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert [
        line for line in lines if not re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.]+", line)
    ] == []
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["train"]]
    assert {re.split(r"[>=<\[]", each)[0].lower().replace("_", "-") for each in wanted} <= pinned


def test_the_base_of_the_image_is_given_by_its_digest() -> None:
    base = re.search(r"^ARG BASE=(\S+)$", (ROOT / "docker/Dockerfile").read_text(), re.MULTILINE)
    assert base is not None
    assert re.fullmatch(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", base[1])
