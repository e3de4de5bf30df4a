"""Check a model's own config before anything starts, without transformers.

The config is inline, in a directory, or in the local Hugging Face cache. Where it is not on this
machine nothing is checked here, and the ranks check again before they prepare data.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, Literal

from drillyard.config.problems import Problem, closest_name
from drillyard.config.run import RunConfig
from drillyard.config.run_model import ModelConfig
from drillyard.errors import ConfigError
from drillyard.guarded_files import (
    LARGEST_MODEL_DOCUMENT_BYTES,
    is_there,
    read_json,
    require_documents,
    require_regular,
    require_usual_files,
)

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
NAMES_SHOWN = 5
"""The most weights or files that an error lists."""


@dataclass(frozen=True)
class Architecture:
    """Structure of one transformers `model_type`.

    `blocks` is the attribute of the base model that holds the transformer blocks in order. `masks`
    says what its forward takes as attention_mask: one causal mask for all layers (`full`), one that
    is limited to the sliding window where the config has one (`window`), or a dictionary with a
    mask per layer type (`by-layer-type`). `undeclared` are settings that the model reads and its
    config class does not declare. `mixture`: it has experts.
    """

    masks: Literal["full", "window", "by-layer-type"]
    blocks: str = "layers"
    undeclared: tuple[str, ...] = ()
    mixture: bool = False


# transformers' model_type of each architecture that the tests train and whose memory estimate they
# compare.
ARCHITECTURES: dict[str, Architecture] = {
    "cohere": Architecture("full"),
    "cohere2": Architecture("by-layer-type"),
    "gemma2": Architecture("by-layer-type"),
    "gemma3_text": Architecture("by-layer-type", undeclared=("rope_local_base_freq",)),
    "gpt2": Architecture("full", blocks="h"),
    "granite": Architecture("full"),
    "llama": Architecture("full"),
    "mistral": Architecture("window"),
    "mixtral": Architecture("window", mixture=True),
    "olmo2": Architecture("full"),
    "olmo3": Architecture("by-layer-type"),
    "phi3": Architecture("window", undeclared=("partial_rotary_factor",)),
    "qwen2": Architecture("by-layer-type"),
    "qwen3": Architecture("by-layer-type"),
    "qwen3_moe": Architecture("window", undeclared=("head_dim",), mixture=True),
    "smollm3": Architecture("by-layer-type"),
}

# Settings of transformers' configs that the trainer ignores, and what to use instead.
SETTINGS_WITHOUT_EFFECT = {
    "output_router_logits": (
        "the auxiliary loss that balances a mixture's experts is not computed; remove it"
    ),
    "dtype": "training.precision says in what the model computes; remove it",
    "torch_dtype": "training.precision says in what the model computes; remove it",
}

REMOTE_CODE_REFUSED = (
    "needs Python code of its own, which Drillyard never runs: it is named by auto_map"
)


def requires_remote_code(error: Exception) -> bool:
    """Whether transformers refused to run the code of a model's or tokenizer's repository
    (trust_remote_code=False)."""
    return isinstance(error, ValueError) and "trust_remote_code" in str(error)


def unsupported_architecture(model_type: str) -> str:
    """Reason why a model of this type is refused, with the nearest spelling and all that are
    supported."""
    longer = (name for name in ARCHITECTURES if name.startswith(f"{model_type}_"))
    near = next(longer, None) or closest_name(model_type, ARCHITECTURES, cutoff=0.75)
    meant = f"did you mean {near}? " if near else ""
    return (
        f"architecture '{model_type}' is not supported: neither the isolation of packed documents"
        f" nor its weight format is proven for it; {meant}supported: {', '.join(ARCHITECTURES)}"
    )


def model_problems(model: ModelConfig) -> Iterator[Problem]:
    """Reasons not to train the model: its architecture, and settings of an inline config that would
    be ignored."""
    if model.config is not None:
        model_type = model.config.get("architecture")
        if isinstance(model_type, str) and model_type not in ARCHITECTURES:
            yield Problem(("model", "config", "architecture"), unsupported_architecture(model_type))
        for key, instead in SETTINGS_WITHOUT_EFFECT.items():
            if model.config.get(key) not in (None, False):
                yield Problem(("model", "config", key), f"has no effect here: {instead}")
    elif model.id is not None:
        model_type = local_model_config(model.id).get("model_type")
        if isinstance(model_type, str) and model_type not in ARCHITECTURES:
            yield Problem(("model", "id"), f"{model.id}: {unsupported_architecture(model_type)}")


def position_problems(
    sequence_length: int, content: Mapping[str, Any], name: str
) -> Iterator[Problem]:
    """Reason why pretrained weights whose config.json is `content` cannot be trained at
    `sequence_length`."""
    positions = content.get("max_position_embeddings", content.get("n_positions"))
    if isinstance(positions, int) and sequence_length > positions:
        yield Problem(
            ("data", "sequence_length"),
            f"{sequence_length} is more than the {positions} positions that {name} was trained for;"
            f" set data.sequence_length to {positions} or less",
        )


def weight_files(directory: FilePath) -> list[FilePath]:
    """The safetensors files of a model directory, as its index lists them. Raises UserError when
    one is missing."""
    index = directory / INDEX
    if is_there(index):
        try:
            weight_map = read_json(index, LARGEST_MODEL_DOCUMENT_BYTES)["weight_map"]
            names = sorted({str(name) for name in weight_map.values()})
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"{index} is damaged ({error})\nfetch or export the model again"
            ) from error
        if outside := [
            name for name in names if FilePath(name).is_absolute() or ".." in FilePath(name).parts
        ]:
            raise ConfigError(
                f"{index} names {outside[0]!r}, which is not a file of {directory}\nfetch or export"
                " the model again"
            )
        if absent := [name for name in names if not (directory / name).is_file()]:
            raise ConfigError(
                f"{directory} lacks {len(absent)} of {len(names)} weight files, {absent[0]} for one"
            )
        return [directory / name for name in names]
    if (directory / WEIGHTS).is_file():
        return [directory / WEIGHTS]
    other = sorted(
        path.name
        for pattern in ("*.bin", "*.pth", "*.safetensors")
        for path in directory.glob(pattern)
    )
    found = f"it has {', '.join(other[:NAMES_SHOWN])}" if other else "it has no weights"
    raise ConfigError(
        f"{directory} has no {WEIGHTS} and no {INDEX}; {found}\n"
        "give a model in the safetensors format, or set model.init: random"
    )


def read_adapter_config(path: str | FilePath) -> dict[str, Any]:
    """The content of adapter_config.json in the directory of an adapter. Raises UserError where
    there is none."""
    file = FilePath(path).expanduser() / ADAPTER_CONFIG
    try:
        content = read_json(file)
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"model.lora.adapter: {file} cannot be read: {reason}\ngive the directory of an adapter"
            " in PEFT's format"
        ) from None
    if not isinstance(content, dict) or content.get("peft_type") != "LORA":
        raise ConfigError(
            f"model.lora.adapter: {file} describes no LoRA adapter\ngive the directory of one"
        )
    # peft's own values where a file does not say them.
    return {"r": 8, "lora_alpha": 8} | content


def read_adapted_layers(path: str | FilePath) -> list[str]:
    """The last part of the names of the layers that an adapter in PEFT's format has weights for,
    without torch.

    The target_modules of its config may also be whole names or a pattern. Raises UserError where
    the file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    opener: Any = safe_open
    file = FilePath(path).expanduser() / ADAPTER_WEIGHTS
    require_regular(file)
    try:
        with opener(str(file), framework="numpy") as stored:
            layers = [name.partition(".lora_A.")[0] for name in stored.keys() if ".lora_A." in name]  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise unreadable_adapter(file, error) from None
    return sorted({layer.rpartition(".")[2] for layer in layers})


