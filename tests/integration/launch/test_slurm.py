"""Runs on a real Slurm cluster of four nodes: what each disturbance leads to, and what users
see."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.facts import says
from tests.integration.conftest import Reference
from tests.integration.held import Holds
from tests.integration.launch.desk import Desk
from tests.integration.launch.slurm_cluster import GPUS_PER_NODE, SlurmCluster, slurm_cluster
from tests.integration.launch.sshd_hosts import two_hosts
from tests.integration.tiny_run import STEPS, TIMEOUT_SECONDS, Run, write_config
from tests.integration.waiting import until

from drillyard.config.load import load_cluster_config
from drillyard.launch.agent.index import list_runs
from drillyard.launch.run_status import RunStatus, State
from drillyard.launch.slurm.launcher import SlurmLauncher
from drillyard.programs import Programs, Result

TITAN = """
import time
import torch.distributed as dist
dist.init_process_group("gloo")
for step in range(1, 9):
    time.sleep(0.02)
    if dist.get_rank() == 0:
        print(f"[titan] 2026-11-21 10:00:{step:02} - root - INFO - step: {step:2}  loss: {12.5 - step:7.4f}  "
              f"grad_norm:  1.2500  memory:  0.50GiB(1.00%)  tps: {1000 + step}  tflops: 1.00  mfu: 0.10%", flush=True)
dist.destroy_process_group()
"""  # noqa: E501
"""A training script of somebody else, whose log is in the shape of torchtitan's."""

SAVES = """
import os, pathlib, signal, sys, time
run, node, begun = pathlib.Path(os.environ["RUN"]), os.environ["NODE_RANK"], os.environ["ROUND"]
def save(*_):
    (run / "saved").mkdir(exist_ok=True)
    (run / "saved" / f"{begun}-{node}").touch()
    sys.exit(85)
signal.signal(signal.SIGTERM, save)
while not (run / "enough").exists():
    with open(run / "written", "a") as file:
        file.write(f"{begun} {node} {time.time()}\\n")
    time.sleep(0.05)
"""
"""Writes into the run directory until SIGTERM: then it saves, as a trainer would."""


class IndexReadHere(Programs):
    """Reads the index of runs in this process: hundreds of looks would wait for a Python each."""

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float | None = None
    ) -> Result:
        """As Programs.run."""
        *_, verb, option, cluster = argv
        if (verb, option) != ("list", "--cluster"):
            return super().run(argv, stdin=stdin, timeout=timeout)
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            code = list_runs(Namespace(cluster=cluster))
        return Result(tuple(argv), code, said.getvalue(), "")


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    """Nodes n1 to n4."""
    with slurm_cluster() as made:
        yield made


@pytest.fixture(autouse=True)
def all_nodes_are_idle(cluster: SlurmCluster) -> Iterator[None]:
    """What a test has left is ended, and its nodes are back, before the next."""
    yield
    cluster.reset()


@pytest.fixture
def desk(cluster: SlurmCluster, tmp_path: Path) -> Desk:
    """A user of the cluster, with runs of two nodes."""
    return sit_down(cluster, tmp_path / "desk")


def sit_down(cluster: SlurmCluster, directory: Path, **changes: Any) -> Desk:
    """A user whose cluster config has these changes."""
    slurm = {"partition": "main", "gres": f"gpu:{GPUS_PER_NODE}"} | changes.pop("slurm", {})
    settings = {
        "name": "quad",
        "platform": "slurm",
        "nodes": 2,
        "processes_per_node": 1,
        "slurm": slurm,
    }
    desk = Desk(directory, settings | {"python": sys.executable} | changes)
    desk.environment["SLURM_CONF"] = cluster.environment["SLURM_CONF"]
    return desk


