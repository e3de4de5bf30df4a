"""Runs that are launched through the file that `up` wrote, on a Slurm that is configured as the
cluster's blueprint configures it: preempted, set down, with a prolog that fails, cancelled.

A program stands in for gcluster (`fake_gcluster.py`), another one for the tunnel to the login node,
which is an sshd of this machine; docker, which the prolog calls, is a stand-in too. Slurm, its
accounts and its cgroups are real.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.facts import says
from tests.integration.conftest import Reference
from tests.integration.held import Holds
from tests.integration.launch.desk import Desk
from tests.integration.launch.slurm_cluster import slurm_cluster, until
from tests.integration.launch.sshd_hosts import two_hosts
from tests.integration.provision.made_slurm import MadeSlurm
from tests.integration.provision.test_hosts_life import write_tunnel
from tests.integration.tiny_run import STEPS, Run, write_config
from tests.unit.provision.slurm_clusters import plan
from tests.unit.provision.test_toolkit_life import SETTINGS, Toolkit

# Unique on this machine: cgroups and shared connections of ssh are called after it.
NAME = f"c{os.getpid()}"
COMMANDS = ("sbatch", "squeue", "scancel", "sinfo", "sacct", "scontrol", "srun")
_DOCKER = """\
#!/bin/bash
echo "$SLURM_JOB_ID $SLURMD_NODENAME $1" >>{directory}/docker.log
case "$1" in
  run) [ ! -e {directory}/fails-on-$SLURMD_NODENAME ];;
  logs) echo "Buffer manager initialization complete";;
esac
"""
STAYS = """
import os, subprocess, sys, time
# Of another session, and with nothing of the run in its environment.
subprocess.Popen(["sleep", "86401"], start_new_session=True, env={})
while not os.path.exists(os.environ["ENOUGH"]):
    time.sleep(0.05)
"""


class MadeCluster:
    """The cluster that `up` made: its Slurm, and a user with the file that `up` wrote."""

    def __init__(self, slurm: MadeSlurm, desk: Desk, programs: Path) -> None:
        self.slurm, self.desk, self._programs = slurm, desk, programs

    def launch(self, config: Path, *options: str) -> str:
        return self.desk.launch(config, "--nodes", "2", *options)

    def job_of(self, handle: str) -> str:
        return str(self.desk.status(handle)["native"]["job_id"])

    def write_stays(self, name: str) -> tuple[Path, Path]:
        """A run config of STAYS, and the file that ends it."""
        enough = self.desk.directory / f"{name}-enough"
        workload = {
            "command": [sys.executable, "-c", STAYS],
            "environment": {"ENOUGH": str(enough)},
        }
        return self.desk.write_run(name, workload), enough

    def occupy(self, *options: str) -> str:
        """Have a job take nodes; its id."""
        words = ("sbatch", "--parsable", "--exclusive", "--output=/dev/null", "--wrap=sleep 86400")
        job = self.slurm.run(*words, *options).stdout.strip()
        until(lambda: self.slurm.job(job) == "RUNNING", "the other job")
        return job

    def fail_prologs(self, node: str, *, fail: bool) -> None:
        """Whether docker fails on a node, and so its prolog."""
        path = self._programs / f"fails-on-{node}"
        path.touch() if fail else path.unlink()

    def daemon_calls(self, job: str) -> list[tuple[str, str]]:
        """(node, verb) of each call of docker in a job's prologs and epilogs."""
        rows = [line.split() for line in (self._programs / "docker.log").read_text().splitlines()]
        return [(node, verb) for number, node, verb in rows if number == job]


def running(status: dict[str, Any]) -> bool:
    assert not status["over"], status
    return bool(status["state"] == "running")


