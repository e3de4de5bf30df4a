"""What the benchmarks train: a Llama of a given shape on random text that fills every sequence, as
a run config."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any


def write_text(path: Path, *, documents: int, words: int) -> None:
    """`documents` JSONL rows of `words` words each, drawn from 2,000 made-up ones; the same on
    every call."""
    generator = random.Random(0)
    vocabulary = [
        "".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=generator.randint(2, 8)))
        for _ in range(2000)
    ]
    with path.open("w") as file:
        for _ in range(documents):
            file.write(
                json.dumps({"text": " ".join(generator.choices(vocabulary, k=words))}) + "\n"
            )


def llama_run(
    directory: Path,
    name: str,
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    sequence_length: int,
    micro_batch_size: int,
    vocab_size: int,
    documents: int,
    words: int,
    **sections: dict[str, Any],
) -> dict[str, Any]:
    """The settings of a run in `directory`, whose text is written there; `sections` add to those of
    the run config."""
    write_text(directory / "text.jsonl", documents=documents, words=words)
    settings: dict[str, dict[str, Any]] = {
        "model": {
            "init": "random",
            "config": {
                "architecture": "llama",
                "hidden_size": hidden,
                "intermediate_size": 4 * hidden,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "num_key_value_heads": kv_heads,
            },
        },
        "data": {
            "source": str(directory / "text.jsonl"),
            "sequence_length": sequence_length,
            "tokenizer": {"train": "bpe", "vocab_size": vocab_size},
            "cache_directory": str(directory / "cache"),
        },
        "training": {
            "micro_batch_size": micro_batch_size,
            "optimizer": {"learning_rate": 1e-3, "weight_decay": 0.01},
            "schedule": {"name": "constant"},
            "activation_checkpointing": "none",
        },
    }
    for section, changes in sections.items():
        settings.setdefault(section, {}).update(changes)
    return {"name": name, "output": str(directory / "runs"), **settings}
