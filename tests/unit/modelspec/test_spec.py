"""Parameter counts from a config alone equal the models that transformers builds from it."""

from __future__ import annotations

import random

import pytest

from drillyard.errors import UserError
from drillyard.modelspec import FAMILIES, model_spec


def random_config(family: str, draw: random.Random) -> dict:
    """A small config of the family with every field that changes shapes drawn."""
    kv_heads, head_dim = draw.choice([1, 2, 3]), 2 * draw.randint(1, 6)
    heads = kv_heads * draw.randint(1, 3)
    layers = draw.randint(1, 3)
    hidden = heads * 2 * draw.randint(1, 8)
    if family == "gpt2":
        return {
            "n_embd": hidden,
            "n_layer": layers,
            "n_head": heads,
            "n_inner": draw.choice([None, 24]),
            "n_positions": draw.randint(4, 40),
            "vocab_size": draw.randint(10, 90),
            "tie_word_embeddings": draw.random() < 0.5,
        }
    config = {
        "vocab_size": draw.randint(10, 90),
        "hidden_size": hidden,
        "intermediate_size": draw.randint(3, 50),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": draw.random() < 0.5,
    }
    if family not in ("qwen2", "olmo2"):
        config["head_dim"] = head_dim
    if family in ("llama", "qwen3", "olmo2", "gemma3_text", "qwen3_moe"):
        config["attention_bias"] = draw.random() < 0.5
    if family == "llama":
        config["mlp_bias"] = draw.random() < 0.5
    if family in ("mixtral", "qwen3_moe"):
        experts = draw.randint(1, 5)
        config["num_experts_per_tok"] = draw.randint(1, experts)
        config["num_local_experts" if family == "mixtral" else "num_experts"] = experts
    if family == "qwen3_moe":
        config["moe_intermediate_size"] = draw.randint(3, 20)
        config["decoder_sparse_step"] = draw.randint(1, 2)
        config["mlp_only_layers"] = draw.choice([[], [0]])
    return config


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_counts_equal_the_model_built_on_the_meta_device(family):
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    draw = random.Random(family)
    for _ in range(6):
        inline = random_config(family, draw)
        config = CONFIG_MAPPING[family](**inline)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        total = sum(parameter.numel() for parameter in model.parameters())
        expert = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
        for given in ({"architecture": family, **inline}, config.to_dict()):
            spec = model_spec(given)
            assert spec.total_parameters == total, given
            assert spec.embedding_parameters == model.get_input_embeddings().weight.numel()
            if expert:
                share = given["num_experts_per_tok"] / getattr(config, "num_local_experts", 0)
                assert spec.active_parameters == total - expert + round(expert * share)
            else:
                assert spec.active_parameters == total


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_defaults_are_those_of_transformers(family):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[family]()
    assert model_spec({"model_type": family}) == model_spec(config.to_dict())


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        (
            {
                "model_type": "llama",
                "vocab_size": 128256,
                "hidden_size": 8192,
                "intermediate_size": 28672,
                "num_hidden_layers": 80,
                "num_attention_heads": 64,
                "num_key_value_heads": 8,
            },
            70_553_706_496,
            70_553_706_496,
        ),
        ({"model_type": "mixtral"}, 46_702_792_704, 12_879_925_248),
        (
            {
                "model_type": "qwen3_moe",
                "hidden_size": 2048,
                "num_hidden_layers": 48,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
                "head_dim": 128,
                "moe_intermediate_size": 768,
                "num_experts": 128,
                "num_experts_per_tok": 8,
            },
            30_532_122_624,
            3_353_032_704,
        ),
        ({"model_type": "gpt2"}, 124_439_808, 124_439_808),
    ],
    ids=["Llama 3.1 70B", "Mixtral 8x7B", "Qwen3 30B-A3B", "GPT-2"],
)
def test_published_models(config, total, active):
    spec = model_spec(config)
    assert (spec.total_parameters, spec.active_parameters) == (total, active)


@pytest.mark.parametrize(
    ("config", "layers_with_window"),
    [
        ({"model_type": "gemma3_text", "num_hidden_layers": 12}, 10),
        ({"model_type": "gemma3_text", "num_hidden_layers": 4, "sliding_window_pattern": 2}, 2),
        ({"model_type": "gemma3_text", "num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2}, 2),
        ({"model_type": "mistral", "num_hidden_layers": 3}, 3),
        ({"model_type": "mistral", "num_hidden_layers": 3, "sliding_window": None}, 0),
        ({"model_type": "qwen3", "num_hidden_layers": 3, "sliding_window": 8}, 0),
        (
            {
                "model_type": "qwen3",
                "num_hidden_layers": 5,
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 3,
            },
            2,
        ),
        ({"model_type": "llama", "num_hidden_layers": 3, "sliding_window": 8}, 0),
    ],
)
def test_which_layers_have_a_window(config, layers_with_window):
    windows = model_spec(config).windows
    assert len(windows) == config["num_hidden_layers"]
    assert sum(window is not None for window in windows) == layers_with_window


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "lama"}, "'lama'.*\n?.*Did you mean llama"),
        ({}, "None is not one whose shapes are known"),
        ({"model_type": "llama", "hidden_size": "4096"}, "hidden_size must be a positive integer, found '4096'"),
        ({"model_type": "llama", "num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, found 0"),
        ({"model_type": "llama", "attention_bias": 1}, "attention_bias must be true or false"),
        ({"model_type": "llama", "hidden_size": 100, "num_attention_heads": 32}, "100 does not divide by 32"),
        ({"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 5}, "do not divide by 5"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "9, but there are 8 experts"),
        ({"model_type": "gemma3_text", "layer_types": ["full_attention"]}, "names 1 layers, num_hidden_layers is 26"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "only decoders"),
    ],
)
def test_a_wrong_config_is_refused_by_field(config, message):
    with pytest.raises(UserError, match=message):
        model_spec(config)
