"""The life of a cluster of virtual machines over the real Terraform, and a run on the hosts that
`up` made, with sshd on this machine in their place."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integration.launch.desk import Desk
from tests.integration.launch.sshd_hosts import SshHosts, two_hosts
from tests.integration.provision.fake_cloud import Fault
from tests.integration.provision.interruption import kill_and_wait
from tests.integration.provision.project import Project, until
from tests.integration.provision.project_at_google import ProjectAtGoogle
from tests.integration.tiny_run import write_config

VM = "google_compute_instance"
SETTINGS: dict[str, Any] = {
    "platform": "gce",
    "machine": "g2-standard-12",
    "image": None,
    "gce": {"os_login": True, "user": "root"},
}


@pytest.fixture
def project(make_project: Callable[..., Project]) -> Project:
    made = make_project(**SETTINGS, storage={"bucket": "c-runs"})
    tunnel = made.directory / "bin/gcloud"
    tunnel.write_text("#!/bin/sh\nexit 1\n")
    tunnel.chmod(0o700)
    return made


def test_hosts_are_made_kept_and_removed(project: Project) -> None:
    # A host that was made while `up` was killed is found again, and what came before a refusal
    # stays.
    stockout = "Error 503: The zone does not have enough resources available, GCE_STOCKOUT"
    project.cloud.faults[f"create {VM} c-1"] = Fault(stockout, times=None)
    killed = threading.Event()
    project.cloud.on_begin = lambda verb, kind, name: kind == VM and killed.wait(60)
    command = project.start("up", "--yes")
    until(lambda: f"create {VM} c-0" in project.cloud.log, "no host is made")
    kill_and_wait(project, command)
    killed.set()
    until(lambda: project.cloud.kinds()[VM] == 1, "the host is not made")
    failed = project.run("up", "--yes")
    assert failed.returncode == 2 and "GCE_STOCKOUT" in failed.stderr
    assert f"found {VM}.c_0" in failed.stderr and f"{VM}.c_0" in project.state
    project.cloud.faults.clear()
    made = yaml.safe_load(project.up().stdout)
    project.require_whole()
    assert made["platform"] == "ssh" and made["ssh"]["hosts"] == ["c-0", "c-1"]
    assert Path(made["ssh"]["config_file"]).is_file()
    log = project.log.read_text("utf-8").splitlines()
    assert log == ["login c-0 c-1"]

    # Labels change in place, and nobody asks the hosts for it.
    changed = len(project.cloud.log)
    project.write(**SETTINGS, storage={"bucket": "c-runs"}, cluster={"labels": {"team": "a"}})
    # Google takes no other labels for a boot disk: they would replace the host.
    project.cloud.replaced_by.add((VM, "boot_disk"))
    project.stages(unreachable=True)
    project.up()
    project.require_whole()
    verbs = {line.split()[0] for line in project.cloud.log[changed:]}
    assert verbs == {"update"}
    # Fewer hosts take nodes from runs.
    project.write(**SETTINGS, storage={"bucket": "c-runs"}, nodes=1)
    unknown = project.run("up", "--yes")
    assert unknown.returncode == 2 and "is not known" in unknown.stderr
    project.stages(unreachable=False, runs=["long of c on c-1"])
    refused = project.run("up", "--yes")
    assert refused.returncode == 2 and "c_1: would be" in refused.stderr
    assert "long of c on c-1" in refused.stderr
    assert not any(line.startswith("delete") for line in project.cloud.log)
    project.stages(runs=[])
    shrunk = yaml.safe_load(project.up().stdout)
    project.require_whole()
    assert shrunk["nodes"] == 1 and shrunk["ssh"]["hosts"] == ["c-0"]

    project.stages(runs=["long of c on c-0"])
    refused = project.run("down", "--yes")
    assert refused.returncode == 2 and "long of c on c-0" in refused.stderr
    project.stages(runs=[], unreachable=True)
    unknown = project.run("down", "--yes")
    assert unknown.returncode == 2 and "--ignore-runs" in unknown.stderr
    project.require_whole()
    # One that somebody has deleted cannot be asked.
    project.cloud.remove(VM)
    gone = project.down()
    assert "the hosts are gone already" in gone.stderr
    project.require_nothing()


_TUNNEL = """\
#!{python}
import select, socket, sys
ports = {ports}
assert sys.argv[1:3] == ["compute", "start-iap-tunnel"] and "--listen-on-stdin" in sys.argv
server = socket.create_connection(("127.0.0.1", ports[sys.argv[3]]))
while True:
    for ready in select.select([0, server], [], [])[0]:
        if ready == 0:
            data = __import__("os").read(0, 1 << 16)
            server.sendall(data)
        else:
            data = server.recv(1 << 16)
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        if not data:
            sys.exit()
