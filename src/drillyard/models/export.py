"""A sharded model as a Hugging Face directory, written by all ranks, each holding a few MB of it at a time.

Tensors are dealt out to files and files to ranks before anything moves. Then, in rounds, every rank sends its share of
one part per writer, and each writer puts the part together and appends it to its file. Parts are at most 8 MiB: besides
its own shard a rank holds that much, whatever the size of the model, of a tensor or of a file.

Files are written into a hidden directory beside the target, flushed to disk, and put in place by a rename when all of
them, the index and the configs are complete: a reader sees the old directory, none, or the new one. Object-store mounts
have no such rename: there the files are moved one by one, config.json last, and without it nothing takes the directory
for a model.

Format of a safetensors file: 8 bytes with the length of a JSON header, the header (name -> dtype, shape, byte range),
the data (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from drillyard.errors import UserError
from drillyard.models.layout import Piece, named_tensors, overlap, pieces_to_store, relative
from drillyard.models.pretrained import INDEX, WEIGHTS
from drillyard.models.sharding import Region, holders, local_region, local_tensor
from drillyard.models.tokenizer_files import write_tokenizer
from drillyard.storage import describe, flush, publish

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
LARGEST_FILE_BYTES = 4 * 1024**3
SMALLEST_FILE_BYTES = 256 * 1024**2
LARGEST_PART_BYTES = 8 * 1024**2
CONFIG = "config.json"


@dataclass(frozen=True)
class Item:
    """One stored tensor: the parameter it is a box of, and its precision in the file."""

    piece: Piece
    tensor: torch.Tensor
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.piece.stored_shape).numel() * self.dtype.itemsize

    def parts(self) -> Iterator[Part]:
        """The tensor in boxes of at most about LARGEST_PART_BYTES that follow each other in the file."""
        region = self.piece.region
        dim = next((dim for dim, size in enumerate(region) if size.stop - size.start > 1), None)
        if dim is None:
            yield Part(region, self.tensor, self.dtype)
            return
        along = region[dim]
        step = max(1, LARGEST_PART_BYTES * (along.stop - along.start) // self.num_bytes)
        for start in range(along.start, along.stop, step):
            box = (*region[:dim], slice(start, min(start + step, along.stop)), *region[dim + 1 :])
            yield Part(box, self.tensor, self.dtype)


@dataclass(frozen=True)
class Part:
    """A box of a parameter that travels to its writer in one round."""

    box: Region
    tensor: torch.Tensor
    dtype: torch.dtype


def export(
    model: PreTrainedModel,
    directory: str | Path,
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
    process_group: dist.ProcessGroup | None = None,
    max_file_bytes: int | None = None,
) -> None:
    """Write `model`, sharded or not, so that `AutoModelForCausalLM.from_pretrained(directory)` gives its weights to
    the bit.

    All ranks of `process_group` (default: all) call it. Floating-point weights are converted to `dtype` when one is
    given. Files hold at most `max_file_bytes` (default: what spreads them over the ranks, between 256 MiB and 4 GiB).
    A model directory that is already there is replaced; a directory with anything else in it raises UserError, and so
    does a disk that is full or read-only: on every rank, with the old directory untouched. Beside the old one there
    must be room for the new one.
    """
    target = Path(directory)
    rank, world_size = _place(process_group)
    staging = target.with_name(f".{target.name}.incomplete")
    _raise_together(_prepare(target, staging) if rank == 0 else None, target, process_group)
    items = _items(model, dtype)
    total = sum(item.num_bytes for item in items)
    limit = max_file_bytes or min(LARGEST_FILE_BYTES, max(SMALLEST_FILE_BYTES, -(-total // world_size)))
    files = _deal(items, limit)
    names = [f"model-{n + 1:05}-of-{len(files):05}.safetensors" for n in range(len(files))]
    names = names if len(names) > 1 else [WEIGHTS]
    try:
        problem = _write_files(staging, files, names, rank, world_size, process_group)
        _raise_together(problem, target, process_group)
        if rank == 0:
            problem = _finish(staging, target, model, tokenizer, dtype, files, names)
        _raise_together(problem, target, process_group)
    except UserError:
        if rank == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise


def _place(process_group: dist.ProcessGroup | None) -> tuple[int, int]:
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(process_group), dist.get_world_size(process_group)


def _prepare(target: Path, staging: Path) -> str | None:
    """Make an empty staging directory; the reason when the target must not or cannot be written."""
    try:
        # With the staged config the last files of an export were being moved when it was ended.
        ours = (target / CONFIG).is_file() or (staging / CONFIG).is_file()
        if target.exists() and not ours and (not target.is_dir() or any(target.iterdir())):
            return "it exists and is not a model directory; give another path"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    except OSError as error:
        return _problem(error, staging)
    return None


def _problem(error: OSError, path: Path) -> str:
    """What to tell of an error at `path`, where the error does not know a better place."""
    return f"{error.filename or path}: {describe(error)}, then run the same command again"


def _raise_together(problem: str | None, target: Path, process_group: dist.ProcessGroup | None) -> None:
    """Raise UserError on every rank when any rank has a problem; otherwise wait until all have come here."""
    problems = [problem]
    if dist.is_initialized():
        problems = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(problems, problem, group=process_group)
    for found in problems:
        if found is not None:
            raise UserError(f"cannot export to {target}: {found}")


def _items(model: PreTrainedModel, dtype: torch.dtype | None) -> list[Item]:
    tensors = named_tensors(model)
    items = []
    for name, pieces in pieces_to_store(model).items():
        tensor = tensors[name]
        stored_dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        items += [Item(piece, tensor, stored_dtype) for piece in pieces]
    return items


def _deal(items: list[Item], limit: int) -> list[list[Item]]:
    """Files of at most `limit` bytes in the model's order; a tensor that is larger has a file of its own."""
    files: list[list[Item]] = [[]]
    filled = 0
    for item in items:
        if files[-1] and filled + item.num_bytes > limit:
            files.append([])
            filled = 0
        files[-1].append(item)
        filled += item.num_bytes
    return files


