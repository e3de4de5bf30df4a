"""The work of a step: FLOPs are those that torch counts while a model runs, bytes follow from
shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from drillyard.estimation.setup import LoraSetup, Setup
from drillyard.estimation.step_work import count_work, optimizer_bytes
from drillyard.estimation.timeline import unit_copies
from drillyard.models.adapter_forward import use_own_forward
from drillyard.modelspec import flops_per_token, model_spec, spec_from_counts
from drillyard.parallel.parallelize import checkpoint_activations

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 160,
    "n_positions": 24,
}
MIXTRAL: dict[str, Any] = {
    **LLAMA,
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 48,
}
SEQUENCE, MICRO_BATCH = 24, 2


def setup(config: dict[str, Any] = LLAMA, **changes: Any) -> Setup:
    settled: dict[str, Any] = {
        "spec": model_spec(config),
        "precision": "fp32",
        "sequence_length": SEQUENCE,
        "micro_batch_size": MICRO_BATCH,
        "gradient_accumulation": 1,
        "activation_checkpointing": "none",
        "shard": 1,
        "replicate": 1,
        "gpus_per_node": 8,
        "kernel": "eager",
        "compiled": False,
        "loss_chunk_tokens": 16,
    }
    return Setup(**{**settled, **changes})


def counted_by_torch(config: dict[str, Any], mode: str, rank: int | None = None) -> int:
    """FLOPs of a forward and backward through transformers' model, its blocks checkpointed as the
    trainer does; with `rank` of peft's adapters on all linear layers of it."""
    no_dropout = (
        {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        if config["model_type"] == "gpt2"
        else {}
    )
    options = {"bos_token_id": 0, "eos_token_id": 0, **no_dropout, **config}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**options), attn_implementation="eager", experts_implementation="eager"
    )
    blocks = model.transformer.h if config["model_type"] == "gpt2" else model.model.layers
    if rank is not None:
        model = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))
        use_own_forward(model)
    for block in blocks:
        checkpoint_activations(block, mode)
    tokens = torch.arange(MICRO_BATCH * SEQUENCE).view(MICRO_BATCH, SEQUENCE) % config["vocab_size"]
    with FlopCounterMode(display=False) as counter:
        model(tokens, use_cache=False).logits.logsumexp(-1).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("config", [LLAMA, GPT2, MIXTRAL], ids=lambda config: config["model_type"])
def test_executed_flops_are_those_that_torch_counts(config, mode):
    assert count_work(setup(config, activation_checkpointing=mode)).flops == counted_by_torch(
        config, mode
    )


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_executed_flops_with_adapters_are_those_that_torch_counts_but_for_the_first_input(mode):
    """Nothing needs the gradient of the first block's input, to which three projections and their
    adapters add."""
    message = count_work(
        setup(activation_checkpointing=mode, adapters=LoraSetup(4, "all-linear"))
    ).flops
    spared = 2 * MICRO_BATCH * SEQUENCE * (32 * (32 + 16 + 16) + 3 * 4 * 32)
    assert message - spared == counted_by_torch(LLAMA, mode, rank=4)


def test_fused_attention_does_the_causal_half_and_computes_scores_again_in_backward():
    config = {**LLAMA, "vocab_size": 8}
    forward = 4 * 32 * SEQUENCE * 2
    eager, varlen = count_work(setup(config)), count_work(setup(config, kernel="varlen"))
    tokens = SEQUENCE * MICRO_BATCH
    assert eager.flops - varlen.flops == tokens * (forward * 3 - forward / 2 * 3.5)


def test_without_recomputation_it_is_the_causal_ruler_less_the_embedding():
    spec = model_spec(
        {**LLAMA, "num_hidden_layers": 40, "hidden_size": 256, "intermediate_size": 1024}
    )
    one = setup(spec=spec, kernel="varlen", sequence_length=32)
    ruler = flops_per_token(spec, "causal", 32) - 6 * spec.embedding_parameters
    assert count_work(one).flops / one.tokens_per_step_per_gpu == pytest.approx(ruler, rel=0.01)


