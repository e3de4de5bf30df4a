"""The container image: built from docker/Dockerfile for real, and used as launchers use it."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.facts import says
from tests.integration.launch.image_build import BASE, ROOT, TOOLS, Builder, write_pip_conf

from drillyard.version import __version__

RUN = """
name: tiny
workload: {command: [sh, -c, 'test "$(id -u)" != 0 && echo "rank $NODE_RANK"']}
processes_per_node: 1
"""
CLUSTER = """
name: here
platform: local
"""


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    """The image, made without the training libraries, which are gigabytes."""
    made = Builder(TOOLS)
    made.make_base()
    pip = tmp_path_factory.mktemp("pip") / "pip.conf"
    write_pip_conf(pip)
    made.build(pip, [f"BASE={BASE}", "EXTRAS=", "SYSTEM=python3-venv", f"VERSION={__version__}"])
    return made


@pytest.fixture(scope="module")
def container(builder: Builder) -> Iterator[str]:
    """A container of it."""
    name = builder.container()
    yield name
    builder("rm", name)


def test_the_command_is_there_for_a_user_who_is_not_root(builder, container):
    assert builder.run(container, "drillyard", "--version").strip() == f"drillyard {__version__}"
    assert builder.run(container, "id", "-u").strip() == "10001"
    assert builder.run(container, "sh", "-c", "touch ~/here && echo well").strip() == "well"
    assert (
        builder.run(container, "sh", "-c", "test -w /opt/drillyard || echo kept").strip() == "kept"
    )


def test_a_plan_is_made_and_its_agent_runs_in_the_image(builder, container, tmp_path):
    (tmp_path / "run.yaml").write_text(RUN, encoding="utf-8")
    (tmp_path / "cluster.yaml").write_text(CLUSTER, encoding="utf-8")
    builder("copy", "--chown", "drillyard", container, str(tmp_path), "/home/drillyard/")
    plan = builder.run(container, "drillyard", "launch", "run.yaml", "--dry-run")
    assert "local://here/tiny" in plan
    builder.run(container, "drillyard", "launch", "run.yaml", "--wait")
    assert "rank 0" in builder.run(container, "drillyard", "runs", "logs", "tiny")


def test_its_configuration_is_what_launchers_rely_on(builder):
    configuration = builder.configuration()
    assert configuration["User"] == "drillyard"
    assert not configuration.get("Entrypoint")
    assert configuration["Cmd"] == ["drillyard", "--help"]
    assert configuration["Labels"]["org.opencontainers.image.title"] == "Drillyard"
    assert configuration["Labels"]["org.opencontainers.image.version"] == __version__
    assert configuration["Labels"]["org.opencontainers.image.base.name"] == BASE
    assert [each for each in configuration["Env"] if each.startswith("PATH=/opt/drillyard/bin:")]


def test_nothing_of_the_machine_that_built_it_is_in_it(builder, container):
    assert not [
        each for each in builder.configuration()["Env"] if "PIP" in each or "proxy" in each.lower()
    ]
    assert builder.run(container, "pip", "config", "list").strip() == ""
    root = builder.mount(container)
    # buildah leaves the empty file on which pip's settings were mounted.
    assert (root / "etc/pip.conf").read_text() == ""
    assert list((root / "tmp").iterdir()) == []
    assert not (root / "root/.cache/pip").exists()
    builder("umount", container)


def test_it_holds_what_is_needed_and_no_more(builder, container):
    assert "tcpxo" in builder.run(container, "drillyard", "hardware", "a3-megagpu-8g")
    installed = {
        each["name"].lower()
        for each in json.loads(builder.run(container, "pip", "list", "--format", "json"))
    }
    assert {"drillyard", "pydantic", "typer", "numpy"} <= installed
    notices = builder.run(container, "cat", "/usr/share/doc/drillyard/NOTICES")
    assert "\npydantic " in notices
    assert "Permission is hereby granted" in notices
    assert not installed & {"pytest", "ruff", "mypy", "hypothesis", "torch"}
    megabytes = int(builder.run(container, "du", "-sm", "/opt/drillyard").split()[0])
    assert megabytes < 250


def requirements(extras: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "docker/requirements.py", "pyproject.toml", extras]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_extras_are_a_build_argument():
    project = tomllib.loads(Path(ROOT, "pyproject.toml").read_text(encoding="utf-8"))["project"]
    core, extras = project["dependencies"], project["optional-dependencies"]
    assert requirements("").stdout.split("\n")[:-1] == core
    assert requirements("train,gcp").stdout.split("\n")[:-1] == [
        *core,
        *extras["train"],
        *extras["gcp"],
    ]
    refused = requirements("trian")
    assert refused.returncode == 1
    assert says(refused.stderr, "'trian'; ... train")
