"""A causal language model on the meta device from a run config: architecture and shapes, no
weights, no memory.

A model that does not fit the tokenizer or the sequence length is refused here, before anything is
allocated. Code from a model repository is never run.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypedDict, Unpack

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import __version__ as transformers_version
from transformers.utils import logging as transformers_logging

from drillyard.config.fetch_limits import withheld_error
from drillyard.config.model_files import (
    ARCHITECTURES,
    REMOTE_CODE_REFUSED,
    require_model_directory,
    require_vocabulary,
    requires_remote_code,
)
from drillyard.config.run_model import ModelConfig
from drillyard.errors import UserError
from drillyard.guarded_files import require_documents
from drillyard.hub_access import denied_access, require_cached_only
from drillyard.models.architectures import architecture, refuse_unproven_settings
from drillyard.models.attention import TRANSFORMERS_NAMES, refuse_unfit_kernel
from drillyard.modelspec import ModelSpec, spec_from_shapes
from drillyard.modelspec.config_fields import require_plausible_sizes

# Keys that config classes of transformers take besides their fields, by the field that they turn
# them into.
LEGACY_KEYS = {
    "rope_parameters": ("rope_theta", "rope_scaling"),
    "layer_types": ("sliding_window_pattern",),
}


class SpecialTokens(TypedDict, total=False):
    """The tokenizer's special tokens, where it has them."""

    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None


def build_model(
    model_config: ModelConfig,
    *,
    vocab_size: int | None,
    dtype: torch.dtype,
    attention: str,
    sequence_length: int,
    **special_tokens: Unpack[SpecialTokens],
) -> PreTrainedModel:
    """The model of a run config on the meta device, parameters in `dtype` (the master precision),
    ready to be sharded.

    `vocab_size` is the tokenizer's number of entries and `attention` a kernel that
    `resolve_attention` returned. Raises UserError for a model that is not there, a key or value
    that its config does not take, an architecture that is not proven, a vocabulary smaller than the
    tokenizer's or positions fewer than the sequence length.
    """
    config = load_config(model_config)
    if model_config.config is not None and "vocab_size" not in model_config.config:
        config.vocab_size = config.vocab_size if vocab_size is None else vocab_size
    elif vocab_size is not None:
        require_vocabulary(model_config, config.vocab_size, vocab_size)
    _fit_positions(config, model_config, sequence_length)
    refuse_unproven_settings(config, sequence_length)
    refuse_unfit_kernel(config, attention)
    if getattr(config, "output_router_logits", False):
        # The router's logits would be kept for an auxiliary loss that is not computed.
        config.output_router_logits = False
    if model_config.init != "pretrained":
        _set_special_tokens(config, model_config.config or {}, special_tokens)

    options: dict[str, Any] = {"attn_implementation": TRANSFORMERS_NAMES[attention]}
    if architecture(config.model_type).mixture and dtype == torch.float64:
        # The grouped matrix product of torch has no fp64; one expert after the other has.
        options["experts_implementation"] = "eager"
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=False, **options
            )  # type: ignore[no-untyped-call]
    except (
        Exception
    ) as error:  # a foreign class fails in its own way at each value that it cannot take
        raise UserError(
            f"{'model.config' if model_config.config else model_config.id}: no {config.model_type}"
            f" model can be built from these values: {type(error).__name__}: {_lines(error)[-1]}"
        ) from error
    # Recorded now: sharding replaces the class by one of another name.
    model.config.architectures = [type(model).__name__]
    model.config.use_cache = False
    _train_shared_padding_row(model)
    # A model without generation_config.json keeps what its config implies.
    if (found := load_generation_config(model_config)) is not None:
        model.generation_config = found
    for name, value in special_tokens.items():
        if value is not None and getattr(model.generation_config, name) is None:
            setattr(model.generation_config, name, value)
    return model


def load_config(model_config: ModelConfig) -> PreTrainedConfig:
    """The transformers config of `model.id` or of the inline `model.config`; its architecture is
    one of the table."""
    if model_config.config is not None:
        return _inline_config(model_config.config)
    assert model_config.id is not None
    directory = Path(model_config.id).expanduser()
    cached_only = not directory.is_dir() and require_cached_only(model_config.id, "model.id")
    require_model_directory(model_config.id)
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        # Before a config is made of them, which may have a list with an entry per layer.
        values, _ = PreTrainedConfig.get_config_dict(
            directory if directory.is_dir() else model_config.id,
            local_files_only=directory.is_dir() or cached_only,
        )
        # What is no object is refused by transformers below.
        if isinstance(values, dict):
            require_plausible_sizes(values, f"model.id: {model_config.id}")
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            directory if directory.is_dir() else model_config.id,
            trust_remote_code=False,
            local_files_only=directory.is_dir() or cached_only,
        )
    except (OSError, ValueError, KeyError, RecursionError, StrictDataclassError) as error:
        if requires_remote_code(error):
            raise UserError(
                f"model.id: {model_config.id} {REMOTE_CODE_REFUSED} in its config.json\ngive a"
                " model of an architecture that transformers has; supported:"
                f" {', '.join(ARCHITECTURES)}"
            ) from error
        if cached_only:
            raise withheld_error(f"model.id: {model_config.id}") from None
        if denied := denied_access(model_config.id, error):
            raise UserError(f"model.id: {denied}") from None
        raise UserError(
            f"model.id: {model_config.id} cannot be read: {_lines(error)[0]}\n"
            "check the id or path, the network, and access to the model (hf auth login)"
        ) from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    architecture(config.model_type)
    _share_rope_theta(config, values)
    return config