def saves(desk: Desk, name: str) -> tuple[Path, Path]:
    """A run config of SAVES, and its run directory."""
    environment = {"RUN": "{run_directory}", "ROUND": "{round}"}
    workload = {
        "command": [sys.executable, "-c", SAVES],
        "environment": environment,
        "checkpoints": "saved/*",
    }
    return desk.write_run(name, workload), desk.directory / "runs" / name


def job_of(desk: Desk, handle: str) -> str:
    """The job's id."""
    return str(desk.status(handle)["native"]["job_id"])


@contextlib.contextmanager
def looking(desk: Desk) -> Iterator[SlurmLauncher]:
    """What `drillyard runs` asks, in this process: it looks often enough to see what lasts for
    seconds."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HOME", "SLURM_CONF"):
            patch.setenv(name, desk.environment[name])
        patch.delenv("XDG_STATE_HOME", raising=False)
        yield SlurmLauncher(load_cluster_config(desk.directory / "cluster.yaml"), IndexReadHere())


def is_running(status: dict[str, Any]) -> bool:
    """For `Desk.wait_for`."""
    return bool(status["state"] == "running")


def waiting(desk: Desk, handle: str) -> RunStatus:
    """The status as soon as the run is in the queue again, which may last for a second only."""
    seen: list[RunStatus] = []
    with looking(desk) as look:

        def is_pending() -> bool:
            seen.append(look.status(handle.rpartition("/")[2]))
            return seen[-1].native.get("state") == "PENDING"

        until(is_pending, "the queue")
    return seen[-1]


def written(run_directory: Path, begun: int) -> list[tuple[int, float]]:
    """What the nodes of an attempt of SAVES have written: node and time."""
    with contextlib.suppress(FileNotFoundError):
        lines = [line.split() for line in (run_directory / "written").read_text().splitlines()]
        return [(int(node), float(at)) for number, node, at in lines if int(number) == begun]
    return []


def test_a_run_that_loses_a_node_twice_and_reaches_its_time_limit_loses_no_bit(
    cluster: SlurmCluster, workplace: Path, reference: Reference, tmp_path: Path
) -> None:
    run = Run(write_config(workplace, "over-slurm"))
    moments = ["attempt-0-step-9", "attempt-1-step-20", "attempt-2-step-25"]
    holds = Holds(tmp_path, *moments)
    python = holds.interpreter(tmp_path / "python")
    environment = {"GLOO_SOCKET_IFNAME": "lo"}
    slurm = {"time_limit": "50", "signal_seconds": 300}
    desk = sit_down(cluster, tmp_path / "desk", python=python, environment=environment, slurm=slurm)
    handle = desk.launch(run.config)
    assert handle == "slurm://quad/over-slurm"
    job = job_of(desk, handle)
    until(lambda: holds.reached(moments[0], 0, 1), "the first start")
    lost = desk.status(handle)["hosts"][1]
    cluster.kill_agent(lost)

    # The reason is there as soon as the job waits.
    status = waiting(desk, handle)
    assert says(status.reason or "", f"lost node 1 ({lost}): Killed"), status
    assert status.state is State.restarting, status
    assert "without" not in (status.reason or "")
    until(lambda: holds.reached(moments[1], 0, 1), "the second start")
    # Its end is nearer than `signal_seconds` now. Slurm looks every 30 s.
    minutes = 3 + cluster.elapsed_seconds(job) // 60
    cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")
    status = waiting(desk, handle)
    assert (status.state, status.failures) == (State.restarting, 0), status
    assert says(status.reason or "", "time limit ... saved"), status
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=50")
    log = run.directory / "launch" / f"slurm-{job}.log"
    until(lambda: holds.reached(moments[2], 0, 1), "the third start")
    cluster.kill_agent(lost)
    status = waiting(desk, handle)
    assert says(status.reason or "", f"node 1 ({lost}): Killed; ... without {lost}"), status
    assert desk.say("runs", "wait", handle).returncode == 0, log.read_text()
    ended = desk.status(handle)
    assert (ended["state"], ended["failures"], ended["round"]) == ("succeeded", 0, 3)
    assert lost not in ended["hosts"] and "time limit" in log.read_text()
    assert [start["round"] for start in run.events("run_start")] == [0, 1, 2, 3]
    assert [each["step"] for each in run.events("resume")] == [21, 21]
    # Steps after the newest checkpoint were trained again, with the same bits.
    assert set(run.figures()) == set(reference.run.figures())
    assert run.last_step() == STEPS and run.weights() == reference.run.weights()


def test_nodes_without_the_storage_are_named_and_left_out(
    cluster: SlurmCluster, desk: Desk
) -> None:
    config, directory = saves(desk, "unmounted")
    # The first one would run the job script, the other one joins a leader.
    for node in ("n1", "n3"):
        cluster.unmount(node, desk.directory)
    handle = desk.launch(config)
    reasons: set[str] = set()
    with looking(desk) as look:

        def has_started() -> bool:
            status = look.status("unmounted")
            reasons.add(status.reason or "")
            return status.state is State.running

        until(has_started, "the start on nodes with the storage")
    # Which of the two comes first is up to Slurm.
    assert says(reasons, f"n1 ... {directory}/launch; ... without n1"), reasons
    named = [reason for reason in reasons if says(reason, "node 1 (n3) cannot start: ")]
    assert named and all("No such file" in reason for reason in named), reasons
    assert says(named, "(Exited with exit code 2); ... without n3"), reasons
    message = desk.wait_for(handle, is_running)
    assert message["hosts"] == ["n2", "n4"] and message["failures"] == 0
    until(lambda: {node for node, _ in written(directory, 0)} == {0, 1}, "attempt 0")
    # A leader that is killed is a loss of its host; the others leave at once.
    cluster.kill_agent("n2")
    assert says(waiting(desk, handle).reason or "", "node 0 (n2) ... killed")
    desk.wait_for(handle, lambda message: is_running(message) and message["round"] == 1)
    (directory / "enough").touch()
    assert desk.say("runs", "wait", handle).returncode == 0


def test_a_run_whose_node_lost_its_slurmd_goes_on_elsewhere_after_the_old_node_has_ended(
    cluster: SlurmCluster, desk: Desk
) -> None:
    config, directory = saves(desk, "orphaned")
    handle = desk.launch(config)
    status = desk.wait_for(handle, is_running)
    until(lambda: {node for node, _ in written(directory, 0)} == {0, 1}, "attempt 0")
    lost = status["hosts"][0]
    cluster.kill_node(lost)
    status = desk.wait_for(handle, lambda status: is_running(status) and status["round"] == 1)
    assert lost not in status["hosts"] and status["failures"] == 0
    until(lambda: {node for node, _ in written(directory, 1)} == {0, 1}, "attempt 1")
    (directory / "enough").touch()
    assert desk.say("runs", "wait", handle).returncode == 0
    last_of_old, first_of_new = (
        max(at for _, at in written(directory, 0)),
        min(at for _, at in written(directory, 1)),
    )
    assert last_of_old < first_of_new
    until(
        lambda: not cluster.processes(str(directory)), f"left: {cluster.processes(str(directory))}"
    )


def test_cancel_is_for_good_and_a_run_is_not_submitted_twice(
    cluster: SlurmCluster, desk: Desk, tmp_path: Path
) -> None:
    config, directory = saves(desk, "twice")
    # Of two launches at the same moment one submits.
    launches = [desk.start("launch", config) for _ in range(2)]
    said = [launching.communicate(timeout=TIMEOUT_SECONDS) for launching in launches]
    assert sorted(launching.returncode for launching in launches) == [0, 2], said
    assert any("nothing was submitted" in errors for _, errors in said), said
    handle = "slurm://quad/twice"
    desk.wait_for(handle, is_running)
    refused = desk.say("launch", config)
    first = job_of(desk, handle)
    assert refused.returncode == 2 and says(
        refused.stderr, f"{handle}: ... running already ... job {first}"
    )
    # Another project of this user has a run of the name, and one job keeps running.
    other = desk.second_project(tmp_path / "other")
    theirs, _ = saves(other, "twice")
    other.require_refused(theirs, desk, handle)
    assert job_of(desk, handle) == first and cluster.job(first) == "RUNNING"
    assert desk.launch(config, "--replace") == handle
    desk.wait_for(handle, is_running)
    second = job_of(desk, handle)
    assert first != second and cluster.job(first) == "CANCELLED"
    # Somebody who does not know drillyard cancels it: it must not queue itself again, although it
    # has saved.
    until(lambda: bool(written(directory, 0)), "attempt 0")
    cluster.run("scancel", second)
    status = desk.wait_for(handle, lambda status: status["state"] == "cancelled")
    assert status["native"]["job_id"] == second
    until(lambda: cluster.job(second) == "CANCELLED", "the end of the job")
    assert (directory / "saved").exists()
    # What is over is resumed by a job of its own, which goes on from what was saved.
    resumed = desk.say("runs", "resume", handle)
    assert resumed.returncode == 0, resumed.stderr
    desk.wait_for(handle, is_running)
    cancelled = desk.say("runs", "cancel", handle)
    assert cancelled.returncode == 0, cancelled.stderr
    assert desk.status(handle)["state"] == "cancelled"
    assert not cluster.processes(str(directory))
    again = desk.say("runs", "cancel", handle)
    assert again.returncode == 0 and says(again.stdout, f"{handle}  ... already cancelled")
    listed = desk.say("runs", "list")
    assert handle in listed.stdout and "cancelled" in listed.stdout
    # Once it is over the other project may take the name; by the handle it ends from anywhere.
    taken = other.say("launch", theirs)
    assert taken.returncode == 0 and f"launched from {desk.directory}" in taken.stderr
    refused = desk.say("runs", "cancel", "twice")
    assert refused.returncode == 2 and f"launched from {other.directory}" in refused.stderr
    assert desk.say("runs", "cancel", handle).returncode == 0
    assert desk.status(handle)["state"] == "cancelled"
    refused = desk.say("runs", "resume", "twice")
    assert refused.returncode == 2 and f"runs resume {handle}" in refused.stderr


def test_a_preempted_run_is_queued_again_and_not_counted(cluster: SlurmCluster, desk: Desk) -> None:
    config, directory = saves(desk, "preempted")
    handle = desk.launch(config)
    desk.wait_for(handle, is_running)
    until(lambda: {node for node, _ in written(directory, 0)} == {0, 1}, "attempt 0")
    # The partition's PreemptMode is CANCEL: Slurm itself would let the job end here.
    urgent = [
        "--partition=urgent",
        "--nodes=4",
        "--exclusive",
        "--output=/dev/null",
        "--wrap=sleep 1000",
    ]
    other = cluster.run("sbatch", "--parsable", *urgent).stdout.strip()
    status = waiting(desk, handle)
    assert status.state is State.restarting and says(status.reason or "", "queued again")
    cluster.run("scancel", other)
    message = desk.wait_for(handle, lambda message: is_running(message) and message["round"] == 1)
    assert message["failures"] == 0
    assert desk.say("runs", "cancel", handle).returncode == 0


def test_a_sweep_is_one_array_of_runs(cluster: SlurmCluster, tmp_path: Path) -> None:
    desk = sit_down(cluster, tmp_path / "desk", nodes=1)
    workload = {
        "command": ["bash", "-c", 'echo "rate $RATE"; [ "$RATE" != 3 ]'],
        "environment": {"RATE": "0"},
    }
    config = desk.write_run("sweep", workload)
    done = desk.say(
        "launch",
        config,
        "--sweep",
        "workload.environment.RATE='1','2','3','4'",
        "--max-failures",
        0,
    )
    assert done.returncode == 0, done.stderr
    handles = done.stdout.split()
    assert len(handles) == 4
    ends = [
        desk.wait_for(handle, lambda message: message["state"] in ("succeeded", "failed"))
        for handle in handles
    ]
    assert [message["state"] for message in ends] == [
        "succeeded",
        "succeeded",
        "failed",
        "succeeded",
    ]
    array = {message["native"]["job_id"].split("_")[0] for message in ends}
    assert len(array) == 1 and [
        message["native"]["job_id"].split("_")[1] for message in ends
    ] == list("0123")
    assert ends[2]["failure"]["exit_code"] == 1
    assert "rate 2" in desk.say("runs", "logs", handles[1]).stdout


def test_a_script_of_torchrun_that_logs_as_torchtitan_is_launched_and_measured(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    desk = sit_down(cluster, tmp_path / "desk", slurm={"directory": str(tmp_path / "project")})
    (desk.directory / "train.py").write_text(TITAN, encoding="utf-8")
    subprocess.run(["git", "init", "-q"], cwd=desk.directory, check=True)
    workload = {
        "command": ["python", "train.py"],
        "per": "gpu",
        "environment": {"GLOO_SOCKET_IFNAME": "lo"},
    }
    desk.environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    handle = desk.launch(desk.write_run("titan", workload), "--sync")
    assert desk.say("runs", "wait", handle).returncode == 0, desk.say("runs", "logs", handle).stdout
    fetched = desk.say(
        "runs", "artifacts", handle, "launch/node-0.log", "--fetch", tmp_path / "here"
    )
    assert fetched.returncode == 0, fetched.stderr
    measured = desk.say("metrics", tmp_path / "here" / "launch" / "node-0.log", "--json")
    assert measured.returncode == 0, measured.stderr
    assert '"torchtitan"' in measured.stdout and "11.5" in measured.stdout


def test_who_follows_logs_hears_all_although_the_controller_is_away(
    cluster: SlurmCluster, desk: Desk, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    script = (
        f"echo before $NODE_RANK; while [ ! -e {go} ]; do sleep 0.1; done; echo after $NODE_RANK"
    )
    handle = desk.launch(desk.write_run("talks", {"command": ["bash", "-c", script]}))
    follower = desk.start("runs", "logs", "-f", handle)
    assert follower.stdout is not None and follower.stderr is not None
    heard = []
    while not (
        any("before 0" in line for line in heard) and any("before 1" in line for line in heard)
    ):
        heard.append(follower.stdout.readline())
    cluster.stop_controller()
    while not says(said := follower.stderr.readline(), "trying again"):
        assert said, "the follower has ended"
    asked = desk.say("runs", "status", handle)
    assert asked.returncode == 2 and "squeue" in asked.stderr
    cluster.start_controller()
    while not says(said := follower.stderr.readline(), "answers again"):
        assert said, "the follower has ended"
    go.touch()
    rest, errors = follower.communicate(timeout=240)
    assert follower.returncode == 0, errors
    assert all(f"after {node}" in rest for node in (0, 1))
    assert desk.wait_for(handle, lambda status: status["state"] == "succeeded")


def test_a_login_node_that_ssh_reaches_does_the_same(cluster: SlurmCluster, tmp_path: Path) -> None:
    with two_hosts(tmp_path / "hosts") as hosts:
        login = hosts.hosts[0]
        for name in ("sbatch", "squeue", "scancel", "sinfo", "sacct"):
            command = login.home / "bin" / name
            slurm_conf = cluster.environment["SLURM_CONF"]
            command.write_text(
                f'#!/bin/sh\nSLURM_CONF={slurm_conf} exec {shutil.which(name)} "$@"\n'
            )
            command.chmod(0o755)
        project = tmp_path / "project"
        slurm = {
            "login_host": "h0",
            "config_file": str(hosts.config_file),
            "directory": str(project),
        }
        # A login that prints, without a line break at its end, and asks; and a site's defaults.
        (login.home / ".bashrc").write_text(
            "echo 42; echo '[1]'; echo oops >&2; read answer; export SBATCH_EXPORT=NONE"
            " SLURM_EXPORT_ENV=NONE SBATCH_TIMELIMIT=1; printf 'Welcome to h0'\n"
        )
        desk = sit_down(cluster, tmp_path / "desk", slurm=slurm)
        desk.environment["SLURM_CONF"] = "/nonexistent"
        config, _ = saves(desk, "remote")
        handle = desk.launch(config)
        status = desk.wait_for(handle, is_running)
        listed = desk.say("runs", "list")
        assert handle in listed.stdout or "remote" in listed.stdout
        assert listed.stderr.count("Welcome to h0") == 1
        until(lambda: bool(written(project / "runs" / "remote", 0)), "attempt 0")
        hosts.close_connections()
        assert says(
            desk.say("runs", "logs", handle).stdout,
            f"attempt 0 ... remote ... {status['hosts'][1]}",
        )
        login.power_off()
        away = desk.say("runs", "status", handle)
        assert away.returncode == 2 and "h0" in away.stderr and "ssh: connect" in away.stderr
        login.power_on()
        assert desk.say("runs", "cancel", handle).returncode == 0
        assert desk.status(handle)["state"] == "cancelled" and not cluster.processes(str(project))


def test_what_slurm_refuses_is_reported_with_what_to_do(
    cluster: SlurmCluster, desk: Desk, tmp_path: Path
) -> None:
    lost = sit_down(cluster, tmp_path / "lost", slurm={"partition": "nosuch"})
    run = lost.write_run("refused", {"command": ["true"]})
    done = lost.say("launch", run)
    assert done.returncode == 2 and done.stdout == ""
    assert "invalid partition" in done.stderr.lower()
    assert says(done.stderr, "sbatch refused") and says(done.stderr, "sinfo -s ... slurm.partition")
    typed = sit_down(cluster, tmp_path / "typed", slurm={"gres": "gpu:h100:8"})
    done = typed.say("launch", run)
    assert done.returncode == 2 and "slurm.gres" in done.stderr
    # More nodes than there are: Slurm takes the job all the same.
    many = sit_down(cluster, tmp_path / "many", nodes=9)
    handle = many.launch(run)
    status = many.wait_for(handle, lambda status: "reason" in status["native"])
    assert status["state"] == "queued" and "(PartitionConfig)" in status["reason"], status
    nothing = sit_down(cluster, tmp_path / "nothing")
    (tmp_path / "bin").mkdir()
    for name in ("env", "sh", "mktemp", "tar", "rm", "python3"):
        (tmp_path / "bin" / name).symlink_to(
            sys.executable if name == "python3" else shutil.which(name) or name
        )
    nothing.environment["PATH"] = str(tmp_path / "bin")
    done = nothing.say("launch", run)
    assert done.returncode == 2 and "set slurm.login_host" in done.stderr


def test_a_job_that_waits_tells_why_and_is_cancelled_in_the_queue(
    cluster: SlurmCluster, desk: Desk
) -> None:
    config, _ = saves(desk, "first")
    first = desk.launch(config)
    desk.wait_for(first, is_running)
    after, _ = saves(desk, "second")
    second = desk.launch(after, "--after", first)
    status = desk.wait_for(second, lambda status: status["native"].get("reason") == "Dependency")
    assert status["state"] == "queued" and says(
        status["reason"], "waits ... another run ... (Dependency)"
    )
    assert desk.say("runs", "cancel", second).returncode == 0
    assert desk.status(second)["state"] == "cancelled" and desk.status(first)["state"] == "running"
    assert desk.say("runs", "cancel", first).returncode == 0
