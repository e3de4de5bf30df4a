"""A node's share of a run: which ranks it has."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from drillyard.cli.main import app
from drillyard.errors import UserError
from drillyard.supervise.nodes import NodePlacement, rank_environments


def test_a_second_node_has_the_ranks_after_those_of_the_first() -> None:
    node = NodePlacement(count=3, rank=1, master_addr="n0", master_port=2000)
    ranks = rank_environments({"MASTER_PORT": "2000"}, 2, 0, node)
    assert [(rank["RANK"], rank["LOCAL_RANK"]) for rank in ranks] == [("2", "0"), ("3", "1")]
    assert {(rank["WORLD_SIZE"], rank["LOCAL_WORLD_SIZE"], rank["MASTER_ADDR"]) for rank in ranks} == {("6", "2", "n0")}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--nnodes", "2"], "--nnodes needs --master-addr and --master-port"),
        (["--nnodes", "2", "--node-rank", "2", "--master-addr", "a", "--master-port", "1"], "the last one is 1"),
        (["--node-rank", "1"], "belong to --nnodes N"),
        (["--master-port", "2000"], "belong to --nnodes N"),
        (
            ["--nnodes", "2", "--master-addr", "a", "--master-port", "1", "--max-restarts", "1"],
            "a node of several cannot start again alone",
        ),
    ],
)
def test_options_of_nodes_that_do_not_fit_together_are_refused(options: list[str], said: str) -> None:
    ended = CliRunner().invoke(app, ["train", "run.yaml", *options])
    assert isinstance(ended.exception, UserError) and said in str(ended.exception)
