"""What the ranks of torchrun print reaches the node's log line by line, each with its rank."""

from __future__ import annotations

import operator
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drillyard.launch.agent import exec_command, output_pump
from drillyard.launch.agent.exit_report import last_lines, merged_rank_output
from drillyard.launch.agent.output_pump import RankPipes, Sink, open_log, prefixes_ranks
from drillyard.launch.logs.line_selection import RankFilter

TORCHRUN = """
E1122 torch/distributed/elastic/multiprocessing/api.py:988] failed (exitcode: 7) local_rank: 1 (pid: 9) of binary: p
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_03:00:00
  host      : n1
  rank      : 3 (local_rank: 1)
  exitcode  : 7 (pid: 9)
"""  # noqa: E501


def rank(pipes: Path | str, local: int, *command: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-u", exec_command.__file__, "--rank", *command]
    environment = {**os.environ, exec_command.RANK_PIPES: str(pipes), "LOCAL_RANK": str(local)}
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def log(tmp_path: Path) -> Sink:
    return open_log(tmp_path / "node-1.log")


def test_each_rank_prints_into_a_pipe_of_its_own(tmp_path: Path, log: Sink) -> None:
    reader, writer = os.pipe()
    passed_on = Sink(writer, "")
    pipes = RankPipes(tmp_path, 1, 2, log, passed_on)
    for local in (1, 0):
        code = (
            f"import sys; print('out {local}\\nand on'); print('no end', file=sys.stderr, end='');"
            f" sys.exit({local})"
        )
        ended = rank(pipes.directory, local, "python", "-c", code)
        assert (ended.returncode, ended.stdout, ended.stderr) == (local, "", "")
    assert pipes.finish(60.0) == [b"out 0\nand on\nno end", b"out 1\nand on\nno end"]
    log.close()
    passed_on.close()
    lines = (tmp_path / "node-1.log").read_bytes().splitlines()
    for local in (0, 1):
        marked = [
            b"[default%d]:%s" % (local, text) for text in (b"out %d" % local, b"and on", b"no end")
        ]
        finder = RankFilter(2 + local, node=1, per_node=2)
        assert [line[28:] for line in lines if finder(line)] == marked
    assert sorted(os.read(reader, 1 << 16).splitlines()) == sorted(line[28:] for line in lines)
    assert not pipes.directory.exists()


def test_pipes_of_an_agent_that_ends_late_are_its_own(tmp_path: Path, log: Sink) -> None:
    old = RankPipes(tmp_path, 1, 1, log, None)
    new = RankPipes(tmp_path, 1, 1, log, None)
    # Its ranks may still open their pipes.
    assert rank(old.directory, 0, "echo", "late").stderr == ""
    assert old.finish(60.0) == [b"late\n"] and not old.directory.exists()
    assert rank(new.directory, 0, "echo", "here").stderr == ""
    assert new.finish(60.0) == [b"here\n"] and list(tmp_path.glob("*.ranks*")) == []


def test_pipes_that_a_killed_agent_has_left_make_way_and_those_of_other_nodes_do_not(
    tmp_path: Path, log: Sink
) -> None:
    left, other = (tmp_path / name for name in ("node-1.ranks-abc", "node-11.ranks-abc"))
    for directory in (left, other):
        directory.mkdir()
        os.mkfifo(directory / "0")
    pipes = RankPipes(tmp_path, 1, 1, log, None)
    assert not left.exists() and other.exists() and pipes.directory.exists()
    pipes.finish(60.0)


def test_an_attempt_that_is_over_is_read_before_its_pipes_go(
    tmp_path: Path, log: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipes = RankPipes(tmp_path, 1, 1, log, None)
    finish, there = pipes._pumps[0].finish, []

    def seen(seconds: float) -> bytes:
        there.append(pipes.directory.exists())
        return finish(seconds)

    monkeypatch.setattr(pipes._pumps[0], "finish", seen)
    pipes.finish(60.0)
    assert there == [True] and not pipes.directory.exists()


@pytest.mark.parametrize("refused", ["os.mkfifo", "os.open"])
def test_where_the_launch_directory_takes_no_pipes_this_host_does(
    tmp_path: Path, log: Sink, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    allowed = operator.attrgetter(refused)(output_pump)

    def no_pipes_on_a_bucket(path: Path, *more: int, **options: Any) -> object:
        if Path(path).is_relative_to(tmp_path / "bucket") and Path(path).name == "0":
            raise PermissionError(1, "Operation not permitted")
        return allowed(path, *more, **options)

    (tmp_path / "bucket").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(f"drillyard.launch.agent.output_pump.{refused}", no_pipes_on_a_bucket)
        pipes = RankPipes(tmp_path / "bucket", 0, 1, log, None)
    rank(pipes.directory, 0, "echo", "here")
    assert pipes.finish(60.0) == [b"here\n"]
    assert not pipes.directory.exists() and list((tmp_path / "bucket").iterdir()) == []


@pytest.mark.parametrize("refused", ["os.mkfifo", "os.open"])
def test_where_no_place_takes_pipes_nothing_is_left(
    tmp_path: Path, log: Sink, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    allowed = operator.attrgetter(refused)(output_pump)

    def not_the_second_pipe(path: Path, *more: int, **options: Any) -> object:
        if Path(path).name == "1":
            raise PermissionError(1, "Operation not permitted")
        return allowed(path, *more, **options)

    for name in ("launch", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(output_pump.tempfile, "tempdir", str(tmp_path / "tmp"))
    with monkeypatch.context() as patch:
        patch.setattr(f"drillyard.launch.agent.output_pump.{refused}", not_the_second_pipe)
        with pytest.raises(PermissionError):
            RankPipes(tmp_path / "launch", 0, 2, log, None)
    assert not [*(tmp_path / "launch").iterdir(), *(tmp_path / "tmp").iterdir()]
    opened = {os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()}
    assert not [
        path for path in opened if path.startswith((f"{tmp_path}/launch", f"{tmp_path}/tmp"))
    ]


@pytest.mark.parametrize("gone", [True, False])
def test_without_a_reader_a_rank_prints_where_torchrun_does(tmp_path: Path, gone: bool) -> None:
    if not gone:
        os.mkfifo(tmp_path / "0")
    ended = rank(tmp_path, 0, "echo", "here")
    assert ended.stdout == "here\n" and "lines of local rank 0 are not prefixed" in ended.stderr
    assert rank("", 0, "echo", "here").stderr == ""


def test_a_program_that_is_not_there_is_named() -> None:
    ended = rank("", 0, "/nonexistent/program")
    assert ended.returncode == 127 and "/nonexistent/program" in ended.stderr


def test_the_rank_that_failed_first_has_the_last_word_before_torchrun() -> None:
    ranks = ["ValueError: mine\n", "ValueError: the cause", "ConnectionError: late\n"]
    words = merged_rank_output(TORCHRUN, ranks, first_rank=2)
    assert (
        words.index("mine")
        < words.index("late")
        < words.index("the cause")
        < words.index("Root Cause")
    )
    assert last_lines(words)[-1] == "ValueError: the cause"
    assert merged_rank_output("", ["a\n", "", "b"], 0) == "a\nb\n"


def test_a_command_tells_whether_it_marks_its_ranks() -> None:
    assert prefixes_ranks(
        ["torchrun", "{launch_directory}/agent/exec_command.py", "--rank", "python", "a.py"]
    )
    assert not prefixes_ranks(["torchrun", "a.py"])
