"""The hosts that `up` made: how ssh finds them, the file for `launch`, and what `status` says."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from tests.facts import says
from tests.unit.provision.vm_clusters import config, plan

from drillyard.cli.main import main
from drillyard.config.load import load_cluster_config
from drillyard.errors import UnreachableError, UserError
from drillyard.launch.hosts.launcher import HostsLauncher
from drillyard.launch.hosts.plan import layout_of
from drillyard.programs import Programs, Result
from drillyard.provision import hosts_stage, run_guards, up
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.cluster_status import cluster_status, status_text
from drillyard.provision.hosts_stage import require_programs, running_on_hosts
from drillyard.provision.made_hosts import (
    MadeHost,
    launch_file_of,
    launch_text_of_hosts,
    made_hosts,
    planned_hosts,
    remove_login,
    ssh_directory,
    write_launch_file,
    write_login,
)
from drillyard.provision.terraform_output import Change, StateResource

VM = "google_compute_instance"
PUBLIC = {"private_nodes": False, "authorized_networks": ["203.0.113.0/24"]}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRILLYARD_CACHE", str(tmp_path / "cache"))


def state(nodes: int, **changes: Any) -> dict[str, StateResource]:
    """What Terraform's state has of so many nodes."""
    found = {}
    for number in reversed(range(nodes)):
        outside = {"access_config": [{"nat_ip": f"198.51.100.{number + 1}"}]}
        values = {
            "name": f"team-{number}",
            "zone": "us-central1-b",
            "instance_id": f"77{number}",
            "creation_timestamp": f"2026-11-28T10:00:0{number}.000-00:00",
            "network_interface": [{"network_ip": f"10.0.0.{number + 2}", **outside}, {}],
            **changes,
        }
        address = f"{VM}.team_{number}"
        found[address] = StateResource(address, VM, values)
    vpc = "google_compute_network.system"
    return {vpc: StateResource(vpc, "google_compute_network", {"name": "team"}), **found}


def made(directory: Path, nodes: int = 2, **settings: Any) -> tuple[ClusterPlan, Any]:
    found = plan(directory, config("g2-standard-12", "on-demand", nodes=nodes, **settings))
    return found, planned_hosts(found, made_hosts(state(nodes)))


def test_hosts_are_in_the_order_of_their_ranks(tmp_path: Path) -> None:
    found, hosts = made(tmp_path, 12)
    assert [each.name for each in hosts] == [f"team-{number}" for number in range(12)]
    assert hosts[3] == MadeHost(
        f"{VM}.team_3",
        "team-3",
        "us-central1-b",
        "10.0.0.5",
        "198.51.100.4",
        "773",
        "2026-11-28T10:00:03.000-00:00",
    )
    assert [each.name for each in planned_hosts(found, made_hosts(state(14)))][-1] == "team-11"


def effective(path: Path, host: str) -> dict[str, str]:
    """What ssh itself makes of the configuration."""
    shown = subprocess.run(
        ["ssh", "-G", "-F", str(path), host], check=True, capture_output=True, text=True
    ).stdout
    return dict(line.split(" ", 1) for line in shown.splitlines() if " " in line)


def test_ssh_reaches_private_hosts_by_the_tunnel(tmp_path: Path) -> None:
    found, hosts = made(tmp_path, gce={"identity_file": "key"})
    path = write_login(found, hosts)
    said = effective(path, "team-1")
    assert said["proxycommand"].split() == [
        *("gcloud", "compute", "start-iap-tunnel", "%n", "%p", "--listen-on-stdin"),
        *("--zone=us-central1-b", "--project=my-project", "--verbosity=warning"),
    ]
    assert said["hostkeyalias"] == "drillyard-771"
    assert said["stricthostkeychecking"] == "accept-new"
    assert said["userknownhostsfile"] == str(ssh_directory(found) / "known_hosts")
    assert said["identitiesonly"] == "yes"
    # One that is made again is another host, whose key is not known yet.
    again = made_hosts(state(2, instance_id="999"))
    assert effective(write_login(found, again), "team-1")["hostkeyalias"] == "drillyard-999"
    # Nor is it one whose connection is still open: ssh tells those apart by the name.
    assert said["hostname"] == "team-1.771"
    assert effective(path, "team-1")["hostname"] == "team-1.999"


