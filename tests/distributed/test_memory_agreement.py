"""Hosts of different memory lay a model out alike: what fits is judged by the least that any rank
has."""

from __future__ import annotations

from unittest import mock

import torch.distributed as dist
from tests.distributed.ranks import run_ranks

from drillyard.config.run import ParallelismConfig, TrainingConfig
from drillyard.parallel.ranks import start_ranks
from drillyard.training import model_setup


def least_seen_by(own_bytes: list[int]) -> int:
    training = TrainingConfig.model_validate(
        {"steps": 1, "optimizer": {"learning_rate": 1e-3}, "device": "cpu"}
    )
    ranks = start_ranks(training, ParallelismConfig())
    with mock.patch.object(
        model_setup, "memory_bytes_per_rank", lambda _: own_bytes[dist.get_rank()]
    ):
        return model_setup.least_memory_bytes(ranks)


def test_all_ranks_decide_by_the_least_memory_of_any():
    assert run_ranks(least_seen_by, 2, [80 * 2**30, 40 * 2**30]) == [40 * 2**30] * 2
