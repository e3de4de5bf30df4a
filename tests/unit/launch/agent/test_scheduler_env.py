"""Which node this is, as schedulers tell it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drillyard.launch.agent import scheduler_env

SPEC = {
    "cluster": {"workerpool0": ["chief-0:2222"], "workerpool1": ["worker-0:2222", "worker-1:2222"]},
    "task": {"type": "workerpool1", "index": 1},
}


def test_vertex_counts_workers_after_the_chief() -> None:
    environment = {"CLUSTER_SPEC": json.dumps(SPEC)}
    assert (scheduler_env.node_rank(environment), scheduler_env.leader_host(environment)) == (2, "chief-0")
    chief = {"CLUSTER_SPEC": json.dumps({**SPEC, "task": {"type": "workerpool0", "index": 0}})}
    assert scheduler_env.node_rank(chief) == 0


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"task": {"index": 0}}'])
def test_a_bad_cluster_spec_is_said(text: str) -> None:
    with pytest.raises(ValueError, match="CLUSTER_SPEC"):
        scheduler_env.node_rank({"CLUSTER_SPEC": text})


def test_slurm_tells_rank_and_first_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    environment = {"SLURM_NODEID": "3", "SLURM_JOB_NODELIST": "a3-[07-09,12],b1", "SLURM_RESTART_COUNT": "2"}
    assert (scheduler_env.node_rank(environment), scheduler_env.leader_host(environment)) == (3, "a3-07")
    assert (scheduler_env.restart_count(environment), scheduler_env.submission({"SLURM_JOB_ID": "17"})) == ("2", "17")


def test_without_a_scheduler_nothing_is_known() -> None:
    assert (
        scheduler_env.node_rank({}),
        scheduler_env.leader_host({}),
        scheduler_env.restart_count({}),
        scheduler_env.submission({}),
    ) == (
        None,
        None,
        "0",
        "",
    )


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("n[1-4]", "n1"), ("n[003,005]", "n003"), ("r[1-2]n[05,9],x", "r1n05")],
)
def test_the_first_of_a_hostlist(hosts: str, first: str) -> None:
    assert scheduler_env.first_of_hostlist(hosts) == first


@given(st.lists(st.from_regex(r"[a-z][a-z0-9-]{0,9}", fullmatch=True), min_size=1))
def test_the_first_of_plain_names(names: list[str]) -> None:
    assert scheduler_env.first_of_hostlist(",".join(names)) == names[0]