def test_ssh_reaches_public_hosts_by_their_addresses(tmp_path: Path) -> None:
    found, hosts = made(tmp_path, cluster=PUBLIC)
    said = effective(write_login(found, hosts), "team-1")
    assert said["hostname"] == "198.51.100.2"
    assert "proxycommand" not in said
    # With OS Login the keys of the user's agent may be the ones.
    assert said["identitiesonly"] == "no"


def test_down_removes_what_reaches_the_hosts_and_nothing_else(tmp_path: Path) -> None:
    found, hosts = made(tmp_path)
    other = replace(found, name="team-2")
    path, kept = write_login(found, hosts), write_login(other, hosts)
    (path.parent / "known_hosts").write_text("x")
    remove_login(found)
    remove_login(found)
    assert not path.parent.exists() and kept.exists()
    remove_login(other)
    assert not (tmp_path / "cache/clusters").exists()


def test_the_file_for_launch_is_one_of_platform_ssh(tmp_path: Path) -> None:
    settings = {"gce": {"identity_file": "key", "directory": "/home/drillyard/project"}}
    found, hosts = made(tmp_path, storage={"directory": "/shared"}, **settings)
    file = launch_file_of(tmp_path / "cluster.yaml")
    assert file == tmp_path / "cluster-ssh.yaml"
    write_login(found, hosts)
    (tmp_path / "key").write_text("private")
    text = launch_text_of_hosts(found, hosts, "cluster.yaml")
    write_launch_file(file, text)
    cluster = load_cluster_config(file)
    layout = layout_of(cluster, "python3")
    assert [host.name for host in layout.hosts] == ["team-0", "team-1"]
    assert layout.leader == "10.0.0.2"
    first = layout.hosts[0]
    assert (first.user, first.identity_file) == ("drillyard", str(tmp_path / "key"))
    assert first.config_file == str(ssh_directory(found) / "config")
    assert cluster.machine == "g2-standard-12" and cluster.storage.directory == "/shared"
    assert cluster.section.project_directory == "/home/drillyard/project"
    # What a node-hour costs, as the plan has it.
    assert "--price-per-node-hour 1" in text
    write_launch_file(file, text.replace("team-1", "team-9"))
    for own in ("name: mine\n", file.read_text().replace("nodes: 2", "nodes: 1")):
        file.write_text(own)
        with pytest.raises(UserError, match="move it away, or leave out --write"):
            write_launch_file(file, text)
        assert file.read_text() == own
    file.rename(tmp_path / "away.yaml")
    write_launch_file(file, text)


def test_up_names_a_file_of_the_user_before_anything_is_bought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path)
    (tmp_path / "cluster-ssh.yaml").write_text("name: mine\n")
    bought: list[Any] = []
    monkeypatch.setattr(up, "bring_up", lambda *given: bought.append(given))
    with pytest.raises(SystemExit) as ended:
        main(["cluster", "up", str(tmp_path / "cluster.yaml"), "--yes", "--write"])
    assert ended.value.code == 2 and not bought
    assert "cluster-ssh.yaml: exists" in capsys.readouterr().err


