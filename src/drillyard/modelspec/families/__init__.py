"""The families of models whose shapes are known: one row per `model_type`.

A row says what transformers takes for fields that a config.json leaves out (a saved config omits some, an inline one
many) and which parts its blocks have. Every row is tested against the models that transformers builds.
"""

from __future__ import annotations

from typing import Final

from drillyard.modelspec.families.classic import CLASSIC
from drillyard.modelspec.families.family import Family
from drillyard.modelspec.families.llama_like import LLAMA_LIKE
from drillyard.modelspec.families.mixtures import MIXTURES

FAMILIES: Final[dict[str, Family]] = LLAMA_LIKE | MIXTURES | CLASSIC

TEXT_PARTS: Final[dict[str, str]] = {"gemma3": "gemma3_text", "llama4": "llama4_text"}
"""The family of the text part of a multimodal config whose `text_config` does not name it."""

__all__ = ["FAMILIES", "TEXT_PARTS", "Family"]
