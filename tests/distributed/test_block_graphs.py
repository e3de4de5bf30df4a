"""Graphs that torch.compile makes of blocks: how many, and how many operators are in one.

A count that falls is an improvement: write the new one here and in docs/measurements.md. One that
rises needs a reason.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch._functorch.config as functorch_config
from benchmarks.step_operators import LORA, WIDE, Counts, block_graphs, run_blocks
from tests.unit.models.tiny import CONFIGS

from drillyard.config.kernel_rules import MEMORY_BUDGET

TWO_KINDS_OF_LAYERS = {"qwen2", "qwen3", "gemma2", "gemma3_text", "olmo3", "cohere2", "smollm3"}
"""With and without a window, or with and without rotary positions."""


@pytest.mark.parametrize("architecture", CONFIGS)
def test_each_kind_of_layer_has_one_graph_with_gradients_and_one_without(architecture: str) -> None:
    kinds = 2 if architecture in TWO_KINDS_OF_LAYERS else 1
    assert run_blocks("eager", architecture, batches=3) == 2 * kinds


def test_the_first_block_beside_adapters_has_a_graph_of_its_own() -> None:
    """Nothing before it is trained, so its input gets no gradient."""
    assert run_blocks("eager", "llama", LORA, batches=3, num_hidden_layers=3) == 3


def test_operators_of_a_block_that_is_trained_whole() -> None:
    graphs = block_graphs("llama")
    assert graphs.forward == graphs.inference == [Counts(7, 1, 6, 2)]
    assert graphs.backward == [Counts(14, 1, 11, 2)]


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "adapters"])
def test_within_the_memory_budget_no_product_is_computed_again(lora: Any) -> None:
    without = block_graphs("llama", lora, **WIDE)
    with functorch_config.patch(activation_memory_budget=MEMORY_BUDGET):
        limited = block_graphs("llama", lora, **WIDE)
    for kept, all_kept in zip(limited.kept_bytes, without.kept_bytes, strict=True):
        assert 0 < kept <= MEMORY_BUDGET * all_kept
    for own, other in zip(limited.backward, without.backward, strict=True):
        assert (own.products, own.attention) == (other.products, other.attention)


def test_operators_of_a_block_with_adapters_on_all_linear_layers() -> None:
    graphs = block_graphs("llama", LORA)
    assert [each.products for each in graphs.forward] == [21, 21]
    assert [each.products for each in graphs.backward] == [35, 29]
