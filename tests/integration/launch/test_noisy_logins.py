"""Runs on clusters whose logins print and whose sites have defaults of their own, from a directory
in which no config is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.held import Holds
from tests.integration.launch.desk import Desk
from tests.integration.launch.slurm_cluster import GPUS_PER_NODE, SlurmCluster, slurm_cluster
from tests.integration.launch.sshd_hosts import SshHosts, two_hosts
from tests.integration.tiny_run import STEPS, TIMEOUT_SECONDS, Run, write_config
from tests.integration.waiting import until

NOISE = {
    "text": "echo 'Welcome to the cluster'; echo 'quota: 93 % used' >&2",
    "number": "echo 42; echo 7 >&2",
    "json": """echo '{"entry": {}, "state": null}'; echo '[]'; echo '[1]' >&2""",
    "unended": "printf 'no end of line'; printf '[1, 2' >&2",
}
"""Lines of a .bashrc."""
SITE = "export SBATCH_EXPORT=NONE SLURM_EXPORT_ENV=NONE SBATCH_EXCLUSIVE=user SBATCH_TIMELIMIT=1"
PROMPTS = "read answer; " + SITE
"""What is in every .bashrc: it asks something, too."""
SLURM_COMMANDS = ("sbatch", "squeue", "scancel", "sinfo", "sacct")


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    """Nodes n1 to n4."""
    with slurm_cluster() as made:
        yield made


@pytest.fixture(scope="module")
def hosts(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    """h0 and h1; on h0, Slurm's commands."""
    with two_hosts(tmp_path_factory.mktemp("hosts")) as both:
        for name in SLURM_COMMANDS:
            command = both.hosts[0].home / "bin" / name
            conf, program = cluster.environment["SLURM_CONF"], shutil.which(name)
            command.write_text(f'#!/bin/sh\nSLURM_CONF={conf} exec {program} "$@"\n')
            command.chmod(0o755)
        yield both


@pytest.fixture
def place(cluster: SlurmCluster, hosts: SshHosts, tmp_path: Path) -> Iterator[Place]:
    """Where a test's user is."""
    made = Place(cluster, hosts, tmp_path)
    yield made
    for host in hosts.hosts:
        (host.home / ".bashrc").unlink(missing_ok=True)
    hosts.close_connections()
    cluster.reset()


class Place:
    """A user who types in `elsewhere`; the configs are in `desk.directory`, and name files beside
    them."""

    def __init__(self, cluster: SlurmCluster, hosts: SshHosts, directory: Path) -> None:
        self._cluster, self._hosts = cluster, hosts
        self.directory = directory
        self.project = directory / "project"
        self.elsewhere = directory / "elsewhere"
        self.elsewhere.mkdir()
        (self.elsewhere / "code.txt").write_text("code")
        subprocess.run(["git", "init", "-q"], cwd=self.elsewhere, check=True)

    def sit_down(self, platform: str, noise: str, **settings: Any) -> Desk:
        """A user of `slurm`, `slurm-login` or `ssh`."""
        slurm = {"partition": "main", "gres": f"gpu:{GPUS_PER_NODE}", "time_limit": "30"}
        reached = {"config_file": "ssh_config", "directory": str(self.project)}
        sections: dict[str, dict[str, Any]] = {
            "slurm": {"slurm": slurm},
            "slurm-login": {"slurm": slurm | reached | {"login_host": "h0"}},
            "ssh": {"ssh": reached | {"hosts": self._hosts.names, "rendezvous_host": "127.0.0.1"}},
        }
        nodes = len(self._hosts.hosts) if platform == "ssh" else 1
        common = {"name": "loud", "platform": platform.partition("-")[0], "nodes": nodes}
        common |= {"processes_per_node": 1, "python": sys.executable}
        desk = Desk(self.directory / "desk", common | sections[platform] | settings)
        (desk.directory / "ssh_config").write_text(self._hosts.config_file.read_text())
        if platform == "slurm":
            desk.environment["SLURM_CONF"] = self._cluster.environment["SLURM_CONF"]
            desk.environment |= dict(word.split("=") for word in SITE.split()[1:])
        for host in self._hosts.hosts:
            (host.home / ".bashrc").write_text(f"{noise}\n{PROMPTS}\n{noise}\n")
        # Each test's first command logs in.
        self._hosts.close_connections()
        return desk


