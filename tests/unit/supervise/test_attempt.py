"""One attempt of real processes, and the environment of its ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from drillyard.supervise import attempt
from drillyard.supervise.attempt import rank_environments
from drillyard.supervise.rank_process import ONE_NODE, NodePlacement
from drillyard.supervise.run_lock import exclusive_run_lock
from drillyard.supervise.supervisor import supervise


def test_the_loop_never_sleeps_over_the_exit_of_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which rank ended first is known only while each exit wakes the loop, also after rank 0 has
    printed."""
    clock = {name: getattr(attempt.time, name) for name in ("monotonic", "time")}
    monkeypatch.setattr(attempt, "time", SimpleNamespace(**clock))
    code = (
        "import os, time; print('saved', flush=True); time.sleep(0.1); print('done', flush=True);"
        " os._exit(3)"
    )
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        exclusive_run_lock(tmp_path / "run") as lock,
    ):
        status = supervise(
            [sys.executable, "-I", "-S", "-c", code],
            num_ranks=1,
            run_directory=tmp_path / "run",
            lock=lock,
            max_restarts=0,
            environment={},
            console=Console(file=nowhere),
        )
    assert status == 3


def test_a_file_written_again_has_another_stamp(tmp_path: Path) -> None:
    """Only a summary of this attempt counts."""
    assert attempt.file_stamp(tmp_path / "summary.json") is None
    (tmp_path / "summary.json").write_text("{}")
    before = attempt.file_stamp(tmp_path / "summary.json")
    assert before is not None and attempt.file_stamp(tmp_path / "summary.json") == before
    (tmp_path / "new").write_text("{}")
    (tmp_path / "new").rename(tmp_path / "summary.json")
    assert attempt.file_stamp(tmp_path / "summary.json") != before


def test_a_second_node_has_the_ranks_after_those_of_the_first() -> None:
    node = NodePlacement(count=3, rank=1, master_addr="n0", master_port=2000)
    ranks = rank_environments({"MASTER_PORT": "2000"}, 2, 0, node)
    assert [(rank["RANK"], rank["LOCAL_RANK"]) for rank in ranks] == [("2", "0"), ("3", "1")]
    assert {
        (rank["WORLD_SIZE"], rank["LOCAL_WORLD_SIZE"], rank["MASTER_ADDR"]) for rank in ranks
    } == {("6", "2", "n0")}


def test_each_rank_knows_its_place() -> None:
    first, second = rank_environments({"MASTER_PORT": "20000", "HOME": "/home"}, 2, 3, ONE_NODE)
    assert (first["RANK"], second["RANK"]) == ("0", "1")
    assert (first["LOCAL_RANK"], second["LOCAL_RANK"]) == ("0", "1")
    shared = {name: value for name, value in first.items() if name not in ("RANK", "LOCAL_RANK")}
    assert shared == {
        name: value for name, value in second.items() if name not in ("RANK", "LOCAL_RANK")
    }
    assert shared["WORLD_SIZE"] == shared["LOCAL_WORLD_SIZE"] == "2"
    assert (
        shared["DRILLYARD_ROUND"] == "3"
        and shared["MASTER_PORT"] == "20000"
        and shared["HOME"] == "/home"
    )
