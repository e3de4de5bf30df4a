"""Small sources, tokenizers and run configs for the tests of the data room."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from drillyard.config.run import RunConfig
from drillyard.data import tokenizer as tokenizers_of_runs

TEXTS = [f"def f{i}(x):\n    return x + {i} * {i % 7}\n" * (1 + i % 5) for i in range(60)]


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved byte-level tokenizer with <|endoftext|> as beginning and end."""
    directory = tmp_path_factory.mktemp("tokenizer")
    trained = tokenizers_of_runs._as_pretrained(tokenizers_of_runs._train(320, iter(TEXTS)))
    trained.save_pretrained(str(directory))
    return directory


@pytest.fixture
def chat_tokenizer(
    tokenizer_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Save the tokenizer with a chat template, and the tokens that ChatML needs."""

    def saved(template: str) -> Path:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_directory)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        tokenizer.chat_template = template
        directory = tmp_path_factory.mktemp("chat-tokenizer")
        tokenizer.save_pretrained(directory)
        return directory

    return saved


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Write rows as a JSON Lines file."""

    def write(rows: list[Any], name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def make_config(tmp_path: Path, tokenizer_directory: Path) -> Callable[..., RunConfig]:
    """A run config around settings of `data`; the cache is the test's own."""

    def make(source: Any, seed: int = 0, **data: Any) -> RunConfig:
        settings = {
            "sequence_length": 64,
            "tokenizer": str(tokenizer_directory),
            "cache_directory": str(tmp_path / "cache"),
        }
        listed = source if isinstance(source, list) else [source]
        paths = [str(item) if isinstance(item, Path) else item for item in listed]
        return RunConfig.model_validate(
            {
                "name": "test",
                "model": {"config": {"architecture": "llama"}, "init": "random"},
                "data": {**settings, "source": paths if len(paths) > 1 else paths[0], **data},
                "training": {"steps": 1, "seed": seed, "optimizer": {"learning_rate": 1e-3}},
            }
        )

    return make