def _write_files(
    staging: Path,
    files: list[list[Item]],
    names: list[str],
    rank: int,
    world_size: int,
    process_group: dist.ProcessGroup | None,
) -> str | None:
    """Write all files, file n by rank n modulo ranks; returns what went wrong on this rank's disk.

    After an error of its disk a rank goes on taking part, so that no other one waits for it.
    """
    queues = [
        [part for file in files[writer::world_size] for item in file for part in item.parts()]
        for writer in range(world_size)
    ]
    mine = iter(
        [
            (name, file)
            for number, (name, file) in enumerate(zip(names, files, strict=True))
            if number % world_size == rank
        ]
    )
    left = 0
    output: BinaryIO | None = None
    problem: str | None = None
    for of_round in zip_longest(*queues):
        data = _exchange(of_round, rank, process_group)
        if data is None:
            continue
        try:
            if left == 0:
                name, file = next(mine)
                left = sum(1 for item in file for _ in item.parts())
                if problem is None:
                    output = open(staging / name, "wb")  # noqa: SIM115 (closed with the file's last tensor)
                    output.write(_header(file))
            if output is not None:
                output.write(data.reshape(-1).view(torch.uint8).numpy().data)
        except OSError as error:
            problem = problem or _problem(error, staging / name)
        left -= 1
        if left == 0 and output is not None:
            problem = problem or _close(output, staging / name)
            output = None
    return problem


def _close(output: BinaryIO, path: Path) -> str | None:
    """Flush a file to the disk and close it."""
    try:
        with output:
            output.flush()
            os.fsync(output.fileno())
    except OSError as error:
        return _problem(error, path)
    return None


