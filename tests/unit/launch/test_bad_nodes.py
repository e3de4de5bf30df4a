"""Nodes that a launcher is asked about: those with too few GPUs, and taking one out where that
cannot be done."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.unit.launch.requests import WORKLOAD, cluster, request

from drillyard.errors import ConfigError, UserError
from drillyard.launch.launcher import launcher_for
from drillyard.launch.run_status import Handle, RunStatus, State
from drillyard.launch.submission import plan_requests
from drillyard.programs import Programs, Result


class Answers(Programs):
    """Programs that print what a test says: the first answer whose words are in the command."""

    def __init__(self, **answers: str) -> None:
        self.answers, self.asked = answers, list[str]()

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout: float | None = None,
        directory: Path | None = None,
    ) -> Result:
        text = " ".join(argv)
        self.asked.append(text)
        found = next((out for words, out in self.answers.items() if words in text), "")
        return Result(tuple(argv), 0, found, "")


def config(platform: str) -> str:
    machine = None if platform == "local" else "a3-megagpu-8g"
    more: dict[str, Any] = {"processes_per_node": "1"} if platform == "local" else {}
    return cluster(platform, machine, 1 if platform == "local" else 2, **more)


@pytest.mark.parametrize(
    ("platform", "instead"),
    [("ssh", "ssh.hosts"), ("local", "until it is repaired"), ("vertex", "its support")],
)
def test_a_platform_that_cannot_keep_jobs_off_a_node_says_what_to_do(
    platform: str, instead: str
) -> None:
    launcher = launcher_for(request(config(platform), WORKLOAD).cluster)
    with pytest.raises(UserError, match=instead):
        launcher.drain("n1", "drillyard accept: memory: bad")


def test_slurm_drains_once_with_the_reason_and_says_what_undoes_it() -> None:
    asked = request(config("slurm"), WORKLOAD)
    programs = Answers(sinfo="n1|main*|idle|(null)|gpu:8|none\nn2|main*|drng|(null)|gpu:8|mine\n")
    launcher = launcher_for(asked.cluster, programs)
    assert launcher.drain("n1", "bad") == "scontrol update NodeName=n1 State=RESUME"
    assert "scontrol update NodeName=n1 State=DRAIN Reason=bad" in programs.asked
    # One that is out keeps its own reason.
    assert launcher.drain("n2", "bad") is None


def test_hosts_with_fewer_gpus_than_the_machine_are_named() -> None:
    asked = request(config("ssh"), WORKLOAD)
    programs = Answers(**{" n0 ": json.dumps({"gpus": 8}), " n1 ": json.dumps({"gpus": 7})})
    short = launcher_for(asked.cluster, programs).nodes_short_of_gpus(asked)
    assert list(short) == ["n1"] and short["n1"].startswith("offers 7 of 8 ")


def test_idle_nodes_of_slurm_leave_out_what_the_run_excludes() -> None:
    printed = "".join(f"n{number}|main*|idle|(null)|gpu:8|none\n" for number in range(4))
    programs = Answers(sinfo=printed, hostnames="n0\nn3\n")
    asked = request(config("slurm"), WORKLOAD, exclude=("n[0,3]",))
    assert launcher_for(asked.cluster, programs).idle_nodes(asked) == ["n1", "n2"]


def test_hosts_are_named_as_the_cluster_config_names_them() -> None:
    launcher = launcher_for(request(config("ssh"), WORKLOAD).cluster)
    status = RunStatus(Handle("ssh", "c", "r"), State.succeeded, 2, hosts=("host-a", "host-b"))
    assert launcher.node_names(status) == ("n0", "n1")


@pytest.mark.parametrize("platform", ["ssh", "vertex", "local"])
def test_nodes_are_excluded_only_where_the_launcher_can(platform: str) -> None:
    asked = request(config(platform), WORKLOAD, exclude=("n1",))
    with pytest.raises(ConfigError, match="slurm, kubernetes, gke"):
        plan_requests([asked])


@pytest.mark.parametrize("name", ["", "a b", "-x", "n;1", "n\n", "$(id)"])
def test_what_is_not_a_node_s_name_is_not_excluded(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a node's name"):
        plan_requests([request(config("slurm"), WORKLOAD, exclude=(name,))])
