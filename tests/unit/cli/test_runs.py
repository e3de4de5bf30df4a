"""`drillyard runs`: what is found, what is said, and how it ends."""

from __future__ import annotations

import json
import os
import shlex
import signal
import threading
import time
from pathlib import Path

import pytest
from tests.facts import says
from tests.module_time import set_time
from tests.unit.cli.fake_launcher import FakeRun, World

from drillyard.cli import main as cli
from drillyard.cli.options import complete_run
from drillyard.launch import run_wait
from drillyard.launch.completion_cache import remember_runs
from drillyard.launch.run_status import Handle, RunFailure, RunStatus, State


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(run_wait, "PAUSES", (0.01, 0.01))
    monkeypatch.setenv("COLUMNS", "80")
    return World(tmp_path, monkeypatch)


class Said:
    """What a command printed, and its exit code."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> None:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main(["runs", *arguments])
        self.code = ended.value.code or 0
        self.out, self.err = capsys.readouterr()


Capture = pytest.CaptureFixture[str]


def test_without_any_cluster_it_says_what_to_do(world: World, capsys: Capture) -> None:
    said = Said(capsys, "list")

    assert said.code == 2
    assert says(said.err, "no cluster") and "drillyard launch run.yaml" in said.err


def test_the_clusters_file_here_is_asked_where_none_is_known(world: World, capsys: Capture) -> None:
    world.add("here", known=False).add("a", State.running)
    Path("cluster.yaml").write_text(world.config("here"))

    assert "slurm://here/a" in Said(capsys, "list").out


def test_a_cluster_file_that_is_given_is_the_only_one_asked(
    world: World, capsys: Capture, tmp_path: Path
) -> None:
    world.add("known").add("a", State.running)
    world.add("given", known=False).add("b", State.running)
    file = tmp_path / "given.yaml"
    file.write_text(world.config("given"))

    said = Said(capsys, "list", "--cluster", str(file))

    assert "b" in said.out and "known" not in said.out


def test_a_list_is_newest_first_over_all_clusters_and_shows_why(
    world: World, capsys: Capture
) -> None:
    now = time.time()
    one, other = world.add("one"), world.add("other")
    one.add("old", State.queued, submitted_at=now - 900, since=now - 900, reason="Priority")
    failure = RunFailure("killed by SIGKILL", rank=3, node="n2", exit_code=137)
    one.add("new", State.failed, submitted_at=now - 60, since=now - 50, failure=failure)
    other.add("middle", State.running, submitted_at=now - 300, since=now - 290)

    said = Said(capsys, "list")

    assert said.code == 0
    assert not any(line.endswith(" ") for line in said.out.splitlines())
    assert [line.split() for line in said.out.splitlines()[1:]] == [
        [
            "slurm://one/new",
            "failed",
            "50",
            "s",
            "2",
            *["rank", "3", "on", "n2:", "killed", "by", "SIGKILL", "(exit", "code", "137)"],
        ],
        ["slurm://other/middle", "running", "4", "min", "2"],
        ["slurm://one/old", "queued", "15", "min", "2", "Priority"],
    ]


def test_a_list_of_some_states_and_the_newest(world: World, capsys: Capture) -> None:
    launcher = world.add("one")
    for number in range(4):
        launcher.add(
            f"r{number}", State.running if number % 2 else State.queued, submitted_at=float(number)
        )

    listed = Said(capsys, "list", "--state", "running", "--last", "1", "--json").out

    assert [run["run"] for run in json.loads(listed)["runs"]] == ["r3"]
    assert "running, restarting" in Said(capsys, "list", "--state", "runing").err


def test_a_cluster_that_does_not_answer_hides_no_other(world: World, capsys: Capture) -> None:
    world.add("up").add("a", State.running)
    world.add("down").down = "login: Connection timed out\ncommand: ssh login squeue"

    said = Said(capsys, "list")
    output = json.loads(Said(capsys, "list", "--json").out)

    assert said.code == 1
    assert "slurm://up/a" in said.out
    assert says(
        said.err, "cluster down: no answer: login: ... timed out ... command: ssh login squeue"
    )
    assert [run["handle"] for run in output["runs"]] == ["slurm://up/a"]
    assert output["no_answer"] == [
        {"cluster": "down", "error": "login: Connection timed out\ncommand: ssh login squeue"}
    ]


def test_a_cluster_of_the_address_book_that_cannot_be_read_hides_no_other(
    world: World, capsys: Capture
) -> None:
    world.add("good").add("a", State.running)
    (world.directory / "config/drillyard/clusters/bad.yaml").write_text(
        "name: bad\nplatform: moon\n"
    )

    said = Said(capsys, "list")

    assert said.code == 1
    assert (
        "slurm://good/a" in said.out
        and says(said.err, "cluster bad: ... answer")
        and "moon" in said.err
    )


def test_a_name_is_looked_up_on_all_clusters(world: World, capsys: Capture) -> None:
    world.add("one").add("a", State.running)
    world.add("two").add("b", State.running)

    assert Said(capsys, "status", "b").out.startswith("slurm://two/b  running")


def test_a_name_that_two_clusters_have_is_an_error_with_both_handles(
    world: World, capsys: Capture
) -> None:
    world.add("one").add("a", State.running)
    world.add("two").add("a", State.running)

    said = Said(capsys, "status", "a")

    assert said.code == 2
    assert "slurm://one/a" in said.err and "slurm://two/a" in said.err
    assert Said(capsys, "status", "slurm://two/a").out.startswith("slurm://two/a")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "no such run ... one ... drillyard runs list"),
        ("nothing", "two: login: no route"),
        ("slurm://three/a", "slurm://three ... slurm://one, slurm://two)"),
        ("slurm:/one/a", "no such run"),
        ("slurm://one", "run's handle"),
    ],
)
def test_what_is_not_there_is_an_error_that_helps(
    world: World, capsys: Capture, name: str, words: str
) -> None:
    world.add("one").add("a", State.running)
    world.add("two").down = "login: no route to host"

    said = Said(capsys, "status", name)

    assert said.code == 2
    assert says(said.err, words)


def test_status_is_one_screen_with_what_to_do_next(world: World, capsys: Capture) -> None:
    failure = RunFailure(
        "exit code 1", rank=1, node="n1", exit_code=1, lines=("Traceback", "ValueError: nan")
    )
    world.add("one").add(
        "a",
        State.failed,
        since=time.time() - 30,
        attempt=2,
        failures=3,
        failure=failure,
        native={"job": 17},
    )

    said = Said(capsys, "status", "a")

    assert said.code == 0
    lines = said.out.splitlines()
    assert lines[0] == "slurm://one/a  failed 30 s ago: rank 1 on n1: exit code 1"
    assert "  last lines     | Traceback" in lines and "                 | ValueError: nan" in lines
    assert any("drillyard runs resume slurm://one/a" in line for line in lines)
    assert len(lines) < 24


@pytest.mark.parametrize("is_given", [True, False])
def test_what_to_do_next_names_the_file_of_a_cluster_that_is_not_registered(
    is_given: bool,
    world: World,
    capsys: Capture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world.add("given", known=False).add("a", State.cancelled)
    place, elsewhere = tmp_path / "with blank", tmp_path / "elsewhere"
    for directory in (place, elsewhere):
        directory.mkdir()
    (place / "cluster.yaml").write_text(world.config("given"))
    monkeypatch.chdir(place if not is_given else elsewhere)
    option = ["--cluster", "../with blank/cluster.yaml"] if is_given else []
    shown = Said(capsys, "status", "slurm://given/a", *option).out
    (advice,) = [line for line in shown.splitlines() if "drillyard runs resume" in line]
    # Typed anywhere.
    monkeypatch.chdir("/")
    words = shlex.split(advice.partition("drillyard runs ")[2].partition("   (")[0])
    assert Said(capsys, *words).code == 0


def test_status_as_json_has_the_documented_fields(world: World, capsys: Capture) -> None:
    world.add("one").add("a", State.queued, reason="Resources", since=5.0, native={"job": 17})

    status = json.loads(Said(capsys, "status", "a", "--json").out)

    assert status == {
        "version": 1,
        "handle": "slurm://one/a",
        "platform": "slurm",
        "cluster": "one",
        "run": "a",
        "state": "queued",
        "nodes": 2,
        "reason": "Resources",
        "since": 5.0,
        "submitted_at": None,
        "started_at": None,
        "ended_at": None,
        "round": None,
        "failures": 0,
        "failure": None,
        "run_directory": str(world.directory / "shared/one/a"),
        "hosts": [],
        "native": {"job": 17},
        "over": False,
        "progress": None,
    }


@pytest.mark.parametrize(
    ("state", "code", "exit_code"),
    [
        (State.succeeded, None, 0),
        (State.failed, 1, 1),
        (State.failed, 2, 2),
        (State.failed, None, 1),
        (State.cancelled, None, 130),
    ],
)
def test_waiting_ends_with_the_runs_own_code(
    world: World, capsys: Capture, state: State, code: int | None, exit_code: int
) -> None:
    failure = RunFailure("it failed", exit_code=code) if state is State.failed else None
    launcher = world.add("one")
    launcher.add("a", State.queued, State.running, State.running, state, failure=failure)

    said = Said(capsys, "wait", "a")

    assert said.code == exit_code
    assert [line.split(": ")[2].split()[0].strip("(:") for line in said.err.splitlines()] == [
        "queued",
        "running",
        str(state),
    ]


def test_waiting_outlives_a_scheduler_that_does_not_answer_for_a_while(
    world: World, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = world.add("one")
    launcher.add("a", State.running, State.succeeded)

    def sleep(_: float) -> None:
        launcher.down = None if launcher.down else "slurmctld: no answer"

    set_time(monkeypatch, run_wait.__name__, sleep=sleep)

    said = Said(capsys, "wait", "a", "--json")

    assert said.code == 0 and says(said.err, "slurmctld: ... again")
    assert json.loads(said.out)["exit_code"] == 0


def test_cancel_takes_several_is_idempotent_and_goes_on_past_a_problem(
    world: World, capsys: Capture
) -> None:
    launcher = world.add("one")
    launcher.add("a", State.running)
    launcher.add("b", State.succeeded)

    said = Said(capsys, "cancel", "a", "b", "c")
    again = Said(capsys, "cancel", "a")
    output = json.loads(Said(capsys, "cancel", "a", "--json").out)

    assert said.code == 2 and says(said.err, "slurm://one/c: c: no such")
    assert says(said.out, "slurm://one/a  cancelled ... slurm://one/b  had already succeeded")
    assert again.code == 0 and says(again.out, "slurm://one/a ... already cancelled")
    assert [(run["state"], run["was_over"]) for run in output["runs"]] == [("cancelled", True)]


def test_ctrl_c_ends_the_waiting_of_cancel_at_once_and_not_the_stopping(
    world: World, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = world.add("one")
    launcher.add("a", State.running)
    over, blocked = threading.Event(), []

    def long(run: FakeRun) -> RunStatus:
        # What the programs inherit that the launcher starts.
        blocked.append(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))
        os.kill(os.getpid(), signal.SIGINT)
        assert over.wait(60)
        return run.status

    monkeypatch.setattr(launcher, "stop", long)
    said = Said(capsys, "cancel", "a")
    waited = over.is_set()
    over.set()
    assert (said.code, said.out, waited, blocked) == (130, "", False, [True])
    assert "drillyard runs status slurm://one/a" in said.err


def test_resume_prints_the_handle(world: World, capsys: Capture) -> None:
    launcher = world.add("one")
    launcher.add("a", State.failed)
    launcher.add("b", State.running)

    assert Said(capsys, "resume", "a").out == "slurm://one/a\n"
    assert Said(capsys, "resume", "b").code == 2


def test_artifacts_are_listed_with_sizes_and_fetched_by_pattern(
    world: World, capsys: Capture, tmp_path: Path
) -> None:
    directory = world.add("one").add("a", State.succeeded)
    (directory / "final").mkdir()
    (directory / "final/model.safetensors").write_bytes(b"x" * 2048)
    (directory / "summary.json").write_text("{}")

    listed = Said(capsys, "artifacts", "a").out
    output = json.loads(Said(capsys, "artifacts", "a", "final/*", "--json").out)
    fetched = Said(capsys, "artifacts", "a", "*.json", "--fetch", str(tmp_path / "here"))

    assert "  2.00 KiB  final/model.safetensors\n" in listed and "2 bytes  summary.json" in listed
    assert output["files"] == [{"path": "final/model.safetensors", "bytes": 2048}]
    assert fetched.code == 0
    assert (tmp_path / "here/summary.json").read_text() == "{}" and not (
        tmp_path / "here/final"
    ).exists()
    assert Said(capsys, "artifacts", "a", "*.nothing").code == 2


def test_fetched_files_replace_others_only_on_request(
    world: World, capsys: Capture, tmp_path: Path
) -> None:
    directory = world.add("one").add("a", State.succeeded)
    (directory / "run.yaml").write_text("theirs")
    here = tmp_path / "here"
    here.mkdir()
    (here / "run.yaml").write_text("mine")
    (here / ".run.yaml.partial").write_text("mine too")

    refused = Said(capsys, "artifacts", "a", "run.yaml", "--fetch", str(here))
    assert refused.code == 2 and "--overwrite" in refused.err
    assert {path.name: path.read_text() for path in here.iterdir()} == {
        "run.yaml": "mine",
        ".run.yaml.partial": "mine too",
    }
    assert Said(capsys, "artifacts", "a", "run.yaml", "--fetch", str(here), "--overwrite").code == 0
    assert {path.name: path.read_text() for path in here.iterdir()} == {
        "run.yaml": "theirs",
        ".run.yaml.partial": "mine too",
    }


def test_names_and_handles_are_completed_without_asking_anybody(world: World) -> None:
    launcher = world.add("one")
    remember_runs("one", [Handle("slurm", "one", "llama-8b"), Handle("slurm", "one", "nccl")])

    assert complete_run("ll") == ["llama-8b"]
    assert complete_run("slurm://one/n") == ["slurm://one/nccl"]
    assert launcher.asked == []


def test_a_list_feeds_completion(world: World, capsys: Capture) -> None:
    world.add("one").add("seen", State.running)
    assert complete_run("se") == []

    Said(capsys, "list")

    assert complete_run("se") == ["seen"]


def test_completion_never_fails(world: World) -> None:
    cache = world.directory / "cache/drillyard/runs"
    cache.mkdir(parents=True)
    (cache / "one").write_bytes(b"\xff\xfe no handle\n")
    (cache / "two").write_text("no handle\nslurm://two/a\n")

    assert complete_run("") in (["a", "slurm://two/a"], [])
