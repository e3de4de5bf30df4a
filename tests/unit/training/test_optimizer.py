"""Which weights decay, over every architecture."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.models.tiny import CONFIGS, meta_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from drillyard.config.run import OptimizerConfig
from drillyard.training import optimizer as optimizers
from drillyard.training.optimizer import LocalShard, ShardedAdamW

CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in CONFIGS),
    ("cohere", {"use_qk_norm": True}),
    ("qwen2", {"tie_word_embeddings": False}),
]


def decaying(root: nn.Module, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the parameters that the optimizer of `root` decays."""
    shards: Any = [
        LocalShard(name, parameter, parameter.detach())
        for name, parameter in root.named_parameters()
    ]  # type: ignore[arg-type]
    monkeypatch.setattr(optimizers, "local_shards", lambda root: shards)
    ranks: Any = SimpleNamespace(device=torch.device("cpu"))
    groups = ShardedAdamW(
        root, OptimizerConfig(learning_rate=1e-3), None, ranks
    ).optimizer.param_groups
    names = {id(shard.local): shard.name for shard in shards}
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert sorted(names[id(tensor)] for group in groups for tensor in group["params"]) == sorted(
        names.values()
    )
    return {names[id(tensor)] for tensor in groups[0]["params"]}


@pytest.mark.parametrize(("architecture", "changes"), CASES)
def test_products_and_embeddings_decay_and_nothing_else(
    architecture: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = meta_model(architecture, **changes).to_empty(device="cpu")
    expected = set()
    for name, parameter in root.named_parameters():
        owner, _, leaf = name.rpartition(".")
        module = root.get_submodule(owner)
        is_product = isinstance(module, nn.Linear | nn.Embedding | Conv1D) and leaf == "weight"
        # Stacked experts and their router have parameters without a module of torch.
        is_mixture = parameter.ndim == 3 or type(module).__name__.endswith("Router")
        if is_product or is_mixture:
            expected.add(name)
    assert decaying(root, monkeypatch) == expected
    assert all("norm" not in name and "ln_" not in name for name in expected)


def test_a_stacked_bias_does_not_decay(monkeypatch: pytest.MonkeyPatch) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down_proj = nn.Parameter(torch.zeros(4, 8, 2))
            self.down_proj_bias = nn.Parameter(torch.zeros(4, 2))

    assert decaying(nn.ModuleDict({"experts": Experts()}), monkeypatch) == {"experts.down_proj"}


@pytest.mark.parametrize("others", [True, False])
def test_all_ranks_update_by_the_kernel_or_none(
    others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two roundings would let copies of a model drift apart."""
    monkeypatch.setattr(optimizers, "_kernel_fits", lambda *_: True)
    monkeypatch.setattr(optimizers, "gather", lambda own: [own, others])
    assert optimizers._fits_one_pass([], torch.device("cuda")) == others
    assert not optimizers._fits_one_pass([], torch.device("cpu"))
