"""`drillyard checkpoint`: what it says and in which exit code, for people and for machines."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.facts import says
from tests.unit.checkpoint.made import damage_silently, make_checkpoint
from tests.unit.ended_command import Ended, run_command

from drillyard.supervise.run_lock import exclusive_run_lock, lock_owner
from drillyard.telemetry import append_event
from drillyard.training.checkpoint.inventory import list_checkpoints, step_directory_name
from drillyard.training.checkpoint.manifest import MANIFEST_NAME
from drillyard.training.checkpoint.verification import plan_prune


@pytest.fixture
def checkpoint(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: object) -> Ended:
        return run_command(capsys, "checkpoint", *arguments)

    return call


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 10 to 40, the best at 20, and an interrupted save at 50."""
    for step, loss in ((10, 2.0), (20, 1.25), (30, 1.5), (40, None)):
        make_checkpoint(tmp_path, step, held_out_loss=loss)
    (make_checkpoint(tmp_path, 50) / MANIFEST_NAME).unlink()
    return tmp_path


def steps(run: Path) -> list[int]:
    return [info.step for info in list_checkpoints(run)]


def path_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / step_directory_name(step)


def test_list_shows_every_checkpoint_and_marks_the_newest_and_the_best(
    checkpoint: Any, run: Path
) -> None:
    message = checkpoint("list", run)
    assert message.code == 0
    assert message.lines[0].split() == [
        "step",
        "size",
        "age",
        "ranks",
        "held-out",
        "loss",
        "status",
    ]
    rows = {line.split()[0]: line.split() for line in message.lines[1:6]}
    assert rows["20"][-3:] == ["1.2500", "complete", "best"]
    assert rows["40"][-2:] == ["complete", "newest"] and "2" in rows["40"]
    assert rows["50"][-1] == "incomplete"
    assert says(message.lines, "step-00000050: ... no manifest.json")
    assert says(message.lines[-1], "step 40 ... checkpoint.resume: auto")
    assert max(map(len, message.lines[:6])) <= 80 and "\x1b" not in message.out


def test_list_for_machines_has_the_same_facts(checkpoint: Any, run: Path) -> None:
    message = checkpoint("list", run / "checkpoints", "--json").json
    assert (message["version"], message["next_start"], message["refusal"]) == (1, 40, None)
    second = message["checkpoints"][1]
    assert (second["step"], second["status"], second["world_size"]) == (20, "complete", 2)
    assert (second["held_out_loss"], second["format_version"], second["marks"]) == (
        1.25,
        1,
        ["best"],
    )
    assert second["bytes"] == sum(file.stat().st_size for file in path_of(run, 20).iterdir())
    made = datetime(2026, 1, 31, 12, tzinfo=UTC).timestamp()
    assert abs(second["age_seconds"] - max(0, time.time() - made)) < 100


def test_list_says_how_the_next_start_will_end(checkpoint: Any, run: Path, tmp_path: Path) -> None:
    make_checkpoint(run, 60, format_version=2)
    message = checkpoint("list", run)
    assert message.code == 0 and says(
        message.lines[-1], "refused ... step-00000060: manifest.json: ... version 2"
    )
    damaged = tmp_path / "damaged"
    (make_checkpoint(damaged, 10) / ".metadata").unlink()
    message = checkpoint("list", damaged)
    assert says(message.lines, "step-00000010: .metadata ... missing")
    assert says(message.lines[-1], "refused: none")
    lost = tmp_path / "lost"
    (make_checkpoint(lost, 10) / MANIFEST_NAME).unlink()
    assert says(checkpoint("list", lost).lines[-1], "start begins ... step 0")
    append_event(lost, "checkpoint", step=10)
    assert says(checkpoint("list", lost).lines[-1], "refused: none")
    (tmp_path / "new" / "checkpoints").mkdir(parents=True)
    assert says(checkpoint("list", tmp_path / "new").lines[-1], "start begins ... step 0")