"""
"""In place of Google's: a connection to the sshd of the instance that it is asked for."""


def write_tunnel(path: Path, ports: dict[str, int]) -> None:
    """Write a gcloud that connects to an sshd of this machine, by the instance's name."""
    path.write_text(_TUNNEL.format(python=sys.executable, ports=json.dumps(ports)))
    path.chmod(0o700)


class HostsProject(ProjectAtGoogle):
    """Its virtual machines are sshd on this machine."""

    def _computed(self, kind: str, value: dict[str, Any]) -> dict[str, Any]:
        if kind != VM:
            return super()._computed(kind, value)
        nics = [{**each, "network_ip": "127.0.0.1"} for each in value["network_interface"]]
        made = {"creation_timestamp": "2026-11-28T10:00:00.000-00:00", "current_status": "RUNNING"}
        return {**made, "instance_id": f"77-{value['name']}", "network_interface": nics}


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[SshHosts]:
    with two_hosts(tmp_path / "hosts", ("c-0", "c-1")) as both:
        yield both


@pytest.fixture
def made(hosts: SshHosts, tmp_path: Path) -> Iterator[HostsProject]:
    shared = tmp_path / "shared"
    shared.mkdir()
    settings = {
        **SETTINGS,
        "gce": {"user": "root", "identity_file": str(hosts.directory / "user_key")},
        "storage": {"directory": str(shared), "bucket": "c-runs"},
        "processes_per_node": 1,
        "python": sys.executable,
    }
    project = HostsProject(tmp_path / "project", **settings)
    write_tunnel(project.directory / "bin/gcloud", {host.name: host.port for host in hosts.hosts})
    yield project
    project.close()


def test_a_run_on_the_hosts_that_up_made(
    made: HostsProject, hosts: SshHosts, workplace: Path
) -> None:
    checked = made.run("plan", "--check")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    written = made.up("--write")
    made.require_whole()
    file = made.config.with_name("c-ssh.yaml")
    assert f"drillyard launch RUN.YAML --cluster {file}" in written.stderr
    assert made.leaks()["leaks"] == []

    # The hosts answer, and have no GPU: both commands say so.
    status = made.run("status")
    assert status.returncode == 1, status.stdout + status.stderr
    assert "0 of 2 nodes ready" in status.stdout and "c-0, c-1: offers 0 of 1" in status.stdout
    desk = Desk(made.directory / "desk", {})
    desk.environment |= {name: made.environment[name] for name in ("PATH", "DRILLYARD_CACHE")}
    waiting = made.directory / "go"
    script = f"while [ ! -e {waiting} ]; do sleep 0.1; done; echo node $NODE_RANK"
    run = desk.write_run("first", {"command": ["sh", "-c", script]})
    refused = desk.say("launch", run, "--cluster", file)
    assert refused.returncode == 2 and "0 GPUs, and machine g2-standard-12 has 1" in refused.stderr
    values = yaml.safe_load(file.read_text("utf-8"))
    del values["machine"]
    (desk.directory / "cluster.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")

    handle = desk.launch(run)
    assert handle == "ssh://c/first"
    desk.wait_for(handle, lambda status: status["state"] == "running")
    busy = made.run("down", "--yes")
    assert busy.returncode == 2 and "first of c on c-0, c-1" in busy.stderr
    waiting.touch()
    ended = desk.wait_for(handle, lambda status: status["state"] not in ("running", "starting"))
    assert ended["state"] == "succeeded", ended
    logs = desk.say("runs", "logs", handle).stdout
    assert "node 0" in logs and "node 1" in logs

    # The trainer, over both.
    handle = desk.launch(write_config(workplace, "tiny", training__steps=2))
    ended = desk.wait_for(handle, lambda status: status["state"] not in ("running", "starting"))
    assert ended["state"] == "succeeded", ended
    assert hosts.nothing_left()
    made.down("--delete-data")
    made.require_nothing()
    assert made.leaks()["exit_code"] == 0
