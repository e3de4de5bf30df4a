"""A sharded model as a Hugging Face directory, written by all ranks, each holding a few MB of it at a time.

Tensors are dealt out to files and files to ranks before anything moves. Then, in rounds, every rank sends its share of
one part per writer, and each writer puts the part together and appends it to its file. Parts are at most 8 MiB: besides
its own shard a rank holds that much, whatever the size of the model, of a tensor or of a file.

Files are written under temporary names and put in place when all of them, the index and the configs are complete and
on the disk, config.json last: without it nothing takes the directory for a model. What may be replaced is decided by
the record that exports keep of their files (export_directory.py).

Format of a safetensors file: 8 bytes with the length of a JSON header, the header (name -> dtype, shape, byte range),
the data (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from transformers import PreTrainedModel

from drillyard import export_directory
from drillyard.config.model_files import INDEX, WEIGHTS
from drillyard.errors import UserError
from drillyard.export_directory import FileChecksum
from drillyard.models.exchange import ParameterBox, exchange_boxes
from drillyard.models.tokenizer_files import read_files, write_tokenizer
from drillyard.models.weight_layout import StoredPiece, named_tensors, pieces_to_export
from drillyard.safe_files import describe_os_error

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


@dataclass(frozen=True)
class ExportTensor:
    """One stored tensor: the parameter it is a box of, and its precision in the file."""

    piece: StoredPiece
    tensor: torch.Tensor
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.piece.stored_shape).numel() * self.dtype.itemsize

    def parts(self) -> Iterator[ParameterBox]:
        """The tensor in boxes of at most about LARGEST_PART_BYTES that follow each other in the file."""
        region = self.piece.region
        dim = next((dim for dim, size in enumerate(region) if size.stop - size.start > 1), None)
        if dim is None:
            yield ParameterBox(region, self.tensor, self.dtype)
            return
        along = region[dim]
        step = max(1, LARGEST_PART_BYTES * (along.stop - along.start) // self.num_bytes)
        for start in range(along.start, along.stop, step):
            box = (*region[:dim], slice(start, min(start + step, along.stop)), *region[dim + 1 :])
            yield ParameterBox(box, self.tensor, self.dtype)


def export(
    model: PreTrainedModel,
    directory: str | Path,
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
    overwrite: bool = False,
    otherwise: str | Path | None = None,
    process_group: dist.ProcessGroup | None = None,
    max_file_bytes: int | None = None,
) -> Path:
    """Write `model`, sharded or not, so that `AutoModelForCausalLM.from_pretrained(directory)` gives its weights to
    the bit; returns the directory.

    All ranks of `process_group` (default: all) call it. Floating-point weights are converted to `dtype`: one for all,
    or one for each parameter by name (default: as they are). Files hold at most `max_file_bytes` (default: what spreads
    them over the ranks, between 256 MiB and 4 GiB).
    The directory must be absent or empty or, with `overwrite`, hold nothing but an earlier export, which is replaced;
    where it does not, the model goes to `otherwise` under the same conditions, if that is given. Raises UserError on
    every rank, with everything as it was, where neither may be written and when the disk is full or read-only. Beside
    an earlier export there must be room for the new one.
    """
    rank, world_size = _place(process_group)
    chosen = _choose([directory, *([] if otherwise is None else [otherwise])], overwrite, process_group)
    target = _real(chosen)
    items = _items(model, dtype)
    total = sum(item.num_bytes for item in items)
    limit = max_file_bytes or min(LARGEST_FILE_BYTES, max(SMALLEST_FILE_BYTES, -(-total // world_size)))
    files = _deal(items, limit)
    names = [f"model-{n + 1:05}-of-{len(files):05}.safetensors" for n in range(len(files))]
    names = names if len(names) > 1 else [WEIGHTS]
    problem, small = _small_files(model, tokenizer, files, names) if rank == 0 else (None, {})
    _raise_together(problem, target, process_group)
    with ExitStack() as held:
        problem = _begin(target, [*names, *small], overwrite, held) if rank == 0 else None
        _raise_together(problem, target, process_group)
        try:
            problem, written = _write_files(target, files, names, rank, world_size, process_group)
            _raise_together(problem, target, process_group)
            contents = {name: content for part in _gather(written, process_group) for name, content in part.items()}
            if rank == 0:
                problem = _finish(target, small, contents)
            _raise_together(problem, target, process_group)
        except UserError:
            if rank == 0:
                with contextlib.suppress(OSError):
                    export_directory.cancel(target)
            raise
        if rank == 0:
            problem = _publish(target, contents)
        _raise_together(problem, target, process_group)
    return chosen


def _place(process_group: dist.ProcessGroup | None) -> tuple[int, int]:
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(process_group), dist.get_world_size(process_group)


def _real(directory: str | Path) -> Path:
    """Where a link leads: that directory is written, and the link stays."""
    return Path(os.path.realpath(directory))


def _choose(directories: Sequence[str | Path], overwrite: bool, process_group: dist.ProcessGroup | None) -> Path:
    """The first directory that may be written. UserError, about the first one, when there is none."""
    rank, world_size = _place(process_group)
    problems: list[str] = []
    for directory in directories:
        target = _real(directory)
        problem = None
        try:
            if rank == 0:
                problem = export_directory.reason_to_refuse(target, overwrite=overwrite)
            problem = problem or export_directory.first_changed(target, rank, world_size)
            problem = problem and f"{problem}; name a new directory"
        except OSError as error:
            problem = _problem(error, target)
        found = next((each for each in _gather(problem, process_group) if each is not None), None)
        if found is None:
            return Path(directory)
        problems.append(found)
    raise UserError(f"cannot export to {directories[0]}: {problems[0]}")


def _begin(
    target: Path,
    names: list[str],
    overwrite: bool,
    held: ExitStack,
) -> str | None:
    """Lock the directory and record that the files `names` will be written; returns what is wrong.

    When `held` closes, a directory that was made here and is still empty is removed.
    """
    try:
        is_new = not target.exists()
        target.mkdir(parents=True, exist_ok=True)
        held.enter_context(export_directory.locked(target))
        if is_new:
            held.callback(_remove_empty, target)
        refused = export_directory.reason_to_refuse(target, overwrite=overwrite)
        if refused is not None:
            return refused
        export_directory.begin(target, names)
    except OSError as error:
        return _problem(error, target)
    except UserError as error:
        return str(error)
    return None


def _remove_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()


def _problem(error: OSError, path: Path) -> str:
    """What to tell of an error at `path`, where the error does not know a better place."""
    return f"{error.filename or path}: {describe_os_error(error)}, then run the same command again"


def _gather(value: Any, process_group: dist.ProcessGroup | None) -> list[Any]:
    """The values of all ranks, in order of rank."""
    values: list[Any] = [value]
    if dist.is_initialized():
        values = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(values, value, group=process_group)
    return values


def _raise_together(problem: str | None, target: Path, process_group: dist.ProcessGroup | None) -> None:
    """Raise UserError on every rank when any rank has a problem; otherwise wait until all have come here."""
    for found in _gather(problem, process_group):
        if found is not None:
            raise UserError(f"cannot export to {target}: {found}")


def _items(model: PreTrainedModel, dtype: torch.dtype | Mapping[str, torch.dtype] | None) -> list[ExportTensor]:
    tensors = named_tensors(model)
    items = []
    for name, pieces in pieces_to_export(model).items():
        tensor = tensors[name]
        wanted = dtype.get(name) if isinstance(dtype, Mapping) else dtype
        stored_dtype = wanted if wanted is not None and tensor.is_floating_point() else tensor.dtype
        items += [ExportTensor(piece, tensor, stored_dtype) for piece in pieces]
    return items


def _deal(items: list[ExportTensor], limit: int) -> list[list[ExportTensor]]:
    """Files of at most `limit` bytes in the model's order; a tensor that is larger has a file of its own."""
    files: list[list[ExportTensor]] = [[]]
    filled = 0
    for item in items:
        if files[-1] and filled + item.num_bytes > limit:
            files.append([])
            filled = 0
        files[-1].append(item)
        filled += item.num_bytes
    return files


