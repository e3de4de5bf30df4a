"""One row of the table of families: what transformers takes for fields left out, and which parts the blocks have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from drillyard.modelspec.block_modules import AttentionPart, MlpPart, NormPart, Tensors, rms_norm
from drillyard.modelspec.config_fields import ConfigFields
from drillyard.modelspec.layer_rules import KindsRule, SparseRule, all_full


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How the models of one `model_type` are built.

    `defaults` are the values of transformers' config class for the fields that shapes and windows depend on; None is a
    value that is derived from others. `block_norms` and `final_norm` may depend on fields. `experts` replace `mlp` in
    the layers that `sparse` names. `aliases` are other names of fields, `harmless` fields of this family alone that
    change neither shapes nor windows, `fixed` fields of which only one value is known.
    """

    defaults: Mapping[str, Any]
    attention: AttentionPart
    mlp: MlpPart
    block_norms: tuple[str, ...] | Callable[[ConfigFields], tuple[str, ...]] = (
        "input_layernorm",
        "post_attention_layernorm",
    )
    norm: NormPart = rms_norm
    norm_weights: bool | str = True
    final_norm: str = "model.norm"
    final_norm_when: Callable[[ConfigFields], bool] = lambda f: True
    embedding: str = "model.embed_tokens"
    embedding_size: str = "hidden_size"
    root: Callable[[ConfigFields], Tensors] = lambda f: ()
    positions: str | None = None
    """The field that holds the number of learned positions."""
    blocks: str = "model.layers"
    head: str = "lm_head"
    head_bias: bool | str = False
    parallel: bool | str = False
    kinds: KindsRule = all_full
    linear_attention: AttentionPart | None = None
    experts: MlpPart | None = None
    sparse: SparseRule = lambda f: frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)
    harmless: frozenset[str] = frozenset()
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    hidden_divides_by_heads: bool = False
    """Whether transformers insists that it does although head_dim is a field of its own."""
    head_dim_is_derived: bool = False
    """Whether transformers takes the hidden size over the heads, whatever head_dim says."""
    extra_prediction_layers: str | None = None
    """The field with the number of multi-token prediction layers, which transformers does not build."""
