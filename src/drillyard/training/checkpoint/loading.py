"""Reading a checkpoint into the state at hand, whatever number of ranks and sharding wrote it.

Reading is collective: the coordinator says which checkpoint and hands out its manifest, every rank
verifies what it is about to read, and a problem on one rank is a problem on all, so that all ranks
load the same checkpoint or none. Damage found by a checksum is found before the state is touched;
only an I/O error in the short time between the check and the read leaves it partly filled, and then
an older checkpoint fills all of it or the run ends.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as load_state_dict

from drillyard.errors import NotFoundError, UserError
from drillyard.parallel.collectives import from_first_rank, gather
from drillyard.training.checkpoint.dcp_planners import PlainLoadPlanner, flatten, unflatten_into
from drillyard.training.checkpoint.dcp_storage import (
    CheckpointReader,
    DamagedCheckpoint,
    metadata_of,
    require_undamaged,
)
from drillyard.training.checkpoint.index_reader import METADATA_NAME, read_index
from drillyard.training.checkpoint.inventory import (
    CHECKPOINTS_NAME,
    CheckpointInfo,
    incomplete_error,
    inspect,
    list_checkpoints_in,
    newest_usable,
)
from drillyard.training.checkpoint.manifest import MANIFEST_NAME

# torch raises a RuntimeError for a key that is missing, a ValueError for another shape or kind of
# entry, and any of these for an archive whose numbers make no tensor.
_FROM_CONTENT = (
    ValueError,
    RuntimeError,
    TypeError,
    AssertionError,
    OverflowError,
    UnpicklingError,
)

# The state to fill, or what makes it once the checkpoint's metadata (such as its number of ranks)
# is known.
StateSource = dict[str, Any] | Callable[[dict[str, Any]], dict[str, Any]]
AcceptMetadata = Callable[[dict[str, Any]], None]

# A single process is a supported way to load and save, not a mistake.
warnings.filterwarnings(
    "ignore",
    message="torch.distributed is disabled, unavailable or uninitialized",
    category=UserWarning,
)


@dataclass(frozen=True)
class LoadedCheckpoint:
    """Loaded checkpoint: its directory and manifest, and the filled state."""

    info: CheckpointInfo
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps that were done when it was saved."""
        return self.info.step

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata given to `save`, with `step`, `world_size` (of the saving run) and
        `path`."""
        return full_metadata(self.info)


def load_checkpoint(
    path: Path,
    state: StateSource,
    *,
    process_group: dist.ProcessGroup | None = None,
    accept: AcceptMetadata | None = None,
) -> LoadedCheckpoint:
    """Fill `state` from the checkpoint at `path`, or the newest complete one of a run directory.
    Collective.

    `state`: nested dictionary of tensors and DTensors, which are filled in place, and of small
    objects, which are replaced; every key must be in the checkpoint, which may hold more.
    `accept(metadata)` may raise to refuse it beforehand. Raises UserError when there is no such
    checkpoint or it does not fit the state, DamagedCheckpoint when a file is not as written,
    UnsafeCheckpoint (a UserError) when it is and could run code.
    """
    info = from_first_rank(lambda: _find(path), process_group)
    return read(info, state, process_group, accept)


def read(
    info: CheckpointInfo,
    state: StateSource,
    group: dist.ProcessGroup | None,
    accept: AcceptMetadata | None,
) -> LoadedCheckpoint:
    """Load one complete checkpoint; `info` must be the same on all ranks. Raises as
    `load_checkpoint`."""
    assert info.manifest is not None
    metadata = full_metadata(info)
    if accept is not None:
        accept(metadata)
    index = _read_index(info)
    for problem in gather(index if isinstance(index, Exception) else None, group):
        if problem is not None:
            raise problem
    assert isinstance(index, Metadata)
    filled = state(metadata) if callable(state) else state
    flat = flatten(filled)
    try:
        load_state_dict(
            flat,
            storage_reader=CheckpointReader(info.path, info.manifest, index),
            planner=PlainLoadPlanner(),
            process_group=group,
            no_dist=not dist.is_initialized(),
        )
    except CheckpointException as failure:
        raise _translated(info, failure) from failure
    unflatten_into(filled, flat)
    return LoadedCheckpoint(info, filled)


def full_metadata(info: CheckpointInfo) -> dict[str, Any]:
    """The caller's metadata, with `step`, `world_size` and `path`."""
    assert info.manifest is not None
    return {
        **info.metadata,
        "step": info.step,
        "world_size": info.manifest.world_size,
        "path": str(info.path),
    }


def failure_text(failures: Mapping[int, Any]) -> str:
    """`rank 1: OSError: [Errno 28] No space left on device`, for up to three of the ranks that
    failed."""
    ranks = sorted(failures)
    texts = [
        f"rank {rank}: {type(failures[rank][0]).__name__}: {failures[rank][0]}"
        for rank in ranks[:3]
    ]
    return "; ".join(texts) + (f"; and {len(ranks) - 3} more ranks" if len(ranks) > 3 else "")


def _find(path: Path) -> CheckpointInfo:
    """The checkpoint that a user's path means: itself, or the newest complete one below a run
    directory."""
    if any((path / name).is_file() for name in (MANIFEST_NAME, METADATA_NAME)):
        candidates = [info for info in [inspect(path)] if info is not None]
    else:
        inner = path / CHECKPOINTS_NAME
        candidates = list_checkpoints_in(inner if inner.is_dir() else path)
    if (newest := newest_usable(candidates)) is not None:
        return newest
    if not candidates:
        raise NotFoundError(
            f"{path}: there is no checkpoint; name one such as RUN_DIR/checkpoints/step-00000050"
        )
    raise incomplete_error(candidates[-1])


def _read_index(info: CheckpointInfo) -> Metadata | DamagedCheckpoint | UserError:
    """The index as torch has it, or why there is none to use. It is verified before anything in it
    is believed."""
    assert info.manifest is not None
    try:
        require_undamaged(info.path, METADATA_NAME, info.manifest)
        return metadata_of(read_index(info.path, info.manifest), info.manifest)
    except (DamagedCheckpoint, UserError) as problem:
        return problem
    except OSError as error:
        return DamagedCheckpoint(f"{info.path / METADATA_NAME}: it cannot be read: {error}")


def _translated(info: CheckpointInfo, failure: CheckpointException) -> Exception:
    """The same exception on every rank: damage (an I/O error too), a state that does not fit, or
    neither."""
    for rank in sorted(failure.failures):
        error = failure.failures[rank][0]
        if isinstance(error, DamagedCheckpoint | UserError):
            return type(error)(str(error))
        if isinstance(error, OSError):
            return DamagedCheckpoint(f"{info.path}: it cannot be read: {error}")
    if all(isinstance(failure.failures[rank][0], _FROM_CONTENT) for rank in failure.failures):
        return UserError(f"{info.path} does not fit this model: {failure_text(failure.failures)}")
    return RuntimeError(f"loading {info.path} failed: {failure}")
