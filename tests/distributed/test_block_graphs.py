"""Graphs that torch.compile makes of blocks: how many, and how many operators are in one.

A count that falls is an improvement: write the new one here and in docs/measurements.md. One that
rises needs a reason.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch._functorch.config as functorch_config
from benchmarks.step_operators import LORA, BlockGraphs, Counts, block_graphs, run_blocks
from tests.unit.models.tiny import CONFIGS

from drillyard.config.kernel_rules import MEMORY_BUDGET
from drillyard.estimation.memory.fsdp import REWRITTEN_IN
from drillyard.estimation.setup import installed_torch

IS_OLDER = installed_torch() < REWRITTEN_IN
"""Then compiled graphs are grouped and split otherwise."""

FEW_TOKENS = 64
"""Where graphs are counted alone: their products are computed, in bf16 on a CPU."""
TWO_KINDS_OF_LAYERS = {"qwen2", "qwen3", "gemma2", "gemma3_text", "olmo3", "cohere2", "smollm3"}
"""With and without a window, or with and without rotary positions."""


@pytest.mark.parametrize("architecture", CONFIGS)
def test_each_kind_of_layer_has_one_graph_with_gradients_and_one_without(architecture: str) -> None:
    kinds = 2 if architecture in TWO_KINDS_OF_LAYERS else 1
    assert run_blocks("eager", architecture, batches=3, tokens=FEW_TOKENS) == 2 * kinds


@pytest.mark.parametrize("architecture", ["llama", "mixtral", "qwen3_moe"])
def test_the_first_block_beside_adapters_has_a_graph_of_its_own(architecture: str) -> None:
    """Nothing before it is trained, so its input gets no gradient."""
    few = {"tokens": FEW_TOKENS, "num_hidden_layers": 3}
    assert run_blocks("eager", architecture, LORA, batches=3, **few) == 3


def products(graphs: BlockGraphs) -> list[list[int]]:
    return [[each.products for each in ways] for ways in (graphs.forward, graphs.backward)]


def test_operators_of_a_block_that_is_trained_whole() -> None:
    graphs = block_graphs("llama")
    assert products(graphs) == [[7], [14]]
    if not IS_OLDER:
        assert graphs.forward == [Counts(7, 1, 6, 2, 45.0)]
        assert graphs.backward == [Counts(14, 1, 11, 2, 179.7)]


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "adapters"])
def test_within_the_memory_budget_no_product_is_computed_again(lora: Any) -> None:
    without = block_graphs("llama", lora)
    with functorch_config.patch(activation_memory_budget=MEMORY_BUDGET):
        limited = block_graphs("llama", lora)
    for kept, all_kept in zip(limited.kept_bytes, without.kept_bytes, strict=True):
        assert 0 < kept <= MEMORY_BUDGET * all_kept
    for own, other in zip(limited.backward, without.backward, strict=True):
        assert (own.products, own.attention) == (other.products, other.attention)


def test_operators_of_a_block_with_adapters_on_all_linear_layers() -> None:
    """The first block, which is second in backward, has no gradient of its input."""
    graphs = block_graphs("llama", LORA)
    assert products(graphs) == [[18, 18], [29, 25]]
    if not IS_OLDER:
        assert graphs.forward == 2 * [Counts(18, 1, 11, 4, 81.2)]
        assert graphs.backward == [Counts(29, 1, 21, 4, 184.2), Counts(25, 1, 17, 4, 150.1)]
