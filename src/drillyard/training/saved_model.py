"""Where a saved model is and what it was trained with: looked up without torch, so that mistakes are told at once."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drillyard import export_directory
from drillyard.config import load_run_config
from drillyard.config.run import RunConfig
from drillyard.errors import NotFoundError, UserError
from drillyard.safe_files import describe_os_error
from drillyard.training.run_directory import SAVED_CONFIG, SAVED_TOKENIZER

SAVED_BASE = "base"
BASE_RECORD = "base.json"


@dataclass(frozen=True)
class SavedModel:
    """Where a saved model is, and the config it was trained with (None for a model from elsewhere)."""

    path: Path
    is_checkpoint: bool
    config: RunConfig | None

    @property
    def tokenizer_directory(self) -> Path:
        """Where the model's tokenizer is saved: beside the weights, or in the run directory."""
        owner = run_directory_above(self.path)
        return owner / SAVED_TOKENIZER if self.is_checkpoint and owner else self.path

    @property
    def base(self) -> dict[str, Any] | None:
        """What the checkpoint's run recorded of its base model; None where it has none, or an earlier version did not
        record it."""
        owner = run_directory_above(self.path)
        return None if owner is None or self.config is None else read_base_record(owner, self.config.model.id)

    def config_from_run(self) -> RunConfig:
        """The run config of a checkpoint, with the base's config as the run kept it: the base need not be there."""
        owner = run_directory_above(self.path)
        assert self.config is not None and owner is not None, "a checkpoint is in a run directory"
        if self.base is None:
            return self.config
        model = self.config.model.model_copy(update={"id": str(owner / SAVED_BASE)})
        return self.config.model_copy(update={"model": model})


def read_base_record(run_directory: Path, model_id: str | None) -> dict[str, Any] | None:
    """The record that a run keeps of the base model `model_id` (see base.py); None where there is none of it."""
    try:
        record = json.loads((run_directory / SAVED_BASE / BASE_RECORD).read_text(encoding="utf-8"))
        is_known = record["version"] == 1 and record["id"] == model_id and isinstance(record["dtypes"], dict)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return dict(record) if is_known else None


def find_saved_model(path: Path) -> SavedModel:
    """What `path` is: a checkpoint directory, a model directory in Hugging Face format, or a run directory (its
    final/).

    Raises UserError when it is none of them.
    """
    if not path.is_dir():
        raise NotFoundError(f"{path}: no such directory; give a checkpoint, a final/ directory or a run directory")
    owner = run_directory_above(path)
    config = load_run_config(owner / SAVED_CONFIG, resolve_environment=False) if owner else None
    if (path / "config.json").is_file():
        return SavedModel(path, False, config)
    if (path / "manifest.json").is_file():
        if config is None:
            raise UserError(
                f"{path}: a checkpoint needs its run's run.yaml two directories above it, to build the model"
            )
        return SavedModel(path, True, config)
    if (path / "final" / "config.json").is_file():
        return SavedModel(path / "final", False, config)
    raise UserError(
        f"{path}: neither a complete checkpoint (manifest.json) nor a model (config.json) nor a run with final/"
    )


def find_checkpoint_to_export(path: Path, destination: Path, *, overwrite: bool = False) -> SavedModel:
    """The checkpoint at `path`. UserError when it is none, or when it must not be exported to `destination`."""
    saved = find_saved_model(path)
    if not saved.is_checkpoint:
        raise UserError(f"{path}: is not a checkpoint; give RUN_DIR/checkpoints/step-N")
    target = Path(os.path.realpath(destination))
    checkpoint = Path(os.path.realpath(path))
    here = Path.cwd()
    if target in (here, *here.parents):
        which = "the working directory" if target == here else "above the working directory"
        raise UserError(f"{destination}: is {which}; name a new directory, such as ./model")
    if target in (checkpoint, *checkpoint.parents):
        raise UserError(f"{destination}: holds the checkpoint; name a new directory")
    if checkpoint.parent in target.parents:
        raise UserError(f"{destination}: is among the checkpoints, which a run deletes; name a directory elsewhere")
    if any((above / export_directory.RECORD).is_file() for above in target.parents):
        raise UserError(f"{destination}: is inside an exported model; name a directory elsewhere")
    assert saved.config is not None, "a checkpoint comes with its config"
    known = [saved.config.model.id, saved.config.data.tokenizer, (saved.base or {}).get("path")]
    for base in (Path(os.path.realpath(Path(name).expanduser())) for name in known if isinstance(name, str)):
        if base.is_dir() and target in (base, *base.parents):
            raise UserError(
                f"{destination}: holds the model or tokenizer that the run began from; name a new directory"
            )
    try:
        refused = export_directory.reason_to_refuse(target, overwrite=overwrite)
    except OSError as error:
        raise UserError(f"{destination}: cannot be read: {describe_os_error(error)}") from None
    if refused is not None:
        advice = (
            "give --overwrite to replace it" if refused == export_directory.EARLIER_EXPORT else "move this one away"
        )
        raise UserError(f"{destination}: {refused}; name a new directory, or {advice}")
    return saved


def run_directory_above(path: Path) -> Path | None:
    """The nearest directory, `path` or up to two above it, that holds a saved run config."""
    for directory in (path, path.parent, path.parent.parent):
        if (directory / SAVED_CONFIG).is_file():
            return directory
    return None


def as_pretrained(config: RunConfig, path: Path) -> RunConfig:
    """`config` with the model and tokenizer of the Hugging Face directory at `path`."""
    model = config.model.model_copy(update={"id": str(path), "config": None, "init": "pretrained", "lora": None})
    return config.model_copy(update={"model": model, "data": config.data.model_copy(update={"tokenizer": str(path)})})
