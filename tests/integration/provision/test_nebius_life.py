"""`drillyard cluster` for Nebius over the real Terraform: from nothing to a cluster and back, from
wherever a command was killed."""

from __future__ import annotations

import json
import random
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integration.launch.desk import Desk
from tests.integration.launch.sshd_hosts import two_hosts
from tests.integration.provision.fake_cloud import Fault
from tests.integration.provision.interruption import Steps, kill_and_wait
from tests.integration.provision.nebius_project import (
    CONTROL_PLANE,
    FILES,
    SECRET,
    STATE,
    VM,
    NebiusProject,
)
from tests.integration.provision.project import TIMEOUT_SECONDS, until

from drillyard.config.load import load_cluster_config
from drillyard.provision.nebius.listings import LISTINGS
from drillyard.provision.nebius.nebius_plan import BUCKET_KIND

DISK, NETWORK = "nebius_compute_v1_disk", "nebius_vpc_v1_network"
LOCK = "team/default.tfstate.tflock"


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., NebiusProject]]:
    made: list[NebiusProject] = []

    def one(**settings: Any) -> NebiusProject:
        made.append(NebiusProject(tmp_path / "project", **settings))
        return made[-1]

    yield one
    for each in made:
        each.close()


@pytest.fixture
def project(make: Callable[..., NebiusProject]) -> NebiusProject:
    return make()


def test_a_cluster_is_made_changed_and_removed_but_for_its_data(project: NebiusProject) -> None:
    checked = project.run("plan", "--check")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert project.leaks()["exit_code"] == 0
    written = project.up("--write")
    project.require_whole()
    file = project.config.with_name("team-ssh.yaml")
    assert f"drillyard launch RUN.YAML --cluster {file}" in written.stderr
    launched = load_cluster_config(file, resolve_environment=False)
    assert launched.platform == "ssh" and launched.nodes == 2
    assert launched.section.model_dump(include={"hosts", "rendezvous_host"}) == {
        "hosts": ["team-0", "team-1"],
        "rendezvous_host": "10.0.0.0",
    }
    reached = Path(yaml.safe_load(file.read_text())["ssh"]["config_file"]).read_text()
    assert "HostName 198.51.100.1" in reached
    assert project.leaks()["leaks"] == []

    # The same again changes nothing; labels change in place, and nobody asks the hosts.
    begun = len(project.cloud.log)
    project.up("--write")
    assert len(project.cloud.log) == begun
    project.write(cluster={**_access(project), "labels": {"team": "a"}})
    project.up()
    assert {line.split()[0] for line in project.cloud.log[begun:]} == {"update"}
    status = project.run("status", "--json")
    found = json.loads(status.stdout)
    assert found["drift"] == [] and "created" in json.dumps(found["objects"])
    assert status.returncode == 1  # No host answers.

    # Fewer nodes, and the way back, ask the hosts first, which do not answer.
    project.write(nodes=1, cluster={**_access(project), "labels": {"team": "a"}})
    refused = project.run("up", "--yes")
    assert refused.returncode == 2 and "team_1: would be" in refused.stderr
    refused = project.run("down", "--yes")
    assert refused.returncode == 2 and "--ignore-runs" in refused.stderr
    assert project.cloud.kinds()[VM] == 2

    kept = project.down("--ignore-runs")
    assert "file system team (computefilesystem-team) has data and stays" in kept.stderr
    assert project.cloud.kinds() == {FILES: 1} and project.buckets == {}
    # A later one has it again, and it goes with its data on demand.
    project.write()
    again = project.up()
    assert f"found {FILES}.shared" in again.stderr
    project.require_whole()
    project.down("--ignore-runs", "--delete-data")
    project.require_nothing()
    assert project.leaks()["exit_code"] == 0


