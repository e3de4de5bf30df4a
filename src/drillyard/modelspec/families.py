"""The families of models whose shapes are known: the rows of families.yaml, one per `model_type`.

A row says what transformers takes for fields that a config.json leaves out (a saved config omits
some, an inline one many) and which modules its blocks have. Every row is tested against the models
that transformers builds.

Cost: about 10 ms when the first family of a process is looked up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from drillyard.packaged_yaml import read_packaged_yaml

TEXT_PARTS: Final[dict[str, str]] = {"gemma3": "gemma3_text", "llama4": "llama4_text"}
"""The family of the text part of a multimodal config whose `text_config` does not name it."""

SIZES: Final = (
    *("vocab_size", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
)
"""The fields that `sizes` of a row gives."""

Settings = Mapping[str, Any]
"""Keyword arguments of a function in block_modules.py, and `kind`, which chooses it."""
Switch = bool | str
"""A constant of the family, or the field of the config that switches it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Structure of the models of one `model_type`.

    `defaults` are the values of transformers' config class for the fields that shapes and windows
    depend on; None is a value that is derived from others. `experts` replace `mlp` in the layers
    that `sparse_layers` selects. `aliases` are other names of fields, `ignored` fields of this
    family alone that change neither shapes nor windows, `fixed` fields of which only the given
    values are known.
    """

    defaults: Mapping[str, Any]
    attention: Settings = field(default_factory=dict)
    linear_attention: Settings | None = None
    mlp: Settings = field(default_factory=dict)
    experts: Settings | None = None
    layer_kinds: Sequence[Any] = ("full",)
    """A rule of layer_rules.py with its arguments."""
    sparse_layers: str | None = None
    """A rule of layer_rules.py."""
    norm: str = "rms_norm"
    norm_weights: Switch = True
    block_norms: Sequence[str] = ("input_layernorm", "post_attention_layernorm")
    parallel_block_norms: Sequence[str] | None = None
    """The norms of a block where `parallel` is switched on, if they differ."""
    parallel: Switch = False
    final_norm: str = "model.norm"
    final_norm_flags: Mapping[str, bool] = field(default_factory=dict)
    """The flags with which there is a final norm."""
    embedding: str = "model.embed_tokens"
    embedding_size: str = "hidden_size"
    embedding_norm: str | None = None
    embedding_projections: Sequence[str] = ()
    """The modules that project into and out of an embedding narrower than the hidden size."""
    positions: str | None = None
    """The field with the number of learned positions."""
    position_table: str | None = None
    extra_positions: int = 0
    blocks: str = "model.layers"
    head: str = "lm_head"
    head_bias: Switch = False
    aliases: Mapping[str, str] = field(default_factory=dict)
    ignored: Sequence[str] = ()
    fixed: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    hidden_divides_by_heads: bool = False
    """Whether transformers requires it although head_dim is a field."""
    head_dim_is_derived: bool = False
    """Whether transformers takes the hidden size over the heads, whatever head_dim says."""
    extra_prediction_layers: str | None = None
    """The field with the number of multi-token prediction layers, which transformers does not
    build."""


@cache
def all_families() -> Mapping[str, Family]:
    """All families by `model_type`."""
    return {
        name: _family(row)
        for name, row in read_packaged_yaml("drillyard.modelspec", "families.yaml").items()
    }


def _family(row: dict[str, Any]) -> Family:
    if (sizes := row.pop("sizes", None)) is not None:
        common = {
            **dict(zip(SIZES, sizes, strict=True)),
            "head_dim": None,
            "tie_word_embeddings": False,
        }
        row["defaults"] = common | row.get("defaults", {})
    return Family(**row)
