"""A mesh axis besides `replicate` and `shard`, whose peers hold equal weights, changes no bit of
training.

4 ranks with an axis of 2 peers are 2 data ranks: losses, gradient norms and the held-out loss equal
those of 2 ranks to the bit, with dropout too. A trainer that deals samples by world rank is caught.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.distributed.ranks import run_ranks
from tests.distributed.training_case import build, make_config, run_steps, write_documents

from drillyard.data.prepared_data import prepare
from drillyard.evaluation.held_out_loss import evaluate_loss
from drillyard.parallel.ranks import Ranks, start_ranks

GPT2 = {
    "architecture": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.1,
}
PEERS = {"tensor": 2}


class DealtByWorldRank(Ranks):
    """The planted fault: samples are shared out by world rank."""

    @property
    def data_rank(self) -> int:
        return self.rank

    @property
    def num_data_ranks(self) -> int:
        return self.world_size


def trained(
    directory: str, other_axes: dict[str, int], replicate: int, fault: bool
) -> tuple[np.ndarray, float]:
    """Losses and norms of 6 steps, and the held-out loss after them."""
    config = make_config(
        Path(directory),
        model__config=GPT2,
        parallelism__replicate=replicate,
        training__global_batch_size=8,
        training__precision="fp32",
        data__held_out={"fraction": 0.2},
    )
    ranks = start_ranks(config.training, config.parallelism, other_axes=other_axes)
    if fault:
        ranks = DealtByWorldRank(
            **{field.name: getattr(ranks, field.name) for field in dataclasses.fields(ranks)}
        )
    trainer, model = build(config, ranks)
    rows = run_steps(trainer, 0, 6)
    sequences: Any = next(iter(prepare(config, only_open=True).held_out.values()))
    found = evaluate_loss(
        model.root,
        sequences,
        ranks,
        attention=model.attention,
        batch_size=2,
        limit=None,
        chunk_tokens=None,
    )
    return rows, found["loss"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("axes")
    write_documents(folder)
    return str(folder)


@pytest.mark.parametrize("replicate", [1, 2])
def test_peers_with_equal_weights_train_as_one_data_rank(directory: str, replicate: int) -> None:
    reference, held_out = run_ranks(trained, 2, directory, {}, replicate, False)[0]
    assert len(set(reference[:, 0])) == 6
    for rows, loss in run_ranks(trained, 4, directory, PEERS, replicate, False):
        assert rows.tobytes() == reference.tobytes()
        assert loss == held_out


def test_samples_dealt_by_world_rank_are_caught(directory: str) -> None:
    reference, _ = run_ranks(trained, 2, directory, {}, 1, False)[0]
    faulty, _ = run_ranks(trained, 4, directory, PEERS, 1, True)[0]
    assert not np.allclose(faulty[:, 0], reference[:, 0], rtol=1e-3)
