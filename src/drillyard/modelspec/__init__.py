"""A model from its config alone, without torch: tensors, parameters, FLOPs per token under named formulas, MFU."""

from drillyard.modelspec.adapters import adapted, adapter_parameters
from drillyard.modelspec.built import built_spec, counted_spec
from drillyard.modelspec.families import FAMILIES
from drillyard.modelspec.flops import (
    FORMULAS,
    Formula,
    attention_flops_per_token,
    flops_per_token,
    formula_label,
    mean_attended_length,
    training_flops_per_token,
)
from drillyard.modelspec.reading import model_spec, read_config
from drillyard.modelspec.spec import Attention, Block, Mlp, ModelSpec, Tensor
from drillyard.modelspec.utilisation import Utilisation, implausible, mfu, utilisation

__all__ = [
    "FAMILIES",
    "FORMULAS",
    "Attention",
    "Block",
    "Formula",
    "Mlp",
    "ModelSpec",
    "Tensor",
    "Utilisation",
    "adapted",
    "adapter_parameters",
    "attention_flops_per_token",
    "built_spec",
    "counted_spec",
    "flops_per_token",
    "formula_label",
    "implausible",
    "mean_attended_length",
    "mfu",
    "model_spec",
    "read_config",
    "training_flops_per_token",
    "utilisation",
]
