"""Nodes of a partition, from what sinfo prints."""

from __future__ import annotations

import pytest

from drillyard.launch.slurm.config import SlurmConfig
from drillyard.launch.slurm.nodes import (
    drain_command,
    parse_sinfo,
    short_of_gpus,
    undrain_command,
    usable_nodes,
)
from drillyard.launch.slurm.rules import gpus_of_gres

PRINTED = """\
some site prints a line here
n1|main*|idle|h100,rack-a|gpu:h100:8(S:0-1)|none
n2|main*|mix|h100,rack-b|gpu:h100:8(S:0,2)|none
n3|main*|idle|h100,rack-b|gpu:h100:7|none
n4|main*|drain|h100,rack-b|gpu:h100:8|gres/gpu count reported lower than configured (6 < 8)
n5|main*|idle~|h100,rack-b|gpu:h100:8|none
n6|main*|down*|(null)|(null)|no | answer
c1|cpu|idle|(null)|(null)|none
"""


def test_a_partition_s_nodes_are_read_and_other_lines_are_not() -> None:
    nodes = {each.name: each for each in parse_sinfo(PRINTED, None)}
    assert sorted(nodes) == ["n1", "n2", "n3", "n4", "n5", "n6"]
    assert {name: each.gpus for name, each in nodes.items()} == {
        **{"n1": 8, "n2": 8, "n3": 7, "n4": 8, "n5": 8, "n6": 0}
    }
    assert [name for name, each in nodes.items() if each.is_drained] == ["n4"]
    assert [each.name for each in parse_sinfo(PRINTED, "cpu")] == ["c1"]
    assert nodes["n6"].reason == "no | answer"


def test_nodes_that_offer_fewer_gpus_are_named_with_what_they_offer() -> None:
    nodes = parse_sinfo(PRINTED, "main")
    short = short_of_gpus(nodes, 8, wanted=2)
    assert sorted(short) == ["n3", "n4"]
    assert short["n3"].startswith("offers 7 of 8 ") and short["n4"].startswith("offers 6 of 8 ")
    # Another kind of node is named only where the others are too few.
    assert "n6" in short_of_gpus(nodes, 8, wanted=9)


def test_a_job_s_constraint_and_excluded_nodes_are_taken_into_account() -> None:
    nodes = parse_sinfo(PRINTED, "main")
    rack = usable_nodes(nodes, SlurmConfig(constraint="rack-b"), ["n5"])
    assert rack is not None and [each.name for each in rack] == ["n2", "n3", "n4"]
    assert usable_nodes(nodes, SlurmConfig(constraint="rack-a|rack-b"), []) is None


@pytest.mark.parametrize(
    ("gres", "count"), [("gpu:8(S:0,2)", 8), ("gpu:h100:8(S:0-1),nvme:1", 8), ("(null)", None)]
)
def test_sockets_in_a_gres_are_no_count(gres: str, count: int | None) -> None:
    assert gpus_of_gres(gres) == count


def test_a_drain_has_its_reason_and_its_undo() -> None:
    assert drain_command("n1", "a b")[2:] == ["NodeName=n1", "State=DRAIN", "Reason=a b"]
    assert undrain_command("n1")[2:] == ["NodeName=n1", "State=RESUME"]
