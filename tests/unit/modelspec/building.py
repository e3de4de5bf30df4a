"""Models as transformers builds them on the meta device, and small configs of every family drawn at
random."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from drillyard.modelspec import ModelSpec, all_families

Shapes = dict[str, tuple[int, ...]]


def transformers_config(config: dict[str, Any]) -> Any:
    """The config object of transformers for the contents of a config.json; special tokens may be
    anything."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[config["model_type"]]
    fields = {config_class.attribute_map.get(name, name): value for name, value in config.items()}
    no_tokens = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    return config_class(
        **no_tokens | {name: value for name, value in fields.items() if name != "model_type"}
    )


def built_model(config: Any) -> Any:
    """The model of a transformers config on the meta device: no weights, no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def named_shapes(spec: ModelSpec) -> Shapes:
    """Every tensor of a spec by its full name, as `named_parameters` of the transformers model
    gives them."""
    shapes = {tensor.name: tensor.shape for tensor in spec.root}
    for index, block in enumerate(spec.blocks):
        shapes |= {
            f"{spec.blocks_path}.{index}.{tensor.name}": tensor.shape for tensor in block.tensors
        }
    return shapes


def shapes_of(model: Any) -> Shapes:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def windows_of(config: Any) -> tuple[int | None, ...]:
    """The window of each layer by what transformers made of a config."""
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    by_kind = {
        "sliding_attention": window,
        "chunked_attention": getattr(config, "attention_chunk_size", None),
    }
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return (window,) * config.num_hidden_layers
    return tuple(by_kind.get(kind) for kind in kinds)


@st.composite
def small_configs(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """A small config of the family: every field that decides shapes is drawn, and some are left
    out."""
    layers, kv_heads = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3))
    experts, key_heads = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    some_layers = st.lists(st.integers(0, layers), unique=True)
    width, few = st.integers(1, 40), st.integers(1, 4)
    kinds = {"qwen3_next": "linear_attention", "llama4_text": "chunked_attention"}.get(
        family, "sliding_attention"
    )
    per_layer = {"min_size": layers, "max_size": layers}
    drawn = {
        "vocab_size": st.integers(1, 90),
        "hidden_size": st.integers(1, 6).map(lambda half: heads * 2 * half),
        "num_hidden_layers": st.just(layers),
        "num_attention_heads": st.just(heads),
        "num_key_value_heads": st.just(kv_heads),
        "num_kv_heads": st.just(kv_heads),
        "head_dim": st.integers(1, 6).map(lambda half: 2 * half),
        "intermediate_size": width,
        "intermediate_size_mlp": width,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": width,
        "ffn_dim": width,
        "ffn_hidden_size": st.none() | width,
        "n_inner": st.none() | width,
        "word_embed_proj_dim": st.none() | width,
        "n_positions": width,
        "max_position_embeddings": width,
        "num_ln_in_parallel_attn": st.none() | st.integers(1, 2),
        "sliding_window": st.none() | width,
        "attention_chunk_size": width,
        "sliding_window_pattern": few,
        "full_attention_interval": few,
        "no_rope_layer_interval": few,
        "no_rope_layers": st.none() | st.lists(st.integers(0, 1), **per_layer),
        "layer_types": st.none()
        | st.lists(st.sampled_from(["full_attention", kinds]), **per_layer),
        "max_window_layers": st.integers(0, 5),
        "mlp_only_layers": st.none() | some_layers,
        "moe_layers": st.none() | some_layers,
        "decoder_sparse_step": few,
        "interleave_moe_layer_step": few,
        "moe_layer_interval": few,
        "moe_layer_start_index": st.integers(0, 2),
        "moe_layer_end_index": st.integers(-1, layers),
        "moe_num_shared_experts": st.integers(0, 2),
        "n_shared_experts": few,
        "first_k_dense_replace": st.integers(0, layers + 1),
        "num_nextn_predict_layers": st.integers(0, 1),
        "q_lora_rank": st.none() | width,
        "kv_lora_rank": width,
        "qk_nope_head_dim": few,
        "qk_rope_head_dim": st.integers(1, 3).map(lambda half: 2 * half),
        "v_head_dim": few,
        "linear_conv_kernel_dim": few,
        "linear_key_head_dim": few,
        "linear_value_head_dim": few,
        "linear_num_key_heads": st.just(key_heads),
        "linear_num_value_heads": st.integers(1, 2).map(lambda ratio: key_heads * ratio),
        **dict.fromkeys(
            ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
            st.just(experts),
        ),
        **dict.fromkeys(("num_experts_per_tok", "moe_k"), st.integers(1, experts)),
    }
    known = all_families()[family]
    config: dict[str, Any] = {"model_type": family}
    for name, default in known.defaults.items():
        if name == "head_dim" and known.head_dim_is_derived:
            continue
        if name in drawn:
            config[name] = draw(drawn[name])
        else:
            assert isinstance(default, bool), f"no values to draw for {name} of {family}"
            config[name] = draw(st.booleans())
    for name in draw(
        st.lists(st.sampled_from([n for n in config if n not in _NEEDED]), unique=True, max_size=3)
    ):
        del config[name]
    if family == "exaone4" and config.get("layer_types") is None:
        config["sliding_window"] = (
            config.get("sliding_window") or 8
        )  # without either, transformers divides by zero
    return config


# Without these a model is large, or its heads do not divide.
_NEEDED = {
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "num_kv_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
    *(
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "moe_num_experts",
        "num_experts_per_tok",
        "moe_k",
    ),
}
