"""The run directory at the start of a run: is it this run's, may it be written, and what is already in it.

A directory that holds another run is never touched: the saved run.yaml is compared with the config that is about to
start, and what differs in a way that matters is said.
"""

from __future__ import annotations

import os
from pathlib import Path

from drillyard.config import differences, load_run_config, save_resolved
from drillyard.config.run import RunConfig
from drillyard.errors import UserError
from drillyard.training.checkpoint import list_checkpoints

SAVED_CONFIG = "run.yaml"
SAVED_TOKENIZER = "tokenizer"


def run_directory_of(config: RunConfig) -> Path:
    """`<output>/<name>`."""
    return Path(config.output) / config.name


def claim_run_directory(config: RunConfig) -> Path:
    """Create or reuse the run directory of `config` and save the resolved config there; returns its path.

    Raises UserError when it cannot be written, holds a different run, or holds checkpoints that `resume: never` would
    pass over.
    """
    directory = run_directory_of(config)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{directory}: cannot be created ({error.strerror}); choose another `output`") from None
    if not os.access(directory, os.W_OK | os.X_OK) or not _accepts_a_file(directory):
        raise UserError(
            f"{directory}: the run directory is read-only; choose another `output`, or give write permission"
        )
    saved = directory / SAVED_CONFIG
    if saved.is_file():
        _require_same_run(directory, load_run_config(saved, resolve_environment=False), config)
    if config.checkpoint.resume == "never" and list_checkpoints(directory):
        raise UserError(
            f"{directory}: holds checkpoints, and checkpoint.resume is never; "
            "set `resume: auto` to go on from them, or choose another name"
        )
    save_resolved(config, saved)
    return directory


def _require_same_run(directory: Path, old: RunConfig, new: RunConfig) -> None:
    changed = differences(old, new)
    if changed:
        shown = "; ".join(changed[:5]) + (f"; and {len(changed) - 5} more" if len(changed) > 5 else "")
        raise UserError(f"{directory}: holds a different run ({shown}); choose another `name`, or undo the change")


def _accepts_a_file(directory: Path) -> bool:
    """Whether a file can really be made: root passes every permission check, also on a read-only mount."""
    probe = directory / f".probe-{os.getpid()}"
    try:
        probe.touch()
        probe.unlink()
    except OSError:
        return False
    return True
