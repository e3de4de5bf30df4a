"""Random weights follow each model's own scheme, depend on the seed and the module alone, and leave
nothing unset."""

from __future__ import annotations

import math

import pytest
import torch
from tests.unit.models.tiny import CONFIGS, meta_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from drillyard.models.random_init import init_random, module_seed


def materialised(architecture: str, **changes: object) -> PreTrainedModel:
    """A tiny model whose memory holds NaN everywhere, so that what is left unset shows."""
    model = meta_model(architecture, **changes).to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(math.nan)
    return model


@pytest.mark.parametrize("architecture", CONFIGS)
def test_every_parameter_and_buffer_is_set(architecture: str) -> None:
    model = materialised(architecture)
    init_random(model, seed=1)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert torch.isfinite(tensor).all(), name


@pytest.mark.parametrize("architecture", CONFIGS)
def test_each_parameter_has_the_distribution_that_the_model_itself_gives_it(
    architecture: str,
) -> None:
    model = materialised(architecture)
    init_random(model, seed=1)
    torch.manual_seed(0)
    own = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    expected = dict(own.named_parameters())
    assert dict(model.named_parameters()).keys() == expected.keys()
    for name, parameter in model.named_parameters():
        parameter, other = parameter.detach(), expected[name].detach()
        if other.unique().numel() <= 2:
            assert torch.equal(parameter, other), name
            continue
        # Two estimates of one standard deviation from n draws each differ by less than five of
        # their errors.
        error = 5 * math.sqrt(1 / parameter.numel())
        assert float(parameter.std() / other.std()) == pytest.approx(1, abs=error), name
        assert abs(float(parameter.mean())) < 5 * float(other.std()) / math.sqrt(
            parameter.numel()
        ), name
    buffers = dict(own.named_buffers())
    assert dict(model.named_buffers()).keys() == buffers.keys()
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


def test_gpt2_scales_the_projections_that_feed_the_residual_stream() -> None:
    model = materialised("gpt2")
    init_random(model, seed=1)
    block = model.transformer.h[0]
    assert float(block.attn.c_proj.weight.std() / block.attn.c_attn.weight.std()) == pytest.approx(
        0.5, abs=0.06
    )


def test_gemma_norms_start_at_zero_and_llama_norms_at_one() -> None:
    for architecture, value in (("gemma3_text", 0.0), ("llama", 1.0)):
        model = materialised(architecture)
        init_random(model, seed=1)
        assert (model.model.norm.weight == value).all()


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
def test_no_two_weights_share_their_draws(architecture: str) -> None:
    model = materialised(architecture)
    init_random(model, seed=1)
    firsts = [
        float(row.flatten()[0])
        for parameter in model.parameters()
        if parameter.ndim > 1
        for row in parameter
        if row.abs().sum() > 0
    ]
    assert len(set(firsts)) == len(firsts)


def test_the_same_seed_gives_the_same_bits_and_another_seed_others() -> None:
    models = [materialised("llama") for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        init_random(model, seed)
    first, second, other = (model.state_dict() for model in models)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_a_deeper_model_starts_with_the_same_first_layers() -> None:
    """Draws belong to the module's name, not to its place in a stream of random numbers."""
    shallow, deep = materialised("llama"), materialised("llama", num_hidden_layers=3)
    init_random(shallow, 1)
    init_random(deep, 1)
    expected = deep.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in shallow.state_dict().items())


def test_tied_weights_stay_one_tensor_with_the_embeddings_draws() -> None:
    tied, untied = materialised("llama", tie_word_embeddings=True), materialised("llama")
    init_random(tied, 1)
    init_random(untied, 1)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert torch.equal(tied.lm_head.weight, untied.model.embed_tokens.weight)
    assert not torch.equal(untied.lm_head.weight, untied.model.embed_tokens.weight)


def test_initialisation_leaves_the_callers_random_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    init_random(materialised("llama"), 1)
    assert torch.equal(torch.rand(3), expected)


def test_a_scheme_that_misses_a_parameter_is_noticed() -> None:
    model = materialised("llama")
    model.model.register_parameter("forgotten", torch.nn.Parameter(torch.empty(3)))
    with pytest.raises(AssertionError, match=r"leaves model\.forgotten unset"):
        init_random(model, 1)


def test_module_seeds_differ() -> None:
    seeds = {module_seed(seed, name) for seed in range(10) for name in ("", "a", "a.b", "1/a")}
    assert len(seeds) == 40
