"""The life of a Slurm cluster that Cluster Toolkit makes, with a program at the edge of gcluster's
protocol in its place: what is asked of it, and what is in the bucket. It shows nothing of the real
one."""

from __future__ import annotations

import getpass
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integration.forked_start import PLAIN, forked
from tests.integration.provision.bucket_server import BucketServer
from tests.unit.provision.slurm_clusters import config

from drillyard.hardware.cluster_toolkit import toolkit_release

SETTINGS: dict[str, Any] = {
    "name": "c",
    "location": {"project": "p", "zone": "us-central1-b"},
    "consumption": "flex-start",
}
ROOT = Path(__file__).resolve().parents[3]
PYTHONPATH = f"{ROOT / 'src'}:{ROOT}"
_SECONDS = 120
STATES = ["c/c/base/default.tfstate", "c/c/cluster/default.tfstate", "c/deployed.json"]
CREATED = "create -l ERROR -o c.toolkit -d deployment.yaml blueprint.yaml"
GROUP = "google_compute_instance_group_manager"


class Toolkit:
    """A project on this machine: a bucket server, and a program `gcluster`."""

    def __init__(self, directory: Path) -> None:
        self.store = BucketServer()
        self.config, self.log_file = directory / "c.yaml", directory / "stages.log"
        self.directory, self.room = directory, directory / "gcluster"
        self._stages: dict[str, Any] = {"log": str(self.log_file)}
        self.room.mkdir()
        (directory / "bin").mkdir()
        self.program(f'exec {sys.executable} -m tests.unit.provision.fake_gcluster "$@"')
        self.environment = {
            **os.environ,
            "PATH": f"{directory / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": PYTHONPATH,
            "DRILLYARD_CACHE": str(directory / "cache"),
            "STORAGE_EMULATOR_HOST": self.store.endpoint,
            # Cloud Storage alone is asked: the stages of the tests answer for the others.
            "DRILLYARD_GOOGLE_ENDPOINT": "http://127.0.0.1:9",
            "FAKE_GCLUSTER": str(self.room),
            "FAKE_WHO": f"{getpass.getuser()}@{socket.gethostname()}",
        }
        self.write()

    def write(self, **settings: Any) -> None:
        self.config.write_text(yaml.safe_dump(config(**{**SETTINGS, **settings})))

    def program(self, line: str) -> None:
        path = self.directory / "bin" / "gcluster"
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)

    def stages(self, **settings: Any) -> None:
        """What the stages of the next commands answer."""
        self._stages.update(settings)

    def fault(self, **faults: tuple[str, int]) -> None:
        named = {key.replace("_", " "): value for key, value in faults.items()}
        (self.room / "faults.json").write_text(json.dumps(named))

    @property
    def log(self) -> list[str]:
        """What was asked of the program since the last look."""
        path = self.room / "log"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines

    def start(self, verb: str, *options: str) -> subprocess.Popen[str]:
        stages = self.directory / "stages.json"
        stages.write_text(json.dumps(self._stages))
        module = "tests.integration.provision.run_command"
        return subprocess.Popen(
            [sys.executable, "-m", module, verb, str(self.config), str(stages), "--yes", *options],
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, verb: str, *options: str) -> subprocess.CompletedProcess[str]:
        started = self.start(verb, *options)
        out, err = started.communicate(timeout=_SECONDS)
        return subprocess.CompletedProcess(started.args, started.returncode, out, err)

    def done(self, verb: str, *options: str) -> subprocess.CompletedProcess[str]:
        """A command that succeeds."""
        ended = self.run(verb, *options)
        assert ended.returncode == 0, ended.stderr
        return ended

    def hang(self, verb: str) -> subprocess.Popen[str]:
        """Start a command, and wait until a Terraform of it hangs."""
        started, end = self.start(verb), time.monotonic() + _SECONDS
        while not (self.room / "hangs").exists():
            assert time.monotonic() < end, f"{verb} does not come so far"
            time.sleep(0.02)
        (self.room / "hangs").unlink()
        return started

    def require_nothing(self) -> None:
        assert self.store.buckets == {}
        assert [*(self.directory / "cache").rglob("*")] == []


def kill(command: subprocess.Popen[str]) -> None:
    """Kill a command as a loss of power would, and wait until what it started has ended."""
    command.kill()
    command.communicate(timeout=_SECONDS)


@pytest.fixture(scope="module", autouse=True)
def commands_are_forks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched, forked(PLAIN):
        patched.setenv("PYTHONPATH", PYTHONPATH)
        yield


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Toolkit]:
    made = Toolkit(tmp_path)
    yield made
    made.store.close()


def stage_log(project: Toolkit) -> list[str]:
    return project.log_file.read_text().splitlines()