def test_a_kept_file_system_is_deleted_on_demand_without_a_state(project: NebiusProject) -> None:
    project.add(FILES, "team")
    kept = project.run("down", "--yes")
    assert kept.returncode == 0 and project.cloud.kinds() == {FILES: 1}
    project.add(FILES, "team-of-others", label="others")
    project.down("--delete-data")
    assert [value["name"] for value in list(project.cloud.objects.values())] == ["team-of-others"]


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_any_step_up_ends_in_the_same_state_and_down_in_nothing(
    project: NebiusProject, seed: int
) -> None:
    project.cloud.seconds = 0.02
    draw = random.Random(seed)
    steps = Steps(project)
    assert steps.run("up", kill_at=draw.randrange(18, 45)) == -signal.SIGKILL
    assert steps.run("up") == 0, steps.errors
    project.require_whole()
    steps = Steps(project, "--ignore-runs", "--delete-data")
    assert steps.run("down", kill_at=draw.randrange(6, 25)) == -signal.SIGKILL
    assert steps.run("down") == 0, steps.errors
    project.require_nothing()


def test_what_a_killed_up_has_made_is_found_by_its_name_and_label(project: NebiusProject) -> None:
    project.cloud.faults[f"create {VM}"] = Fault("", None, hang_seconds=60)
    command = project.start("up", "--yes")
    until(lambda: any(VM in line for line in project.cloud.log), "no node is made")
    kill_and_wait(project, command)
    # Terraform saves its state only now and then: it knows of little that was made.
    made = [
        each.address
        for each in project.plan.made_by_terraform
        if (each.kind, each.name) in project.cloud.objects and each.address not in project.state
    ]
    removed = project.down("--ignore-runs", "--delete-data")
    assert all(f"found {each}: " in removed.stderr for each in made), made
    project.require_nothing()

    # Something of the name that another has made meanwhile is not taken.
    command = project.start("up", "--yes")
    until(lambda: (NETWORK, "team") in project.cloud.objects, "no network is made")
    kill_and_wait(project, command)
    project.cloud.objects[NETWORK, "team"]["labels"] = {"drillyard-cluster": "others"}
    for verb in ("up", "down"):
        refused = project.run(verb, "--yes")
        assert refused.returncode == 2 and "is not" in refused.stderr, refused.stderr
        assert (NETWORK, "team") in project.cloud.objects


def test_of_two_at_once_one_works_and_a_lock_is_released_by_its_id(project: NebiusProject) -> None:
    go = threading.Event()
    project.cloud.on_begin = lambda *words: go.wait(TIMEOUT_SECONDS)
    first = project.start("up", "--yes")
    until(lambda: len(project.cloud.log) > 0, "nothing is made")
    second = project.run("up", "--yes")
    go.set()
    assert second.returncode == 2
    assert f"process {first.pid}" in second.stderr and "--unlock" in second.stderr
    _, errors = first.communicate(timeout=TIMEOUT_SECONDS)
    assert first.returncode == 0, errors
    project.require_whole()
    # A terraform by hand has the lock, with its own format; its id is the object's version.
    held = {"ID": "1", "Operation": "OperationTypeApply", "Who": "ann@desk", "Created": "today"}
    version = project.store.put(STATE, LOCK, json.dumps(held))
    refused = project.run("down", "--yes", "--ignore-runs")
    assert refused.returncode == 2 and "ann@desk" in refused.stderr
    assert f"--unlock {version}" in refused.stderr
    project.down("--ignore-runs", "--delete-data", "--unlock", version)
    project.require_nothing()


_PREFIXES = {"nebius_vpc_v1_security_group": "vpcsecuritygroup", CONTROL_PLANE: "mk8scluster"}


