"""What a run config becomes, and what is refused before anything is allocated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.models.tiny import CONFIGS, meta_model, model_config
from transformers import CONFIG_MAPPING, configuration_utils

from drillyard.config.run import RunConfig
from drillyard.config.run_model import ModelConfig
from drillyard.errors import UserError
from drillyard.models.architectures import settings_without_effect
from drillyard.models.attention import resolve_attention
from drillyard.models.export import export
from drillyard.models.meta_model import build_model, load_config
from drillyard.models.random_init import init_random
from drillyard.training.model_setup import attention_kernel


def build(config: ModelConfig, **changes: Any) -> Any:
    options = {
        "vocab_size": 48,
        "dtype": torch.float32,
        "attention": "sdpa",
        "sequence_length": 24,
        **changes,
    }
    return build_model(config, **options)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = meta_model("llama").to_empty(device="cpu")
    init_random(model, 0)
    export(model, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_parameters_are_on_meta_in_the_master_precision(
    architecture: str, dtype: torch.dtype
) -> None:
    model = meta_model(architecture, dtype=dtype)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model.config.use_cache is False


def test_vocabulary_comes_from_the_tokenizer_unless_the_config_gives_one() -> None:
    assert build(model_config("llama")).config.vocab_size == 48
    assert build(model_config("llama", vocab_size=64)).config.vocab_size == 64
    with pytest.raises(UserError, match=r"tokenizer .*48 .*40"):
        build(model_config("llama", vocab_size=40))


def test_positions_grow_with_the_sequence_only_without_trained_weights(saved: Path) -> None:
    for architecture in ("llama", "gpt2"):
        assert (
            build(model_config(architecture), sequence_length=100).config.max_position_embeddings
            == 100
        )
    with pytest.raises(UserError, match=r"sequence_length 100 .*64 positions"):
        build(ModelConfig(id=str(saved)), sequence_length=100)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architecture": "llama", "hidden_sise": 3}, "hidden_sise.*\n.*mean hidden_size"),
        ({"architecture": "llama", "qqq": 3}, "qqq.*\nits keys: .*hidden_size"),
        ({"architecture": "llama", "hidden_size": "wide"}, "expected int"),
        ({"architecture": "llama", "hidden_size": 10, "num_attention_heads": 3}, "not a multiple"),
        ({"architecture": "lama"}, "mean llama"),
        ({"architecture": "bert"}, "'bert'(.|\n)*supported: .*llama"),
        ({"hidden_size": 3}, "`architecture` is missing"),
        ({"architecture": "gpt2", "rope_theta": 1.0}, "no such setting"),
        ({"architecture": "llama", "id2label": 3}, "llama config"),
        ({"architecture": "llama", "num_attention_heads": 0}, "llama config"),
        ({"architecture": "olmo2", "num_key_value_heads": 0}, "olmo2(.|\n)*ZeroDivisionError"),
        ({"architecture": "olmo2", "hidden_act": "x"}, "olmo2(.|\n)*'x'"),
        ({"architecture": "phi3", "intermediate_size": -1}, "phi3(.|\n)*negative dimension"),
        ({"architecture": "gpt2", "add_cross_attention": True}, "cross attention"),
        ({"architecture": "gemma3_text", "use_bidirectional_attention": True}, "not causal"),
    ],
)
def test_a_config_that_cannot_be_right_is_refused_in_two_lines(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        build(ModelConfig(config=config, init="random"))
    assert len(str(caught.value).splitlines()) <= 2


@pytest.mark.parametrize("given", ["id", "inline"])
def test_all_layers_of_an_olmo_3_have_the_theta_of_its_config(given: str, tmp_path: Path) -> None:
    config = model_config("olmo3", rope_theta=9.0)
    if given == "id":
        content = dict(config.config or {})
        content["model_type"] = content.pop("architecture")
        (tmp_path / "config.json").write_text(json.dumps(content))
        config = ModelConfig(id=str(tmp_path))
    tables = load_config(config).rope_parameters
    assert {name: table["rope_theta"] for name, table in tables.items()} == {
        "full_attention": 9.0,
        "sliding_attention": 9.0,
    }


@pytest.mark.parametrize(
    ("architecture", "settings", "path"),
    [
        ("gemma3_text", {"rope_local_base_freq": 3.0}, ["sliding_attention", "rope_theta"]),
        ("phi3", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
    ],
)
def test_positions_are_taken_by_the_names_of_published_configs(
    architecture: str, settings: dict[str, float], path: list[str]
) -> None:
    found: Any = load_config(model_config(architecture, **settings)).rope_parameters
    for key in path:
        found = found[key]
    assert [found] == list(settings.values())


@pytest.mark.parametrize("model_id", ["./nowhere", "/nowhere/model", "nobody/no-such-model"])
def test_a_model_that_is_not_there_is_refused_in_two_lines(model_id: str) -> None:
    with pytest.raises(UserError, match=model_id) as caught:
        build(ModelConfig(id=model_id))
    assert len(str(caught.value).splitlines()) == 2


def test_a_directory_of_an_unproven_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bloom"}))
    with pytest.raises(UserError, match=r"'bloom' .*supported"):
        build(ModelConfig(id=str(tmp_path)))


@pytest.mark.parametrize("asked_for", [True, False])
def test_a_models_wish_for_an_auxiliary_loss_is_reported_and_set_aside(
    asked_for: bool, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    config = CONFIG_MAPPING["mixtral"](
        **{**model_config("mixtral").config, "output_router_logits": asked_for}
    )
    config.save_pretrained(directory)
    from_directory = ModelConfig(id=str(directory), init="random")
    notes = settings_without_effect(load_config(from_directory))
    assert [
        "auxiliary loss" in note and "output_router_logits: true" in note for note in notes
    ] == [True] * asked_for
    assert build(from_directory).config.output_router_logits is False


def test_looking_for_settings_without_effect_brings_no_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers warns of some names whenever they are read, and users would see it in every
    export."""
    warnings: list[str] = []
    monkeypatch.setattr(
        configuration_utils.logger, "warning_once", lambda text, *_, **__: warnings.append(text)
    )
    assert settings_without_effect(load_config(model_config("gpt2"))) == []
    assert warnings == []


