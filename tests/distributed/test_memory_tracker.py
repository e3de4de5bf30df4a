"""The estimate against torch's own memory tracker over the trainer's own step, on a fake group of 1
to 64 ranks.

State is equal to the byte, padding included. Activations with temporaries, and the peak, are within
5 % as asked for; what is asserted is 0.5 %, since a thing that is left out shows there first.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.distributed.memory_case import Case, measure, measure_whole, setup_of

from drillyard.estimation.memory import memory_estimate
from drillyard.estimation.memory.autograd import MemoryKind
from drillyard.estimation.memory.step_memory import StepMemory
from drillyard.models import loss
from drillyard.models.head_product import SummedGradient

TOLERANCE = 0.005
MOVING = (
    MemoryKind.BUFFERS,
    MemoryKind.INPUTS,
    MemoryKind.ACTIVATIONS,
    MemoryKind.LOSS,
    MemoryKind.TEMPORARIES,
    MemoryKind.WHOLE_GRADIENTS,
)


def llama(**changes: Any) -> dict[str, Any]:
    return {
        "architecture": "llama",
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
    } | changes


def gpt2(**changes: Any) -> dict[str, Any]:
    return {
        "architecture": "gpt2",
        "n_embd": 256,
        "n_layer": 2,
        "n_head": 8,
        "vocab_size": 1000,
        "n_positions": 1024,
        "resid_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "tie_word_embeddings": True,
    } | changes


TIED = {"tie_word_embeddings": True}
LORA = {"rank": 8, "target_modules": ["q_proj", "v_proj"]}
ON_ALL = {"rank": 4, "target_modules": "all-linear"}
FROZEN: dict[str, Any] = {"keeps_frozen_whole": True}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SMALL_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
WIDE_VOCABULARY = {"vocab_size": 12000, "hidden_size": 128, "intermediate_size": 256}

CASES: dict[str, Case] = {
    # Where logits, gradients of the head and all saved activations meet.
    "llama": Case(llama()),
    "one-rank": Case(llama(), shard=1),
    "ranks-that-do-not-divide": Case(
        llama(hidden_size=264, num_attention_heads=6), shard=7, micro_batch_size=3
    ),
    "64-ranks": Case(llama(), shard=64, micro_batch_size=2),
    "replicas": Case(llama(), shard=4, replicate=2),
    "weights-kept": Case(llama(), keeps_unsharded=True),
    "gradients-kept": Case(llama(), keeps_unsharded=True, accumulation=2),
    "gradients-kept-tied": Case(llama(**TIED), keeps_unsharded=True, accumulation=2),
    "accumulation": Case(llama(), accumulation=3),
    "accumulation-and-replicas": Case(llama(), shard=4, replicate=2, accumulation=4),
    "wide-vocabulary-with-checkpoints": Case(llama(**WIDE_VOCABULARY), checkpointing="full"),
    "small-chunks": Case(llama(), chunk=32),
    "biases-and-tied": Case(llama(architecture="qwen2", **TIED)),
    "wide-heads-with-norms": Case(
        llama(architecture="qwen3", head_dim=64), sequence_length=256, micro_batch_size=2
    ),
    "four-norms-two-windows": Case(
        llama(architecture="gemma3_text", head_dim=32, sliding_window=128, **TIED)
    ),
    "parallel-branches": Case(llama(architecture="cohere", **TIED)),
    "norms-over-all-heads": Case(llama(architecture="olmo2")),
    "fused-projections": Case(llama(architecture="phi3")),
    # Where a layer's backward is the most, without and with the layer made again.
    "fp32": Case(llama(), precision="fp32"),
    "gpt2": Case(gpt2()),
    "eager": Case(llama(), attention="eager"),
    "soft-caps": Case(
        llama(architecture="gemma2", head_dim=32, **TIED), attention="eager", sequence_length=256
    ),
    "adapters": Case(llama(), lora=LORA),
    "adapters-on-attention": Case(
        llama(), lora={"rank": 8, "target_modules": "attention"}, shard=2
    ),
    "adapters-with-magnitudes": Case(llama(), lora=LORA | {"variant": "dora"}),
    "checkpoints-adapters-with-magnitudes": Case(
        llama(architecture="qwen2"),
        lora={"rank": 4, "variant": "dora", "target_modules": "all-linear"},
        checkpointing="full",
    ),
    "adapters-on-experts": Case(llama(architecture="mixtral", **EXPERTS), lora=ON_ALL),
    "checkpoints-adapters-on-experts": Case(
        llama(architecture="qwen3_moe", **SMALL_EXPERTS), lora=ON_ALL, checkpointing="full", shard=2
    ),
    "adapters-on-whole": Case(llama(), lora=LORA, **FROZEN),
    "adapters-on-whole-replicas": Case(
        llama(**TIED), lora=ON_ALL, accumulation=3, shard=4, replicate=2, **FROZEN
    ),
    "adapters-on-whole-kept": Case(llama(), lora=ON_ALL, keeps_unsharded=True, accumulation=2),
    "adapters-on-whole-kept-replicas": Case(
        llama(), lora=LORA, keeps_unsharded=True, shard=2, replicate=2
    ),
    "adapters-on-whole-fp32": Case(llama(**TIED), lora=LORA, precision="fp32", shard=2, **FROZEN),
    "adapters-with-magnitudes-on-whole": Case(
        llama(), lora=ON_ALL | {"variant": "dora"}, shard=3, **FROZEN
    ),
    "adapters-on-whole-experts": Case(
        llama(architecture="mixtral", **EXPERTS), lora=ON_ALL, shard=2, **FROZEN
    ),
    "checkpoints-adapters-on-whole": Case(
        llama(), checkpointing="full", lora=LORA, micro_batch_size=2, shard=2, **FROZEN
    ),
    "nf4-on-whole": Case(llama(), lora=ON_ALL, quantization="nf4", **FROZEN),
    "checkpoints-nf4-on-whole": Case(
        llama(), lora=ON_ALL, quantization="nf4", checkpointing="full", micro_batch_size=2, **FROZEN
    ),
    "adapters-on-whole-on-one-rank": Case(llama(), lora=ON_ALL, shard=1, **FROZEN),
    "nf4": Case(llama(), lora=LORA, quantization="nf4"),
    "nf4-on-one-rank-with-biases": Case(
        llama(architecture="qwen2"), lora=ON_ALL, quantization="nf4", shard=1
    ),
    "nf4-fp32": Case(
        llama(), lora=ON_ALL, quantization="nf4", precision="fp32", shard=3, sequence_length=64
    ),
    "nf4-with-magnitudes": Case(llama(), lora=LORA | {"variant": "dora"}, quantization="nf4"),
    "checkpoints-nf4": Case(
        llama(), lora=ON_ALL, quantization="nf4", checkpointing="full", micro_batch_size=2
    ),
    "selective-checkpoints-nf4": Case(
        llama(num_hidden_layers=4), lora=ON_ALL, quantization="nf4", checkpointing="selective"
    ),
    "nf4-on-fused-projections": Case(llama(architecture="phi3"), lora=ON_ALL, quantization="nf4"),
    "experts": Case(llama(architecture="mixtral", num_local_experts=4, num_experts_per_tok=2)),
    "small-experts": Case(
        llama(
            architecture="qwen3_moe",
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=256,
        )
    ),
    "checkpoints": Case(llama(), checkpointing="full", micro_batch_size=4),
    "selective-checkpoints": Case(llama(num_hidden_layers=4), checkpointing="selective"),
    "selective-checkpoints-eager": Case(llama(), checkpointing="selective", attention="eager"),
    "checkpoints-fp32": Case(llama(), checkpointing="full", precision="fp32", micro_batch_size=2),
    "checkpoints-eager": Case(llama(), checkpointing="full", attention="eager", micro_batch_size=2),
    "checkpoints-adapters": Case(llama(), checkpointing="full", lora=LORA, micro_batch_size=2),
    "checkpoints-gpt2": Case(gpt2(), checkpointing="full", micro_batch_size=2),
    "checkpoints-granite": Case(
        llama(architecture="granite"), checkpointing="full", shard=3, micro_batch_size=2
    ),
    # Where state is the most, and the last reduction before the optimizer step its peak.
    "state-on-one-rank": Case(llama(vocab_size=8000), shard=1, sequence_length=16),
    "state-on-two-ranks": Case(
        llama(vocab_size=8000), shard=2, sequence_length=8, precision="fp32", chunk=8
    ),
    "state-with-biases": Case(
        llama(architecture="qwen2", vocab_size=6000), shard=1, sequence_length=16, chunk=16
    ),
    "state-with-checkpoints": Case(
        llama(vocab_size=6000), shard=1, sequence_length=16, checkpointing="full", chunk=16
    ),
    "state-on-replicas": Case(llama(vocab_size=8000), shard=1, replicate=2, sequence_length=16),
}


def drawn(seed: int) -> Case:
    """A case of any kind, the same for a seed everywhere."""
    draw = random.Random(seed)
    heads = draw.choice([2, 4, 6, 8])
    architecture = draw.choice(
        ["llama", "mistral", "qwen2", "qwen3", "olmo2", "granite", "smollm3", "gemma3_text"]
    )
    head_dim = draw.choice([16, 32, 48])
    model = llama(
        architecture=architecture,
        hidden_size=heads * head_dim,
        num_attention_heads=heads,
        num_key_value_heads=draw.choice([k for k in (1, 2, heads) if heads % k == 0]),
        intermediate_size=draw.randrange(96, 700),
        num_hidden_layers=draw.choice([1, 2, 3]),
        vocab_size=draw.randrange(300, 4000),
        tie_word_embeddings=draw.random() < 0.5,
    )
    if architecture in ("qwen3", "gemma3_text"):
        model["head_dim"] = head_dim
    replicate = draw.choice([1, 1, 2])
    return Case(
        model,
        sequence_length=draw.randrange(32, 500),
        micro_batch_size=draw.choice([1, 2, 3]),
        accumulation=draw.choice([1, 1, 2, 3]),
        precision=draw.choice(["bf16", "fp32"]),
        checkpointing=draw.choice(["none", "full"]),
        shard=draw.choice([1, 2, 3, 8, 12, 32]),
        replicate=replicate,
        keeps_unsharded=draw.random() < 0.3,
        attention=draw.choice(["sdpa", "sdpa", "eager"]),
        clipping=draw.choice([None, 1.0]),
        lora=draw.choice(
            [None, None, {"rank": draw.choice([2, 16]), "target_modules": "all-linear"}]
        ),
    )


ALONE = {"shard": 1, "keeps_unsharded": True}
WHOLE_CASES = {
    "whole": Case(llama(), **ALONE),
    "whole-tied": Case(llama(**TIED), **ALONE),
    "whole-micro-batches": Case(llama(**TIED), accumulation=3, **ALONE),
    "whole-fp32": Case(llama(), precision="fp32", accumulation=2, **ALONE),
    "whole-with-checkpoints": Case(llama(), checkpointing="full", **ALONE),
    "whole-gpt2": Case(gpt2(), **ALONE),
    "whole-adapters": Case(llama(), lora=ON_ALL, **ALONE),
    "whole-nf4": Case(llama(), lora=ON_ALL, quantization="nf4", **ALONE),
    "whole-state": Case(llama(vocab_size=8000), sequence_length=16, **ALONE),
}
CASES |= {f"drawn-{seed}": drawn(seed) for seed in range(10)}


WHOLE_CASES |= {
    name: CASES.pop(name) for name, case in list(CASES.items()) if setup_of(case).holds_whole
}


@pytest.mark.parametrize("name", WHOLE_CASES)
def test_estimate_without_fsdp2_is_what_storages_come_to(name):
    case = WHOLE_CASES[name]
    measured, estimated = measure_whole(case), StepMemory(setup_of(case))
    assert estimated.ledger.peak == pytest.approx(measured.peak, rel=TOLERANCE)
    assert estimated.moments["optimizer step"] == pytest.approx(
        measured.at_optimizer_step, rel=TOLERANCE
    )


@pytest.mark.parametrize("name", CASES)
def test_estimate_is_what_the_tracker_measures(name):
    case = CASES[name]
    measured, estimated = measure(case), StepMemory(setup_of(case))
    estimate = memory_estimate(replace(setup_of(case), device_type="cpu"))
    live = estimated.ledger.at_peak
    assert estimate.state_bytes["parameters"] == measured.parameters
    assert estimate.state_bytes["gradients"] == measured.gradients
    assert estimate.state_bytes["optimizer"] == measured.optimizer
    assert estimated.ledger.peak == pytest.approx(measured.peak, rel=TOLERANCE)
    if measured.phase in ("loss", "forward") or (
        case.shard > 1 and estimated.moment.startswith("backward of a")
    ):
        others = (
            "Sharded Param",
            "Unsharded Param",
            "Sharded Grad",
            "OptState",
            "All Gather",
            "Reduce Scatter",
        )
        # Weights that a gather is just writing are activations to the tracker.
        written = live[MemoryKind.GATHERED] - measured.kinds["Unsharded Param"]
        moving = sum(live[kind] for kind in MOVING) + written
        assert moving == pytest.approx(measured.without(*others), rel=TOLERANCE)
    assert phase_of(estimated.moment) == measured.phase
    assert estimated.moments["optimizer step"] == pytest.approx(
        measured.at_optimizer_step, rel=TOLERANCE
    )


@pytest.mark.parametrize(
    "case",
    [
        Case(llama(**WIDE_VOCABULARY)),
        Case(llama(architecture="gemma2", head_dim=32, **TIED), attention="eager"),
        Case(llama(**WIDE_VOCABULARY), precision="fp32", shard=1, keeps_unsharded=True),
    ],
)
def test_a_gradient_in_place_of_the_logits_is_estimated_so(case, monkeypatch):
    """As on a GPU, whose kernel needs no memory of its own; here nothing stands for it."""
    monkeypatch.setattr(loss, "loss_and_gradient", lambda logits, *_: (logits[0, 0] * 1.0, logits))
    monkeypatch.setattr(SummedGradient, "add", add_nothing)
    counted = measure_whole(case) if setup_of(case).holds_whole else measure(case)
    estimated = StepMemory(replace(setup_of(case), device_type="cuda"))
    assert estimated.ledger.peak == pytest.approx(counted.peak, rel=TOLERANCE)
    on_cpu = StepMemory(setup_of(case))
    assert estimated.moments["loss"] < on_cpu.moments["loss"]


def add_nothing(gradient: SummedGradient, *unused: Any) -> None:
    if gradient.total is None:
        gradient.total = torch.empty_like(gradient.weight, dtype=gradient.dtype)


PEAKS_OF_TORCH_2_11 = {
    "llama": 22797412,
    "one-rank": 41571556,
    "gradients-kept": 31846500,
    "state-on-one-rank": 104486884,
    "state-on-two-ranks": 71458844,
    "state-on-replicas": 120871908,
}
"""What the tracker measures with torch 2.11."""


@pytest.mark.parametrize("name", PEAKS_OF_TORCH_2_11)
def test_an_older_torch_is_estimated_as_measured_with_it(name):
    case = CASES[name]
    estimated = StepMemory(replace(setup_of(case), torch_release=(2, 11)))
    assert estimated.ledger.peak == pytest.approx(PEAKS_OF_TORCH_2_11[name], rel=TOLERANCE)


def phase_of(moment: str) -> str:
    """The tracker's phase of an estimated moment."""
    if moment == "last reduction, before the optimizer step":
        return "last reduction"
    if moment.startswith("forward"):
        return "forward"
    return "backward" if moment.startswith(("backward", "reduction")) else moment


def test_cases_cover_what_can_be_the_peak():
    """Activations are over half of the peak in most cases, and each moment that can be the peak is
    so in several."""
    steps = [StepMemory(setup_of(case)) for case in CASES.values()]
    assert len(steps) >= 30
    assert (
        sum(
            sum(step.ledger.at_peak[kind] for kind in MOVING) > step.ledger.peak / 2
            for step in steps
        )
        >= 20
    )
    moments = [step.moment for step in steps]
    for moment in (
        "loss",
        "backward of a recomputed layer",
        "last reduction, before the optimizer step",
    ):
        assert moments.count(moment) >= 3, moment
