"""The memory estimate of published sizes, with each technique, against the storages that the
trainer's own step has: nothing is computed, so sizes are free."""

from __future__ import annotations

from typing import Any

import pytest
from tests.distributed.memory_case import Case, measure, measure_whole
from tests.distributed.test_memory_tracker import TOLERANCE, setup_of

from drillyard.estimation.memory.step_memory import StepMemory

LLAMA_3 = {
    "architecture": "llama",
    "intermediate_size": 8192,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
ONE = LLAMA_3 | {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32}
THREE = LLAMA_3 | {
    "hidden_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "head_dim": 128,
}
EIGHT = LLAMA_3 | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}
"""Of meta-llama/Llama-3.2-1B, -3B and Llama-3.1-8B, config.json."""
WHOLE: dict[str, Any] = {"shard": 1, "keeps_unsharded": True, "sequence_length": 4096}
RANK_16 = {"rank": 16, "target_modules": "all-linear"}
CASES = {
    "1B": (1.24, Case(ONE, **WHOLE | {"sequence_length": 2048, "micro_batch_size": 2})),
    "1B-recomputed": (1.24, Case(ONE, checkpointing="full", **WHOLE)),
    "3B-partly-recomputed": (3.21, Case(THREE, checkpointing="selective", **WHOLE)),
    "3B-on-eight-ranks": (3.21, Case(THREE, shard=8, sequence_length=4096, micro_batch_size=2)),
    "8B-adapters": (8.03, Case(EIGHT, lora=RANK_16, **WHOLE)),
    "8B-adapters-on-eight-ranks": (
        8.03,
        Case(EIGHT, lora=RANK_16, sequence_length=4096, keeps_frozen_whole=True),
    ),
    "8B-adapters-on-nf4-recomputed": (
        8.03,
        Case(EIGHT, lora=RANK_16, quantization="nf4", checkpointing="full", **WHOLE),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_published_sizes_take_what_is_estimated(name: str) -> None:
    billions, case = CASES[name]
    setup = setup_of(case)
    assert setup.spec.total_parameters / 1e9 == pytest.approx(billions, abs=0.01)
    counted = measure_whole(case) if setup.holds_whole else measure(case)
    estimated = StepMemory(setup)
    assert estimated.ledger.peak == pytest.approx(counted.peak, rel=TOLERANCE)
    assert estimated.moments["optimizer step"] == pytest.approx(
        counted.at_optimizer_step, rel=TOLERANCE
    )