def test_adapters_leave_out_the_gradients_of_frozen_weights():
    full, adapted = count_work(setup()), count_work(setup(adapters=LoraSetup(4, "all-linear")))
    matrices = count_work(setup()).trainable - model_spec(LLAMA).embedding_parameters
    assert 2 / 3 * full.flops < adapted.flops < full.flops
    assert adapted.trainable == 4 * 2 * (64 + 3 * (32 + 88) + 2 * (32 + 16) + 64)
    assert adapted.trainable < matrices
    assert adapted.parameters == full.parameters + adapted.trainable


def test_of_counted_parameters_alone_six_flops_each_are_known():
    spec = spec_from_counts(1000, 400)
    assert count_work(setup(spec=spec)).flops == 6 * 400 * SEQUENCE * MICRO_BATCH
    assert (
        count_work(setup(spec=spec, activation_checkpointing="full")).flops
        == 8 * 400 * SEQUENCE * MICRO_BATCH
    )


def test_compiling_moves_fewer_bytes_and_checkpointing_more():
    eager, compiled = (
        count_work(setup(precision="bf16")),
        count_work(setup(precision="bf16", compiled=True)),
    )
    again = count_work(setup(precision="bf16", compiled=True, activation_checkpointing="full"))
    assert compiled.elementwise_bytes < eager.elementwise_bytes / 2
    assert compiled.elementwise_bytes < again.elementwise_bytes


def test_a_compiled_block_moves_these_bytes():
    """Per token and bf16 element, forward: two norms and residual sums in and out, rotated queries
    and keys, SwiGLU."""
    block = count_work(setup(precision="bf16", kernel="varlen", compiled=True)).blocks[0]
    hidden, rotated, width = 32, 32 + 16, 88
    assert block.forward_bytes == 2 * (8 * hidden + 2 * rotated + 3 * width)
    assert block.backward_bytes == 2 * (12 * hidden + 3 * rotated + 5 * width)


def test_the_optimizer_reads_and_writes_seven_words_a_parameter_and_the_norm_and_clipping_more():
    assert optimizer_bytes(setup(precision="bf16"), 10) == 8 * 10 * 4
    assert optimizer_bytes(setup(precision="bf16", clips_gradients=False), 10) == 8 * 10 * 4
    assert optimizer_bytes(setup(precision="fp64"), 10) == 10 * 10 * 8
    on_a_cpu = setup(precision="bf16", device_type="cpu")
    assert optimizer_bytes(on_a_cpu, 10) == 10 * 10 * 4


def test_fsdp_copies_what_it_gathers_and_reduces():
    one = setup(precision="bf16", shard=4)
    work = count_work(one)
    unit = work.blocks[0]
    gather = unit.parameters / 4 * 6 + 4 * unit.parameters
    assert unit_copies(one, work, unit) == (gather, gather + 6 * unit.parameters)
    kept = replace(one, keeps_unsharded=True)
    assert unit_copies(kept, work, unit) == (gather, 6 * unit.parameters)
    whole = replace(one, adapters=LoraSetup(4, "all-linear"), keeps_frozen_whole=True)
    work = count_work(whole)
    trained = work.blocks[0].trainable
    gather = trained / 4 * 6 + 4 * trained
    assert unit_copies(whole, work, work.blocks[0]) == (gather, gather + 6 * trained)
    assert unit_copies(whole, work, work.root) == (0, 0)


def test_a_rank_that_is_alone_casts_its_weights_once_a_step_and_gathers_nothing():
    alone = setup(precision="bf16", shard=1, keeps_unsharded=True, gradient_accumulation=4)
    work = count_work(alone)
    unit = work.blocks[0]
    assert unit_copies(alone, work, unit) == (6 * unit.parameters / 4, 6 * unit.parameters)
    full = replace(alone, precision="fp32")
    assert unit_copies(full, count_work(full), unit) == (0, 0)
    at_once = replace(alone, gradient_accumulation=1)
    assert unit_copies(at_once, count_work(at_once), unit) == (6 * unit.parameters, 0)


