"""Layout of a model's parameters on disk: which stored tensor is which part of which parameter.

Most parameters are stored whole, under their own name or an older one. transformers fuses some that
checkpoints keep apart, such as the experts of a mixture: `experts.gate_up_proj` [E, 2I, H] is
stored as `experts.<e>.w1.weight` and `.w3.weight`, each [I, H]. Either way a stored tensor is a box
of the parameter, a `StoredPiece`, for loading and for export.

The names come from transformers' own conversion tables; a conversion that is not a box is refused.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from drillyard.errors import UserError
from drillyard.models.sharding import Region, is_adapter_name, plain_name, whole_region

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By their names in safetensors files: https://github.com/huggingface/safetensors#format."""

# The conversions that are boxes: operations of a converter, with the dimension each works on.
STACKED = (("MergeModulelist", 0),)
STACKED_AND_JOINED = (("MergeModulelist", 0), ("Concatenate", 1))


@dataclass(frozen=True)
class StoredPiece:
    """A stored tensor and the box of the parameter that it fills; `stacked`: without the
    parameter's first dim."""

    stored_name: str
    region: Region
    stacked: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        sizes = tuple(part.stop - part.start for part in self.region)
        return sizes[1:] if self.stacked else sizes


def unwrapped_twin(model: PreTrainedModel) -> PreTrainedModel:
    """The same model on the meta device, as transformers knows it: without wrappers, shards or
    their class names."""
    config = copy.deepcopy(model.config)
    with torch.device("meta"):
        twin: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    return twin


def named_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by plain name, tied ones under each of their names; without
    adapters."""
    tensors: dict[str, torch.Tensor] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        if is_adapter_name(module_name):
            continue
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and name not in module._non_persistent_buffers_set:
                tensors[plain_name(f"{module_name}.{name}".lstrip("."))] = tensor
    return tensors


def pieces_of_files(
    model: PreTrainedModel, stored_shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, list[StoredPiece]], list[str]]:
    """(pieces of each parameter by name, stored names that belong to none) for the tensors of a
    checkpoint.

    Raises UserError where a stored shape does not fit, and for a conversion that is not a box.
    """
    twin = unwrapped_twin(model)
    shapes = {name: tensor.shape for name, tensor in twin.state_dict().items()}
    conversions = get_model_conversion_mapping(twin)
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [
        conversion for conversion in conversions if isinstance(conversion, WeightConverter)
    ]
    whole: dict[str, list[StoredPiece]] = {}
    unexpected: list[str] = []
    parts: dict[str, dict[str, list[str]]] = {}
    for stored in sorted(stored_shapes, key=dot_natural_key):
        name, pattern = rename_source_key(
            stored, renamings, converters, twin.base_model_prefix, shapes
        )
        if name not in shapes and stored in shapes:
            name, pattern = stored, None
        if name not in shapes:
            unexpected.append(stored)
        elif pattern is None:
            whole.setdefault(name, []).append(StoredPiece(stored, whole_region(shapes[name])))
        else:
            parts.setdefault(name, {}).setdefault(pattern, []).append(stored)
    for name, by_pattern in parts.items():
        converter = next(c for c in converters if set(by_pattern) <= set(c.source_patterns))
        groups = [by_pattern.get(pattern, []) for pattern in converter.source_patterns]
        operations = tuple(
            (type(each).__name__, getattr(each, "dim", -1)) for each in converter.operations
        )
        whole[name] = _stacked_pieces(name, shapes[name], groups, operations)
    for name, pieces in whole.items():
        _check_shapes(name, shapes[name], pieces, stored_shapes)
    ignored = [*(twin._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
    return whole, [
        name for name in unexpected if not any(re.search(pattern, name) for pattern in ignored)
    ]


def pieces_to_export(model: PreTrainedModel) -> dict[str, list[StoredPiece]]:
    """Pieces of each parameter by name, in the layout that checkpoints on the hub have; tied
    weights once."""
    twin = unwrapped_twin(model)
    tied = twin.all_tied_weights_keys
    shapes = {name: tensor.shape for name, tensor in twin.state_dict().items() if name not in tied}
    pieces: dict[str, list[StoredPiece]] = {}
    for name, shape in shapes.items():
        stored = revert_weight_conversion(twin, {name: torch.empty(shape, device="meta")})
        names = list(stored)
        if len(names) == 1 and stored[names[0]].shape == shape:
            pieces[name] = [StoredPiece(names[0], whole_region(shape))]
            continue
        num_parts, remainder = divmod(len(names), shape[0])
        if remainder:
            raise UserError(
                f"{name} is stored as {len(names)} tensors in a layout that is not known here"
            )
        groups = [names[part * shape[0] : (part + 1) * shape[0]] for part in range(num_parts)]
        pieces[name] = _stacked_pieces(
            name, shape, groups, STACKED if num_parts == 1 else STACKED_AND_JOINED
        )
        _check_shapes(
            name, shape, pieces[name], {key: tuple(tensor.shape) for key, tensor in stored.items()}
        )
    return pieces


def _stacked_pieces(
    name: str, shape: torch.Size, groups: list[list[str]], operations: tuple[tuple[str, int], ...]
) -> list[StoredPiece]:
    """Boxes of a parameter [E, J*I, ...] whose entries along E are stored apart, in J groups joined
    along I."""
    if operations not in (STACKED, STACKED_AND_JOINED) or (
        operations == STACKED and len(groups) != 1
    ):
        raise UserError(f"{name} is stored in a layout that is not known here ({operations})")
    joined = shape[1] // len(groups)
    rest = tuple(slice(0, size) for size in shape[2:])
    return [
        StoredPiece(
            stored, (slice(e, e + 1), slice(j * joined, (j + 1) * joined), *rest), stacked=True
        )
        for j, group in enumerate(groups)
        for e, stored in enumerate(group)
    ]


def _check_shapes(
    name: str,
    shape: torch.Size,
    pieces: list[StoredPiece],
    stored_shapes: Mapping[str, tuple[int, ...]],
) -> None:
    for piece in pieces:
        found = tuple(stored_shapes[piece.stored_name])
        if found != piece.stored_shape:
            raise UserError(
                f"{piece.stored_name} has shape {list(found)} in the files,"
                f" {list(piece.stored_shape)} in the model\nthe weights and the config do not"
                " belong together"
            )
    stacked = [piece for piece in pieces if piece.stacked]
    covered = sum(torch.Size(piece.stored_shape).numel() for piece in stacked)
    if stacked and covered != shape.numel():
        raise UserError(
            f"{name}: the files hold {len(stacked)} of its parts, {covered} of {shape.numel()}"
            " numbers"
        )
