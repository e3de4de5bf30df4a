"""The estimate, which has no torch, chooses the attention kernel that the trainer chooses."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from tests.unit.models.tiny import COMMON, CONFIGS
from transformers import CONFIG_MAPPING

from drillyard.config.run import RunConfig
from drillyard.estimation.resolved_setup import FIELDS_OF_FAMILIES, resolve_setup
from drillyard.models.attention import resolve_attention
from drillyard.modelspec import all_families, model_spec, spec_from_counts

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def run_config(inline: dict, precision: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "x",
            "model": {"config": inline, "init": "random"},
            "data": {"source": "x.jsonl", "sequence_length": 64},
            "training": {"steps": 1, "precision": precision, "optimizer": {"learning_rate": 1e-3}},
        }
    )


@pytest.mark.parametrize("architecture", CONFIGS)
def test_every_architecture_gets_the_kernel_that_it_trains_with(architecture: str) -> None:
    shape = (
        {"n_embd": 32, "n_layer": 2, "n_head": 4}
        if architecture == "gpt2"
        else {**COMMON, **CONFIGS[architecture]}
    )
    extremes = [
        {},
        {"attention_dropout": 0.2},
        {"attn_logit_softcapping": None},
        {"attn_pdrop": 0.0},
    ]
    for changes, device, precision in product(extremes, ("cpu", "cuda"), DTYPES):
        declared = CONFIG_MAPPING[architecture]().to_dict()
        fields = {**shape, **{key: value for key, value in changes.items() if key in declared}}
        inline = {"architecture": architecture, "vocab_size": 64, **fields}
        resolved = resolve_setup(
            run_config(inline, precision),
            model_spec(inline),
            num_gpus=1,
            gpus_per_node=1,
            memory_gib=None,
            device_type=device,
        )
        expected = resolve_attention(
            "auto", device, DTYPES[precision], CONFIG_MAPPING[architecture](**fields)
        )
        assert resolved.setup.kernel == expected, (changes, device, precision)


def test_defaults_of_config_classes_are_those_of_transformers() -> None:
    fields = ("attn_logit_softcapping", "attention_dropout", "attn_pdrop")
    found = {}
    for family in sorted(set(all_families()) & set(CONFIG_MAPPING)):
        config = CONFIG_MAPPING[family]()
        said = {name: getattr(config, name, None) for name in fields}
        found[family] = {name: value for name, value in said.items() if value}
    assert {family: values for family, values in found.items() if values} == FIELDS_OF_FAMILIES


def test_a_config_json_of_a_hub_model_decides_where_it_is_given() -> None:
    config = run_config({"architecture": "llama", "vocab_size": 8}, "bf16").model_copy(deep=True)
    options = {"num_gpus": 1, "gpus_per_node": 1, "memory_gib": None, "device_type": "cuda"}
    spec = spec_from_counts(10)
    assert resolve_setup(config, spec, **options).setup.kernel == "varlen"
    assert (
        resolve_setup(config, spec, **options, model_config={"attention_dropout": 0.1}).setup.kernel
        == "sdpa"
    )
    capped = {"text_config": {"attn_logit_softcapping": 30.0}}
    assert resolve_setup(config, spec, **options, model_config=capped).setup.kernel == "flex"
    assert (
        resolve_setup(config, spec, **options, model_config=capped, kernel="eager").setup.kernel
        == "eager"
    )