def works(desk: Desk, *arguments: object) -> str:
    """The output of a command, which must work and note a login at most once."""
    done = desk.say(*arguments)
    assert done.returncode == 0, (arguments, done.stderr)
    assert done.stderr.count("its login printed") <= 1, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("platform", "noise"),
    [
        *((place, noise) for place in ("slurm-login", "ssh") for noise in NOISE),
        ("slurm", "unended"),
    ],
)
def test_every_command_works_where_a_login_prints(platform: str, noise: str, place: Place) -> None:
    desk = place.sit_down(platform, NOISE[noise])
    go = place.directory / "go"
    script = f"echo begun; while [ ! -e {go} ]; do sleep 0.1; done; echo ended $NODE_RANK"
    desk.write_run("talks", {"command": ["bash", "-c", script]})
    desk.directory = place.elsewhere
    sync = [] if platform == "slurm" else ["--sync"]
    cluster_file = ["--cluster", "../desk/cluster.yaml"]
    handle = works(desk, "launch", "../desk/talks.yaml", *cluster_file, *sync).strip()
    assert handle == f"{platform.partition('-')[0]}://loud/talks"
    desk.wait_for(handle, lambda status: status["state"] == "running")
    until(lambda: " begun\n" in works(desk, "runs", "logs", handle), "the run's first line")
    listed = json.loads(works(desk, "runs", "list", "--json"))
    assert handle in [run["handle"] for run in listed["runs"]] and listed["no_answer"] == []
    if sync:
        assert (place.project / "code.txt").read_text() == "code"
    works(desk, "runs", "cancel", handle)
    assert desk.status(handle)["state"] == "cancelled"
    assert works(desk, "runs", "resume", handle).strip() == handle
    go.touch()
    works(desk, "runs", "wait", handle)
    logs = works(desk, "runs", "logs", "--follow", handle)
    assert "ended 0" in logs and "no end of line" not in logs


def test_a_run_that_trains_is_resumed_followed_and_measured_where_a_login_prints(
    place: Place, workplace: Path, tmp_path: Path
) -> None:
    run = Run(write_config(workplace, "loud", checkpoint={"every_steps": 5}))
    place.project.mkdir()
    holds = Holds(tmp_path, "attempt-0-step-9")
    desk = place.sit_down(
        "slurm-login", NOISE["json"], python=holds.interpreter(tmp_path / "python")
    )
    desk.directory = place.elsewhere
    handle = works(desk, "launch", run.config, "--cluster", "../desk/cluster.yaml").strip()
    until(lambda: holds.reached("attempt-0-step-9", 0), "step 9")
    cancelling = desk.start("runs", "cancel", handle)
    log = run.directory / "launch" / "node-0.log"
    until(lambda: "SIGTERM" in log.read_text(), "the signal to save")
    holds.release("attempt-0-step-9")
    assert cancelling.wait(TIMEOUT_SECONDS) == 0
    works(desk, "runs", "resume", handle)
    assert f"{STEPS}" in works(desk, "runs", "watch", handle)
    assert run.last_step() == STEPS and run.events("resume")
    works(desk, "runs", "artifacts", handle, "--fetch", "here")
    measured = json.loads(works(desk, "metrics", "here", "--json"))
    assert (measured["format"], measured["restarts"]) == ("drillyard", 1), measured
    works(desk, "report", "here", "--output", "page.html")
    assert "<html" in (place.elsewhere / "page.html").read_text()
