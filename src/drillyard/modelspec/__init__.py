"""A model from its config alone, without torch: tensors, parameters, FLOPs per token under named
formulas, MFU."""

from drillyard.modelspec.adapters import (
    AdapterTargets,
    adapter_layers,
    adapter_matrices,
    adapter_module_names,
    adapter_parameters,
    layers_sharing_input,
)
from drillyard.modelspec.config_json import model_spec, read_config
from drillyard.modelspec.families import all_families
from drillyard.modelspec.flops import (
    FORMULAS,
    Formula,
    attention_flops_per_token,
    flops_per_token,
    formula_label,
    implausible_mfu,
    mean_attended_length,
)
from drillyard.modelspec.spec import Attention, Block, Mlp, ModelSpec, TensorSpec
from drillyard.modelspec.unknown_family import spec_from_counts, spec_from_shapes

__all__ = [
    "FORMULAS",
    "AdapterTargets",
    "Attention",
    "Block",
    "Formula",
    "Mlp",
    "ModelSpec",
    "TensorSpec",
    "adapter_layers",
    "adapter_matrices",
    "adapter_module_names",
    "adapter_parameters",
    "all_families",
    "attention_flops_per_token",
    "flops_per_token",
    "formula_label",
    "implausible_mfu",
    "layers_sharing_input",
    "mean_attended_length",
    "model_spec",
    "read_config",
    "spec_from_counts",
    "spec_from_shapes",
]
