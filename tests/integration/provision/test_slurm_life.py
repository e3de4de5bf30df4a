"""Runs that are launched through the file that `up` wrote, on a Slurm that is configured as the
cluster's blueprint configures it: preempted, set down, with a prolog that fails, cancelled.

A program stands in for gcluster (`fake_gcluster.py`), another one for the tunnel to the login node,
which is an sshd of this machine; docker, which the prolog calls, is a stand-in too. Slurm, its
accounts and its cgroups are real.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.facts import says
from tests.integration.conftest import Reference
from tests.integration.held import Holds
from tests.integration.launch.desk import Desk
from tests.integration.launch.slurm_cluster import slurm_cluster
from tests.integration.launch.sshd_hosts import two_hosts
from tests.integration.provision.made_slurm import MadeSlurm
from tests.integration.provision.test_hosts_life import write_tunnel
from tests.integration.tiny_run import STEPS, TIMEOUT_SECONDS, Run, write_config
from tests.integration.waiting import until
from tests.unit.provision.slurm_clusters import plan
from tests.unit.provision.test_toolkit_life import Toolkit

from drillyard.config.load import load_cluster_config
from drillyard.launch.run_status import RunStatus, State
from drillyard.launch.slurm.launcher import SlurmLauncher
from drillyard.programs import Programs

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
# Another test of this machine has another number.
_SECONDS = f"{86400 + os.getpid()}"
STAYS = f"""
import os, subprocess, sys, time
# Of another session, and with nothing of the run in its environment.
subprocess.Popen(["sleep", "{_SECONDS}"], start_new_session=True, env={{}})
while not os.path.exists(os.environ["ENOUGH"]):
    time.sleep(0.05)
"""


class MadeCluster:
    """The cluster that `up` made: its Slurm, and a user with the file that `up` wrote."""

    def __init__(self, slurm: MadeSlurm, desk: Desk, programs: Path) -> None:
        self.slurm, self.desk, self._programs = slurm, desk, programs
        self._look = SlurmLauncher(load_cluster_config(desk.directory / "cluster.yaml"), Programs())

    def launch(self, config: Path, *options: str) -> str:
        """Launch a run on two nodes; its handle."""
        return self.desk.launch(config, "--nodes", "2", *options)

    def status(self, handle: str) -> RunStatus:
        """What `runs status` asks, in this process."""
        return self._look.status(handle.rpartition("/")[2])

    def wait_for(self, handle: str, wanted: Callable[[RunStatus], bool]) -> RunStatus:
        """The status, once it is as wanted; at no time before may the run be over."""
        seen: list[RunStatus] = []

        def found() -> bool:
            seen.append(self.status(handle))
            assert wanted(seen[-1]) or not seen[-1].state.over, seen[-1]
            return wanted(seen[-1])

        until(found, "the run's status")
        return seen[-1]

    def occupy(self, *options: str) -> str:
        """Have a job take nodes; its id."""
        words = ("sbatch", "--parsable", "--exclusive", "--output=/dev/null", "--wrap=sleep 86400")
        job = self.slurm.run(*words, *options).stdout.strip()
        until(lambda: self.slurm.job(job) == "RUNNING", "the other job")
        return job

    def require_ends(self, job: str, *states: str) -> None:
        """How each start of a job ended, by sacct; nothing is left of them."""
        until(lambda: [each.split()[0] for each in self.slurm.ends(job)] == [*states], "sacct")
        assert self.slurm.in_cgroups() == []

    def write_stays(self, name: str) -> tuple[Path, Path]:
        """A run config of STAYS, and the file that ends it."""
        enough = self.desk.directory / f"{name}-enough"
        workload = {
            "command": [sys.executable, "-c", STAYS],
            "environment": {"ENOUGH": str(enough)},
        }
        return self.desk.write_run(name, workload), enough

    def fail_prologs(self, node: str, *, fail: bool) -> None:
        """Whether docker fails on a node, and so its prolog."""
        path = self._programs / f"fails-on-{node}"
        path.touch() if fail else path.unlink()

    def daemon_calls(self, job: str) -> list[tuple[str, str]]:
        """(node, verb) of each call of docker in a job's prologs and epilogs."""
        rows = [line.split() for line in (self._programs / "docker.log").read_text().splitlines()]
        return [(node, verb) for number, node, verb in rows if number == job]


