"""Who failed first, and what is read from what commands print."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from drillyard.launch.agent import records

# The report of torch.distributed.elastic.multiprocessing.errors (PyTorch), shortened.
TORCHRUN = """[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 3, in <module>
[rank1]:     raise ValueError("bad batch")
[rank1]: ValueError: bad batch
E1121 22:55:10.0 7 torch/distributed/elastic/multiprocessing/api.py:1] failed (exitcode: 1) local_rank: 1 (pid: 12) of binary: python
Traceback (most recent call last):
  File "torchrun", line 8, in <module>
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-21_22:55:10
  host      : b
  rank      : 6 (local_rank: 2)
  exitcode  : -15 (pid: 13)
  error_file: <N/A>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_22:55:09
  host      : b
  rank      : 5 (local_rank: 1)
  exitcode  : 1 (pid: 12)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""  # noqa: E501


def report(returncode: int, message: dict[str, Any] | None = None, printed: str = "", **known: Any) -> dict[str, Any]:
    return records.make_report(
        known.get("node", 0), "a", returncode, message or {}, printed, known.get("asked", False), known.get("why")
    )


def test_torchruns_root_cause_is_read() -> None:
    assert records.torchrun_cause(TORCHRUN) == (5, 1)
    assert records.torchrun_cause(TORCHRUN.replace("exitcode  : 1 ", "exitcode  : -9 ")) == (5, -9)
    assert records.torchrun_cause(TORCHRUN.split("Traceback (most recent call last):\n  File")[0]) == (None, 1)
    assert records.torchrun_cause("ValueError: no report\n") is None


def test_a_node_under_torchrun_is_reported_by_its_rank() -> None:
    message = report(1, printed=TORCHRUN)
    assert (message["rank"], message["status"], message["exit_code"]) == (5, 1, 1)
    assert message["reason"] == "rank 5: exit code 1; ValueError: bad batch"
    assert message["lines"][-1] == "[rank1]: ValueError: bad batch"


@pytest.mark.parametrize(("exitcode", "status"), [("85", 85), ("2", 2), ("-9", 137)])
def test_the_code_that_decides_is_the_ranks(exitcode: str, status: int) -> None:
    message = report(1, printed=TORCHRUN.replace("exitcode  : 1 (pid: 12)", f"exitcode  : {exitcode} (pid: 12)"))
    assert message["status"] == status


def test_a_commands_own_record_counts_more() -> None:
    own = {"rank": 3, "exit_code": 85, "reason": "stopped", "lines": ["saved"], "lost_peer": False}
    message = report(1, own, TORCHRUN)
    assert (message["rank"], message["status"], message["reason"], message["lines"]) == (3, 85, "stopped", ["saved"])


def test_an_end_with_0_has_no_cause() -> None:
    message = report(0, {"exit_code": 7}, "ValueError: caught and survived\n")
    assert (message["status"], message["lines"]) == (0, [])


def test_a_killed_command_names_its_signal() -> None:
    assert report(-9)["reason"] == "killed by SIGKILL (exit code 137)"
    assert report(-9, printed="Estimate: it fits\n")["reason"] == "killed by SIGKILL (exit code 137)"
    assert report(-9, why="not renewed")["reason"] == "not renewed"


def test_the_cause_is_the_first_that_does_not_speak_of_a_lost_peer() -> None:
    effect = report(1, printed="RuntimeError: [gloo] Connection closed by peer\n", node=0)
    cause = report(1, printed="ValueError: bad row\n", node=2)
    assert effect["lost_peer"] and not cause["lost_peer"]
    found = records.first_cause([effect, cause])
    assert found is not None and found["node"] == 2
    alone = records.first_cause([effect])
    assert alone is not None and alone["node"] == 0


def test_one_that_was_reported_to_stop_is_a_cause_only_with_a_code_of_its_own() -> None:
    effect = report(1, printed="RuntimeError: [gloo] Connection closed by peer\n", node=0)
    ended = report(-15, node=1, asked=True)
    own = report(3, printed="ValueError: bad row\n", node=2, asked=True)
    found = records.first_cause([effect, ended, own])
    assert found is not None and found["node"] == 2
    assert records.first_cause([report(0), report(-15, asked=True)]) is None


