"""Every family is what transformers builds: names and shapes of all tensors, defaults, windows,
ignored fields."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.modelspec.building import (
    built_model,
    named_shapes,
    shapes_of,
    small_configs,
    transformers_config,
    windows_of,
)

from drillyard.modelspec import ModelSpec, all_families, model_spec, spec_from_shapes
from drillyard.modelspec.config_fields import is_ignored

FAMILY_NAMES = sorted(all_families())

# What a config must say before transformers can build the family.
REQUIRED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "glm4_moe": {"head_dim": 128},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILY_NAMES)
@settings(max_examples=5)
@given(data=st.data())
def test_tensors_equal_those_of_the_model_built_on_the_meta_device(family, data):
    config = data.draw(small_configs(family))
    resolved = transformers_config(config)
    model = built_model(resolved)
    spec = model_spec(config)
    assert named_shapes(spec) == shapes_of(model)
    assert spec.windows == windows_of(resolved)
    assert spec.tied == (
        model.get_input_embeddings().weight is model.get_output_embeddings().weight
    )
    assert spec.embedding_parameters == model.get_input_embeddings().weight.numel()
    assert spec.head_matrix_parameters == model.get_output_embeddings().weight.numel()
    assert spec.active_parameters == spec.total_parameters - idle_parameters(model)
    assert linear_layers(spec) == linear_layers_of(model)
    assert_counts_of_units(spec, model)
    assert model_spec(resolved.to_dict()) == spec
    assert_read_off_the_names(spec, model)


def idle_parameters(model) -> int:
    """Parameters of the experts that a token does not pass; experts are stacked along the first
    dimension."""
    chosen = next(
        (
            getattr(model.config, n)
            for n in ("num_experts_per_tok", "moe_k")
            if hasattr(model.config, n)
        ),
        0,
    )
    stacked = [p for name, p in model.named_parameters() if ".experts." in name]
    return sum(p.numel() // p.shape[0] * (p.shape[0] - chosen) for p in stacked)


def linear_layers(spec: ModelSpec) -> set[str]:
    in_blocks = {
        f"{spec.blocks_path}.{index}.{tensor.name}"
        for index, block in enumerate(spec.blocks)
        for tensor in block.tensors
        if tensor.linear
    }
    return in_blocks | {tensor.name for tensor in spec.root if tensor.linear}


def linear_layers_of(model) -> set[str]:
    import torch
    from transformers.pytorch_utils import Conv1D

    names = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D)
    }
    return names & dict(model.named_parameters()).keys()


def assert_counts_of_units(spec: ModelSpec, model) -> None:
    """What FSDP shards as a unit: each block, and the root with all the rest."""
    blocks = model.get_submodule(spec.blocks_path)
    counts = [sum(p.numel() for p in block.parameters()) for block in blocks]
    assert [block.parameters for block in spec.blocks] == counts
    assert spec.root_parameters == sum(p.numel() for p in model.parameters()) - sum(counts)


def assert_read_off_the_names(spec: ModelSpec, model) -> None:
    """`--build` finds the same without knowing the family."""
    names = (
        "hidden_size",
        "vocab_size",
        "num_attention_heads",
        "num_key_value_heads",
        "num_experts_per_tok",
        "moe_k",
    )
    names += ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    config = {name: getattr(model.config, name, None) for name in names}
    built = spec_from_shapes(shapes_of(model), config)
    for count in (
        "total_parameters",
        "active_parameters",
        "embedding_parameters",
        "active_matmul_parameters",
    ):
        assert getattr(built, count) == getattr(spec, count), count
    assert (built.blocks_path, len(built.blocks), built.tied) == (
        spec.blocks_path,
        len(spec.blocks),
        spec.tied,
    )


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_fields_left_out_have_the_values_of_transformers(family):
    required = {"model_type": family} | REQUIRED.get(family, {})
    resolved = transformers_config(required)
    assert model_spec(required) == model_spec(resolved.to_dict())


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_no_field_of_the_config_class_is_unknown(family):
    known = all_families()[family]
    fields = own_fields(transformers_config({"model_type": family} | REQUIRED.get(family, {})))
    refused = {"add_cross_attention"}  # by all families
    assert (
        not fields
        - known.defaults.keys()
        - known.aliases.keys()
        - known.fixed.keys()
        - refused
        - {name for name in fields if name in known.ignored or is_ignored(name)}
    )


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_ignored_fields_change_no_tensor(family):
    small = {"vocab_size": 16, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    known = all_families()[family]
    small |= {"num_key_value_heads": 2} if "num_key_value_heads" in known.defaults else {}
    config = {"model_type": family} | REQUIRED.get(family, {}) | small
    resolved = transformers_config(config)
    changed = {
        name: other(getattr(resolved, name))
        for name in own_fields(resolved)
        if name in known.ignored or is_ignored(name)
        if name not in known.defaults and name not in known.aliases and name not in _NOT_FREE
    }
    changed = {name: value for name, value in changed.items() if value is not None}
    assert len(changed) >= 3
    assert shapes_of(built_model(transformers_config(config | changed))) == named_shapes(
        model_spec(config | changed)
    )


# Fields that transformers derives or checks against others, and tokens that must be in the
# vocabulary.
_NOT_FREE = {"rope_parameters", "head_dim", "qk_head_dim", "num_key_value_heads"} | {
    f"{token}_token_id" for token in ("bos", "eos", "pad", "sep", "eod")
}


def own_fields(resolved) -> set[str]:
    """The fields that a config has beyond those of all configs."""
    from transformers import PreTrainedConfig

    common = {
        field.name for field in dataclasses.fields(PreTrainedConfig)
    } | PreTrainedConfig().to_dict().keys()
    return {*resolved.to_dict(), *(field.name for field in dataclasses.fields(resolved))} - common


def other(value: Any) -> Any:
    """Another value of the same type; None where there is none to take."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 2
    return value + 0.125 if isinstance(value, float) else None
