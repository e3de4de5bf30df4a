"""The container image: built from docker/Dockerfile for real, and used as launchers use it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from tests.facts import says
from tests.integration.launch.image_build import (
    BASE,
    DATE,
    ROOT,
    TOOLS,
    Builder,
    make_checkout,
    run_git,
)

from drillyard.provision.image_registry import image_digest
from drillyard.version import __version__

LABEL = "org.opencontainers.image"
SBOM = "/usr/share/doc/drillyard/sbom.cdx.json"
RUN = """
name: tiny
workload: {command: [sh, -c, 'test "$(id -u)" != 0 && echo "rank $NODE_RANK"']}
processes_per_node: 1
"""
CLUSTER = """
name: here
platform: local
"""


@dataclass(frozen=True)
class Built:
    """An image, the checkout that it is of, and its commit."""

    name: str
    checkout: Path
    commit: str


@pytest.fixture(scope="module")
def registry() -> Iterator[str]:
    """The address of a registry, empty."""
    program = TOOLS / "registry-v0.22.1"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([str(program), "-port", str(port)], stderr=subprocess.DEVNULL)
    until = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            break
        except OSError:
            assert time.monotonic() < until and process.poll() is None, "the registry did not start"
            time.sleep(0.05)
    yield f"localhost:{port}"
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    made = Builder(TOOLS, tmp_path_factory.mktemp("builder"))
    made.make_base()
    return made


@pytest.fixture(scope="module")
def image(builder: Builder, registry: str, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The image, made without the training libraries, which are gigabytes."""
    checkout = tmp_path_factory.mktemp("first") / "checkout"
    commit = make_checkout(checkout)
    return Built(builder.build(checkout, f"{registry}/test/drillyard"), checkout, commit)


@pytest.fixture(scope="module")
def container(builder: Builder, image: Built) -> Iterator[str]:
    """A container of it."""
    name = builder.container(image.name)
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


def test_its_configuration_is_what_launchers_rely_on(builder, image):
    inspected = builder.inspected(image.name)["OCIv1"]
    configuration = inspected["config"]
    # A number: Kubernetes cannot see that a name is not root's.
    assert configuration["User"] == "10001"
    assert not configuration.get("Entrypoint")
    assert configuration["Cmd"] == ["drillyard", "--help"]
    labels = configuration["Labels"]
    assert labels[f"{LABEL}.title"] == "Drillyard"
    assert labels[f"{LABEL}.revision"] == image.commit
    assert labels[f"{LABEL}.version"] == image.commit[:12]
    assert labels[f"{LABEL}.created"] == DATE
    assert inspected["created"] == "1980-01-01T00:00:00Z"
    assert labels[f"{LABEL}.base.name"] == BASE
    assert [each for each in configuration["Env"] if each.startswith("PATH=/opt/drillyard/bin:")]


def test_nothing_of_the_machine_that_built_it_is_in_it(builder, image, container):
    environment = builder.inspected(image.name)["OCIv1"]["config"]["Env"]
    assert not [each for each in environment if "PIP" in each or "proxy" in each.lower()]
    assert builder.run(container, "pip", "config", "list").strip() == ""
    root = builder.mount(container)
    # buildah leaves the empty file on which pip's settings were mounted.
    assert (root / "etc/pip.conf").read_text() == ""
    assert list((root / "tmp").iterdir()) == []
    for left in ("root/.cache/pip", "build", "package", "var/log/apt", "var/log/dpkg.log"):
        assert not (root / left).exists()
    assert list((root / "var/lib/apt/lists").iterdir()) == []
    builder("umount", container)


def test_its_bill_of_materials_has_every_package(builder, container):
    text = builder.run(container, "cat", SBOM)
    # Its import compiles a grammar of addresses for seconds, which only this test needs.
    from cyclonedx.validation.json import JsonStrictValidator

    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    found = {(each["name"], each["version"]) for each in json.loads(text)["components"]}
    listed = json.loads(builder.run(container, "pip", "list", "--format", "json"))
    assert {(each["name"], each["version"]) for each in listed} <= found
    shown = builder.run(container, "dpkg-query", "--show", "--showformat=${Package} ${Version}\\n")
    assert {tuple(line.split()) for line in shown.splitlines()} <= found
    assert ("drillyard", __version__) in found
    assert not [name for name, _ in found if name.startswith("cyclonedx")]


def test_two_builds_of_a_commit_are_the_same_image(builder, image, registry, tmp_path):
    # Another checkout, made by somebody else at another time, and none of the first one's steps.
    mask = os.umask(0o077)
    run_git(tmp_path, "clone", "--quiet", str(image.checkout), "checkout")
    os.umask(mask)
    second = builder.build(tmp_path / "checkout", f"{registry}/test/second", "--no-cache")
    one, two = (builder.inspected(name) for name in (image.name, second))
    layers = one["OCIv1"]["rootfs"]["diff_ids"]
    assert two["OCIv1"]["rootfs"]["diff_ids"] == layers
    # Of the base, the system, the dependencies and the package.
    assert len(layers) == 4
    assert two["OCIv1"] == one["OCIv1"]
    digests = []
    for name in (image.name, second):
        (tmp_path / "cluster.yaml").write_text("name: a\nplatform: local\n")
        pushed = builder.image(
            *("push", "--tag", name, "--builder", "buildah"),
            *("--write", str(tmp_path / "cluster.yaml"), "--", "--tls-verify=false"),
        )
        digests.append(image_digest(name))
        assert pushed == f"image: {name.rpartition(':')[0]}@{digests[-1]}\n"
        assert pushed in (tmp_path / "cluster.yaml").read_text()
    assert digests[0] == digests[1]


def test_no_secret_no_git_and_no_run_is_sent_to_a_builder(builder, tmp_path):
    # As `docker build` in a checkout sends it, without drillyard.
    shutil.copy(ROOT / ".dockerignore", tmp_path)
    kept = ["pyproject.toml", "docker/sbom.py", "src/a.py", "charts/a.yaml"]
    left = [".env", ".git/config", "runs/a/run.yaml", "src/.env", "src/a.pem", "src/deep/id.key"]
    for name in [*kept, *left]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "docker/Dockerfile").write_text("FROM scratch\nCOPY . /\n")
    words = ["--file", str(tmp_path / "docker/Dockerfile"), "--tag", "localhost/sent"]
    builder("build", *words, str(tmp_path))
    container = builder("from", "--pull-never", "localhost/sent").strip()
    root = builder.mount(container)
    sent = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    builder("umount", container)
    builder("rm", container)
    builder("rmi", "localhost/sent")
    assert sent & {*kept, *left} == set(kept)


def test_workflows_are_what_github_takes():
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    files = sorted((ROOT / ".github/workflows").glob("*.yml"))
    command = [str(TOOLS / "actionlint-v1.7.12"), *map(str, files)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, len(files)) == (0, "", 2)


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
