"""Read the fields of a config.json under one family: fill in defaults, check types, refuse unknown
fields.

A family declares the fields that decide shapes or attended lengths. The fields in `_IGNORED` decide
neither: numerics, dropout, rotary tables, token ids, routing scores, bookkeeping. Any other field
may change shapes, so it is an error unless its value is null, false, 0 or empty.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

from drillyard.errors import UserError
from drillyard.modelspec.families import Family, Switch

REMEDY: Final = (
    "\nGive --params (and --active-params) instead, or --build to count the model that transformers"
    " builds."
)
_ACTIVATIONS: Final = ("hidden_activation", "hidden_act", "activation_function", "activation")

_MOST: Final = (
    (re.compile(r"layers?$"), 10_000),
    (re.compile(r"experts?$|heads?(_kv)?$"), 100_000),
    (re.compile(r"^(num|n|max)_|_(size|dim|width|length|window|rank|positions)$"), 10**9),
)
"""Limits beyond any model, by name: nothing of such a size is built, or counted layer by layer."""

_SIZES: Final = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def require_plausible_sizes(config: Mapping[str, Any], source: str) -> None:
    """Raise UserError for a size that no model has, in a config.json or a part of it. `source`
    names the config."""
    for name, value in config.items():
        if isinstance(value, Mapping) and name.endswith("config"):
            require_plausible_sizes(value, f"{source}: {name}")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            most = next((most for pattern, most in _MOST if pattern.search(name)), None)
            if most is not None and abs(value) > most:
                shown = value if isinstance(value, float) or abs(value) < 10**30 else "a number"
                raise UserError(f"{source}: {name} is {shown}, more than {most}")


class ConfigFields:
    """The fields of one config under one family. Every reader raises UserError where the value has
    a wrong type."""

    def __init__(
        self,
        config: Mapping[str, Any],
        model_type: str,
        family: Family,
        *,
        source: str,
        built: bool,
    ) -> None:
        """`source` names the config in errors. `built`: transformers built the model, so unknown
        fields are ignored."""
        defaults, aliases, fixed = family.defaults, family.aliases, family.fixed
        self.source = source
        self.model_type = model_type
        self.activation = next(
            (config[name] for name in _ACTIVATIONS if isinstance(config.get(name), str)), None
        )
        self._values = dict(defaults)
        self.left_out = [
            name for name in _SIZES if name not in {aliases.get(given, given) for given in config}
        ]
        """Sizes that the config does not give, so the defaults of transformers count."""
        for name, value in config.items():
            if (own := aliases.get(name, name)) in defaults:
                self._set(own, name, value, config)
            elif not value or built or name in family.ignored or is_ignored(name):
                continue
            elif name not in fixed:
                near = difflib.get_close_matches(name, defaults, n=1)
                hint = f" (did you mean {near[0]}?)" if near else ""
                raise self.error(
                    f"{name}: {model_type} has no such field{hint}, and it may change shapes",
                    remedy=True,
                )
            elif value not in fixed[name]:
                known = " or ".join(repr(choice) for choice in fixed[name])
                raise self.error(
                    f"{name} is {value!r}; of {model_type} only {known} is known", remedy=True
                )

    def _set(self, own: str, name: str, value: Any, config: Mapping[str, Any]) -> None:
        """Set a value given under its own name or an alias; two that contradict each other are an
        error."""
        given = config.get(own)
        if own == name or given is None:
            self._values[own] = value
        elif value is not None and value != given:
            raise self.error(f"{name} is {value!r}, but {own}, which means the same, is {given!r}")

    def error(self, problem: str, *, remedy: bool = False) -> UserError:
        """The exception for a problem of this config; `remedy` adds the options that need no
        shapes."""
        return UserError(f"{self.source}: {problem}.{REMEDY if remedy else ''}")

    def integer(self, name: str, derived: int | None = None, *, minimum: int = 1) -> int:
        """An integer of at least `minimum`; `derived` where the field is null."""
        value = self._values[name]
        if value is None and derived is not None:
            return derived
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            kind = "a positive integer" if minimum == 1 else f"an integer of at least {minimum}"
            raise self.error(f"{name} must be {kind}, found {value!r}")
        return value

    def optional_integer(self, name: str) -> int | None:
        return None if self._values[name] is None else self.integer(name)

    def flag(self, name: str) -> bool:
        """True or false; null counts as false."""
        value = self._values[name]
        if value is not None and not isinstance(value, bool):
            raise self.error(f"{name} must be true or false, found {value!r}")
        return bool(value)

    def switch(self, setting: Switch) -> bool:
        """A constant of the family, or the flag that a config sets."""
        return self.flag(setting) if isinstance(setting, str) else setting

    def sequence(self, name: str) -> list[Any] | None:
        value = self._values[name]
        if value is not None and not isinstance(value, list | tuple):
            raise self.error(f"{name} must be a list, found {value!r}")
        return None if value is None else list(value)

    def layer_indices(self, name: str) -> frozenset[int] | None:
        """A list of layers by index, from 0; null gives None."""
        value = self.sequence(name)
        wrong = next(
            (
                index
                for index in value or ()
                if isinstance(index, bool) or not isinstance(index, int)
            ),
            None,
        )
        if wrong is not None:
            raise self.error(f"{name} must be a list of integers, found {wrong!r} in it")
        return None if value is None else frozenset(value)

    def value(self, name: str) -> Any:
        """The raw value, for fields of more than one type."""
        return self._values[name]

    def has(self, name: str) -> bool:
        return name in self._values

    # The shape that every family has.

    @property
    def hidden(self) -> int:
        return self.integer("hidden_size")

    @property
    def layers(self) -> int:
        return self.integer("num_hidden_layers")

    @property
    def vocab(self) -> int:
        return self.integer("vocab_size")

    @property
    def heads(self) -> int:
        return self.integer("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        kv_heads = (
            self.integer("num_key_value_heads", self.heads)
            if self.has("num_key_value_heads")
            else self.heads
        )
        if self.heads % kv_heads:
            raise self.error(
                f"{self.heads} attention heads do not divide by {kv_heads} key-value heads"
            )
        return kv_heads

    @property
    def head_dim(self) -> int:
        if self.has("head_dim") and self.value("head_dim") is not None:
            return self.integer("head_dim")
        if self.hidden % self.heads:
            raise self.error(
                f"the hidden size {self.hidden} does not divide by {self.heads} attention heads"
            )
        return self.hidden // self.heads


_IGNORED: Final = frozenset(
    {
        # bookkeeping
        "architectures",
        "architecture",
        "model_type",
        "auto_map",
        "transformers_version",
        "tokenizer_class",
        "task_specific_params",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "torch_dtype",
        "dtype",
        "quantization_config",
        "compression_config",
        "transformers.js_config",
        "is_llama_config",
        "finetuning_task",
        "is_encoder_decoder",
        "is_decoder",
        "model_max_length",
        # what a forward pass returns, keeps or runs on
        "output_hidden_states",
        "output_attentions",
        "output_router_logits",
        "return_dict",
        "use_return_dict",
        "torchscript",
        "use_cache",
        "cache_implementation",
        "chunk_size_feed_forward",
        "pretraining_tp",
        "gradient_checkpointing",
        "attn_implementation",
        "attn_impl",
        "use_flash_attn",
        "use_flash_attention",
        "flash_attn",
        "use_bfloat16",
        # generation settings that old configs carry
        "max_length",
        "min_length",
        "max_new_tokens",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "num_return_sequences",
        "output_scores",
        "return_dict_in_generate",
        "remove_invalid_values",
        "suppress_tokens",
        "begin_suppress_tokens",
        "prefix",
        # initialisation and elementwise functions
        "initializer_range",
        "init_std",
        "hidden_act",
        "hidden_activation",
        "activation_function",
        "activation",
        "swiglu_limit",
        "swiglu_alpha",
        "layerdrop",
        "residual_in_fp32",
        "use_parallel_residual",
        "clip_qkv",
        # positions that have no parameters
        "max_position_embeddings",
        "original_max_position_embeddings",
        "max_sequence_length",
        "seq_length",
        "initial_context_length",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "rope_local_base_freq",
        "rope_interleave",
        "rope_type",
        "rope_pct",
        "partial_rotary_factor",
        "rotary",
        "rotary_dim",
        "rotary_pct",
        "rotary_emb_base",
        "rotary_scaling_factor",
        "rope_interleaved",
        "no_rope_layers",
        "no_rope_layer_interval",
        # scales
        "attention_multiplier",
        "embedding_multiplier",
        "logits_scaling",
        "residual_multiplier",
        "logit_scale",
        "query_pre_attn_scalar",
        "scale_attn_weights",
        "attention_softmax_in_fp32",
        "scale_attention_softmax_in_fp32",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "attn_temperature_tuning",
        "attn_scale",
        "floor_scale",
        # how a router chooses, not how many
        "scoring_func",
        "topk_method",
        "topk_group",
        "n_group",
        "routed_scaling_factor",
        "norm_topk_prob",
        "seq_aux",
        "aux_loss_alpha",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "input_jitter_noise",
        "ep_size",
        "moe_norm_min",
    }
)

_IGNORED_PATTERNS: Final = (
    "*_token_id",
    "*_token_index",
    "*dropout*",
    "*_pdrop",
    "*_eps",
    "*_epsilon",
    "summary_*",
    "unsloth_*",
    "_name_or_path",
    "_attn_implementation*",
    "_commit_hash",
    "_from_model_config",
)


def is_ignored(name: str) -> bool:
    """Whether the field decides neither shapes nor attended lengths in any family."""
    return name in _IGNORED or any(fnmatchcase(name, pattern) for pattern in _IGNORED_PATTERNS)