def running(status: RunStatus) -> bool:
    return status.state is State.running


def job_of(status: RunStatus) -> str:
    return str(status.native["job_id"])


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@contextlib.contextmanager
def ssh_agent(directory: Path, key: Path) -> Iterator[dict[str, str]]:
    """An agent that has the key; what its clients need in their environment."""
    place = directory / "agent"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(place)], stdout=subprocess.PIPE)
    try:
        until(place.exists, "ssh-agent")
        found = {"SSH_AUTH_SOCK": str(place)}
        subprocess.run(["ssh-add", "-q", str(key)], check=True, env=os.environ | found)
        yield found
    finally:
        agent.terminate()
        agent.communicate()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MadeCluster]:
    directory = tmp_path_factory.mktemp("made")
    login, toolkit = f"{NAME}-login-001", Toolkit(directory)
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
    planned = plan(directory, yaml.safe_load(toolkit.config.read_text()))
    assert cluster["slurm"]["directory"] == "/home/root/project"
    # All nodes are this machine: its /home is not the tests', and it has no such network.
    cluster["slurm"]["directory"] = str(directory / "project")
    cluster |= {"python": sys.executable, "network_stack": "ethernet"}
    with contextlib.ExitStack() as started:
        started.callback(toolkit.store.close)
        hosts = started.enter_context(two_hosts(directory / "hosts", (login,)))
        (host,) = hosts.hosts
        write_tunnel(directory / "bin" / "gcloud", {host.name: host.port})
        agent = started.enter_context(ssh_agent(directory, hosts.directory / "user_key"))
        # Prologs run as root of the node, which may not enter the tests' directories.
        programs = Path(started.enter_context(tempfile.TemporaryDirectory()))
        programs.chmod(0o755)
        write_program(programs / "docker", _DOCKER.format(directory=programs))
        write_program(programs / "modprobe", "#!/bin/sh\n")
        slurm = started.enter_context(slurm_cluster(lambda at: MadeSlurm(at, planned, programs)))
        slurm.run("sacctmgr", "-i", "add", "qos", "urgent", "Preempt=normal")
        for name in COMMANDS:
            speaks = f"SLURM_CONF={slurm.environment['SLURM_CONF']} exec {shutil.which(name)}"
            write_program(host.home / "bin" / name, f'#!/bin/sh\n{speaks} "$@"\n')
        desk = Desk(directory / "desk", cluster)
        own = {"PATH": toolkit.environment["PATH"], "HOME": desk.environment["HOME"], **agent}
        desk.environment |= own
        patch = started.enter_context(pytest.MonkeyPatch.context())
        for variable, value in own.items():
            patch.setenv(variable, value)
        yield MadeCluster(slurm, desk, programs)


@pytest.fixture(autouse=True)
def all_nodes_are_idle(made: MadeCluster) -> Iterator[None]:
    """What a test has left is ended, and its nodes are back, before the next."""
    yield
    made.slurm.reset()


