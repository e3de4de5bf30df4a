"""Graphs that torch.compile makes of blocks: how many, and how many operators are in one.

A count that falls is an improvement: write the new one here and in docs/measurements.md. One that
rises needs a reason.
"""

from __future__ import annotations

import pytest
from benchmarks.step_operators import LORA, Counts, block_graphs, run_blocks
from tests.unit.models.tiny import CONFIGS

TWO_KINDS_OF_LAYERS = {"qwen2", "qwen3", "gemma2", "gemma3_text", "olmo3", "cohere2", "smollm3"}
"""With and without a window, or with and without rotary positions."""


@pytest.mark.parametrize("architecture", CONFIGS)
def test_each_kind_of_layer_has_one_graph_with_gradients_and_one_without(architecture: str) -> None:
    kinds = 2 if architecture in TWO_KINDS_OF_LAYERS else 1
    assert run_blocks("eager", architecture, batches=3) == 2 * kinds


@pytest.mark.parametrize("architecture", ["llama", "mixtral", "qwen3_moe"])
def test_the_first_block_beside_adapters_has_a_graph_of_its_own(architecture: str) -> None:
    """Nothing before it is trained, so its input gets no gradient."""
    assert run_blocks("eager", architecture, LORA, batches=3, num_hidden_layers=3) == 3


def test_operators_of_a_block_that_is_trained_whole() -> None:
    graphs = block_graphs("llama")
    assert graphs.forward == graphs.inference == [Counts(7, 1, 6, 2)]
    assert graphs.backward == [Counts(14, 1, 11, 2)]


def test_operators_of_a_block_with_adapters_on_all_linear_layers() -> None:
    graphs = block_graphs("llama", LORA)
    assert [each.products for each in graphs.forward] == [21, 21]
    assert [each.products for each in graphs.backward] == [35, 29]
