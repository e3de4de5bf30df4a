"""Checkpoints: saved while training goes on, verified when read, complete only when the manifest is there.

`manifest`, `inventory` and `verification` describe what is on disk and need no torch. `index_reader` and
`archive_check` read pickles without running them. `dcp_storage` and `dcp_planners` make torch.distributed.checkpoint
take checksums while it writes and verify them when it reads. `loading` reads, and the trainer uses `checkpointer`.
Names that need torch are imported at first use, so that commands which only list checkpoints start without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from drillyard.training.checkpoint.inventory import (
    CheckpointInfo,
    inspect,
    list_checkpoints,
    prunable,
    remove_checkpoint,
)
from drillyard.training.checkpoint.verification import FileVerdict, verify

if TYPE_CHECKING:
    from drillyard.training.checkpoint.checkpointer import Checkpointer
    from drillyard.training.checkpoint.dcp_storage import DamagedCheckpoint
    from drillyard.training.checkpoint.loading import LoadedCheckpoint, load_checkpoint

__all__ = [
    "CheckpointInfo",
    "Checkpointer",
    "DamagedCheckpoint",
    "FileVerdict",
    "LoadedCheckpoint",
    "inspect",
    "list_checkpoints",
    "load_checkpoint",
    "prunable",
    "remove_checkpoint",
    "verify",
]

_NEED_TORCH = {
    "Checkpointer": "checkpointer",
    "DamagedCheckpoint": "dcp_storage",
    "LoadedCheckpoint": "loading",
    "load_checkpoint": "loading",
}


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_NEED_TORCH[name]}"), name)