def named_in(status: dict[str, Any]) -> str:
    """The reason of a run that is not over."""
    assert not status["over"], status
    return status["reason"] or ""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MadeCluster]:
    directory = tmp_path_factory.mktemp("made")
    programs = Path(subprocess.run(["mktemp", "-d"], capture_output=True, text=True).stdout.strip())
    programs.chmod(0o755)
    for name, text in (
        ("docker", _DOCKER.format(directory=programs)),
        ("modprobe", "#!/bin/sh\n"),
    ):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    login = f"{NAME}-login-001"
    with two_hosts(directory / "hosts", (login,)) as hosts:
        toolkit = Toolkit(directory)
        settings: dict[str, Any] = {
            "name": NAME,
            "machine": "a3-megagpu-8g",
            "consumption": "spot",
            "nodes": 4,
            "slurm": {"login_host": f"root@{login}", "time_limit": "50"},
            "processes_per_node": 1,
            "environment": {"GLOO_SOCKET_IFNAME": "lo"},
            "image": None,
        }
        toolkit.write(**settings)
        cluster = yaml.safe_load(toolkit.done("up").stdout)
        assert cluster["slurm"]["directory"] == "/home/root/project"
        # All nodes are this machine, whose /home is not the tests'.
        cluster["slurm"]["directory"] = str(directory / "project")
        planned = plan(directory, yaml.safe_load(toolkit.config.read_text()))
        (host,) = hosts.hosts
        write_tunnel(directory / "bin" / "gcloud", {host.name: host.port})
        agent = directory / "agent"
        ssh_agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(agent)], stdout=subprocess.PIPE)
        until(agent.exists, "ssh-agent")
        wanted = {"SSH_AUTH_SOCK": str(agent)}
        subprocess.run(
            ["ssh-add", "-q", str(hosts.directory / "user_key")],
            check=True,
            env=os.environ | wanted,
        )
        with slurm_cluster(lambda place: MadeSlurm(place, planned, programs)) as slurm:
            assert isinstance(slurm, MadeSlurm)
            slurm.run("sacctmgr", "-i", "add", "qos", "urgent", "Preempt=normal")
            for name in COMMANDS:
                command = host.home / "bin" / name
                conf = slurm.environment["SLURM_CONF"]
                command.write_text(
                    f'#!/bin/sh\nSLURM_CONF={conf} exec {shutil.which(name)} "$@"\n'
                )
                command.chmod(0o755)
            # The libraries of its network stack are not there.
            own = {"python": sys.executable, "network_stack": "ethernet"}
            desk = Desk(directory / "desk", cluster | own)
            desk.environment |= wanted | {"PATH": toolkit.environment["PATH"]}
            yield MadeCluster(slurm, desk, programs)
            toolkit.store.close()
        ssh_agent.terminate()
        ssh_agent.communicate()
    shutil.rmtree(programs)


@pytest.fixture(autouse=True)
def all_nodes_are_idle(made: MadeCluster) -> Iterator[None]:
    yield
    made.slurm.reset()


def test_a_preempted_run_is_queued_again_by_slurm_and_loses_no_bit(
    made: MadeCluster, workplace: Path, reference: Reference, tmp_path: Path
) -> None:
    run = Run(write_config(workplace, "preempted"))
    moment = "attempt-0-step-9"
    holds = Holds(tmp_path, moment)
    cluster = made.desk.directory / "cluster.yaml"
    before = cluster.read_text()
    python = holds.interpreter(tmp_path / "python")
    cluster.write_text(yaml.safe_dump(yaml.safe_load(before) | {"python": python}))
    handle = made.launch(run.config)
    cluster.write_text(before)
    until(lambda: holds.reached(moment, 0, 1), "the first start")
    job = made.job_of(handle)
    assert made.slurm.in_cgroups() or made.slurm.lacks
    other = made.occupy("--qos=urgent", "--nodes=4")
    status = made.desk.status(handle)
    assert status["state"] == "restarting" and says(status["reason"], "queued again"), status
    made.slurm.run("scancel", other)
    assert made.desk.say("runs", "wait", handle).returncode == 0
    ended = made.desk.status(handle)
    assert (ended["state"], ended["failures"], ended["round"]) == ("succeeded", 0, 1)
    # It was given the time to save.
    assert [each["step"] for each in run.events("resume")] == [9]
    assert run.figures() == reference.run.figures()
    assert run.last_step() == STEPS and run.weights() == reference.run.weights()
    until(lambda: made.slurm.accounts(job)[-1][0] == "COMPLETED", "the accounts")
    assert [state for state, _ in made.slurm.accounts(job)] == ["PREEMPTED", "COMPLETED"]
    assert made.slurm.in_cgroups() == []
    # The network stack's daemon was started on both nodes by each start's prolog, and ended.
    calls = made.daemon_calls(job)
    assert [verb for _, verb in calls].count("run") == 4
    for node in {node for node, _ in calls}:
        assert [verb for each, verb in calls if each == node][-1] == "rm"


