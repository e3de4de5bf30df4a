"""Which node this is, as schedulers report it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drillyard.launch.agent import scheduler_env

SPEC = {
    "cluster": {"workerpool0": ["chief-0:2222"], "workerpool1": ["worker-0:2222", "worker-1:2222"]},
    "task": {"type": "workerpool1", "index": 1},
}


def test_vertex_counts_workers_after_the_chief() -> None:
    environment = {"CLUSTER_SPEC": json.dumps(SPEC)}
    assert scheduler_env.node_place(environment) == (2, "chief-0")
    chief = {"CLUSTER_SPEC": json.dumps({**SPEC, "task": {"type": "workerpool0", "index": 0}})}
    assert scheduler_env.node_place(chief) == (0, "chief-0")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"task": {"index": 0}}'])
def test_a_bad_cluster_spec_is_said(text: str) -> None:
    with pytest.raises(ValueError, match="CLUSTER_SPEC"):
        scheduler_env.node_place({"CLUSTER_SPEC": text})


def test_slurm_reports_the_rank() -> None:
    assert scheduler_env.node_place({"SLURM_NODEID": "3"}) == (3, None)


def test_without_a_scheduler_nothing_is_known() -> None:
    assert scheduler_env.node_place({}) == (None, None)


LOG = """\
srun: error: n0: task 0: Exited with exit code 1
=== 2026-11-22T13:33:46Z job 12, start 1: on n[1-16], led by n1
02: python3: can't open file '/shared/launch/agent': [Errno 2] No such file or directory
srun: error: n3: task 2: Exited with exit code 2
srun: error: n[5-7,9]: tasks 4-6,8: Killed
11: Traceback (most recent call last):
11:   File "/shared/launch/agent/cli.py", line 3
11: PermissionError: [Errno 13] Permission denied: '/shared/launch/secret'
srun: error: n12: task 11: Exited with exit code 1
srun: Job step aborted: Waiting up to 32 seconds for job step to finish.
srun: error: n10: task 9: Exited with exit c"""


def test_ended_agents_are_known_by_rank_with_their_last_words(tmp_path: Path) -> None:
    log = tmp_path / "slurm-12.log"
    log.write_text(LOG)
    ended = scheduler_env.Allocation("n1,n2", (str(log), LOG.index("=== 2026"))).ended()
    assert ended == {
        2: (
            "python3: can't open file '/shared/launch/agent': [Errno 2] No such file or directory "
            "(Exited with exit code 2)"
        ),
        **dict.fromkeys((4, 5, 6, 8), "Killed"),
        11: (
            "PermissionError: [Errno 13] Permission denied: '/shared/launch/secret' (Exited with"
            " exit code 1)"
        ),
    }


def test_without_slurm_nothing_is_known(tmp_path: Path) -> None:
    assert (scheduler_env.Allocation().hosts, scheduler_env.Allocation().ended()) == ({}, {})
    assert scheduler_env.Allocation("n1,n2", (str(tmp_path / "none.log"), 0)).ended() == {}
    assert scheduler_env.Allocation("n1,n2").hosts == {0: "n1", 1: "n2"}


@pytest.mark.parametrize(
    ("printed", "srun_code", "code", "unstarted"),
    [
        ("", 0, 0, []),
        ("", 85, 85, []),
        ("", 137, None, []),
        ("", -9, None, []),
        ("srun: error: n1: task 0: Exited with exit code 2\n", 137, 2, []),
        ("srun: error: n[1-3]: tasks 0-2: Exited with exit code 127\n", 127, 127, []),
        ("srun: error: n1: task 0: Killed\n", 137, None, []),
        # Of another node than the first: its own end decides.
        ("srun: error: n2: task 1: Exited with exit code 1\n", 1, 1, []),
        ("srun: error: Task launch for StepId=12.0 failed on node n2: no route\n", 1, None, ["n2"]),
    ],
)
def test_how_the_leaders_agent_ended_is_read_from_srun(
    printed: str, srun_code: int, code: int | None, unstarted: list[str]
) -> None:
    end = scheduler_env.leader_end(f"0: a line\n0: the last\n1: other\n{printed}", srun_code, "n1")
    assert (end.host, end.code, end.unstarted) == ("n1", code, unstarted)
    assert end.last_line == "the last"