def test_leaks_finds_one_of_each_kind_and_its_commands_delete_them(project: NebiusProject) -> None:
    project.up()
    for row in LISTINGS:
        parent = {"parent_id": f"{_PREFIXES[row.of]}-left"} if row.of else {}
        project.add(row.kind, "left", **parent)
        if not row.of:
            project.add(row.kind, "of-others", label="others")
    project.cloud.objects[VM, "left"]["resources"] = {
        "platform": "gpu-h100-sxm",
        "preset": "8gpu-128vcpu-1600gb",
    }
    found = project.leaks()
    assert found["exit_code"] == 1
    # A group of nodes stands for its machines, and for their disks.
    kinds = [each.kind for each in LISTINGS if each.kind not in (VM, DISK)]
    assert [each["kind"] for each in found["leaks"]] == kinds
    assert {each["name"] for each in found["leaks"]} == {"left"}
    for command in found["commands"]:
        project.type(command)
    found = project.leaks()
    assert [each["kind"] for each in found["leaks"]] == [VM, DISK, FILES]
    assert found["leaks"][0]["usd_per_day"] == pytest.approx(24 * 23.60)
    for command in found["commands"]:
        project.type(command)
    left = project.leaks()["leaks"]
    # It may have data: the command is named, and is not among those to be typed.
    assert [each["kind"] for each in left] == [FILES]
    project.type(left[0]["why"].partition("with it: ")[2])
    assert project.leaks()["leaks"] == []
    # A list that is refused is not `nothing`.
    project.refuse = lambda words: (
        "rpc error: code = PermissionDenied desc = no" if words[1] == "disk" else None
    )
    assert project.leaks()["exit_code"] == 3


def test_what_the_project_lacks_is_one_error_each_and_nothing_is_made(
    project: NebiusProject,
) -> None:
    def refused(*said: str) -> None:
        for command in (("plan", "--check"), ("up", "--yes")):
            ended = project.run(*command)
            text = ended.stdout + ended.stderr
            assert ended.returncode == (1 if command[0] == "plan" else 2), text
            assert all(each in text for each in said), text
        assert project.buckets == {} and project.cloud.objects == {}

    project.region = "eu-west1"
    refused("location.region: eu-north1", "write region: eu-west1")
    project.region = "eu-north1"
    project.presets = {"gpu-h200-sxm": "8gpu-128vcpu-1600gb"}
    refused("no platform gpu-h100-sxm", "nebius compute platform list --parent-id")
    project.presets = {"gpu-h100-sxm": "1gpu-16vcpu-200gb"}
    refused("no preset 8gpu-128vcpu-1600gb")
    project.presets = {"gpu-h100-sxm": "8gpu-128vcpu-1600gb"}
    project.fabrics = ["fabric-9"]
    refused("eu-north1 has no fabric-2", "write one of fabric-9")
    project.fabrics = ["fabric-2"]
    project.limit = "8"
    refused("16 GPUs of compute.instance.gpu.h100 in eu-north1: 8 are granted, 0 in use")
    project.limit = "64"
    project.write(nebius={"identity_file": "key", "filesystem": "computefilesystem-e00gone"})
    refused("computefilesystem-e00gone does not exist")
    project.filesystems = ["computefilesystem-e00gone"]
    assert project.run("plan", "--check").returncode == 0
    project.write()
    project.add(NETWORK, "team", label=None)
    taken = project.run("up", "--yes")
    assert taken.returncode == 2 and "vpcnetwork-team" in taken.stderr
    project.type(taken.stderr.partition("delete it: ")[2].splitlines()[0])
    assert project.run("plan", "--check").returncode == 0
    project.fabrics = []
    assert project.run("plan", "--check").returncode == 3


def test_credentials_that_are_missing_or_wrong_are_named(project: NebiusProject) -> None:
    secret = project.environment.pop("AWS_SECRET_ACCESS_KEY")
    for command in (("plan", "--check"), ("up", "--yes"), ("down", "--yes")):
        ended = project.run(*command)
        text = ended.stdout + ended.stderr
        if command[0] != "down":
            assert ended.returncode and "AWS_SECRET_ACCESS_KEY is not set" in text
            assert "nebius iam v2 access-key create" in text
        else:
            assert ended.returncode == 0  # Nothing is there, and no object is read.
    project.environment["AWS_SECRET_ACCESS_KEY"] = secret
    project.environment["AWS_ACCESS_KEY_ID"] = "wrong"
    wrong = project.run("up", "--yes")
    assert wrong.returncode == 2 and "(InvalidAccessKeyId)" in wrong.stderr
    assert project.cloud.objects == {}
    project.environment["AWS_ACCESS_KEY_ID"] = "user"

    project.refuse = lambda words: "rpc error: code = Unauthenticated desc = token is expired"
    for verb in ("up", "down"):
        ended = project.run(verb, "--yes")
        assert ended.returncode == 2 and "nebius profile create" in ended.stderr
    project.refuse = lambda words: "dial tcp: lookup api.eu.nebius.cloud: no such host"
    ended = project.run("up", "--yes")
    assert ended.returncode == 2 and "Check the network" in ended.stderr
    project.refuse = lambda words: None

    (project.directory / "bin/nebius").unlink()
    if shutil.which("nebius") is None:
        for command in (("up", "--yes"), ("down", "--yes"), ("leaks",), ("plan", "--check")):
            ended = project.run(*command)
            assert ended.returncode in (2, 3), ended.stdout
            assert "nebius: is not installed" in ended.stdout + ended.stderr
    assert SECRET in project.environment.values()


