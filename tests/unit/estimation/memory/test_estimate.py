"""What is put together from a step's bytes: parts in GiB, what a GPU adds, the verdict and its
limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from drillyard.errors import UserError
from drillyard.estimation.memory import MemoryEstimate, memory_estimate, verdict_on
from drillyard.estimation.memory.estimate import GIB, MIB
from drillyard.estimation.memory.step_memory import StepMemory
from drillyard.estimation.quantity import Range, given
from drillyard.estimation.setup import Setup
from drillyard.modelspec import model_spec

LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
}


def setup(config: dict[str, Any] = LLAMA, **changes: Any) -> Setup:
    step: dict[str, Any] = {
        "precision": "bf16",
        "sequence_length": 64,
        "micro_batch_size": 2,
        "gradient_accumulation": 1,
        "activation_checkpointing": "none",
        "shard": 4,
        "replicate": 1,
        "gpus_per_node": 8,
        "kernel": "varlen",
        "compiled": False,
        "loss_chunk_tokens": 32,
        "torch_release": (2, 15),
    }
    return Setup(spec=model_spec(config), **{**step, **changes})


def bytes_of(estimate: MemoryEstimate) -> dict[str, tuple[int, int]]:
    """Low and high end of each part, in bytes."""
    return {
        part.low.name: (round(part.low.value * GIB), round(part.high.value * GIB))
        for part in estimate.parts
    }


@pytest.mark.parametrize(
    ("low", "high", "available", "verdict"),
    [
        (70, 80, 80, "fits"),
        (70, 80, 79.99, "may not fit"),
        (70, 80, 70, "may not fit"),
        (70, 80, 69.99, "does not fit"),
        (80, 80, 80, "fits"),
        (80, 80, 79, "does not fit"),
    ],
)
def test_a_verdict_is_by_both_ends_of_the_range(
    low: float, high: float, available: float, verdict: str
) -> None:
    assert verdict_on(Range(given(low), given(high)), available) == verdict


def test_parts_are_the_kinds_of_bytes_at_the_peak() -> None:
    at_peak = StepMemory(setup()).ledger.at_peak
    parts = bytes_of(memory_estimate(setup(device_type="cpu")))
    groups = {
        "parameters": (0, 1),
        "gradients": (3, 5),
        "optimizer state": (2,),
        "gathered weights": (4,),
        "communication buffers": (6, 7),
        "inputs and masks": (8,),
        "activations": (9,),
        "logits and loss": (10,),
        "temporaries": (11,),
    }
    assert parts == {
        name: (sum(at_peak[kind] for kind in kinds),) * 2 for name, kinds in groups.items()
    }
    assert sum(low for low, _ in parts.values()) == StepMemory(setup()).ledger.peak


@pytest.mark.parametrize(
    ("shard", "replicate", "buffers"),
    # Two neighbours, 4 MiB, 2 to 64 channels, and a communicator of all ranks, of those of a shard
    # and of the copies.
    [(1, 1, None), (2, 1, (2 * 16, 2 * 512)), (1, 2, (2 * 16, 2 * 512)), (4, 2, (3 * 16, 3 * 512))],
)
def test_nccl_has_buffers_for_each_group_of_ranks(
    shard: int, replicate: int, buffers: tuple[int, int] | None
) -> None:
    found = bytes_of(memory_estimate(setup(shard=shard, replicate=replicate))).get("NCCL buffers")
    assert found == (None if buffers is None else (buffers[0] * MIB, buffers[1] * MIB))


def test_what_a_gpu_adds() -> None:
    parts = bytes_of(memory_estimate(setup()))
    assert parts["CUDA context"] == (723 * MIB, 1343 * MIB)
    moving = StepMemory(setup()).ledger.at_peak
    assert parts["allocator fragmentation"] == (0, round(0.15 * sum(moving[4:8] + moving[9:])))


@pytest.mark.parametrize(
    ("kv_heads", "kernel", "changes", "workspace"),
    # 128 rows, 4 heads of 32: sums in fp32 with one more per head, and keys and values of each
    # query head.
    [
        (4, "varlen", {}, 128 * 4 * 33 * 4),
        (2, "varlen", {}, 128 * 4 * 33 * 4 + 128 * 4 * 64 * 2),
        (2, "sdpa", {}, 128 * 4 * 33 * 4 + 128 * 4 * 64 * 2),
        (2, "flex", {}, None),
        (2, "eager", {}, None),
        (2, "varlen", {"precision": "fp32"}, 128 * 4 * 33 * 4 + 128 * 4 * 64 * 4),
    ],
)
def test_backward_of_fused_attention_may_need_a_workspace(
    kv_heads: int, kernel: str, changes: dict[str, Any], workspace: int | None
) -> None:
    found = bytes_of(
        memory_estimate(setup({**LLAMA, "num_key_value_heads": kv_heads}, kernel=kernel, **changes))
    )
    assert found.get("fused attention") == (None if workspace is None else (0, workspace))


def test_compiling_and_the_other_half_of_the_products_are_ranges_of_their_own() -> None:
    """Each is the difference of two peaks, here below what eager blocks need."""
    eager = setup(activation_checkpointing="selective", device_type="cpu")
    compiled = replace(eager, compiled=True)
    peak = StepMemory(eager).ledger.peak
    other, fused = (
        StepMemory(eager, skips_first_product=True).ledger.peak,
        StepMemory(eager, fuses=True).ledger.peak,
    )
    assert max(other, fused) < peak
    parts = bytes_of(memory_estimate(compiled))
    assert parts["selective policy"] == (other - peak, 0)
    assert parts["compiled blocks"] == (fused - peak, 0)
    assert "compiled blocks" not in bytes_of(memory_estimate(eager))
    assert "selective policy" not in bytes_of(
        memory_estimate(replace(compiled, activation_checkpointing="full"))
    )


def test_linear_attention_is_refused_and_a_model_without_comparison_is_noted() -> None:
    linear = {
        **LLAMA,
        "model_type": "qwen3_next",
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 96,
    }
    with pytest.raises(UserError, match="qwen3_next"):
        memory_estimate(setup(linear))
    assert memory_estimate(setup()).notes == ()
    assert any(
        "stablelm" in note
        for note in memory_estimate(setup({**LLAMA, "model_type": "stablelm"})).notes
    )