def test_a_rope_table_that_follows_the_longest_document_is_refused() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "long_factor": [1.0] * 4,
        "short_factor": [1.0] * 4,
        "factor": 4.0,
    }
    limits = {"rope_parameters": rope, "original_max_position_embeddings": 16}
    with pytest.raises(UserError, match="longrope"):
        build(model_config("phi3", **limits))
    assert build(model_config("phi3", **limits), sequence_length=16)


def test_an_id_gives_its_config_and_its_generation_settings(saved: Path) -> None:
    settings = json.loads((saved / "generation_config.json").read_text())
    (saved / "generation_config.json").write_text(
        json.dumps({**settings, "do_sample": True, "temperature": 0.3})
    )
    model = build(ModelConfig(id=str(saved)))
    assert model.config.hidden_size == 32
    assert model.generation_config.temperature == 0.3


def test_special_tokens_are_the_tokenizers_where_weights_are_random() -> None:
    model = build(model_config("llama"), bos_token_id=None, eos_token_id=7, pad_token_id=3)
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (
        None,
        7,
        3,
    )
    assert model.generation_config.eos_token_id == 7


def test_the_end_token_learns_when_it_pads_too() -> None:
    model = build(model_config("llama"), eos_token_id=7, pad_token_id=7)
    assert model.get_input_embeddings().padding_idx is None
    assert model.generation_config.pad_token_id == 7
    explicit = build(model_config("llama", pad_token_id=7), eos_token_id=7, pad_token_id=7)
    assert explicit.get_input_embeddings().padding_idx is None


def test_auto_attention_is_the_fastest_kernel_that_trains() -> None:
    assert resolve_attention("auto", "cpu") == "sdpa"
    assert resolve_attention("auto", "cuda", torch.bfloat16) == "varlen"
    assert resolve_attention("auto", "cuda", torch.float32) == "sdpa"
    capped = meta_model("gemma2", head_dim=16).config
    assert resolve_attention("auto", "cpu", torch.float32, capped) == "eager"
    assert resolve_attention("auto", "cuda", torch.bfloat16, capped) == "flex"
    assert (
        resolve_attention("auto", "cuda", torch.bfloat16, meta_model("gpt2", attn_pdrop=0.1).config)
        == "sdpa"
    )


@pytest.mark.parametrize(
    ("attention", "device", "dtype"),
    [
        ("varlen", "cpu", torch.bfloat16),
        ("flex", "cpu", torch.float32),
        ("varlen", "cuda", torch.float32),
    ],
)
def test_a_kernel_that_cannot_train_here_is_refused(
    attention: str, device: str, dtype: torch.dtype
) -> None:
    with pytest.raises(UserError, match=f"{attention} cannot train"):
        resolve_attention(attention, device, dtype)


@pytest.mark.parametrize("head_dim", [20, 264])
def test_head_sizes_without_a_flash_attention_kernel_train_with_sdpa(head_dim: int) -> None:
    config = meta_model("qwen3", head_dim=head_dim).config
    assert resolve_attention("auto", "cuda", torch.bfloat16, config) == "sdpa"
    assert resolve_attention("sdpa", "cuda", torch.bfloat16, config) == "sdpa"
    with pytest.raises(UserError, match=f"is {head_dim}; .*attention: sdpa"):
        resolve_attention("varlen", "cuda", torch.bfloat16, config)


def test_gpus_before_ampere_train_with_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig.model_validate(
        {
            "name": "x",
            "model": {"config": {"architecture": "llama"}, "init": "random"},
            "data": {"source": "x.jsonl", "sequence_length": 64},
            "training": {"steps": 1, "precision": "bf16", "optimizer": {"learning_rate": 1e-3}},
        }
    )
    asked = config.model_copy(
        update={"model": config.model.model_copy(update={"attention": "varlen"})}
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert attention_kernel(config, torch.device("cuda")) == "sdpa"
    with pytest.raises(UserError, match=r"8\.0 .*7\.5\n.*sdpa"):
        attention_kernel(asked, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert attention_kernel(config, torch.device("cuda")) == "varlen"


def test_a_kernel_that_computes_something_else_is_refused() -> None:
    with pytest.raises(UserError, match="soft-cap"):
        build(model_config("gemma2"), attention="sdpa")
    with pytest.raises(UserError, match=r"dropout is 0\.1"):
        build(model_config("gpt2", attn_pdrop=0.1), attention="flex")