def test_verify_tells_every_file_and_passes_when_all_are_as_written(
    checkpoint: Any, run: Path
) -> None:
    (path_of(run, 10) / "notes.txt").write_text("mine")
    message = checkpoint("verify", run)
    assert message.code == 0
    assert message.lines[0].startswith("step-00000010  undamaged")
    assert "  ok          __0_0.distcp" in message.lines
    assert says(message.lines, "unexpected ... notes.txt")
    assert message.lines[-2].startswith("step-00000050  incomplete")


def test_verify_names_what_is_wrong_and_exits_with_1(checkpoint: Any, run: Path) -> None:
    damage_silently(path_of(run, 30))
    message = checkpoint("verify", run)
    assert message.code == 1 and "step-00000030  damaged" in message.out
    assert any(
        line.startswith("  wrong checksum  __1_0.distcp  xxh3_128 ") for line in message.lines
    )
    assert checkpoint("verify", run, "--step", 20).code == 0
    assert checkpoint("verify", run, "--step", 30).code == 1
    assert checkpoint("verify", path_of(run, 30)).code == 1
    message = checkpoint("verify", path_of(run, 30), "--json")
    (judged,) = message.json["checkpoints"]
    assert (message.code, message.json["undamaged"], judged["good"]) == (1, False, False)
    assert [file["verdict"] for file in judged["files"]] == ["ok", "ok", "ok", "wrong checksum"]


@pytest.mark.parametrize("name", [MANIFEST_NAME, ".metadata", "__0_0.distcp"])
def test_verify_finds_a_file_that_is_gone_or_cut(checkpoint: Any, run: Path, name: str) -> None:
    file = path_of(run, 30) / name
    file.write_bytes(file.read_bytes()[:-1])
    assert checkpoint("verify", run).code == 1
    file.unlink()
    assert checkpoint("verify", run, "--step", 30).code == 1


def test_verify_never_passes_without_having_seen_a_good_one(
    checkpoint: Any, run: Path, tmp_path: Path
) -> None:
    assert checkpoint("verify", run, "--step", 50).code == 1
    (tmp_path / "new" / "checkpoints").mkdir(parents=True)
    message = checkpoint("verify", tmp_path / "new")
    assert message.code == 1 and says(message.out, "no checkpoint")


def test_prune_keeps_the_newest_and_the_best(checkpoint: Any, run: Path) -> None:
    before = steps(run)
    message = checkpoint("prune", run, "--keep", 1, "--dry-run")
    assert message.code == 0 and steps(run) == before
    assert [line.split(":")[0] for line in message.lines if says(line, "would be deleted")] == [
        "step-00000010",
        "step-00000030",
    ]
    message = checkpoint("prune", run, "--keep", 1)
    assert message.code == 0 and steps(run) == [20, 40, 50]
    assert checkpoint("prune", run, "--keep", 1).lines[-1].startswith("Nothing")
    message = checkpoint("prune", run, "--keep", 1, "--left-overs", "--json")
    assert message.code == 0 and steps(run) == [20, 40]
    assert [item["step"] for item in message.json["removed"]] == [50]


def test_prune_goes_by_the_runs_own_setting(checkpoint: Any, run: Path) -> None:
    message = checkpoint("prune", run)
    assert message.code == 2 and says(message.err, "run.yaml: ... --keep")
    assert "give --keep N" in message.err
    (run / "run.yaml").write_text(
        "name: test\n"
        "model: {config: {architecture: llama}, init: random}\n"
        "data: {source: documents.jsonl, sequence_length: 64}\n"
        "training: {steps: 50, optimizer: {learning_rate: 1.0e-3}}\n"
        "checkpoint: {keep: 2, keep_best: false}\n"
    )
    assert checkpoint("prune", run).code == 0
    assert steps(run) == [30, 40, 50]


