"""Weights from safetensors files into a sharded model: each rank reads its own slices, none holds
the whole.

The files are memory-mapped and read by slice, one parameter at a time. What a checkpoint lacks or
has too much of is an error that names it.
"""

from __future__ import annotations

from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from drillyard.config.fetch_limits import withheld_error
from drillyard.config.model_files import NAMES_SHOWN, weight_files
from drillyard.errors import UserError
from drillyard.guarded_files import require_regular
from drillyard.hub_access import denied_access, require_cached_only
from drillyard.models.nf4 import LARGEST_PART_ELEMENTS, pack_into, packed_layers
from drillyard.models.random_init import init_buffers
from drillyard.models.sharding import (
    local_region,
    local_tensor,
    overlap,
    relative,
    restore_ties,
    whole_region,
)
from drillyard.models.weight_layout import DTYPES, StoredPiece, named_tensors, pieces_of_files


def load_pretrained(model: PreTrainedModel, source: str | Path) -> None:
    """Fill a model whose storage is allocated, sharded or not, from a directory or hub id, to the
    bit.

    Equal to transformers' `from_pretrained` in the model's precision, on any number of ranks.
    Buffers that files do not hold are computed. On a CPU, unsharded weights that are frozen and
    that the files hold as they are stay in the mapped files, as with transformers: they take no
    memory but the page cache's, once for all ranks, and the files must not change in place
    meanwhile. Raises UserError for files that are missing, damaged or of another model.
    """
    restore_ties(model)
    with StoredTensors(model_directory(str(source))) as stored, torch.no_grad():
        pieces, by_tensor = _matched(model, stored)
        packed = packed_layers(model)
        for tensor, names in by_tensor:
            first, *others = [pieces[name] for name in names if name in pieces]
            if id(tensor) in packed:
                _read_packed(tensor, packed[id(tensor)].in_features, first, stored)
            elif (
                not isinstance(tensor, DTensor)
                and tensor.device.type == "cpu"
                and _is_frozen_there(tensor, first, stored)
            ):
                tensor.data = stored.mapped(first[0].stored_name)
            else:
                _read(tensor, first, stored)
            for other in chain(*others):
                _require_equal(tensor, first[0], other, stored)
    init_buffers(model)


def stored_dtypes(model: PreTrainedModel, source: str | Path) -> dict[str, torch.dtype]:
    """The floating-point dtype of each parameter in the files of `source`, from their headers.
    Raises UserError."""
    with StoredTensors(model_directory(str(source))) as stored:
        pieces, by_tensor = _matched(model, stored)
    dtypes: dict[str, torch.dtype] = {}
    for _, names in by_tensor:
        # Tied parameters are in the files under one of their names, not always the one that
        # transformers writes.
        found = [
            DTYPES.get(stored.dtypes[pieces[name][0].stored_name])
            for name in names
            if name in pieces
        ]
        if dtype := next(
            (dtype for dtype in found if dtype is not None and dtype.is_floating_point), None
        ):
            dtypes |= dict.fromkeys(names, dtype)
    return dtypes


def frozen_in_files(model: PreTrainedModel, source: str) -> set[nn.Parameter]:
    """The frozen parameters that `load_pretrained` can leave in the files of `source`. Reads
    headers only.

    Raises UserError where it would find files missing or of another model.
    """
    with StoredTensors(model_directory(source)) as stored:
        pieces, by_tensor = _matched(model, stored)
        found = (
            (tensor, next(pieces[name] for name in names if name in pieces))
            for tensor, names in by_tensor
        )
        return {
            tensor
            for tensor, first in found
            if isinstance(tensor, nn.Parameter) and _is_frozen_there(tensor, first, stored)
        }


def require_matching_weights(model: PreTrainedModel, source: str) -> None:
    """Raise UserError where `load_pretrained` would find files missing or of another model. Reads
    headers only."""
    with StoredTensors(model_directory(source)) as stored:
        _matched(model, stored)


def _matched(
    model: PreTrainedModel, stored: StoredTensors
) -> tuple[dict[str, list[StoredPiece]], list[tuple[torch.Tensor, list[str]]]]:
    """Map each parameter to where it is stored, and list every tensor with its names: tied ones
    have several.

    Raises UserError unless the files hold all of them and nothing else.
    """
    pieces, unexpected = pieces_of_files(model, stored.shapes)
    by_tensor: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in named_tensors(model).items():
        by_tensor.setdefault(id(tensor), (tensor, []))[1].append(name)
    missing = [
        names[0] for _, names in by_tensor.values() if not any(name in pieces for name in names)
    ]
    _refuse(stored.directory, "lacks", missing)
    _refuse(stored.directory, "holds weights that the model has no place for:", unexpected)
    return pieces, list(by_tensor.values())