def unreadable_adapter(file: FilePath, error: Exception) -> ConfigError:
    return ConfigError(
        f"model.lora.adapter: {file} cannot be read: {error}\nsave the adapter again with peft's"
        " save_pretrained"
    )


def require_weight_files(model: ModelConfig) -> None:
    """Raise UserError where pretrained weights are to come from a directory of this host that lacks
    their files."""
    directory = FilePath(model.id or "").expanduser()
    if model.init == "pretrained" and model.id is not None and directory.is_dir():
        require_model_directory(model.id)
        weight_files(directory)


def require_usual_model_files(config: RunConfig) -> None:
    """Raise UnsafeFileError for something odd in the place of a file of the model, the adapter or
    the tokenizer that `config` names on this machine, before torch is imported to read it."""
    adapter = config.model.lora and config.model.lora.adapter
    for named in (config.model.id, config.data.tokenizer, adapter):
        if isinstance(named, str):
            require_usual_files(FilePath(named).expanduser())


def require_model_directory(model_id: str) -> None:
    """Raise UserError where `model.id` is a path without a directory, or one without config.json.

    That of a run is answered with what its model is, or the command that writes it.
    """
    directory = FilePath(model_id).expanduser()
    if not directory.is_dir():
        if model_id.startswith((".", "/", "~")) or model_id.count("/") > 1:
            raise ConfigError(
                f"model.id: no directory {model_id}\ngive the path of a model directory or a"
                " Hugging Face id"
            )
        return
    require_documents([directory / "config.json"])
    if (directory / "config.json").is_file():
        return
    if (directory / "final" / "config.json").is_file():
        raise ConfigError(f"model.id: {model_id} is a run\ngive its model: {directory / 'final'}")
    checkpoints = sorted(path.parent.name for path in directory.glob("checkpoints/*/manifest.json"))
    if (directory / "run.yaml").is_file() and checkpoints:
        merge = " --merge" if _trains_adapters(directory) else ""
        words = shlex.join(["drillyard", "export", str(directory), f"{directory}-model"])
        raise ConfigError(
            f"model.id: {model_id} is a run without a model in final/; its checkpoints:"
            f" {', '.join(checkpoints[-NAMES_SHOWN:])}\nwrite the newest as a model and give that"
            f" directory: {words}{merge}"
        )
    raise ConfigError(
        f"model.id: {model_id} has no config.json\ngive a directory in the Hugging Face format"
    )


