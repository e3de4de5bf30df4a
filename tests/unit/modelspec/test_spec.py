"""Adapters are counted on the layers that PEFT puts them on."""

from __future__ import annotations

import pytest
from tests.unit.modelspec.building import built_model, transformers_config

from drillyard.errors import UserError
from drillyard.modelspec import adapter_layers, adapter_parameters, model_spec

QUERY_VALUE = ["q_proj", "v_proj"]
SMALL = {"vocab_size": 40, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 16}


def test_adapters_on_llama_8b():
    # The example of the LoRA configs in the field: rank 8 on q_proj and v_proj of Llama 3.1 8B.
    spec = model_spec(
        {
            "model_type": "llama",
            "vocab_size": 128256,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
        }
    )
    assert adapter_parameters(spec, 8, QUERY_VALUE) == 3_407_872


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama", QUERY_VALUE),
        ("llama", "all-linear"),
        ("gpt2", ["c_attn"]),
        ("gpt2", "all-linear"),
        ("opt", "all-linear"),
        ("qwen2_moe", "all-linear"),
        ("mixtral", "all-linear"),
        ("mixtral", ["q_proj", "w1", "w2", "w3"]),
        ("qwen3_moe", "all-linear"),
        ("qwen3_moe", ["gate"]),
        ("olmoe", "all-linear"),
        ("gpt2", ["attn.c_proj"]),
        ("deepseek_v3", ["q_a_proj", "kv_b_proj", "o_proj"]),
    ],
)
def test_counts_equal_those_of_peft(family, targets):
    from peft import LoraConfig, get_peft_model

    config = (
        {"model_type": family} | SMALL | ({"word_embed_proj_dim": 24} if family == "opt" else {})
    )
    model = built_model(transformers_config(config))
    peft_model = get_peft_model(
        model, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    )
    trained = sum(p.numel() for p in peft_model.parameters() if p.requires_grad)
    assert adapter_parameters(model_spec(config), 4, targets) == trained


def test_adapted_layers_of_a_block_are_named():
    block = model_spec({"model_type": "llama"}).blocks[0]
    assert [tensor.name for tensor in adapter_layers(block.tensors, QUERY_VALUE)] == [
        "self_attn.q_proj.weight",
        "self_attn.v_proj.weight",
    ]


def test_a_target_that_no_layer_has_is_refused_with_those_there_are():
    with pytest.raises(UserError, match=r"gpt2.*q_proj\n.*c_attn, c_fc, c_proj"):
        adapter_parameters(model_spec({"model_type": "gpt2"}), 8, ["c_attn", "q_proj"])