def test_a_cluster_is_made_changed_and_removed(project: Toolkit) -> None:
    made = yaml.safe_load(project.done("up").stdout)
    assert project.log == [CREATED, "deploy c --auto-approve"]
    assert sorted(project.store.names("p-c-tfstate")) == STATES
    assert made["slurm"]["login_host"] == "ann@c-login-001"
    assert made["slurm"]["partition"] == "gpu" and made["slurm"]["directory"] == "/home/ann/project"
    # Again: the image is there, and jobs may go on since nothing changes.
    project.stages(image=True, runs=["job 7"])
    project.write(**{"slurm": made["slurm"]})
    project.done("up")
    assert project.log == [CREATED, "deploy c --auto-approve --skip image"]
    # More nodes, and another partition: refused under jobs, then deployed.
    changed: dict[str, Any] = {"nodes": 3, "slurm": {"partition": "big"}}
    project.write(**changed)
    refused = project.run("up")
    assert refused.returncode == 2 and "job 7" in refused.stderr and project.log == []
    project.stages(runs=[])
    assert yaml.safe_load(project.done("up").stdout)["slurm"]["partition"] == "big"
    blueprint = project.directory / "cache/clusters/p/c.toolkit/blueprint.yaml"
    modules = {
        each["id"]: each.get("settings", {})
        for group in yaml.safe_load(blueprint.read_text())["deployment_groups"]
        for each in group["modules"]
    }
    assert modules["nodes"]["node_count_dynamic_max"] == 3
    assert modules["partition"]["partition_name"] == "big"

    project.stages(runs=["job 8"])
    refused = project.run("down")
    assert refused.returncode == 2 and "job 8" in refused.stderr
    project.stages(runs=[], unreachable=True)
    unknown = project.run("down")
    assert unknown.returncode == 2 and "--ignore-runs" in unknown.stderr
    project.log.clear()
    # A group of nodes is still in use: it is tried again, with the groups removed before.
    said = "googleapi: Error 400: The instance_template resource is already being used by"
    project.fault(destroy_cluster=(f"{said} 'g', resourceInUseByAnotherResource", 1))
    ended = project.done("down", "--ignore-runs")
    assert "trying again" in ended.stderr
    project.require_nothing()
    log = stage_log(project)
    removed = [line for line in log if line.startswith("remove left")]
    assert removed[:2] == [f"remove left {GROUP}"] * 2
    assert "google_compute_image" in removed[-1].split() and log.index(removed[-1]) > 2
    assert log[-1] == "leaks"
    # Nothing is left: `down` again says so.
    project.done("down")


def test_a_killed_up_goes_on_and_its_locks_are_released(project: Toolkit) -> None:
    project.fault(deploy_cluster=("hang", 1))
    kill(project.hang("up"))
    names = project.store.names("p-c-tfstate")
    assert {"c/default.tflock", "c/c/cluster/default.tflock"} <= set(names)
    project.done("up")
    assert sorted(project.store.names("p-c-tfstate")) == STATES
    project.done("down")
    project.require_nothing()


def test_ctrl_c_lets_terraform_save_its_state(project: Toolkit) -> None:
    project.fault(deploy_cluster=("hang", 1))
    started = project.hang("up")
    started.send_signal(signal.SIGINT)
    _, said = started.communicate(timeout=60)
    assert started.returncode == 130 and "in the state" in said
    # The state was saved, and no lock is left.
    assert sorted(project.store.names("p-c-tfstate")) == STATES[:2]
    project.done("down")
    project.require_nothing()


def test_a_lock_of_somebody_else_is_named_with_what_releases_it(project: Toolkit) -> None:
    project.environment["FAKE_WHO"] = "bob@elsewhere"
    project.fault(deploy_cluster=("hang", 1))
    kill(project.hang("up"))
    refused = project.run("up")
    assert refused.returncode == 2 and "bob@elsewhere" in refused.stderr
    unlock = refused.stderr.split("--unlock ")[1].split()[0]
    project.done("up", "--unlock", unlock)


def test_an_error_of_the_cloud_has_its_own_words(project: Toolkit) -> None:
    project.fault(deploy_cluster=("googleapi: Error 403: QUOTA_EXCEEDED - Quota 'CPUS'", 9))
    failed = project.run("up")
    assert failed.returncode == 2
    assert "QUOTA_EXCEEDED" in failed.stderr and "quota" in failed.stderr.lower()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (None, "is not on PATH"),
        ("echo gcluster version v1.94.2", "is 1.94.2"),
        ("echo hello", "prints no version"),
    ],
)
def test_where_gcluster_is_missing_the_error_says_how_to_get_it(
    project: Toolkit, line: str | None, said: str
) -> None:
    if line is None:
        (project.directory / "bin" / "gcluster").unlink()
    else:
        project.program(line)
    refused = project.run("up")
    assert refused.returncode == 2 and said in refused.stderr
    assert f"--branch v{toolkit_release().version}" in refused.stderr
    assert project.store.buckets == {}


def test_a_protected_home_is_not_removed(project: Toolkit) -> None:
    project.done("up")
    blob = project.store.buckets["p-c-tfstate"].live("c/c/cluster/default.tfstate")
    assert blob is not None
    content = json.loads(blob.data)
    content["resources"][0]["instances"][0]["attributes"]["deletion_protection_enabled"] = True
    blob.data = json.dumps(content).encode()
    refused = project.run("down", "--ignore-runs")
    assert refused.returncode == 2 and "cluster.deletion_protection: false" in refused.stderr
    assert sorted(project.store.names("p-c-tfstate")) == STATES
