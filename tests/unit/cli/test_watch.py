"""`drillyard runs logs` and `runs watch`."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from tests.facts import says
from tests.unit.cli.fake_launcher import World
from tests.unit.cli.test_runs import Capture, Said, world

from drillyard.errors import UserError
from drillyard.launch.logs.merge import key_of
from drillyard.launch.request import LogSelection, parse_since
from drillyard.launch.run_status import State
from drillyard.telemetry.jsonlines import encode

__all__ = ["world"]

NOON = 1_763_985_600


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drillyard.launch.logs.reader.ASK_SECONDS", 0.05)
    monkeypatch.setattr("drillyard.watch.remote_run.STATUS_SECONDS", 0.05)
    monkeypatch.setattr("drillyard.watch.remote_run.WAITING_SECONDS", 0.01)


def stamped(second: float, text: str) -> bytes:
    return key_of(round((NOON + second) * 1e6)) + text.encode() + b"\n"


def with_logs(world: World, *states: State, **fields: Any) -> Path:
    reason = "Priority" if states[0] is State.queued else None
    directory = world.add("one").add("a", *states, reason=reason, **fields)
    (directory / "launch/node-0.log").write_bytes(stamped(1, "a") + stamped(3, "[rank0]: c"))
    (directory / "launch/node-1.log").write_bytes(stamped(2, "b"))
    return directory


def test_logs_are_lines_after_their_nodes_number(world: World, capsys: Capture) -> None:
    with_logs(world, State.running)

    assert Said(capsys, "logs", "a").out == "0: a\n1: b\n0: [rank0]: c\n"
    assert (
        Said(capsys, "logs", "a", "-t", "--tail", "1").out
        == "0: 2025-11-24T12:00:03.000000Z [rank0]: c\n"
    )
    assert Said(capsys, "logs", "a", "--node", "1").out == "b\n"
    assert Said(capsys, "logs", "a", "--rank", "0").out == "[rank0]: c\n"
    assert (
        Said(capsys, "logs", "a", "--since", "2025-11-24T12:00:02Z").out == "1: b\n0: [rank0]: c\n"
    )


def test_logs_as_json_are_an_object_a_line(world: World, capsys: Capture) -> None:
    with_logs(world, State.running)

    said = Said(capsys, "logs", "a", "--json").out

    assert json.loads(said.splitlines()[1]) == {
        "node": 1,
        "rank": None,
        "time": "2025-11-24T12:00:02.000000Z",
        "text": "b",
    }


def test_following_tells_how_the_run_stands_and_how_it_ended(world: World, capsys: Capture) -> None:
    with_logs(world, State.queued, State.running, State.succeeded)

    said = Said(capsys, "logs", "-f", "a")

    assert said.code == 0
    assert said.out == "0: a\n1: b\n0: [rank0]: c\n"
    assert "slurm://one/a: queued (Priority)" in said.err and said.err.endswith(
        "slurm://one/a: succeeded\n"
    )


def test_following_begins_with_the_newest_submission(world: World, capsys: Capture) -> None:
    with_logs(world, State.succeeded, submitted_at=NOON + 3.2)

    assert Said(capsys, "logs", "a").out == "0: a\n1: b\n0: [rank0]: c\n"
    assert Said(capsys, "logs", "-f", "a").out == "0: [rank0]: c\n"
    assert (
        Said(capsys, "logs", "-f", "a", "--since", "2025-11-24T12:00:02Z").out
        == "1: b\n0: [rank0]: c\n"
    )


def test_a_run_without_lines_says_so(world: World, capsys: Capture) -> None:
    world.add("one").add("a", State.queued)

    said = Said(capsys, "logs", "a")

    assert said.code == 0 and said.out == ""
    assert says(said.err, "slurm://one/a: ... queued")


def test_ctrl_c_ends_the_following_only(
    world: World, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = world.add("one")
    launcher.add("a", State.running)

    def logs(run: str, wanted: LogSelection) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launcher, "logs", logs)

    said = Said(capsys, "logs", "-f", "a")

    assert said.code == 130 and "slurm://one/a" in said.err
    assert launcher.status("a").state is State.running


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("90s", 910.0),
        ("1.5m", 910.0),
        ("10min", 400.0),
        ("0.25h", 100.0),
        ("1970-01-01T00:01:00Z", 60.0),
        ("1970-01-01 01:01:00+01:00", 60.0),
    ],
)
def test_since_is_an_age_or_a_time(text: str, moment: float) -> None:
    assert parse_since(text, 1000.0) == moment


@pytest.mark.parametrize("text", ["yesterday", "10", "5 m", "2026-13-01T00:00:00Z", "-3h"])
def test_since_refuses_what_is_no_time(text: str) -> None:
    with pytest.raises(UserError, match=f"--since {re.escape(text)}: "):
        parse_since(text, 1000.0)


def write_events(directory: Path, *names: str, **fields: object) -> None:
    with (directory / "events.jsonl").open("a") as file:
        for number, name in enumerate(names):
            now = f"2026-01-31T12:00:{number:02}.000000Z"
            file.write(
                encode({"time": now, "event": name, "rank": 0, "total_steps": 10, **fields}) + "\n"
            )


def write_steps(directory: Path, steps: int) -> None:
    with (directory / "metrics.jsonl").open("a") as file:
        for step in range(1, steps + 1):
            record = {
                "time": f"2026-01-31T12:01:{step:02}.000000Z",
                "step": step,
                "loss": 3.5 - step / 10,
            }
            record |= {
                "step_seconds": 1.0,
                "tokens": 100,
                "tokens_per_second_per_gpu": 50.0,
                "num_gpus": 2,
            }
            file.write(
                encode({**record, "tflops_per_gpu": 1.0, "round": 0, "window_steps": 1}) + "\n"
            )


def test_status_tells_how_far_a_run_is(world: World, capsys: Capture) -> None:
    directory = world.add("one").add("a", State.running)
    write_events(directory, "run_start", "round_start", "order")
    write_steps(directory, 4)

    said = Said(capsys, "status", "a").out
    status = json.loads(Said(capsys, "status", "a", "--json").out)["progress"]

    assert "  progress       step 4 of 10 | loss 3.1" in said
    assert (status["step"], status["total_steps"], status["loss"]) == (4, 10, 3.1)


def test_watch_shows_a_runs_own_files_to_their_end(world: World, capsys: Capture) -> None:
    directory = world.add("one").add("a", State.running, State.running, State.succeeded)
    write_events(directory, "run_start", "round_start", "order")
    write_steps(directory, 10)
    write_events(directory, "end", status="completed")

    said = Said(capsys, "watch", "a", "--interval", "0.05")

    assert said.code == 0
    assert "a: completed, step 10 of 10" in said.out


def test_watch_believes_the_scheduler_that_a_run_is_over(world: World, capsys: Capture) -> None:
    directory = world.add("one").add("a", State.running, State.running, State.failed)
    write_events(directory, "run_start", "round_start", "order")
    write_steps(directory, 3)

    said = Said(capsys, "watch", "a", "--interval", "0.05")

    assert said.code == 1
    assert "a: failed, step 3 of 10" in said.out


def test_watch_waits_for_a_queued_run_and_leaves_one_that_never_spoke(
    world: World, capsys: Capture
) -> None:
    world.add("one").add("a", State.queued, State.queued, State.cancelled)

    said = Said(capsys, "watch", "a")

    assert said.code == 2
    assert said.err.count("waiting") == 1
    assert says(said.err, "cancelled ... nothing to watch")


def test_watch_measures_the_log_of_a_workload(world: World, capsys: Capture) -> None:
    directory = world.add("one").add("a", State.running, State.running, State.succeeded)
    (directory / "launch/run.yaml").write_text("name: a\nworkload: {command: [train]}\n")
    lines = (
        f"[titan] 2025-11-24 12:00:{step:02},000 - root - INFO - step: {step}  loss:"
        f" {4 - step / 10:.4f}  memory: 10.00GiB(12.00%)  tps: 1,000  tflops: 50.00  mfu: 5.00%"
        for step in range(1, 11)
    )
    log = b"".join(stamped(second, line) for second, line in enumerate(lines))
    (directory / "launch/node-0.log").write_bytes(log)

    said = Said(capsys, "watch", "a", "--interval", "0.05")

    assert said.code == 0, said.err
    assert "torchtitan" in said.out and "4 GPUs" in said.out


def test_a_mirror_takes_whole_lines_only(world: World, tmp_path: Path) -> None:
    from drillyard.watch.remote_run import RunMirror

    launcher = world.add("one")
    directory = launcher.add("a", State.running)
    (directory / "events.jsonl").write_bytes(b"whole\ntor")
    (tmp_path / "mirror").mkdir()
    mirror = RunMirror(launcher, "a", tmp_path / "mirror")  # type: ignore[arg-type]

    mirror.copy()
    assert (tmp_path / "mirror/events.jsonl").read_bytes() == b"whole\n"
    (directory / "events.jsonl").write_bytes(b"whole\nmended\n")
    mirror.copy()

    assert (tmp_path / "mirror/events.jsonl").read_bytes() == b"whole\nmended\n"


def test_a_watch_that_is_left_ends_its_thread(world: World) -> None:
    from drillyard.watch.remote_run import mirror_run

    launcher = world.add("one")
    write_events(launcher.add("a", State.running), "run_start")

    with mirror_run(launcher, "a", None, 0.01) as followed:  # type: ignore[arg-type]
        followed.poll()
        assert followed.run.name == "a" and not followed.ended
    asked = len(launcher.asked)
    time.sleep(0.05)

    assert len(launcher.asked) <= asked + 1
