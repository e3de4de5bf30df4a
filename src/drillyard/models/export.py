"""A sharded model as a Hugging Face directory, written by all ranks, each holding a few MB of it at
a time.

Tensors are dealt out to files and files to ranks before anything moves. Then, in rounds, every rank
sends its share of one part per writer, and each writer puts the part together and appends it to its
file. Parts are at most 8 MiB: besides its own shard a rank holds that much, whatever the size of
the model. How files get their names, and which ones may be replaced: export_directory.py.

Format of a safetensors file: 8 bytes with the length of a JSON header, the header (name -> dtype,
shape, byte range), the data (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import PreTrainedModel

from drillyard import export_directory
from drillyard.config.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, INDEX, WEIGHTS
from drillyard.errors import UserError
from drillyard.models.adapter_files import adapter_config, adapter_tensors
from drillyard.models.export_documents import (
    CONFIG,
    GENERATION_CONFIG,
    config_document,
    generation_document,
)
from drillyard.models.sharding import ParameterBox, Region, exchange_boxes, whole_region
from drillyard.models.weight_layout import DTYPES, StoredPiece, named_tensors, pieces_to_export
from drillyard.parallel.collectives import from_first_rank, gather, rank_and_size
from drillyard.safe_files import (
    ChecksummedFile,
    FileChecksum,
    describe_os_error,
    make_directory,
)

if TYPE_CHECKING:
    from drillyard.models.adapters import MergedWeights

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

    def boxes(self) -> Iterator[Region]:
        """The tensor in boxes of at most about LARGEST_PART_BYTES that follow each other in the
        file."""
        region = self.piece.region
        dim = next((dim for dim, size in enumerate(region) if size.stop - size.start > 1), None)
        if dim is None:
            yield region
            return
        along = region[dim]
        step = max(1, LARGEST_PART_BYTES * (along.stop - along.start) // self.num_bytes)
        for start in range(along.start, along.stop, step):
            yield (*region[:dim], slice(start, min(start + step, along.stop)), *region[dim + 1 :])


def export(
    model: PreTrainedModel,
    directory: str | Path,
    *,
    tokenizer: Mapping[str, bytes] | None = None,
    base: Mapping[str, bytes] | None = None,
    dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
    overwrite: bool = False,
    otherwise: str | Path | None = None,
    max_file_bytes: int | None = None,
    adapters: Literal["left out", "alone", "merged"] = "left out",
    before_write: Callable[[], None] = lambda: None,
) -> Path:
    """Write `model`, sharded or not, so that `AutoModelForCausalLM.from_pretrained(directory)`
    gives its weights to the bit; returns the directory. All ranks call it.

    `tokenizer`: the content of its files by path (`tokenizer_files.py`). `base`: config.json and
    generation_config.json of the model that training began from (`export_documents.py`), which the
    export keeps but for what training changed.

    `adapters`: `alone` writes them instead, for `PeftModel.from_pretrained(base, directory)`;
    `merged` adds them to the weights that are written, one weight at a time. `before_write`: called
    on rank 0 before the first file is written, and before the files are moved into place.

    Floating-point weights are converted to `dtype`: one for all, or one for each parameter by name
    (default: as they are). Files hold at most `max_file_bytes` (default: what spreads them over the
    ranks, between 256 MiB and 4 GiB). The directory must be absent or empty or, with `overwrite`,
    hold nothing but an earlier export, which is replaced at the end; else the model goes to
    `otherwise` under the same conditions, if that is given. Raises UserError on every rank, with
    everything unchanged, where neither may be written and when the disk is full or read-only.
    """
    rank, world_size = rank_and_size()
    chosen = _choose([directory, *([] if otherwise is None else [otherwise])], overwrite)
    target = Path(os.path.realpath(chosen))
    merged = _merged_weights(model, world_size) if adapters == "merged" else None
    adapters_only = adapters == "alone"
    items = list(_adapter_items(model, dtype) if adapters_only else _items(model, dtype))
    total = sum(item.num_bytes for item in items)
    limit = max_file_bytes or min(
        LARGEST_FILE_BYTES, max(SMALLEST_FILE_BYTES, -(-total // world_size))
    )
    # Adapters are small, and peft reads them from one file.
    files = [items] if adapters_only else _deal(items, limit)
    names = [f"model-{n + 1:05}-of-{len(files):05}.safetensors" for n in range(len(files))]
    names = names if len(names) > 1 else [ADAPTER_WEIGHTS if adapters_only else WEIGHTS]
    small: dict[str, bytes] = {}
    with ExitStack() as held:

        def begin() -> None:
            before_write()
            small.update(_small_files(model, base or {}, files, names, adapters_only))
            small.update(tokenizer or {})
            _begin(target, [*names, *small], overwrite, held)

        _on_first_rank(begin, target)
        try:
            contents = _write_files(target, files, names, merged)
            _on_first_rank(lambda: _finish(target, small, contents), target)
        except UserError:
            if rank == 0:
                with contextlib.suppress(OSError):
                    export_directory.cancel(target)
            raise

        def put_in_place() -> None:
            before_write()
            export_directory.put_in_place(target, contents)

        _on_first_rank(put_in_place, target)
    return chosen


def _on_first_rank(work: Callable[[], None], target: Path) -> None:
    """Run `work` on rank 0 while the others wait. Raises UserError on every rank when it fails."""
    try:
        from_first_rank(work)
    except (OSError, UserError) as error:
        problem = _problem(error, target) if isinstance(error, OSError) else error
        raise UserError(
            f"cannot export to {target}: {str(problem).removeprefix(f'{target}: ')}"
        ) from None


def _choose(directories: Sequence[str | Path], overwrite: bool) -> Path:
    """The first directory that may be written. UserError, about the first one, when there is
    none."""
    rank, world_size = rank_and_size()
    problems: list[str] = []
    for directory in directories:
        target = Path(os.path.realpath(directory))
        problem = None
        try:
            if rank == 0:
                problem = export_directory.reason_to_refuse(target, overwrite=overwrite)
            problem = problem or export_directory.first_changed(target, rank, world_size)
            problem = problem and f"{problem}; name a new directory"
        except OSError as error:
            problem = _problem(error, target).removeprefix(f"{target}: ")
        found = next((each for each in gather(problem) if each is not None), None)
        if found is None:
            return Path(directory)
        problems.append(found)
    raise UserError(f"cannot export to {directories[0]}: {problems[0]}")


def _begin(target: Path, names: list[str], overwrite: bool, held: ExitStack) -> None:
    """Lock the directory and record the files `names`; if it is new, `held` removes it when it
    stays empty."""
    is_new = not target.exists()
    make_directory(target, parents=True)
    held.enter_context(export_directory.locked(target))
    if is_new:
        held.callback(_remove_empty, target)
    if refused := export_directory.reason_to_refuse(target, overwrite=overwrite):
        raise UserError(refused)
    export_directory.begin(target, names)


def _remove_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()


def _problem(error: OSError, path: Path) -> str:
    """An error of the file system in words, at `path` where the error names no place."""
    return f"{error.filename or path}: {describe_os_error(error)}, then run the same command again"


def _items(
    model: PreTrainedModel, dtype: torch.dtype | Mapping[str, torch.dtype] | None
) -> Iterator[ExportTensor]:
    tensors = named_tensors(model)
    for name, pieces in pieces_to_export(model).items():
        tensor = tensors[name]
        wanted = dtype.get(name) if isinstance(dtype, Mapping) else dtype
        stored_dtype = wanted if wanted is not None and tensor.is_floating_point() else tensor.dtype
        yield from (ExportTensor(piece, tensor, stored_dtype) for piece in pieces)


def _adapter_items(
    model: PreTrainedModel, dtype: torch.dtype | Mapping[str, torch.dtype] | None
) -> Iterator[ExportTensor]:
    for name, tensor in adapter_tensors(model).items():
        piece = StoredPiece(name, whole_region(tensor.shape))
        yield ExportTensor(piece, tensor, dtype if isinstance(dtype, torch.dtype) else tensor.dtype)


def _deal(items: list[ExportTensor], limit: int) -> list[list[ExportTensor]]:
    """Files of at most `limit` bytes in the model's order; a tensor that is larger has a file of
    its own."""
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
    target: Path, files: list[list[ExportTensor]], names: list[str], merged: MergedWeights | None
) -> dict[str, FileChecksum]:
    """Write all files, file n by rank n modulo ranks; returns the content of each. Raises UserError
    on all ranks.

    After an error of its disk a rank still takes part in the exchange, so that no other one waits
    for it.
    """
    rank, world_size = rank_and_size()
    queues = [
        [(item, box) for file in files[writer::world_size] for item in file for box in item.boxes()]
        for writer in range(world_size)
    ]
    written: dict[str, FileChecksum] = {}
    writer = _write_parts(target, list(zip(names, files, strict=True))[rank::world_size], written)
    problem = next(writer, None)
    for of_round in zip_longest(*queues):
        parts = tuple(None if each is None else _part(each, merged) for each in of_round)
        if (data := exchange_boxes(parts, rank)) is not None and problem is None:
            problem = writer.send(data)
    outcomes = gather((problem, written))
    for found, _ in outcomes:
        if found is not None:
            raise UserError(f"cannot export to {target}: {found}")
    return {name: content for _, part in outcomes for name, content in part.items()}


def _merged_weights(model: PreTrainedModel, kept: int) -> MergedWeights:
    from drillyard.models.adapters import MergedWeights  # needs peft

    return MergedWeights(model, kept)


def _part(of: tuple[ExportTensor, Region], merged: MergedWeights | None) -> ParameterBox:
    item, box = of
    values = None if merged is None else merged.part_of(item.tensor)
    return ParameterBox(box, item.tensor, item.dtype, values)


def _write_parts(
    target: Path, files: list[tuple[str, list[ExportTensor]]], written: dict[str, FileChecksum]
) -> Generator[str | None, torch.Tensor, None]:
    """Write files from the parts that are sent in order, recorded in `written`; yields None, or why
    writing failed."""
    name = ""
    try:
        for name, file in files:
            output = ChecksummedFile(export_directory.incomplete(target, name))
            output.write(_header(file))
            for _ in (box for item in file for box in item.boxes()):
                data = yield None
                output.write(data.reshape(-1).view(torch.uint8).numpy().data)
            written[name] = output.close()
        yield None
    except OSError as error:
        yield _problem(error, target / name)


def _header(file: Iterable[ExportTensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for item in file:
        header[item.piece.stored_name] = {
            "dtype": next(name for name, dtype in DTYPES.items() if dtype == item.dtype),
            "shape": list(item.piece.stored_shape),
            "data_offsets": [offset, offset + item.num_bytes],
        }
        offset += item.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _small_files(
    model: PreTrainedModel,
    base: Mapping[str, bytes],
    files: list[list[ExportTensor]],
    names: list[str],
    adapters_only: bool,
) -> dict[str, bytes]:
    """The configs and the index by name."""
    if adapters_only:
        text = json.dumps(adapter_config(model), indent=2, sort_keys=True)
        return {ADAPTER_CONFIG: f"{text}\n".encode()}
    config = copy.deepcopy(model.config)
    config.use_cache = True
    numbers: Counter[torch.dtype] = Counter()
    for item in (item for file in files for item in file if item.dtype.is_floating_point):
        numbers[item.dtype] += torch.Size(item.piece.stored_shape).numel()
    config.dtype = numbers.most_common(1)[0][0]
    small = {CONFIG: config_document(config, base.get(CONFIG))}
    if model.generation_config is not None:
        small[GENERATION_CONFIG] = generation_document(
            model.generation_config, base.get(GENERATION_CONFIG)
        )
    if len(files) > 1:
        weight_map = {
            item.piece.stored_name: name
            for name, file in zip(names, files, strict=True)
            for item in file
        }
        total = sum(item.num_bytes for file in files for item in file)
        index = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
        small[INDEX] = f"{index}\n".encode()
    return small


def _finish(target: Path, small: dict[str, bytes], contents: dict[str, FileChecksum]) -> None:
    """Write the small files, add them to `contents`, and record the export as complete. Raises
    OSError, UserError."""
    for name, content in small.items():
        path = export_directory.incomplete(target, name)
        make_directory(path.parent, parents=True)
        output = ChecksummedFile(path)
        output.write(content)
        contents[name] = output.close()
    if refused := export_directory.reason_to_refuse(target, overwrite=True):
        raise UserError(f"changed meanwhile: {refused}")
    export_directory.complete(target, contents)
