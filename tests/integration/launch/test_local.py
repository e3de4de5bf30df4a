"""Runs launched on this machine outlive the terminal, are found again, and share no run directory
with another."""

from __future__ import annotations

import os
import pty
import signal
from pathlib import Path

import pytest
from tests.facts import says
from tests.integration.conftest import Reference
from tests.integration.held import Holds
from tests.integration.launch.desk import Desk
from tests.integration.tiny_run import (
    STEPS,
    TIMEOUT_SECONDS,
    Run,
    drillyard,
    wait_until,
    write_config,
)
from tests.integration.waiting import until

from drillyard.launch.agent.job import run_token
from drillyard.supervise.reaper import RUN_MARK, end_marked_processes, marked_processes


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    """A user who runs on this machine."""
    return Desk(tmp_path / "desk", {"name": "here", "platform": "local", "processes_per_node": 2})


def processes(run_directory: Path) -> list[int]:
    """All that a launched run has on this machine."""
    return marked_processes(run_token(str(run_directory / "launch")), RUN_MARK)


def test_a_run_goes_on_when_its_terminal_closes_and_is_found_from_another(
    desk: Desk, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    script = (
        f"trap 'echo hung up; exit 1' HUP; while [ ! -e {go} ]; do sleep 0.1; done; echo went on"
    )
    run = desk.write_run("long", {"command": ["bash", "-c", script]})
    # A terminal of its own: when the other end closes, all that belongs to it gets SIGHUP.
    terminal, inside = pty.openpty()
    launching = desk.start(
        "launch",
        run,
        stdin=inside,
        stdout=inside,
        stderr=inside,
        start_new_session=True,
        preexec_fn=_take_terminal,
    )
    os.close(inside)
    assert launching.wait(TIMEOUT_SECONDS) == 0
    os.close(terminal)
    listed = desk.say("runs", "list")
    assert "local://here/long" in listed.stdout, listed.stderr
    assert desk.status("local://here/long")["state"] in ("starting", "running")
    go.touch()
    assert desk.say("runs", "wait", "long").returncode == 0
    assert "went on" in desk.say("runs", "logs", "long").stdout
    assert processes(desk.directory / "runs" / "long") == []


def test_of_launches_at_the_same_moment_one_is_submitted_and_the_others_are_reported(
    desk: Desk,
) -> None:
    runs = []
    for number in range(3):
        written = desk.write_run(
            "same", {"command": ["bash", "-c", f"echo I am {number}; sleep 1000"]}
        )
        runs.append(written.rename(desk.directory / f"same-{number}.yaml"))
    launches = [desk.start("launch", run) for run in runs]
    said = [launch.communicate(timeout=TIMEOUT_SECONDS) for launch in launches]
    codes = [launch.returncode for launch in launches]
    assert sorted(codes) == [0, 2, 2], said
    winner = codes.index(0)
    assert all(
        "nothing was" in error for code, (_, error) in zip(codes, said, strict=True) if code
    ), said
    desk.wait_for("same", lambda status: status["state"] == "running")
    until(lambda: "0: I am" in desk.say("runs", "logs", "same").stdout)
    logs = desk.say("runs", "logs", "same").stdout
    assert f"0: I am {winner}" in logs and logs.count("0: I am") == 1
    assert (desk.directory / "runs" / "same" / "launch" / "claim").read_text() == ""


def test_two_projects_with_one_run_name_keep_off_each_others_run(
    desk: Desk, tmp_path: Path
) -> None:
    other = desk.second_project(tmp_path / "other" / "project")
    runs = [
        each.write_run("same", {"command": ["bash", "-c", "sleep 1000"]}) for each in (desk, other)
    ]
    # Each has a run directory, and so a lock, of its own; the name is one.
    launches = [each.start("launch", run) for each, run in zip((desk, other), runs, strict=True)]
    said = [launch.communicate(timeout=TIMEOUT_SECONDS) for launch in launches]
    assert sorted(launch.returncode for launch in launches) == [0, 2], said
    if launches[0].returncode:
        desk, other, runs = other, desk, runs[::-1]
    handle = "local://here/same"
    desk.wait_for(handle, lambda status: status["state"] == "running")
    other.require_refused(runs[1], desk, handle)
    assert processes(desk.directory / "runs" / "same")
    assert processes(other.directory / "runs" / "same") == []
    below = desk.directory / "below"
    below.mkdir()
    assert desk.second_project(below).say("runs", "cancel", "same").returncode == 0
    assert other.launch(runs[1]) == handle
    assert desk.say("runs", "cancel", handle).returncode == 0
    assert processes(other.directory / "runs" / "same") == []


def test_the_lines_of_each_rank_that_torchrun_starts_are_found_by_its_number(desk: Desk) -> None:
    # torchrun ends the other rank with the first that fails: rank 1 waits until rank 0 has printed
    # its line.
    code = (
        "import os, pathlib, signal, time; r = os.environ['RANK']; printed ="
        " pathlib.Path('rank-0-printed')\nprint(f'I am {r}, deaf to {signal.pthread_sigmask(0,"
        " [])}', flush=True)\nif r == '0': printed.touch()\nwhile not printed.exists():"
        " time.sleep(0.05)\nexit(f'ValueError: bad {r}' if r == '1' else 0)"
    )
    workload = {"command": ["python", "-c", code], "per": "gpu"}
    handle = desk.launch(desk.write_run("ranked", workload), "--max-failures", "0")
    assert desk.say("runs", "wait", handle).returncode == 1
    for rank in (0, 1):
        said = desk.say("runs", "logs", handle, "--rank", str(rank)).stdout
        # Not to Ctrl-C either, which the launch held back.
        assert f"I am {rank}, deaf to set()" in said and f"I am {1 - rank}" not in said
    failure = desk.status(handle)["failure"]
    assert (failure["rank"], failure["lines"][-1]) == (1, "ValueError: bad 1")
    assert not list((desk.directory / "runs" / "ranked" / "launch").glob("*.ranks*"))


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_a_run_whose_agent_and_respawner_are_killed_is_failed_and_leaves_nothing(
    desk: Desk,
) -> None:
    handle = desk.launch(
        desk.write_run("lost", {"command": ["bash", "-c", "setsid sleep 1000 & sleep 1000"]})
    )
    desk.wait_for(handle, lambda status: status["state"] == "running")
    directory = desk.directory / "runs" / "lost"
    until(lambda: len(processes(directory)) >= 4)
    for pid in sorted(_agents(directory)):
        os.kill(pid, signal.SIGKILL)
    until(lambda: processes(directory) == [])
    status = desk.status(handle)
    assert status["state"] == "failed" and "agent gone" in status["reason"]
    assert f"drillyard runs resume {handle}" in desk.say("runs", "status", handle).stdout
    desk.write_run("lost", {"command": ["true"]})
    assert desk.launch(desk.directory / "lost.yaml") == handle
    assert desk.say("runs", "wait", handle).returncode == 0


def _agents(run_directory: Path) -> list[int]:
    """The respawner first: it would start a killed agent again."""
    found = {}
    for pid in processes(run_directory):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if words[2:3] in ([b"keep"], [b"run"]):
            found[words[2]] = pid
    return [found[b"keep"], found[b"run"]]


def test_one_run_directory_has_one_run_and_a_cancelled_one_goes_on_with_the_same_bits(
    workplace: Path, reference: Reference, tmp_path: Path
) -> None:
    run = Run(write_config(workplace, "by-launch", checkpoint={"every_steps": 5}))
    first, second = "attempt-0-step-8", "attempt-0-step-20"
    holds = Holds(tmp_path, first, second)
    python = holds.interpreter(tmp_path / "python")
    settings = {"name": "here", "platform": "local", "processes_per_node": 2, "python": python}
    desk = Desk(tmp_path / "desk", settings)
    # `drillyard train` has the directory: the launched run is refused, in words.
    plain = run.start("--console", "none", holds=holds)
    wait_until(lambda: holds.reached(first, 0, 1), plain)
    handle = desk.launch(run.config)
    assert desk.say("runs", "wait", handle).returncode == 2
    status = desk.status(handle)
    refusal = "\n".join(status["failure"]["lines"])
    assert status["state"] == "failed" and says(
        refusal, f"{run.directory}: ... active ... process {plain.pid} on"
    )
    plain.terminate()
    assert plain.wait(TIMEOUT_SECONDS) == 85
    # The launched run has it: `drillyard train` is refused.
    assert desk.launch(run.config) == handle
    until(lambda: holds.reached(second, 0, 1))
    refused = drillyard("train", run.config, "--nproc-per-node", 2)
    assert refused.returncode == 2 and str(run.directory) in refused.stderr, refused.stderr
    cancelled = desk.say("runs", "cancel", handle)
    assert cancelled.returncode == 0, cancelled.stderr
    assert desk.status(handle)["state"] == "cancelled"
    assert processes(run.directory) == []
    assert desk.say("runs", "resume", handle).returncode == 0
    assert desk.say("runs", "wait", handle).returncode == 0
    undisturbed = reference.run.figures()
    assert {step for step, _, _ in run.figures()} == set(range(1, STEPS + 1))
    assert all(figures == undisturbed[figures[0] - 1] for figures in run.figures())
    assert run.weights() == reference.run.weights()


def test_never_is_about_the_begin_of_a_run_and_a_restart_of_the_launch_goes_on(
    workplace: Path, tmp_path: Path
) -> None:
    run = Run(write_config(workplace, "never", checkpoint={"every_steps": 5, "resume": "never"}))
    held_at = "attempt-0-step-8"
    holds = Holds(tmp_path, held_at)
    python = holds.interpreter(tmp_path / "python")
    settings = {"name": "here", "platform": "local", "processes_per_node": 2, "python": python}
    desk = Desk(tmp_path / "desk", settings)
    handle = desk.launch(run.config)
    until(lambda: holds.reached(held_at, 0, 1) and bool(run.events("checkpoint")))
    run.send(signal.SIGKILL, 1)
    assert desk.say("runs", "wait", handle).returncode == 0
    assert (desk.status(handle)["round"], desk.status(handle)["failures"]) == (1, 1)
    starts = run.events("run_start")
    assert [start["round"] for start in starts] == [0, 1] and len(
        {start["launch"] for start in starts}
    ) == 1
    assert [(event["round"], event["step"]) for event in run.events("resume")] == [(1, 5)]
    # A launch of its own is another begin, and the directory is not empty.
    assert desk.launch(run.config) == handle
    assert desk.say("runs", "wait", handle).returncode == 2
    assert says(desk.status(handle)["failure"]["lines"], "checkpoint.resume ... never")


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, workplace: Path) -> object:
    """What a failed test has launched must not take the cores from the next."""
    yield
    for state in [
        *tmp_path.glob("desk/runs/*"),
        *tmp_path.glob("other/project/runs/*"),
        *workplace.glob("runs/by-launch"),
        *workplace.glob("runs/never"),
    ]:
        end_marked_processes(run_token(str(state / "launch")), RUN_MARK)
