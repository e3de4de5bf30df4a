"""A refusal for lack of memory ends with the nearest settings that fit, among those that this
trainer has."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.models.tiny import CONFIGS, meta_model

from drillyard.config.model_files import ARCHITECTURES
from drillyard.estimation.alternatives import find_alternatives
from drillyard.estimation.setup import Setup
from drillyard.modelspec import all_families, model_spec, spec_from_counts
from drillyard.training.model_setup import describe_nearest_fit


def setup(**changes: Any) -> Setup:
    spec = model_spec(
        {
            "model_type": "llama",
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "intermediate_size": 11_008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        }
    )
    settings: dict[str, Any] = {
        "spec": spec,
        "precision": "bf16",
        "sequence_length": 4096,
        "micro_batch_size": 2,
        "gradient_accumulation": 1,
        "activation_checkpointing": "full",
        "shard": 2,
        "replicate": 1,
        "gpus_per_node": 2,
        "kernel": "sdpa",
        "compiled": False,
        "loss_chunk_tokens": 2048,
        "device_type": "cpu",
        **changes,
    }
    return Setup(**settings)


def test_it_names_the_nearest_with_its_price_and_no_adapters() -> None:
    # 6.7 B parameters x 16 bytes are 100 GiB: 50 per rank on two of them, 25 on four.
    message = describe_nearest_fit(setup(), 30.0)
    nearest = find_alternatives(setup(), 30.0)[0]
    assert message == f"\nwhat would fit: {nearest.in_words()}, at the price of {nearest.costs}"
    assert message.startswith("\nwhat would fit: 4 ranks, training.micro_batch_size: 1 (up to 2")
    assert "2 times the ranks" in message
    assert "GPU" not in message
    assert "GPUs" in describe_nearest_fit(setup(device_type="cuda"), 30.0)


def test_nothing_is_named_where_nothing_is_known_to_fit() -> None:
    assert describe_nearest_fit(setup(), 1e-3) == ""
    assert describe_nearest_fit(setup(spec=spec_from_counts(10**9)), 1.0) == ""


def test_every_architecture_that_trains_is_a_family_whose_memory_can_be_estimated() -> None:
    assert set(ARCHITECTURES) <= set(all_families())


@pytest.mark.parametrize("architecture", CONFIGS)
def test_the_model_that_was_built_is_the_one_that_is_estimated(architecture: str) -> None:
    model = meta_model(architecture)
    spec = model_spec(model.config.to_dict(), built=True)
    assert spec.total_parameters == sum(parameter.numel() for parameter in model.parameters())
