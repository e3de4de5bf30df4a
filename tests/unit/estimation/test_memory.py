"""What a memory estimate is: parts that add up, exact state, and the order that any setting must
keep."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.facts import says

from drillyard.config.kernel_rules import MEMORY_BUDGET
from drillyard.errors import UserError
from drillyard.estimation.memory import MemoryEstimate, memory_estimate
from drillyard.estimation.memory.step_memory import StepMemory
from drillyard.estimation.quantity import Range
from drillyard.estimation.setup import LoraSetup, Setup
from drillyard.modelspec import model_spec, spec_from_counts

FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "olmo2",
    "phi3",
    "cohere",
    "granite",
)


def make_spec(family: str = "llama", **fields: Any):
    config = {
        "model_type": family,
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        **({"head_dim": 32} if family in ("qwen3", "gemma2", "gemma3_text") else {}),
    }
    return model_spec(config | fields)


def make_setup(**changes: Any) -> Setup:
    settled: dict[str, Any] = {
        "spec": make_spec(),
        "precision": "bf16",
        "sequence_length": 64,
        "micro_batch_size": 2,
        "gradient_accumulation": 1,
        "activation_checkpointing": "none",
        "shard": 4,
        "replicate": 1,
        "gpus_per_node": 8,
        "kernel": "sdpa",
        "compiled": False,
        "loss_chunk_tokens": 32,
    }
    return Setup(**(settled | changes))


@st.composite
def setups(draw, **fixed: Any) -> Setup:
    """Any step of a small model."""
    adapters = st.sampled_from(
        [None, LoraSetup(4, ("q_proj", "down_proj")), LoraSetup(8, "all-linear")]
    )
    family = draw(st.sampled_from(FAMILIES))
    if family == "phi3":
        adapters = st.sampled_from([None, LoraSetup(8, "all-linear")])
    drawn: dict[str, Any] = {
        "spec": make_spec(
            family,
            num_hidden_layers=draw(st.integers(4, 6)),
            vocab_size=draw(st.integers(64, 4096)),
        ),
        "precision": draw(st.sampled_from(["bf16", "fp32", "fp64"])),
        "sequence_length": draw(st.integers(8, 300)),
        "micro_batch_size": draw(st.integers(1, 4)),
        "gradient_accumulation": draw(st.integers(1, 4)),
        "activation_checkpointing": draw(
            st.sampled_from(["none", "memory-budget", "selective", "full"])
        ),
        "shard": draw(st.sampled_from([1, 2, 3, 8, 64])),
        "replicate": draw(st.sampled_from([1, 2])),
        "kernel": draw(st.sampled_from(["sdpa", "eager", "varlen", "flex"])),
        "compiled": draw(st.booleans()),
        "loss_chunk_tokens": draw(st.integers(1, 512)),
        "adapters": draw(adapters),
        "keeps_unsharded": draw(st.booleans()),
        "keeps_frozen_whole": draw(st.booleans()),
    }
    return make_setup(**(drawn | fixed))


def ends(part: Any) -> tuple[float, float]:
    return part.low.value, part.high.value


def named(estimate: MemoryEstimate, name: str) -> Range:
    return next(part for part in estimate.parts if part.low.name == name)


def peak(setup: Setup) -> int:
    return StepMemory(setup).ledger.peak


@given(setups(), st.sampled_from(["cuda", "cpu"]))
@settings(max_examples=60)
def test_parts_add_up_to_the_total_at_the_peak(setup, device_type):
    estimate = memory_estimate(replace(setup, device_type=device_type))
    lows, highs = zip(*(ends(part) for part in estimate.parts), strict=True)
    assert (sum(lows), sum(highs)) == pytest.approx(ends(estimate.total))
    assert 0 < sum(lows) <= sum(highs)
    assert max(estimate.moments, key=lambda moment: estimate.moments[moment]) == estimate.peak_at
    assert all(low <= high for low, high in zip(lows, highs, strict=True))


@given(setups())
@settings(max_examples=40)
def test_only_what_is_saved_is_a_part_below_zero(setup):
    parts = memory_estimate(setup).parts
    below = {part.low.name for part in parts if min(ends(part)) < 0}
    assert below <= {"compiled blocks", "selective policy"}


@given(setups())
@settings(max_examples=60)
def test_nothing_is_left_in_memory_that_a_step_has_made(setup):
    """After the last reduction there are state and inputs only: whatever was taken has been given
    back."""
    step = StepMemory(setup)
    state = memory_estimate(replace(setup, device_type="cpu")).state_bytes
    assert step.ledger.total - sum(step.ledger.live[4:]) == step.ledger.live[1] + sum(
        state[name] for name in ("parameters", "gradients", "optimizer")
    )
    trained = sum(unit.trained_shard for unit in step.units)
    # A rank that is alone keeps its copies in compute precision.
    copies = trained * step.compute if setup.holds_whole and step.compute != step.master else 0
    assert step.ledger.live[4] == copies
    assert not any(step.ledger.live[5:])


@given(setups())
@settings(max_examples=40)
def test_more_of_anything_never_takes_less(setup):
    assert peak(replace(setup, micro_batch_size=setup.micro_batch_size + 1)) >= peak(setup)
    assert peak(replace(setup, sequence_length=2 * setup.sequence_length)) >= peak(setup)
    assert peak(replace(setup, gradient_accumulation=setup.gradient_accumulation + 1)) >= peak(
        setup
    )


@given(setups(shard=2, activation_checkpointing="none"))
@settings(max_examples=40)
def test_more_shards_and_more_recomputation_never_take_more(setup):
    assert peak(replace(setup, shard=4)) <= peak(setup)
    assert peak(replace(setup, activation_checkpointing="full")) <= peak(setup)


@given(setups(adapters=None, shard=2))
@settings(max_examples=20)
def test_adapters_need_no_gradients_and_moments_of_what_is_frozen(setup):
    with_adapters = replace(setup, adapters=LoraSetup(4, "all-linear"))
    whole, low_rank = (
        memory_estimate(replace(s, device_type="cpu")).state_bytes for s in (setup, with_adapters)
    )
    assert (
        low_rank["optimizer"] + low_rank["gradients"]
        < (whole["optimizer"] + whole["gradients"]) / 2
    )


def test_state_of_a_model_that_divides_is_its_parameters_over_the_ranks():
    setup = make_setup(shard=8)
    state = memory_estimate(setup).state_bytes
    tensors = 3 + 4 * 9
    assert state["padding"] == 0
    assert state["parameters"] == state["gradients"] == 4 * setup.spec.total_parameters // 8
    assert state["optimizer"] == 8 * setup.spec.total_parameters // 8 + 4 * tensors


def test_padding_fills_up_the_last_rows():
    """3 ranks hold rows of 43 (of 128), 118 (of 352), 22 (of 64) and 171 (of 512)."""
    setup = make_setup(shard=3)
    layer = 2 * 43 * 128 + 2 * 22 * 128 + 2 * 118 * 128 + 43 * 352 + 2 * 43
    held = 4 * layer + 2 * 171 * 128 + 43
    state = memory_estimate(setup).state_bytes
    assert state["parameters"] == 4 * held
    assert state["padding"] == 4 * (3 * held - setup.spec.total_parameters) // 3


def test_a_layer_keeps_what_autograd_saves():
    """A Llama layer in bf16 under sdpa, tensor by tensor; more layers differ by one layer's
    activations at the loss."""
    setup = make_setup(shard=1)
    rows, hidden, ffn, heads = 128, 128, 352, 4
    norm = rows * (
        4 * hidden + 2 * hidden + 2 * hidden + 4
    )  # input in fp32, normalised, weighted, 1 / rms
    attention = (
        rows * (4 * 2 * hidden + 4 * heads) + 2 * 2 * 64 * 64
    )  # q, k, v, out; log-sum-exp; mask of 2 x 64 x 64
    mlp = rows * 4 * 2 * ffn  # gate, its silu, up, their product
    more = make_setup(shard=1, spec=make_spec(num_hidden_layers=5))
    parameters = 4 * (setup.spec.blocks[0].parameters)
    grown = StepMemory(more).moments["loss"] - StepMemory(setup).moments["loss"]
    assert grown - 3 * parameters - 9 * 4 == 2 * norm + attention + mlp


def test_a_hundred_layers_are_looked_at_once():
    step = StepMemory(make_setup(spec=make_spec(num_hidden_layers=100)))
    assert len(step._profiles) == 1


def test_checkpointing_modes_side_by_side():
    setup = make_setup(spec=make_spec(num_hidden_layers=12))
    modes = ("none", "memory-budget", "selective", "full")
    found = [
        memory_estimate(replace(setup, activation_checkpointing=mode, device_type="cpu"))
        for mode in modes
    ]
    none, limited, selective, full = (
        named(estimate, "activations").low.value for estimate in found
    )
    assert full < selective < limited < none
    assert limited == pytest.approx(MEMORY_BUDGET * none, rel=0.1)
    assert says(found[3].peak_at, "recomputed layer")


def test_what_only_a_gpu_has_is_a_range_with_its_source():
    estimate = memory_estimate(make_setup(kernel="varlen", compiled=True))
    names = [part.low.name for part in estimate.parts if part.low != part.high]
    assert names == [
        "compiled blocks",
        "CUDA context",
        "NCCL buffers",
        "allocator fragmentation",
        "fused attention",
    ]
    assert all(part.low.source and part.high.source for part in estimate.parts)
    on_cpu = memory_estimate(replace(make_setup(), device_type="cpu"))
    assert ends(on_cpu.total)[0] == ends(on_cpu.total)[1]


def test_a_model_known_by_its_size_only_is_refused():
    with pytest.raises(UserError, match=r"config\.json"):
        memory_estimate(make_setup(spec=spec_from_counts(1_000_000)))


def test_estimating_imports_no_torch():
    program = (
        "import sys\n"
        "from drillyard.estimation.memory import MemoryEstimate, memory_estimate\n"
        "from drillyard.estimation.setup import Setup\n"
        "from drillyard.modelspec import model_spec\n"
        "spec = model_spec({'model_type': 'llama', 'num_hidden_layers': 4})\n"
        "setup = Setup(spec, 'bf16', 4096, 1, 1, 'full', 8, 1, 8, 'varlen', True, 2048)\n"
        "memory_estimate(setup)\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'transformers')])\n"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (answer.stdout.strip(), answer.stderr) == ("[]", "")
