"""Random state of a rank: no two ranks and no two starts draw alike, and what was saved is put
back."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drillyard.training.resume import get_random_state, seed_rank, set_random_state


@pytest.fixture(autouse=True)
def _keep_random_state() -> Any:
    with torch.random.fork_rng(devices=[]):
        yield


def draws(seed: int, step: int, rank: int, world_size: int) -> tuple[float, ...]:
    ranks: Any = SimpleNamespace(data_rank=rank, num_data_ranks=world_size)
    seed_rank(seed, step, ranks)
    return tuple(torch.rand(4).tolist())


def test_every_rank_seed_step_and_number_of_ranks_draws_its_own_numbers() -> None:
    cases = [case for case in itertools.product((0, 1), (0, 6), range(4), (4, 8))]
    assert len({draws(*case) for case in cases}) == len(cases)
    assert draws(3, 5, 1, 2) == draws(3, 5, 1, 2)


def test_the_state_that_was_taken_is_put_back() -> None:
    cpu = torch.device("cpu")
    torch.manual_seed(11)
    state = get_random_state(cpu).clone()
    first = torch.rand(8)
    torch.rand(3)
    set_random_state(state, cpu)
    assert torch.equal(torch.rand(8), first)
