"""A model from its config alone, without torch: parameter counts, FLOPs per token under named formulas, MFU."""

from drillyard.modelspec.families import FAMILIES
from drillyard.modelspec.flops import FORMULAS, Formula, flops_per_token, mfu, training_flops_per_token
from drillyard.modelspec.spec import ModelSpec, model_spec

__all__ = [
    "FAMILIES",
    "FORMULAS",
    "Formula",
    "ModelSpec",
    "flops_per_token",
    "mfu",
    "model_spec",
    "training_flops_per_token",
]