def _write_files(
    target: Path,
    files: list[list[ExportTensor]],
    names: list[str],
    rank: int,
    world_size: int,
    process_group: dist.ProcessGroup | None,
) -> tuple[str | None, dict[str, FileChecksum]]:
    """Write all files, file n by rank n modulo ranks; (what went wrong on this rank's disk, what this rank wrote).

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
    name = ""
    output: _Output | None = None
    problem: str | None = None
    written: dict[str, FileChecksum] = {}
    for of_round in zip_longest(*queues):
        data = exchange_boxes(of_round, rank, process_group)
        if data is None:
            continue
        try:
            if left == 0:
                name, file = next(mine)
                left = sum(1 for item in file for _ in item.parts())
                if problem is None:
                    output = _Output(export_directory.incomplete(target, name))
                    output.write(_header(file))
            if output is not None:
                output.write(data.reshape(-1).view(torch.uint8).numpy().data)
        except OSError as error:
            problem = problem or _problem(error, target / name)
        left -= 1
        if left == 0 and output is not None:
            try:
                written[name] = output.close()
            except OSError as error:
                problem = problem or _problem(error, target / name)
            output = None
    return problem, written


class _Output:
    """A file that is being written, and the checksum of what has been written so far."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb")  # noqa: SIM115 (closed with the file's last tensor)
        self._digest = xxhash.xxh3_128()
        self._num_bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._digest.update(data)
        self._num_bytes += len(data)

    def close(self) -> FileChecksum:
        """Flush the file to the disk and close it; returns what it holds. Raises OSError."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        return FileChecksum(self._num_bytes, self._digest.hexdigest())


def _header(file: Iterable[ExportTensor]) -> bytes:
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


def _small_files(
    model: PreTrainedModel, tokenizer: Any, files: list[list[ExportTensor]], names: list[str]
) -> tuple[str | None, dict[str, bytes]]:
    """(what went wrong, the index, the configs and the tokenizer by path relative to the model's directory)."""
    config = copy.deepcopy(model.config)
    config.use_cache = True
    numbers: Counter[torch.dtype] = Counter()
    for item in (item for file in files for item in file if item.dtype.is_floating_point):
        numbers[item.dtype] += torch.Size(item.piece.stored_shape).numel()
    config.dtype = numbers.most_common(1)[0][0]
    try:
        with tempfile.TemporaryDirectory() as made:
            directory = Path(made)
            config.save_pretrained(directory)
            if model.generation_config is not None:
                # Not save_pretrained: it refuses settings that models on the hub come with, at the end of a run.
                model.generation_config.to_json_file(directory / "generation_config.json")
            if tokenizer is not None:
                write_tokenizer(tokenizer, directory)
            small = read_files(directory)
    except OSError as error:
        return _problem(error, Path(tempfile.gettempdir())), {}
    return None, small | ({INDEX: _index(files, names).encode()} if len(files) > 1 else {})


def _finish(target: Path, small: dict[str, bytes], contents: dict[str, FileChecksum]) -> str | None:
    """Write the small files and add them to `contents`; returns what went wrong on the disk."""
    try:
        for name, content in small.items():
            path = export_directory.incomplete(target, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            output = _Output(path)
            output.write(content)
            contents[name] = output.close()
        refused = export_directory.reason_to_refuse(target, overwrite=True)
        if refused is not None:
            return f"changed meanwhile: {refused}"
        export_directory.complete(target, contents)
    except OSError as error:
        return _problem(error, target)
    return None


def _publish(target: Path, contents: dict[str, FileChecksum]) -> str | None:
    """Put the complete files in place; returns what went wrong on the disk."""
    try:
        export_directory.put_in_place(target, contents)
    except OSError as error:
        return _problem(error, target)
    return None


def _index(files: list[list[ExportTensor]], names: list[str]) -> str:
    """model.safetensors.index.json: which file holds which tensor."""
    weight_map = {item.piece.stored_name: name for name, file in zip(names, files, strict=True) for item in file}
    total = sum(item.num_bytes for file in files for item in file)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"