def test_with_one_micro_batch_norm_and_update_read_gradients_in_bf16():
    """But that of the head, which is a sum."""
    alone = setup(precision="bf16", shard=1, keeps_unsharded=True)
    head = alone.summed_parameters
    assert head == alone.spec.head_matrix_parameters
    assert optimizer_bytes(alone, head + 10) == 32 * head + (32 - 4) * 10
    several = replace(alone, gradient_accumulation=2)
    assert optimizer_bytes(several, head + 10) == 32 * (head + 10)
    adapted = replace(alone, adapters=LoraSetup(4, "all-linear"))
    assert optimizer_bytes(adapted, 10) == (32 - 4) * 10


@settings(max_examples=50)
@given(
    layers=st.integers(1, 6),
    hidden=st.sampled_from([32, 64, 128]),
    width=st.integers(1, 500),
    vocabulary=st.integers(2, 1000),
    sequence=st.integers(1, 4096),
    micro_batch=st.integers(1, 8),
    accumulation=st.integers(1, 4),
)
def test_work_adds_up_over_tokens_and_blocks(
    layers, hidden, width, vocabulary, sequence, micro_batch, accumulation
):
    shape = {"hidden_size": hidden, "intermediate_size": width, "vocab_size": vocabulary}
    sizes = {
        "sequence_length": sequence,
        "micro_batch_size": micro_batch,
        "gradient_accumulation": accumulation,
    }
    spec = model_spec({**LLAMA, **shape, "num_hidden_layers": layers})
    modes = [
        count_work(setup(spec=spec, activation_checkpointing=mode, **sizes))
        for mode in ("none", "selective", "full")
    ]
    none, selective, full = (work.flops for work in modes)
    assert none <= selective <= full <= 4 / 3 * none
    assert modes[0].tokens == sequence * micro_batch * accumulation
    assert modes[0].parameters == spec.total_parameters
    twice = count_work(setup(spec=spec, **{**sizes, "gradient_accumulation": 2 * accumulation}))
    assert twice.flops == pytest.approx(2 * none)
    assert twice.elementwise_bytes == pytest.approx(2 * modes[0].elementwise_bytes)


def test_fp8_products_are_those_of_linear_layers_in_blocks() -> None:
    sizes = LLAMA | {"intermediate_size": 96}
    exact, cast = (count_work(setup(sizes, precision=each)) for each in ("bf16", "fp8"))
    block = 32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 96  # q and o, k and v, the MLP
    assert cast.fp8_flops == 6 * 2 * block * SEQUENCE * MICRO_BATCH
    assert exact.fp8_flops == 0 and exact.flops == cast.flops
    outputs, inputs = 32 * 2 + 16 * 2 + 96 * 2 + 32, 32 * 6 + 96
    casts = 5 * (2 * inputs + outputs + 2 * block / (SEQUENCE * MICRO_BATCH))
    added = (cast.elementwise_bytes - exact.elementwise_bytes) / (2 * SEQUENCE * MICRO_BATCH)
    assert added == pytest.approx(casts)
    # What is gathered in fp8 is not cast by a product, and copied transposed in backward.
    shared = setup(sizes, precision="fp8", shard=4)
    gathered = count_work(replace(shared, casts_before_gather=True))
    saved = count_work(shared).elementwise_bytes - gathered.elementwise_bytes
    assert saved == pytest.approx(2 * block * (5 + 5 - 2))
    # What rests in fp8 is not either; with an operand for each product nothing is copied.
    adapters = LoraSetup(4, "all-linear")
    frozen = setup(sizes, precision="fp8", adapters=adapters, keeps_frozen_whole=True, shard=4)
    each_time = count_work(frozen).elementwise_bytes
    for scales_rows, left in ((False, 2), (True, 0)):
        at_rest = count_work(replace(frozen, stores_fp8=True, scales_rows=scales_rows))
        saved = each_time - at_rest.elementwise_bytes
        assert saved == pytest.approx(2 * block * (5 + 5 - left))
    odd = count_work(setup(LLAMA | {"intermediate_size": 88}, precision="fp8"))
    assert odd.fp8_flops == 6 * 2 * (block - 3 * 32 * 96) * SEQUENCE * MICRO_BATCH