def test_a_node_whose_prolog_fails_is_named_and_the_run_goes_on_elsewhere(
    made: MadeCluster,
) -> None:
    bad, _, *others = made.slurm.nodes
    other = made.occupy(f"--nodelist={','.join(others)}")
    made.fail_prologs(bad, fail=True)
    config, enough = made.write_stays("elsewhere")
    handle = made.launch(config)
    named = made.desk.wait_for(handle, lambda status: bad in named_in(status))
    assert named["state"] == "queued" and says(named["reason"], "down: ... Prolog error"), named
    made.slurm.run("scancel", other)
    status = made.desk.wait_for(handle, running)
    assert bad not in status["hosts"] and len(status["hosts"]) == 2
    job = made.job_of(handle)
    found = made.desk.say("cluster", "status", "cluster.yaml")
    assert says(found.stdout, f"{bad} ... Prolog error"), found.stdout
    remedy = next(line for line in found.stdout.splitlines() if "Prolog error" in line)
    made.fail_prologs(bad, fail=False)
    made.slurm.run(*remedy[remedy.index("scontrol update") :].split())
    until(lambda: made.slurm.states()[bad] == "idle", f"{bad} does not come back")
    enough.touch()
    assert made.desk.say("runs", "wait", handle).returncode == 0
    until(lambda: made.slurm.accounts(job)[-1][0] == "COMPLETED", "the accounts")
    starts = made.slurm.accounts(job)
    assert [state for state, _ in starts] == ["REQUEUED", "COMPLETED"]


def test_a_run_whose_node_is_set_down_goes_on_elsewhere(made: MadeCluster) -> None:
    config, enough = made.write_stays("lost")
    handle = made.launch(config)
    lost = made.desk.wait_for(handle, running)["hosts"][1]
    job = made.job_of(handle)
    made.slurm.run("scontrol", "update", f"NodeName={lost}", "State=DOWN", "Reason=a bad GPU")
    status = made.desk.wait_for(
        handle, lambda status: running(status) and lost not in status["hosts"]
    )
    assert status["failures"] == 0
    enough.touch()
    assert made.desk.say("runs", "wait", handle).returncode == 0
    made.slurm.run("scontrol", "update", f"NodeName={lost}", "State=RESUME")
    until(lambda: made.slurm.accounts(job)[-1][0] == "COMPLETED", "the accounts")
    assert [state for state, _ in made.slurm.accounts(job)] == ["NODE_FAIL", "COMPLETED"]
    # What had left its session has ended with its node's job, and with the run.
    assert made.slurm.in_cgroups() == []


def test_nothing_is_left_of_a_cancelled_run(made: MadeCluster) -> None:
    config, _ = made.write_stays("cancelled")
    handle = made.launch(config)
    made.desk.wait_for(handle, running)
    job = made.job_of(handle)
    until(lambda: len(stayed(made)) == 2, "both nodes")
    assert made.desk.say("runs", "cancel", handle).returncode == 0
    assert made.desk.status(handle)["state"] == "cancelled"
    until(lambda: made.slurm.accounts(job)[-1][0].startswith("CANCELLED"), "the accounts")
    assert made.slurm.in_cgroups() == []
    assert stayed(made) == []


def stayed(made: MadeCluster) -> list[int]:
    """The processes that STAYS has put into sessions of their own."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cmdline").read_bytes() == b"sleep\x0086401\0":
                found.append(int(process.name))
        except OSError:
            continue
    return found


def test_the_accounts_say_how_a_run_ended_that_slurm_has_forgotten(made: MadeCluster) -> None:
    config, enough = made.write_stays("forgotten")
    enough.touch()
    handle = made.launch(config)
    assert made.desk.say("runs", "wait", handle).returncode == 0
    job = made.job_of(handle)
    directory = Path(made.desk.status(handle)["run_directory"]) / "launch"
    # Slurm purges once a minute.
    until(lambda: not made.slurm.job(job), "Slurm forgets the job")
    for name in ("state.json", "ended.json"):
        (directory / name).unlink(missing_ok=True)
    status = made.desk.status(handle)
    assert status["state"] == "succeeded" and status["native"]["state"] == "COMPLETED", status