@pytest.mark.parametrize("written", [False, True])
def test_up_prints_or_writes_the_file_and_leaves_the_users_alone(
    written: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, hosts = made(tmp_path)
    file = tmp_path / "cluster.yaml"
    before = file.read_text()
    monkeypatch.setattr(up, "bring_up", lambda *_: up.MadeCluster("", {}, hosts))
    with pytest.raises(SystemExit) as ended:
        main(["cluster", "up", str(file), "--yes", *(["--write"] if written else [])])
    printed, errors = capsys.readouterr()
    assert ended.value.code in (0, None), errors
    assert file.read_text() == before
    beside = tmp_path / "cluster-ssh.yaml"
    assert beside.exists() == written
    values = yaml.safe_load(beside.read_text() if written else printed)
    assert values["platform"] == "ssh" and values["ssh"]["hosts"] == ["team-0", "team-1"]
    if written:
        assert f"drillyard launch RUN.YAML --cluster {beside}" in errors


def answers(**said: str | None) -> Any:
    """A launcher's programs: hosts that answer with this JSON, or not at all."""

    def run(argv: Any, **_: Any) -> Result:
        host = argv[argv.index("--") + 1]
        text = said[host.replace("-", "_")]
        if text is None:
            return Result(tuple(argv), 255, "", "Connection refused")
        return Result(tuple(argv), 0, text, "")

    return SimpleNamespace(run=run)


RUN = '{"gpus": 1, "runs": [{"run": "long", "cluster": "team"}]}'


def test_runs_of_any_user_on_any_host_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, hosts = made(tmp_path)

    def ask(**said: str | None) -> list[str]:
        monkeypatch.setattr(hosts_stage, "Programs", lambda: answers(**said))
        return running_on_hosts(found, hosts)

    assert ask(team_0='{"runs": []}', team_1='{"runs": []}') == []
    assert ask(team_0=RUN, team_1=RUN) == ["long of team on team-0, team-1"]
    # What runs on one counts, whatever the other says.
    assert ask(team_0=RUN, team_1=None) == ["long of team on team-0"]
    with pytest.raises(UnreachableError, match="team-1: cannot be reached"):
        ask(team_0='{"runs": []}', team_1=None)


def test_status_names_hosts_that_a_run_would_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = made(tmp_path, 4)
    bucket = SimpleNamespace(title="gs://state", find=lambda: object(), resources=lambda: state(3))
    monkeypatch.setattr(hosts_stage, "state_bucket", lambda plan: bucket)
    said: dict[str, str | None] = {"team_0": '{"gpus": 1}', "team_1": '{"gpus": 0}'}
    monkeypatch.setattr(hosts_stage, "Programs", lambda: answers(**said, team_2=None))
    status = cluster_status(found)
    assert status.objects is not None and not status.ready
    (pool,) = status.objects.pools
    assert (pool.present, pool.ready, pool.wanted) == (3, 1, 4)
    text = status_text(status, "c.yaml")
    assert says(text, "pool ... team-on-demand ... 1 of 4 nodes ready")
    for words in ("1 of 4 hosts: not made", "team-2: cannot be reached", "team-1: offers 0 of 1"):
        assert f"missing: {words}" in text
    assert status.cost is not None and status.cost.usd > 0

    bucket.find = lambda: None
    status = cluster_status(found)
    assert status.objects is None and "none is made yet" in status_text(status)


def test_the_programs_that_reach_the_hosts_are_asked_for_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    monkeypatch.setenv("PATH", str(bin_))
    private, public = made(tmp_path)[0], made(tmp_path, cluster=PUBLIC)[0]
    with pytest.raises(UserError, match="apt-get install openssh-client"):
        require_programs(public)
    (bin_ / "ssh").touch(0o755)
    require_programs(public)
    with pytest.raises(UserError, match="private_nodes: false"):
        require_programs(private)
    (bin_ / "gcloud").touch(0o755)
    require_programs(private)


@pytest.mark.parametrize(
    ("action", "because", "takes"),
    [
        ("update", ("labels", "effective_labels", "terraform_labels"), False),
        ("update", ("metadata",), False),
        ("update", ("desired_status",), False),
        ("update", ("machine_type",), True),
        ("update", ("labels", "service_account"), True),
        ("replace", ("boot_disk",), True),
        ("delete", (), True),
        ("create", (), False),
    ],
)
def test_which_changes_of_a_host_end_its_runs(action: Any, because: Any, takes: bool) -> None:
    assert run_guards._takes_nodes(Change(f"{VM}.team_0", VM, action, because)) == takes


def test_the_launcher_of_the_hosts_asks_each_one(tmp_path: Path) -> None:
    found, hosts = made(tmp_path)
    write_login(found, hosts)
    write_launch_file(tmp_path / "s.yaml", launch_text_of_hosts(found, hosts, "c.yaml"))
    cluster = load_cluster_config(tmp_path / "s.yaml")
    said = answers(team_0='{"gpus": 1}', team_1='{"gpus": 2}')
    programs: Programs = said
    found_answers = HostsLauncher(cluster, programs).host_answers()
    assert [each.parsed() for each in found_answers] == [{"gpus": 1}, {"gpus": 2}]


def test_a_secret_is_no_option_of_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "x")
    with pytest.raises(SystemExit) as ended:
        main(["cluster", "up", str(tmp_path / "cluster.yaml"), "--yes", "--secret", "HF_TOKEN"])
    assert ended.value.code == 2
    assert says(
        capsys.readouterr().err, "--secret HF_TOKEN ... `drillyard launch` ... leave it out"
    )