def model_directory(source: str) -> Path:
    """The local directory of a model: `source` itself, or the hub's copy of it, downloaded when it
    is not here yet. WithheldError where it may not be downloaded (`fetch_limits.py`)."""
    directory = Path(source).expanduser()
    if directory.is_dir():
        return directory
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    cached_only = require_cached_only(source, "model.id")
    try:
        found = Path(
            snapshot_download(
                source,
                allow_patterns=["*.safetensors", "*.json"],
                local_files_only=cached_only,
            )
        )
        if cached_only and not any(found.glob("*.safetensors")):
            raise withheld_error(f"model.id: {source}")
        return found
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        if cached_only:
            raise withheld_error(f"model.id: {source}") from None
        if denied := denied_access(source, error):
            raise UserError(f"model.id: {denied}") from None
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"model.id: {source} is no directory here and cannot be fetched: {reason}\n"
            "check the id or path, the network, and access to the model (hf auth login)"
        ) from error


class StoredTensors(ExitStack):
    """The tensors of a model directory's safetensors files, memory-mapped; read by slices until it
    is closed."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._files: dict[str, Any] = {}
        self.callback(self._files.clear)
        for path in weight_files(directory):
            require_regular(path)
            try:
                file = self.enter_context(safe_open(str(path), framework="pt"))
            except (SafetensorError, OSError) as error:
                self.close()
                raise UserError(
                    f"{path} cannot be read: {error}\nfetch or export the model again"
                ) from error
            for name in file.keys():  # noqa: SIM118 (not a dictionary)
                self._files[name] = file
                stored = file.get_slice(name)
                self.shapes[name] = tuple(stored.get_shape())
                self.dtypes[name] = stored.get_dtype()

    def read(self, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        """A part of a stored tensor, in its stored precision."""
        stored = self._files[name].get_slice(name)
        part: torch.Tensor = stored[region] if region else stored[...]
        return part

    def mapped(self, name: str) -> torch.Tensor:
        """A stored tensor in the mapped file, which stays mapped as long as the tensor is used."""
        whole: torch.Tensor = self._files[name].get_tensor(name)
        return whole


def _is_frozen_there(
    tensor: torch.Tensor, pieces: list[StoredPiece], stored: StoredTensors
) -> bool:
    """Whether a parameter is frozen and in the files as one tensor of its shape and dtype."""
    piece, *others = pieces
    is_whole = not others and not piece.stacked and piece.region == whole_region(tensor.shape)
    return (
        not tensor.requires_grad
        and is_whole
        and DTYPES.get(stored.dtypes[piece.stored_name]) == tensor.dtype
    )


def _refuse(directory: Path, problem: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        raise UserError(
            f"{directory} {problem} {', '.join(names[:NAMES_SHOWN])}{more}\n"
            "its weights and its config.json do not belong to one causal language model"
        )


def _read(tensor: torch.Tensor, pieces: list[StoredPiece], stored: StoredTensors) -> None:
    """Fill this rank's part of a parameter from the stored boxes that it touches."""
    own = local_region(tensor)
    local = local_tensor(tensor)
    for piece in pieces:
        if (common := overlap(own, piece.region)) is not None:
            local[relative(common, own)].copy_(_read_part(piece, common, stored))


def _read_packed(
    tensor: torch.Tensor, columns: int, pieces: list[StoredPiece], stored: StoredTensors
) -> None:
    """Quantize this rank's rows of a weight [O, columns] from the precision they are stored in,
    some at a time."""
    local, rows = local_tensor(tensor), local_region(tensor)[0]
    step = max(1, LARGEST_PART_ELEMENTS // columns)
    for start in range(rows.start, rows.stop, step):
        own = (slice(start, min(rows.stop, start + step)), slice(0, columns))
        found = [
            (common, piece)
            for piece in pieces
            if (common := overlap(own, piece.region)) is not None
        ]
        first, *others = [(common, _read_part(piece, common, stored)) for common, piece in found]
        values = first[1]
        if others:
            values = values.new_empty([part.stop - part.start for part in own])
            for common, part in (first, *others):
                values[relative(common, own)] = part
        pack_into(local[start - rows.start : own[0].stop - rows.start], values.to(local.device))


def _read_part(
    piece: StoredPiece, region: tuple[slice, ...], stored: StoredTensors
) -> torch.Tensor:
    within = relative(region, piece.region)
    part = stored.read(piece.stored_name, within[1:] if piece.stacked else within)
    return part[None] if piece.stacked else part


def _require_equal(
    tensor: torch.Tensor, first: StoredPiece, other: StoredPiece, stored: StoredTensors
) -> None:
    """Refuse a checkpoint that holds two different tensors for one tied parameter."""
    own = local_region(tensor)
    if (common := overlap(own, other.region)) is not None and not torch.equal(
        local_tensor(tensor)[relative(common, own)].cpu(),
        _read_part(other, common, stored).to(tensor.dtype),
    ):
        raise UserError(
            f"{first.stored_name} and {other.stored_name} differ, but the model's config ties"
            " them\nset tie_word_embeddings: false in its config.json if both are meant"
        )