def test_a_preempted_run_is_queued_again_by_slurm_and_loses_no_bit(
    made: MadeCluster, workplace: Path, reference: Reference, tmp_path: Path
) -> None:
    run = Run(write_config(workplace, "preempted"))
    moment = "attempt-0-step-9"
    holds = Holds(tmp_path, moment)
    values = yaml.safe_load((made.desk.directory / "cluster.yaml").read_text())
    held = values | {"python": holds.interpreter(tmp_path / "python")}
    (made.desk.directory / "held.yaml").write_text(yaml.safe_dump(held))
    # A new cluster has no project directory yet.
    subprocess.run(["git", "init", "-q"], cwd=made.desk.directory, check=True)
    handle = made.launch(run.config, "--cluster", "held.yaml", "--sync")
    made.wait_for(handle, lambda _: holds.reached(moment, 0, 1))
    assert made.slurm.in_cgroups() or made.slurm.lacks
    other = made.occupy("--qos=urgent", "--nodes=4")
    status = made.status(handle)
    assert status.state is State.restarting and says(status.reason, "queued again"), status
    made.slurm.run("scancel", other)
    assert made.desk.say("runs", "wait", handle).returncode == 0
    ended = made.status(handle)
    assert (ended.state, ended.failures, ended.attempt) == (State.succeeded, 0, 1)
    # It was given the time to finish step 9 and save.
    assert [each["step"] for each in run.events("resume")] == [10]
    assert run.figures() == reference.run.figures()
    assert run.last_step() == STEPS and run.weights() == reference.run.weights()
    made.require_ends(job_of(ended), "PREEMPTED", "COMPLETED")
    # The network stack's daemon was started on both nodes by each start's prolog, and ended.
    calls = made.daemon_calls(job_of(ended))
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
    named = made.wait_for(handle, lambda status: bad in (status.reason or ""))
    assert named.state is State.queued and says(named.reason, "down: ... Prolog error"), named
    made.slurm.run("scancel", other)
    status = made.wait_for(handle, running)
    assert bad not in status.hosts and len(status.hosts) == 2
    found = made.desk.say("cluster", "status", "cluster.yaml", "--json").stdout
    (finding,) = [each for each in json.loads(found)["findings"] if bad in each["nodes"]]
    assert says(finding["text"], "drained ... Prolog error"), finding
    made.fail_prologs(bad, fail=False)
    remedy = finding["text"]
    made.slurm.run(*remedy[remedy.index("scontrol update") :].split())
    until(lambda: made.slurm.states()[bad] == "idle", f"{bad} does not come back")
    enough.touch()
    made.wait_for(handle, lambda status: status.state is State.succeeded)
    made.require_ends(job_of(status), "REQUEUED", "COMPLETED")


def test_a_run_whose_node_is_set_down_goes_on_elsewhere(made: MadeCluster) -> None:
    config, enough = made.write_stays("lost")
    handle = made.launch(config)
    first = made.wait_for(handle, running)
    waiting = made.desk.start("runs", "wait", handle)
    lost = first.hosts[1]
    # Drained, too: with ReturnToService=2 a node that answers does not stay down.
    for state in ("DRAIN", "DOWN"):
        made.slurm.run("scontrol", "update", f"NodeName={lost}", f"State={state}", "Reason=broken")
    status = made.wait_for(handle, lambda status: running(status) and status.attempt == 1)
    assert lost not in status.hosts and status.failures == 0
    enough.touch()
    # It has not taken the end of the first start for the run's.
    _, said = waiting.communicate(timeout=TIMEOUT_SECONDS)
    assert waiting.returncode == 0, said
    made.slurm.run("scontrol", "update", f"NodeName={lost}", "State=RESUME")
    # What had left its session has ended with each start.
    made.require_ends(job_of(status), "NODE_FAIL", "COMPLETED")


def test_nothing_is_left_of_a_cancelled_run(made: MadeCluster) -> None:
    config, _ = made.write_stays("cancelled")
    handle = made.launch(config)
    status = made.wait_for(handle, running)
    until(lambda: len(stayed()) == 2, "both nodes")
    assert made.desk.say("runs", "cancel", handle).returncode == 0
    assert made.status(handle).state is State.cancelled
    made.require_ends(job_of(status), "CANCELLED")
    assert made.slurm.lacks or stayed() == []


def stayed() -> list[int]:
    """The processes that STAYS has put into sessions of their own."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cmdline").read_bytes().split(b"\0")[:2] == [b"sleep", _SECONDS.encode()]:
                found.append(int(process.name))
    return found


def test_the_accounts_say_how_a_run_ended_that_slurm_has_forgotten(made: MadeCluster) -> None:
    config, enough = made.write_stays("forgotten")
    enough.touch()
    handle = made.launch(config)
    status = made.wait_for(handle, lambda status: status.state is State.succeeded)
    # Slurm purges once a minute.
    until(lambda: not made.slurm.job(job_of(status)), "Slurm forgets the job")
    assert status.run_directory is not None
    for name in ("state.json", "ended.json"):
        (Path(status.run_directory) / "launch" / name).unlink(missing_ok=True)
    status = made.status(handle)
    assert (status.state, status.native["state"]) == (State.succeeded, "COMPLETED"), status