def test_a_bucket_without_versions_is_refused_and_one_of_others_stays(
    project: NebiusProject,
) -> None:
    project.add(BUCKET_KIND, STATE, label="team")
    project.buckets[STATE]["spec"]["versioning_policy"] = "DISABLED"
    refused = project.run("up", "--yes")
    assert refused.returncode == 2 and "--versioning-policy enabled" in refused.stderr
    project.buckets[STATE]["spec"]["versioning_policy"] = "ENABLED"
    project.store.put(STATE, "notes.txt", "mine")
    project.store.put(STATE, "team/notes.txt", "also mine")
    project.up()
    ended = project.run("down", "--yes", "--ignore-runs", "--delete-data")
    assert ended.returncode == 1 and "has 2 objects of others: notes.txt, team/" in ended.stderr
    assert project.store.names(STATE) == ["notes.txt", "team/notes.txt"]


_SSH = """\
#!/bin/sh
for each; do case $each in team-0) port={};; team-1) port={};; esac; done
exec {} -p "$port" "$@"
"""
"""In place of the hosts' addresses: sshd on this machine."""


def test_down_waits_for_the_runs_on_the_hosts_that_up_made(
    make: Callable[..., NebiusProject], tmp_path: Path
) -> None:
    with two_hosts(tmp_path / "hosts", ("team-0", "team-1")) as hosts:
        shared = tmp_path / "shared"
        shared.mkdir()
        section = {"identity_file": str(hosts.directory / "user_key"), "user": "root"}
        project = make(
            nebius={**section, "filesystem_gib": 2048},
            storage={"directory": str(shared)},
            processes_per_node=1,
            python=sys.executable,
        )
        project.public = project.inside = lambda name: "127.0.0.1"
        ports = [host.port for host in hosts.hosts]
        project.program("ssh", _SSH.format(*ports, shutil.which("ssh")))
        project.up("--write")
        file = project.config.with_name("team-ssh.yaml")
        status = project.run("status")
        assert status.returncode == 1, status.stdout + status.stderr
        assert "team-0, team-1: offers 0 of 8 GPUs" in status.stdout

        desk = Desk(tmp_path / "desk", {})
        desk.environment |= {
            name: project.environment[name] for name in ("PATH", "DRILLYARD_CACHE")
        }
        waiting = tmp_path / "go"
        script = f"while [ ! -e {waiting} ]; do sleep 0.1; done; echo node $NODE_RANK"
        run = desk.write_run("first", {"command": ["sh", "-c", script]})
        values = yaml.safe_load(file.read_text("utf-8"))
        del values["machine"]
        (desk.directory / "cluster.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
        handle = desk.launch(run)
        desk.wait_for(handle, lambda status: status["state"] == "running")
        busy = project.run("down", "--yes", "--delete-data")
        assert busy.returncode == 2 and "first of team on team-0, team-1" in busy.stderr
        waiting.touch()
        ended = desk.wait_for(handle, lambda status: status["state"] not in ("running", "starting"))
        assert ended["state"] == "succeeded", ended
        logs = desk.say("runs", "logs", handle).stdout
        assert "node 0" in logs and "node 1" in logs
        assert hosts.nothing_left()
        project.down("--delete-data")
        project.require_nothing()


def _access(project: NebiusProject) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(project.config.read_text("utf-8"))["cluster"]
    return {key: found[key] for key in ("private_nodes", "authorized_networks")}
