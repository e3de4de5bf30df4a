"""Checkpoints: saved while training goes on, verified when read, complete only when the manifest is there.

`files`, `manifest` and `listing` say what lies on disk and need no torch; `storage` and `planning` teach
torch.distributed.checkpoint to take checksums while it writes and to verify them when it reads;
`loading` reads, and `checkpointer` is what the trainer holds. The names that need torch are imported at first use,
so that commands which only list checkpoints start without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from drillyard.training.checkpoint.inventory import (
    CheckpointInfo,
    FileVerdict,
    inspect,
    list_checkpoints,
    prunable,
    remove_checkpoint,
    verify,
)

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
