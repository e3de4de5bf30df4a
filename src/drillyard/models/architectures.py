"""How a model of a supported architecture is handled here, and the settings that no row of the
table covers.

A packed batch trains correctly only if every attention layer takes the masks it is given, and a
sharded model is written and read correctly only if the names of its weights on disk are understood.
Both are tested for each row of `ARCHITECTURES`. A model that is not in the table is refused: some
would leak across documents without a sign.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from drillyard.config.model_files import (
    ARCHITECTURES,
    SETTINGS_WITHOUT_EFFECT,
    Architecture,
    unsupported_architecture,
)
from drillyard.errors import UserError


def architecture(model_type: str) -> Architecture:
    """The table's row for a model type; UserError with the nearest spelling and the whole list when
    there is none."""
    if model_type not in ARCHITECTURES:
        raise UserError(f"model: {unsupported_architecture(model_type)}")
    return ARCHITECTURES[model_type]


def blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The transformer blocks of a causal language model, first to last."""
    return list(getattr(model.base_model, architecture(model.config.model_type).blocks))


def settings_without_effect(config: Any) -> list[str]:
    """Settings of a model's own config that training does not follow, as notes: many configs carry
    them."""
    return [
        f"the model's config has {key}: true, which has no effect here: {reason.partition(';')[0]}"
        for key, reason in SETTINGS_WITHOUT_EFFECT.items()
        # A dtype is never `true`, and transformers warns of its old name whenever it is read.
        if key != "torch_dtype" and getattr(config, key, None) is True
    ]


def refuse_unproven_settings(config: Any, sequence_length: int) -> None:
    """Raise UserError for settings under which a table row does not hold: training would be wrong,
    or fail."""
    problems = []
    rope = getattr(config, "rope_parameters", None) or {}
    for table in [table for table in rope.values() if isinstance(table, dict)] or [rope]:
        original = table.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if table.get("rope_type") == "longrope" and original and sequence_length > original:
            problems.append(
                "rope_type longrope changes its table with the longest document of a batch beyond"
                f" {original} tokens; use data.sequence_length <= {original}"
            )
    if getattr(config, "is_causal", True) is False or getattr(
        config, "use_bidirectional_attention", None
    ):
        problems.append("attention is not causal: only causal language models are trained here")
    if getattr(config, "quantization_config", None) is not None:
        problems.append("the weights are quantised; use the unquantised model")
    if getattr(config, "add_cross_attention", False):
        problems.append("cross attention is not supported")
    if problems:
        raise UserError(f"model of type {config.model_type}: " + "; ".join(problems))