def test_a_node_that_reported_of_its_own_fault_is_the_cause_although_it_was_stopped_meanwhile() -> None:
    effect = {"rank": 0, "exit_code": 1, "reason": "rank 0: Connection reset by peer", "lost_peer": True}
    fault = {"rank": 8, "exit_code": 137, "reason": "rank 8: killed by SIGKILL", "lost_peer": False}
    heard = [
        records.make_report(0, "n0", 1, effect, "", False, None),
        records.make_report(1, "n1", 137, fault, "", True, None),
        records.make_report(2, "n2", -15, {}, "", True, None),
    ]
    found = records.first_cause(heard)
    assert found is not None and (found["node"], found["rank"]) == (1, 8)


def test_on_a_full_disk_a_state_is_cut_to_the_blocks_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    state = records.StateFile(tmp_path, {"state": "running", "reason": None, "since": 0, "hosts": ["n1", "n2"]})
    state.save()
    blocks = 512 * (tmp_path / "state.json").stat().st_blocks
    monkeypatch.setattr(records, "replace_file", full)
    cause = "exit code 2; error: cannot export: No space left on device. " + "x" * 2000
    state.enter("failed", cause, failure={"reason": cause, "rank": 3, "lines": ["y" * 2000] * 20}, exit_code=2)
    message = records.read_state(tmp_path)
    assert (tmp_path / "state.json").stat().st_size <= blocks
    assert (message["state"], message["exit_code"], message["failure"]["rank"]) == ("failed", 2, 3)
    assert message["reason"].startswith("exit code 2; error: cannot export: No space left on device.")


def test_a_state_is_replaced_as_a_whole_and_waits_for_a_disk(tmp_path: Path) -> None:
    state = records.StateFile(tmp_path / "launch", {"state": "starting", "since": 0})
    state.enter("running", round=1)
    assert records.read_state(tmp_path / "launch") == {}
    (tmp_path / "launch").mkdir()
    state.save()
    read = records.read_state(tmp_path / "launch")
    assert (read["state"], read["round"], read["reason"]) == ("running", 1, None) and read["since"] > 0
    since = read["since"]
    state.enter("running", "another reason")
    assert records.read_state(tmp_path / "launch")["since"] == since
    assert [path.name for path in (tmp_path / "launch").iterdir()] == ["state.json"]


def test_a_leader_that_was_superseded_writes_no_state(tmp_path: Path) -> None:
    over: list[int] = []
    state = records.StateFile(tmp_path, {"state": "running"}, lambda: bool(over))
    state.save()
    over.append(1)
    state.enter("failed")
    assert records.read_state(tmp_path)["state"] == "running"


def test_a_summary_says_completed_or_not(tmp_path: Path) -> None:
    assert not records.summary_completed(tmp_path)
    for text, expected in (('{"status": "completed"}', True), ('{"status": "failed"}', False), ("[", False)):
        (tmp_path / "summary.json").write_text(text)
        assert records.summary_completed(tmp_path) is expected


def test_a_newer_checkpoint_is_seen(tmp_path: Path) -> None:
    pattern = str(tmp_path / "*" / "manifest.json")
    assert records.newest_checkpoint(None) is None and records.newest_checkpoint(pattern) is None
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "manifest.json").write_text(json.dumps({}))
    first = records.newest_checkpoint(pattern)
    assert first is not None and first[1].endswith("step-1/manifest.json")
    (tmp_path / "step-2").mkdir()
    assert records.newest_checkpoint(pattern) == first
    (tmp_path / "step-2" / "manifest.json").write_text(json.dumps({}))
    assert records.newest_checkpoint(pattern) not in (None, first)


@pytest.mark.parametrize("lines", [5, "text", {"a": 1}, None, []])
def test_a_record_with_odd_lines_is_no_mishap(lines: object) -> None:
    message = {"lines": lines, "reason": "x" * 10_000_000, "exit_code": 3}
    made = records.make_report(0, "n0", 1, message, "ValueError: bad row\n", False, None)
    assert made["lines"] == ["ValueError: bad row"] and made["status"] == 3
    # The leader takes a line of more than 1 MiB for a lost node.
    assert len(json.dumps(made)) < 1 << 20


def test_an_unreadable_state_is_none_to_go_on_from(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"state": "run')
    assert records.last_state(tmp_path) == {}
    with pytest.raises(ValueError, match="Unterminated"):
        records.read_state(tmp_path)
