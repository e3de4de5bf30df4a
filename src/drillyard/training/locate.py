"""Where a saved model is and what it was trained with: looked up without torch, so that mistakes are told at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from drillyard.config import load_run_config
from drillyard.config.run import RunConfig
from drillyard.errors import UserError
from drillyard.training.directory import SAVED_CONFIG, SAVED_TOKENIZER


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


def find_saved_model(path: Path) -> SavedModel:
    """What `path` is: a checkpoint directory, a model directory in Hugging Face format, or a run directory (its
    final/).

    Raises UserError when it is none of them.
    """
    if not path.is_dir():
        raise UserError(f"{path}: there is no such directory; give a checkpoint, a final/ directory or a run directory")
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


def find_checkpoint_to_export(path: Path, destination: Path) -> SavedModel:
    """The checkpoint at `path`. UserError when it is none, or when `destination` holds something else than a model."""
    saved = find_saved_model(path)
    if not saved.is_checkpoint:
        raise UserError(f"{path}: is not a checkpoint; give RUN_DIR/checkpoints/step-N")
    if destination.exists() and not destination.is_dir():
        raise UserError(f"{destination}: is a file; choose a new directory")
    if destination.exists() and any(destination.iterdir()) and not (destination / "config.json").is_file():
        raise UserError(f"{destination}: holds something else than a model; choose a new directory")
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
