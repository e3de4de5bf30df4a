"""Files of a model that no model has: sizes that would take for ever to build, dtypes that are no
dtypes, tokens outside of the vocabulary, a pattern on which the tokenizers library panics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drillyard.config.run_model import ModelConfig
from drillyard.errors import UserError
from drillyard.models.meta_model import build_spec, load_config
from drillyard.modelspec.config_json import model_spec, read_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 320,
}
ODD_SIZES = [
    ("num_hidden_layers", 10**9),
    ("num_hidden_layers", -(10**9)),
    ("num_attention_heads", 10**9),
    ("hidden_size", 10**12),
    ("vocab_size", 10**12),
    ("intermediate_size", 10**30),
    ("max_position_embeddings", 10**30),
    ("head_dim", 10**12),
]


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("name", "value"), ODD_SIZES)
@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_a_size_that_no_model_has_is_refused_by_each_reader(
    tmp_path: Path, name: str, value: int, model_type: str
) -> None:
    config = {**LLAMA, "model_type": model_type, name: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    inline = {**config, "architecture": model_type}
    del inline["model_type"]
    for read in (
        lambda: model_spec(config),
        lambda: build_spec(config),
        lambda: load_config(ModelConfig(id=str(tmp_path))),
        lambda: load_config(ModelConfig(config=inline, init="random")),
    ):
        with pytest.raises(UserError, match=name):
            read()


def test_a_number_that_python_does_not_read_is_a_damaged_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": ' + "9" * 5000 + "}")
    with pytest.raises(UserError, match=r"config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize("dtype", ["nn", "load", "complex64", "no_such_dtype", 5, None, ["x"]])
def test_a_dtype_of_the_base_is_one_of_a_list(dtype: Any) -> None:
    from drillyard.training.base_record import dtypes_of_record

    with pytest.raises(UserError, match=r"base\.json"):
        dtypes_of_record({"dtypes": {"wte.weight": dtype}})


def make_tokenizer(directory: Path, pattern: str) -> Path:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz<>")}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(directory)  # type: ignore[no-untyped-call]
    return directory


def test_a_tokenizer_that_panics_is_named(tmp_path: Path) -> None:
    from drillyard.data.tokenizer import chat_prompt_tokens, open_tokenizer

    loaded = open_tokenizer(str(make_tokenizer(tmp_path, "(x+x+)+y")))
    with pytest.raises(UserError, match=str(tmp_path)):
        chat_prompt_tokens(loaded.pretrained, "x" * 60)


@pytest.mark.parametrize("token", [28, 70_000, 2**31])
def test_a_token_outside_of_the_vocabulary_is_refused(tmp_path: Path, token: int) -> None:
    from drillyard.data.tokenizer import open_tokenizer

    file = make_tokenizer(tmp_path, "x") / "tokenizer.json"
    content = json.loads(file.read_text())
    begin = {"SpecialToken": {"id": "a", "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"a": {"id": "a", "ids": [token], "tokens": ["a"]}},
    }
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=str(token)):
        open_tokenizer(str(tmp_path))
