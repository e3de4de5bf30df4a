"""A run keeps the files of its tokenizer as they are, and exports them for transformers 4 and 5."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from drillyard.config.fetch_limits import FetchLimits, limited
from drillyard.config.run_data import TrainTokenizer
from drillyard.data.tokenizer import TextTokenizer, open_tokenizer, trained_tokenizer
from drillyard.data.tokenizer_files import save_tokenizer, tokenizer_files
from drillyard.errors import UserError

TEMPLATE = "{% for message in messages %}{{ message.content }}<|eot|>{% endfor %}"
OTHER = "{{ messages[0].content }}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    setting = TrainTokenizer(train="bpe", vocab_size=300)
    cache = tmp_path_factory.mktemp("cache")
    return trained_tokenizer(setting, "key", iter(["some text"] * 9), cache, for_chats=True)


def made(directory: Path, trained: TextTokenizer, files: dict[str, Any]) -> TextTokenizer:
    """The tokenizer of a directory with these files, besides its tokenizer.json."""
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(json.loads(trained.json), indent=7))
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / name).write_text(text)
    return open_tokenizer(str(directory))


def written_config(files: dict[str, bytes]) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(files["tokenizer_config.json"])
    return config


OLDER = {
    "tokenizer_config.json": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "additional_special_tokens": ["<|im_start|>"],
        "chat_template": TEMPLATE,
        "model_max_length": 1000000000000000019884624838656,
    },
    "special_tokens_map.json": {"eos_token": "<|im_end|>"},
    "added_tokens.json": {"<|im_end|>": 3},
    "preprocessor_config.json": {"of": "pictures"},
}


def test_what_transformers_4_wrote_is_kept_to_the_byte(
    trained: TextTokenizer, tmp_path: Path
) -> None:
    tokenizer = made(tmp_path / "base", trained, OLDER)
    # Not of a tokenizer.
    for name in ("config.json", "generation_config.json", "model.safetensors.index.json"):
        (tmp_path / "base" / name).write_text("{}")
    expected = {
        name: (tmp_path / "base" / name).read_bytes() for name in [*OLDER, "tokenizer.json"]
    }
    assert tokenizer_files(tokenizer) == expected
    save_tokenizer(tokenizer_files(tokenizer), tmp_path / "run" / "tokenizer")
    assert tokenizer_files(open_tokenizer(str(tmp_path / "run" / "tokenizer"))) == expected


def test_what_transformers_4_refuses_is_said_so_that_both_read_it(
    trained: TextTokenizer, tmp_path: Path
) -> None:
    newer = {
        "tokenizer_class": "TokenizersBackend",
        "backend": "tokenizers",
        "eos_token": "<|im_end|>",
        "additional_special_tokens": ["<|pad|>"],
        "extra_special_tokens": ["<|im_start|>", "<|pad|>"],
        "auto_map": {"AutoTokenizer": ["own.Own", None]},
    }
    tokenizer = made(tmp_path / "base", trained, {"tokenizer_config.json": newer})
    config = written_config(tokenizer_files(tokenizer))
    assert config == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "backend": "tokenizers",
        "eos_token": "<|im_end|>",
        "additional_special_tokens": ["<|pad|>", "<|im_start|>"],
    }


def test_a_tokenizer_that_is_trained_is_of_a_class_that_both_have(trained: TextTokenizer) -> None:
    config = written_config(tokenizer_files(trained))
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["chat_template"] == trained.chat_template
    assert "checksums.json" not in tokenizer_files(trained)


def test_templates_in_files_are_in_the_config_too(trained: TextTokenizer, tmp_path: Path) -> None:
    one = made(
        tmp_path / "one",
        trained,
        {"tokenizer_config.json": {"eos_token": "<|im_end|>"}, "chat_template.jinja": TEMPLATE},
    )
    files = tokenizer_files(one)
    assert files["chat_template.jinja"] == TEMPLATE.encode()
    assert written_config(files) == {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    several = made(
        tmp_path / "several",
        trained,
        {
            "tokenizer_config.json": {},
            "chat_template.jinja": TEMPLATE,
            "additional_chat_templates/tool_use.jinja": OTHER,
        },
    )
    files = tokenizer_files(several)
    assert files["additional_chat_templates/tool_use.jinja"] == OTHER.encode()
    assert written_config(files)["chat_template"] == [
        {"name": "default", "template": TEMPLATE},
        {"name": "tool_use", "template": OTHER},
    ]


@pytest.mark.parametrize("ending", ["", "\r\n"])
@pytest.mark.parametrize("in_file", [True, False])
def test_a_run_with_a_template_of_its_own_keeps_that(
    in_file: bool, ending: str, trained: TextTokenizer, tmp_path: Path
) -> None:
    base: dict[str, Any] = {"tokenizer_config.json": {"chat_template": TEMPLATE}}
    if in_file:
        base = {"tokenizer_config.json": {}, "chat_template.jinja": TEMPLATE + ending}
    tokenizer = made(tmp_path, trained, base)
    unchanged = tokenizer_files(tokenizer)
    assert unchanged.get("chat_template.jinja") == (
        (TEMPLATE + ending).encode() if in_file else None
    )
    files = tokenizer_files(dataclasses.replace(tokenizer, chat_template=OTHER))
    assert files["chat_template.jinja"] == OTHER.encode()
    assert written_config(files) == {"chat_template": OTHER}


def test_a_tokenizer_without_a_tokenizer_json_gains_one(
    trained: TextTokenizer, tmp_path: Path
) -> None:
    model = json.loads(trained.json)["model"]
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    tokenizer = open_tokenizer(str(tmp_path))
    files = tokenizer_files(tokenizer)
    assert sorted(files) == ["merges.txt", "tokenizer.json", "tokenizer_config.json", "vocab.json"]
    assert files["tokenizer.json"].decode() == tokenizer.json


@pytest.mark.parametrize("content", ["[]", "{", "[" * 100_000])
def test_a_config_that_is_not_an_object_is_named(
    content: str, trained: TextTokenizer, tmp_path: Path
) -> None:
    tokenizer = made(tmp_path, trained, {"tokenizer_config.json": {}})
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(UserError, match=str(tmp_path)):
        tokenizer_files(tokenizer)


def test_a_hub_tokenizer_has_its_files_in_the_cache(
    trained: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    local = made(snapshot, trained, OLDER)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    remote = dataclasses.replace(local, origin="org/name")
    assert tokenizer_files(remote) == tokenizer_files(local)
    with limited(FetchLimits(("x: org/name",), frozenset(), False)):
        assert tokenizer_files(remote) == tokenizer_files(local)