def _trains_adapters(run_directory: FilePath) -> bool:
    from drillyard.config.yaml_document import read_document

    config = read_document(run_directory / "run.yaml").value
    model = config.get("model") if isinstance(config, dict) else None
    return isinstance(model, dict) and model.get("lora") is not None


def require_vocabulary(model: ModelConfig, vocab_size: int, num_tokens: int) -> None:
    """Raise UserError where a model with a vocabulary of `vocab_size` lacks some of a tokenizer's
    `num_tokens`."""
    if vocab_size < num_tokens:
        raise ConfigError(
            f"the tokenizer has {num_tokens} entries, the model only {vocab_size}\n"
            "use the model's own tokenizer, or "
            + (
                "leave model.config.vocab_size out"
                if model.config
                else "train from an inline model.config"
            )
        )


def configured_vocab_size(model: ModelConfig) -> int | None:
    """The vocabulary of a model as its config says; None where it follows the tokenizer, or no
    config is here."""
    content = model.config if model.config is not None else local_model_config(model.id or "")
    vocab_size = content.get("vocab_size")
    return vocab_size if isinstance(vocab_size, int) else None


def local_model_config(model_id: str) -> dict[str, Any]:
    """The config.json of a model directory, or of a hub id from the local cache; empty where there
    is none to read."""
    path = FilePath(model_id).expanduser() / "config.json"
    try:
        content = read_json(path if is_there(path) else cached_config_path(model_id))
    except (OSError, ValueError, RecursionError):
        # The ranks report a missing or damaged config with the error of transformers.
        return {}
    return content if isinstance(content, dict) else {}


def cached_config_path(model_id: str) -> FilePath:
    """Path at which huggingface_hub keeps config.json of an id's main revision (its documented
    cache layout)."""
    home = os.environ.get("HF_HOME") or FilePath(
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"
    )
    hub = FilePath(os.environ.get("HF_HUB_CACHE") or FilePath(home, "hub")).expanduser()
    repository = hub / f"models--{model_id.replace('/', '--')}"
    commit = (repository / "refs" / "main").read_text(encoding="utf-8").strip()
    return repository / "snapshots" / commit / "config.json"