def _share_rope_theta(config: PreTrainedConfig, given: Mapping[str, Any]) -> None:
    """Give all layers of an Olmo 3 the `rope_theta` of its config.

    transformers 5 gives it to the layers of full attention alone, and the others its default.
    """
    if config.model_type == "olmo3" and "rope_theta" in given and not given.get("rope_parameters"):
        for table in config.rope_parameters.values():
            table["rope_theta"] = given["rope_theta"]


def load_generation_config(model_config: ModelConfig) -> GenerationConfig | None:
    """The generation settings that come with the pretrained model `model.id`; None where there are
    none."""
    if model_config.id is None or model_config.init != "pretrained":
        return None
    directory = Path(model_config.id).expanduser()
    is_directory = directory.is_dir()
    require_documents([directory / "generation_config.json"])
    cached_only = not is_directory and require_cached_only(model_config.id, "model.id")
    source = str(directory) if is_directory else model_config.id
    try:
        found: GenerationConfig = GenerationConfig.from_pretrained(
            source, local_files_only=is_directory or cached_only
        )
    except OSError:
        return None
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(
            f"model.id: {model_config.id}: its generation_config.json cannot be read:"
            f" {_lines(error)[0]}\nfetch the model again, or delete that file: it holds defaults of"
            " text generation alone"
        ) from error
    return found


def _inline_config(inline: dict[str, Any]) -> PreTrainedConfig:
    fields = dict(inline)
    model_type = fields.pop("architecture", None)
    if not isinstance(model_type, str):
        raise UserError(
            "model.config: `architecture` is missing; for example {architecture: llama,"
            " hidden_size: 256}"
        )
    require_plausible_sizes(fields, "model.config")
    undeclared = architecture(model_type).undeclared
    config_class = CONFIG_MAPPING[model_type]
    fields_of_class = {*config_class().to_dict(), *config_class.attribute_map}
    legacy = {
        key for field, keys in LEGACY_KEYS.items() if field in fields_of_class for key in keys
    }
    allowed = (fields_of_class | legacy | set(undeclared)) - {"model_type"}
    for key in fields:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1)
            generic = set(PreTrainedConfig().to_dict()) - {"tie_word_embeddings"}
            plain = sorted(name for name in allowed - generic if not name.startswith("_"))
            hint = f"did you mean {near[0]}?" if near else "its keys: " + ", ".join(plain)
            raise UserError(f"model.config.{key}: {model_type} has no such setting\n{hint}")
    try:
        config = config_class(**fields)
    except Exception as error:  # as in build_model
        raise UserError(
            f"model.config: not a valid {model_type} config: {_lines(error)[-1]}"
        ) from error
    _share_rope_theta(config, fields)
    return config


def _fit_positions(
    config: PreTrainedConfig, model_config: ModelConfig, sequence_length: int
) -> None:
    positions = config.max_position_embeddings
    if positions >= sequence_length:
        return
    if model_config.init == "pretrained":
        raise UserError(
            f"data.sequence_length {sequence_length} is more than the {positions} positions that"
            f" {model_config.id} was trained for\nset data.sequence_length to {positions} or less"
        )
    config.max_position_embeddings = sequence_length


def _set_special_tokens(
    config: PreTrainedConfig, explicit: dict[str, Any], tokens: SpecialTokens
) -> None:
    """Take the tokenizer's special tokens where the config does not name them.

    Its defaults (such as llama's bos 1, eos 2) name arbitrary tokens of a trained vocabulary.
    """
    bos, eos, pad = (tokens.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id"))
    for name, value in {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}.items():
        if name not in explicit:
            setattr(config, name, None if name == "pad_token_id" and pad in (bos, eos) else value)


def _train_shared_padding_row(model: PreTrainedModel) -> None:
    """Let the embedding of a padding token learn when it is the end or start token too.

    An `nn.Embedding` gives its padding row no gradient; many models reuse their end token for
    padding.
    """
    ends = model.config.eos_token_id
    shared = {model.config.bos_token_id, *(ends if isinstance(ends, list) else [ends])}
    embedding: Any = model.get_input_embeddings()
    if embedding.padding_idx is not None and embedding.padding_idx in shared:
        embedding.padding_idx = None


def _lines(error: BaseException) -> list[str]:
    """The lines of an error's text, or its type where it has none."""
    return [line.strip() for line in str(error).splitlines() if line.strip()] or [
        type(error).__name__
    ]


# What `spec_from_shapes` asks for, under the names that transformers gives it in every family.
_FIELDS: Final = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "qk_head_dim",
    "v_head_dim",
    "hidden_act",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)


def build_spec(config: Mapping[str, Any], *, source: str = "model config") -> ModelSpec:
    """The spec of a model that transformers builds and `modelspec` does not know. Raises
    UserError."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise UserError(
            f"{source}: transformers {transformers_version} does not know model_type"
            f" {model_type!r}\nGive --params and --active-params instead of --build."
        )
    require_plausible_sizes(config, source)
    try:
        resolved = CONFIG_MAPPING[model_type].from_dict(dict(config))
        with torch.device("meta"):
            # Some configs name an attention kernel of the hub, which transformers would fetch and
            # run.
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                resolved, trust_remote_code=False, attn_implementation="eager"
            )
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        AssertionError,
        StrictDataclassError,
    ) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{source}: transformers cannot build this {model_type}:"
            f" {reason or type(error).__name__}\nCorrect the config, or give --params and"
            " --active-params instead of --build."
        ) from error
    text = resolved.get_text_config(decoder=True)
    fields = {name: getattr(text, name, None) for name in _FIELDS}
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return spec_from_shapes(shapes, fields, source=source)
