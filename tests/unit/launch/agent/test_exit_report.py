"""Who failed first, and what is read from what commands print."""

from __future__ import annotations

import json
from typing import Any

import pytest

from drillyard.launch.agent import exit_report

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


NODE_REPORT = {"node": 1, "host": "n1", "reason": "rank 9: exit code 7"}


def report(
    returncode: int, message: dict[str, Any] | None = None, printed: str = "", **known: Any
) -> dict[str, Any]:
    return exit_report.make_report(
        known.get("node", 0),
        "a",
        returncode,
        message or {},
        printed,
        known.get("asked", False),
        known.get("why"),
    )


def test_torchruns_root_cause_is_read() -> None:
    assert exit_report.torchrun_cause(TORCHRUN) == (5, 1)
    assert exit_report.torchrun_cause(TORCHRUN.replace("exitcode  : 1 ", "exitcode  : -9 ")) == (
        5,
        -9,
    )
    assert exit_report.torchrun_cause(
        TORCHRUN.split("Traceback (most recent call last):\n  File")[0]
    ) == (None, 1)
    assert exit_report.torchrun_cause("ValueError: no report\n") is None


def test_a_node_under_torchrun_is_reported_by_its_rank() -> None:
    message = report(1, printed=TORCHRUN)
    assert (message["rank"], message["status"], message["exit_code"]) == (5, 1, 1)
    assert message["reason"] == "rank 5: exit code 1; ValueError: bad batch"
    assert message["lines"][-1] == "[rank1]: ValueError: bad batch"


@pytest.mark.parametrize(("exitcode", "status"), [("85", 85), ("2", 2), ("-9", 137)])
def test_the_code_that_decides_is_the_ranks(exitcode: str, status: int) -> None:
    message = report(
        1, printed=TORCHRUN.replace("exitcode  : 1 (pid: 12)", f"exitcode  : {exitcode} (pid: 12)")
    )
    assert message["status"] == status


def test_a_commands_own_record_counts_more() -> None:
    own = {"rank": 3, "exit_code": 85, "reason": "stopped", "lines": ["saved"], "lost_peer": False}
    message = report(1, own, TORCHRUN)
    assert (message["rank"], message["status"], message["reason"], message["lines"]) == (
        3,
        85,
        "stopped",
        ["saved"],
    )


def test_an_end_with_0_has_no_cause() -> None:
    message = report(0, {"exit_code": 7}, "ValueError: caught and survived\n")
    assert (message["status"], message["lines"]) == (0, [])


def test_a_killed_command_names_its_signal() -> None:
    assert report(-9)["reason"] == "killed by SIGKILL (exit code 137)"
    assert (
        report(-9, printed="Estimate: it fits\n")["reason"] == "killed by SIGKILL (exit code 137)"
    )
    assert report(-9, why="not renewed")["reason"] == "not renewed"


def test_the_cause_is_the_first_that_does_not_speak_of_a_lost_peer() -> None:
    effect = report(1, printed="RuntimeError: [gloo] Connection closed by peer\n", node=0)
    cause = report(1, printed="ValueError: bad row\n", node=2)
    assert effect["lost_peer"] and not cause["lost_peer"]
    found = exit_report.first_cause([effect, cause])
    assert found is not None and found["node"] == 2
    alone = exit_report.first_cause([effect])
    assert alone is not None and alone["node"] == 0


def test_one_that_was_reported_to_stop_is_a_cause_only_with_a_code_of_its_own() -> None:
    effect = report(1, printed="RuntimeError: [gloo] Connection closed by peer\n", node=0)
    ended = report(-15, node=1, asked=True)
    own = report(3, printed="ValueError: bad row\n", node=2, asked=True)
    found = exit_report.first_cause([effect, ended, own])
    assert found is not None and found["node"] == 2
    assert exit_report.first_cause([report(0), report(-15, asked=True)]) is None


def test_a_node_that_reported_of_its_own_fault_is_the_cause_although_it_was_stopped_meanwhile() -> (
    None
):
    effect = {
        "rank": 0,
        "exit_code": 1,
        "reason": "rank 0: Connection reset by peer",
        "lost_peer": True,
    }
    fault = {"rank": 8, "exit_code": 137, "reason": "rank 8: killed by SIGKILL", "lost_peer": False}
    heard = [
        exit_report.make_report(0, "n0", 1, effect, "", False, None),
        exit_report.make_report(1, "n1", 137, fault, "", True, None),
        exit_report.make_report(2, "n2", -15, {}, "", True, None),
    ]
    found = exit_report.first_cause(heard)
    assert found is not None and (found["node"], found["rank"]) == (1, 8)
    # As an earlier version wrote it.
    old = [
        {"told" if key == "has_record" else key: value for key, value in each.items()}
        for each in heard
    ]
    assert exit_report.first_cause(old) == old[1]


@pytest.mark.parametrize("lines", [5, "text", {"a": 1}, None, []])
def test_a_record_with_odd_lines_is_no_mishap(lines: object) -> None:
    message = {"lines": lines, "reason": "x" * 10_000_000, "exit_code": 3}
    made = exit_report.make_report(0, "n0", 1, message, "ValueError: bad row\n", False, None)
    assert made["lines"] == ["ValueError: bad row"] and made["status"] == 3
    # The leader takes a line of more than 1 MiB for a lost node.
    assert len(json.dumps(made)) < 1 << 20


def test_the_node_is_named_where_there_are_several() -> None:
    assert exit_report.reason_with_node(NODE_REPORT, 1) == "rank 9: exit code 7"
    assert exit_report.reason_with_node(NODE_REPORT, 2) == "node 1 (n1): rank 9: exit code 7"


def test_only_an_end_that_is_no_failure_gives_the_others_time() -> None:
    assert [bool(exit_report.clean_exit_text(code)) for code in (0, 85, 1, 2, 143)] == [
        True,
        True,
        False,
        False,
        False,
    ]