def _header(file: Iterable[Item]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for item in file:
        header[item.piece.stored_name] = {
            "dtype": DTYPE_NAMES[item.dtype],
            "shape": list(item.piece.stored_shape),
            "data_offsets": [offset, offset + item.num_bytes],
        }
        offset += item.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _exchange(
    parts: tuple[Part | None, ...], rank: int, process_group: dist.ProcessGroup | None
) -> torch.Tensor | None:
    """Bring one part per writer to it; returns this rank's, on the CPU, or None when it has nothing to write.

    Between two ranks there is at most one message per round: a rank holds one region, and a writer gets one part.
    """
    operations: list[dist.P2POp] = []
    kept_alive: list[torch.Tensor] = []
    to_copy: list[tuple[torch.Tensor, torch.Tensor]] = []
    whole: torch.Tensor | None = None
    for writer, part in enumerate(parts):
        if part is None:
            continue
        box = part.box
        if writer != rank:
            own = _own_share(part, rank, process_group)
            if own is not None:
                kept_alive.append(own)
                operations.append(_operation(dist.isend, own, writer, process_group))
            continue
        local = local_tensor(part.tensor)
        whole = torch.empty([size.stop - size.start for size in box], dtype=part.dtype, device=local.device)
        for holder, region in _holders(part.tensor, rank, process_group):
            common = overlap(region, box)
            if common is None:
                continue
            place = whole[relative(common, box)]
            if holder == rank:
                place.copy_(local[relative(common, region)])
                continue
            arriving = (
                place if place.is_contiguous() else torch.empty_like(place, memory_format=torch.contiguous_format)
            )
            if arriving is not place:
                to_copy.append((place, arriving))
            operations.append(_operation(dist.irecv, arriving, holder, process_group))
    for request in dist.batch_isend_irecv(operations) if operations else []:
        request.wait()
    for place, arriving in to_copy:
        place.copy_(arriving)
    return None if whole is None else whole.cpu()


def _own_share(part: Part, rank: int, process_group: dist.ProcessGroup | None) -> torch.Tensor | None:
    """What this rank sends of a part that another one writes; None when it holds nothing of it."""
    if not isinstance(part.tensor, DTensor):
        return None
    for holder, region in _holders(part.tensor, rank, process_group):
        common = overlap(region, part.box)
        if holder == rank and common is not None:
            return local_tensor(part.tensor)[relative(common, region)].detach().to(part.dtype).contiguous()
    return None


def _holders(tensor: torch.Tensor, rank: int, process_group: dist.ProcessGroup | None) -> list[tuple[int, Region]]:
    """(rank in the group, region) of those that together hold the tensor; a plain tensor is whole on every rank."""
    if not isinstance(tensor, DTensor):
        return [(rank, local_region(tensor))]
    group = process_group or dist.distributed_c10d._get_default_group()
    return [(dist.get_group_rank(group, holder), region) for holder, region in holders(tensor)]


def _operation(kind: Any, tensor: torch.Tensor, peer: int, process_group: dist.ProcessGroup | None) -> dist.P2POp:
    return dist.P2POp(kind, tensor, group=process_group, group_peer=peer)


def _finish(
    staging: Path,
    target: Path,
    model: PreTrainedModel,
    tokenizer: Any,
    dtype: torch.dtype | None,
    files: list[list[Item]],
    names: list[str],
) -> str | None:
    """Add the index, the configs and the tokenizer, flush them, and publish; returns what went wrong on the disk."""
    try:
        if len(files) > 1:
            (staging / INDEX).write_text(_index(files, names), encoding="utf-8")
        config = copy.deepcopy(model.config)
        config.use_cache = True
        config.dtype = dtype or next(model.parameters()).dtype
        config.save_pretrained(staging)
        if model.generation_config is not None:
            # Not save_pretrained: it refuses settings that models on the hub come with, at the end of a run.
            model.generation_config.to_json_file(staging / "generation_config.json")
        if tokenizer is not None:
            write_tokenizer(tokenizer, staging)
        for path in staging.iterdir():
            flush(path)
        flush(staging)
        _publish(staging, target)
    except OSError as error:
        return _problem(error, staging)
    return None


def _index(files: list[list[Item]], names: list[str]) -> str:
    """model.safetensors.index.json: which file holds which tensor."""
    weight_map = {item.piece.stored_name: name for name, file in zip(names, files, strict=True) for item in file}
    total = sum(item.num_bytes for file in files for item in file)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"


def _publish(staging: Path, target: Path) -> None:
    """Put the complete directory in the target's place."""
    replaced = target.with_name(f".{target.name}.replaced")
    if target.exists():
        try:
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
        except OSError:
            # No rename of directories here. Without its config the old one is no model, however far this gets.
            (target / CONFIG).unlink(missing_ok=True)
            shutil.rmtree(target)
    publish(staging, target, last=CONFIG)
    flush(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)