def test_prune_reads_what_it_keeps_and_tells_damage_in_its_exit_code(
    checkpoint: Any, run: Path
) -> None:
    damage_silently(path_of(run, 40))
    message = checkpoint("prune", run, "--keep", 1)
    assert message.code == 1 and steps(run) == [20, 30, 40, 50]
    assert says(message.lines[0], "step-00000040: damaged ... __1_0.distcp: ... checksum")
    for step in (20, 30):
        damage_silently(path_of(run, step))
    message = checkpoint("prune", run, "--keep", 1, "--left-overs")
    assert message.code == 1 and steps(run) == [20, 30, 40, 50]
    assert says(message.lines[-1], "no undamaged checkpoint")


def test_prune_is_refused_while_a_run_is_active_in_the_directory(
    checkpoint: Any, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drillyard.supervise.run_lock._WAIT_SECONDS", 0.0)
    with exclusive_run_lock(run):
        message = checkpoint("prune", run, "--keep", 1)
    assert message.code == 2 and says(message.err, "active")
    with exclusive_run_lock(run, does="prunes its checkpoints"):
        message = checkpoint("prune", run, "--keep", 1)
    assert message.code == 2 and says(message.err, "prunes its checkpoints")
    assert steps(run) == [10, 20, 30, 40, 50]
    assert checkpoint("prune", run, "--keep", 1).code == 0


def test_a_process_waiting_for_prune_is_reported_that_it_is_one(
    checkpoint: Any, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def plan(*arguments: Any, **settings: Any) -> Any:
        seen.append(lock_owner(run))
        return plan_prune(*arguments, **settings)

    monkeypatch.setattr("drillyard.training.checkpoint.verification.plan_prune", plan)
    assert checkpoint("prune", run, "--keep", 1).code == 0
    assert [(found.does, found.trains) for found in seen] == [("prunes its checkpoints", False)]


def test_what_cannot_be_deleted_is_an_error_that_names_it(
    checkpoint: Any, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("drillyard.training.checkpoint.inventory.remove_checkpoint", refuse)
    message = checkpoint("prune", run, "--keep", 2)
    assert message.code == 2 and says(message.err, "step-00000010: ... Permission denied")


@pytest.mark.parametrize("command", ["list", "verify", "prune"])
def test_a_path_without_checkpoints_is_the_users_mistake(
    checkpoint: Any, tmp_path: Path, command: str
) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        message = checkpoint(command, path)
        assert message.code == 2 and says(message.err, f"{path}: ... no checkpoints")


def test_on_a_terminal_verdicts_are_coloured_and_the_table_fits_80_columns(run: Path) -> None:
    environment = {
        **os.environ,
        "COLUMNS": "80",
        "TERM": "xterm",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    environment.pop("NO_COLOR", None)
    shown = {}
    for command in ("list", "verify"):
        master, slave = pty.openpty()
        arguments = [sys.executable, "-m", "drillyard", "checkpoint", command, str(run)]
        process = subprocess.Popen(
            arguments, stdout=slave, stderr=subprocess.DEVNULL, env=environment
        )
        os.close(slave)
        shown[command] = read_all(master)
        assert process.wait() == 0
    assert "\x1b[32mcomplete\x1b[0m" in shown["list"] and "\x1b[32mok\x1b[0m" in shown["verify"]
    table = re.sub(r"\x1b\[[0-9;]*m", "", shown["list"]).splitlines()[:6]
    assert max(len(line) for line in table) <= 80


def read_all(terminal: int) -> str:
    pieces = []
    try:
        while piece := os.read(terminal, 4096):
            pieces.append(piece)
    except OSError:  # the last writer has gone
        os.close(terminal)
    return b"".join(pieces).decode()


def test_none_of_it_needs_torch(run: Path) -> None:
    code = (
        "import sys, atexit; from drillyard.cli.main import main\n"
        "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))\n"
        f"main(['checkpoint', sys.argv[1], {str(run)!r}, *sys.argv[2:]])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for arguments in (["list"], ["verify"], ["prune", "--keep", "1"]):
        ended = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True,
            text=True,
            env=environment,
            check=True,
        )
        assert ended.stderr == "False\n"
