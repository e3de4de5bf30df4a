"""What a model's own config says against training it, read without transformers and before anything starts.

The model is named by an inline config, a directory or a hub id. Of a directory and of an id that is in the local
Hugging Face cache, `config.json` is read; where neither is there (another machine will train), nothing is said here,
and the ranks look again before they prepare data. Costs one small file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any

from drillyard.config.problems import Problem, nearest
from drillyard.config.run import ModelConfig

# transformers' model_type of every architecture whose training is proven here; `models.architectures` says how each is.
ARCHITECTURES = (
    "cohere", "cohere2", "gemma2", "gemma3_text", "gpt2", "granite", "llama", "mistral", "mixtral", "olmo2", "olmo3",
    "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3",
)  # fmt: skip

# Settings of transformers' configs that this trainer does not follow, and what does what their users want.
WITHOUT_EFFECT = {
    "output_router_logits": "the auxiliary loss that balances a mixture's experts is not computed; remove it",
    "dtype": "training.precision says in what the model computes; remove it",
    "torch_dtype": "training.precision says in what the model computes; remove it",
}


def unsupported(model_type: str) -> str:
    """Why a model of this type is refused, with the nearest spelling and all that are supported."""
    longer = (name for name in ARCHITECTURES if name.startswith(f"{model_type}_"))
    near = next(longer, None) or nearest(model_type, ARCHITECTURES, cutoff=0.75)
    meant = f"did you mean {near}? " if near else ""
    return (
        f"architecture '{model_type}' is not supported: neither the isolation of packed documents nor its weight "
        f"format is proven for it; {meant}supported: {', '.join(ARCHITECTURES)}"
    )


def model_problems(model: ModelConfig) -> Iterator[Problem]:
    """Why the model cannot be trained: its architecture, and settings of an inline config that would be ignored."""
    if model.config is not None:
        model_type = model.config.get("architecture")
        if isinstance(model_type, str) and model_type not in ARCHITECTURES:
            yield Problem(("model", "config", "architecture"), unsupported(model_type))
        for key, instead in WITHOUT_EFFECT.items():
            if model.config.get(key) not in (None, False):
                yield Problem(("model", "config", key), f"has no effect here: {instead}")
    elif model.id is not None:
        model_type = local_model_config(model.id).get("model_type")
        if isinstance(model_type, str) and model_type not in ARCHITECTURES:
            yield Problem(("model", "id"), f"{model.id}: {unsupported(model_type)}")


def position_problems(sequence_length: int, content: Mapping[str, Any], name: str) -> Iterator[Problem]:
    """Why pretrained weights whose config.json is `content` cannot be trained at `sequence_length`."""
    positions = content.get("max_position_embeddings", content.get("n_positions"))
    if isinstance(positions, int) and sequence_length > positions:
        yield Problem(
            ("data", "sequence_length"),
            f"{sequence_length} is more than the {positions} positions that {name} was trained for; "
            f"set data.sequence_length to {positions} or less",
        )


def local_model_config(model_id: str) -> dict[str, Any]:
    """The config.json of a model directory, or of a hub id from the local cache; empty where there is none to read."""
    path = FilePath(model_id).expanduser() / "config.json"
    try:
        content = json.loads((path if path.is_file() else cached_config(model_id)).read_bytes())
    except (OSError, ValueError):
        # What is missing or damaged is told by the ranks, in the words of the library that reads all of it.
        return {}
    return content if isinstance(content, dict) else {}


def cached_config(model_id: str) -> FilePath:
    """Where huggingface_hub keeps the config.json of an id's main revision (its documented cache layout)."""
    home = os.environ.get("HF_HOME") or FilePath(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    hub = FilePath(os.environ.get("HF_HUB_CACHE") or FilePath(home, "hub")).expanduser()
    repository = hub / f"models--{model_id.replace('/', '--')}"
    commit = (repository / "refs" / "main").read_text(encoding="utf-8").strip()
    return repository / "snapshots" / commit / "config.json"
