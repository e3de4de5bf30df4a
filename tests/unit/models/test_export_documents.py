"""config.json and generation_config.json of an export: the base's own, and readable by transformers
4 and 5."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.models.tiny import CONFIGS, model_config
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from drillyard.config.run_model import ModelConfig
from drillyard.errors import UnsafeFileError
from drillyard.models.export_documents import (
    base_documents,
    config_document,
    generation_document,
)
from drillyard.models.meta_model import build_model, load_config

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONG = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}

# As transformers 4 writes it, with keys that it alone knows and an order of its own.
BASE: dict[str, Any] = {
    "_name_or_path": "some/where",
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rope_theta": 500000.0,
    "rope_scaling": LLAMA3,
    "pretraining_tp": 1,
    "note_of_its_authors": {"a": [1]},
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0",
    "use_cache": False,
}


def config_of(content: dict[str, Any], directory: Path) -> PreTrainedConfig:
    """The config of a run that began from a model with this config.json."""
    (directory / "config.json").write_text(json.dumps(content))
    return load_config(ModelConfig(id=str(directory)))


def exported(architecture: str, **settings: Any) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """The config of a new model, and its config.json."""
    config = load_config(model_config(architecture, **settings))
    config.dtype = torch.bfloat16
    return config, json.loads(config_document(config, None))


def read(content: dict[str, Any]) -> dict[str, Any]:
    """What the transformers here reads in a config.json."""
    model_type = content["model_type"]
    config = AutoConfig.for_model(**content)
    fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    assert fields["model_type"] == model_type
    return fields


def test_nothing_that_training_leaves_as_it_was_is_changed(tmp_path: Path) -> None:
    config = config_of(BASE, tmp_path)
    config.use_cache = True
    written = base_documents(tmp_path)["config.json"]
    assert config_document(config, written) == written == json.dumps(BASE).encode()


def test_what_training_changed_is_changed_and_nothing_else(tmp_path: Path) -> None:
    config = config_of(BASE, tmp_path)
    config.vocab_size, config.eos_token_id, config.dtype = 64, 7, torch.float32
    content = json.loads(config_document(config, json.dumps(BASE).encode()))
    changed = {"vocab_size": 64, "eos_token_id": 7, "torch_dtype": "float32"}
    assert content == {**BASE, **changed}
    assert list(content)[: len(BASE)] == list(BASE)


@pytest.mark.parametrize(
    ("keys", "written"),
    [
        ({"torch_dtype": "bfloat16"}, {"torch_dtype"}),
        ({"dtype": "bfloat16"}, {"dtype"}),
        ({"dtype": "bfloat16", "torch_dtype": "bfloat16"}, {"dtype", "torch_dtype"}),
        ({}, {"dtype", "torch_dtype"}),
    ],
)
def test_the_dtype_is_said_as_the_base_says_it(
    keys: dict[str, str], written: set[str], tmp_path: Path
) -> None:
    base = {key: value for key, value in BASE.items() if key != "torch_dtype"} | keys
    config = config_of(base, tmp_path)
    config.dtype = torch.float16
    content = json.loads(config_document(config, json.dumps(base).encode()))
    found = {key: content[key] for key in ("dtype", "torch_dtype") if key in content}
    assert found == dict.fromkeys(written, "float16")


def test_code_that_is_not_copied_is_not_named(tmp_path: Path) -> None:
    base = {**BASE, "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    content = json.loads(config_document(config_of(BASE, tmp_path), json.dumps(base).encode()))
    assert content == BASE


def test_a_base_that_transformers_5_wrote_gains_the_keys_of_4(tmp_path: Path) -> None:
    config = config_of(BASE, tmp_path)
    config.save_pretrained(tmp_path / "newer")
    base = (tmp_path / "newer" / "config.json").read_bytes()
    assert "rope_scaling" not in json.loads(base)
    content = json.loads(config_document(config, base))
    gained = {"rope_theta": 500000.0, "rope_scaling": LLAMA3, "torch_dtype": "bfloat16"}
    assert content == json.loads(base) | gained
    assert read(content) == read(json.loads(base))


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_new_model_has_the_keys_of_both(architecture: str) -> None:
    rope = {} if architecture == "gpt2" else {"rope_theta": 777.0}
    config, content = exported(architecture, **rope)
    assert (content["torch_dtype"], content["dtype"]) == ("bfloat16", "bfloat16")
    assert content.get("rope_theta") == rope.get("rope_theta")
    assert content.get("rope_scaling") is None
    found = read(content)
    for key in ("torch_dtype", "partial_rotary_factor", "_name_or_path"):
        found.pop(key, None)
    expected = json.loads(config.to_json_string(use_diff=False))
    assert found == {key: value for key, value in expected.items() if key in found}


@pytest.mark.parametrize(
    ("architecture", "settings", "expected"),
    [
        ("llama", {"rope_scaling": LLAMA3}, {"rope_scaling": LLAMA3}),
        (
            "gemma3_text",
            {
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "rope_theta": 5.0,
                "rope_local_base_freq": 3.0,
            },
            {
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "rope_theta": 5.0,
                "rope_local_base_freq": 3.0,
            },
        ),
        # Transformers 4 takes these two in one form alone.
        (
            "olmo2",
            {"rope_parameters": {"rope_type": "linear", "factor": 4, "rope_theta": 9.0}},
            {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 9.0},
        ),
        (
            "phi3",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 9.0,
                    "partial_rotary_factor": 0.5,
                    "factor": 2.0,
                    **LONG,
                },
                "original_max_position_embeddings": 32,
            },
            {
                "rope_scaling": {"type": "longrope", **LONG},
                "rope_theta": 9.0,
                "partial_rotary_factor": 0.5,
                "original_max_position_embeddings": 32,
            },
        ),
        # A scaling that it cannot say is left whole: it refuses that, and ours reads it.
        (
            "olmo2",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
        ),
        ("qwen3_moe", {}, {"num_experts": 4, "num_local_experts": 4}),
    ],
)
def test_transformers_4_finds_positions_and_experts_under_its_own_names(
    architecture: str, settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    config, content = exported(architecture, **settings)
    assert {key: content[key] for key in expected} == expected
    found, wanted = read(content), json.loads(config.to_json_string(use_diff=False))
    assert without_old_names(found["rope_parameters"], config) == without_old_names(
        wanted["rope_parameters"], config
    )


def without_old_names(rope: dict[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    """Rope parameters without `type`, which older files say beside `rope_type`, and without a
    factor that the positions give."""
    unused = {"type"} | ({"factor"} if rope.get("rope_type") == "longrope" else set())
    return {key: value for key, value in rope.items() if key not in unused}


def test_sampling_settings_are_the_bases_own_and_missing_tokens_are_added() -> None:
    settings = {
        "do_sample": True,
        "temperature": 0.6,
        "eos_token_id": [1, 2],
        "pad_token_id": None,
        "of_another_library": True,
        "transformers_version": "4.42.3",
    }
    config = GenerationConfig(**settings)
    base = json.dumps(settings).encode()
    assert generation_document(config, base) == base
    config.pad_token_id, config.eos_token_id = 5, 9
    assert json.loads(generation_document(config, base)) == {**settings, "pad_token_id": 5}


def test_documents_are_those_that_are_there_and_regular(tmp_path: Path) -> None:
    assert base_documents(tmp_path) == {}
    assert base_documents("nobody/no-such-model") == {}
    (tmp_path / "config.json").write_bytes(b"{}")
    assert base_documents(str(tmp_path)) == {"config.json": b"{}"}
    (tmp_path / "generation_config.json").mkdir()
    with pytest.raises(UnsafeFileError, match=r"generation_config\.json"):
        base_documents(tmp_path)


def test_a_hub_model_has_its_documents_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "models--org--name"
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots" / "abc" / "config.json").write_bytes(b"{ }")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert base_documents("org/name") == {"config.json": b"{ }"}


def test_what_building_a_model_adds_to_its_config_is_no_change(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4}
    base = {
        **BASE,
        "max_position_embeddings": 64,
        "original_max_position_embeddings": 32,
        "rope_scaling": {"rope_type": "longrope", "factor": 2.0, **factors},
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(base))
    model = build_model(
        ModelConfig(id=str(tmp_path)),
        vocab_size=48,
        dtype=torch.float32,
        attention="sdpa",
        sequence_length=24,
    )
    model.config.dtype = torch.bfloat16
    assert config_document(model.config, path.read_bytes()) == path.read_bytes()
