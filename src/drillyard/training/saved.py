"""A trained model back in memory, from `final/` or from a checkpoint, for evaluation and export.

Both come up under the same sharding as in training, on however many ranks there are, so what could be trained can be
evaluated and exported on the same hosts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from drillyard.config import load_run_config
from drillyard.config.run import RunConfig
from drillyard.data.tokenizer import open_tokenizer
from drillyard.errors import UserError
from drillyard.models import export
from drillyard.parallel.ranks import Ranks, start_ranks, stop_ranks
from drillyard.parallel.setup import SetUpModel, fill_weights, set_up_model
from drillyard.training.checkpoint import DamagedCheckpoint, load_checkpoint
from drillyard.training.directory import SAVED_CONFIG, SAVED_TOKENIZER
from drillyard.training.optimizer import local_shards
from drillyard.training.state import model_state


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


def bring_up(saved: SavedModel, config: RunConfig, tokenizer: PreTrainedTokenizerFast, ranks: Ranks) -> SetUpModel:
    """The saved model, sharded over the ranks and filled. Raises UserError when one of its files is damaged."""
    model = set_up_model(config, tokenizer, ranks)
    if not saved.is_checkpoint:
        fill_weights(config, model.causal_lm)
        return model
    try:
        load_checkpoint(saved.path, model_state(local_shards(model.root)))
    except DamagedCheckpoint as damage:
        raise UserError(f"{saved.path}: damaged: {damage}; use another checkpoint") from None
    return model


def export_checkpoint(path: Path, destination: Path) -> None:
    """Write the checkpoint at `path` as a Hugging Face directory, as one rank of however many there are.

    Raises UserError when `path` is no checkpoint or `destination` holds something else.
    """
    saved = find_saved_model(path)
    if not saved.is_checkpoint or saved.config is None:
        raise UserError(f"{path}: is not a checkpoint; give RUN_DIR/checkpoints/step-N")
    if destination.exists() and any(destination.iterdir()) and not (destination / "config.json").is_file():
        raise UserError(f"{destination}: holds something else than a model; choose a new directory")
    ranks = start_ranks(saved.config.training, saved.config.parallelism)
    try:
        tokenizer = open_tokenizer(str(saved.tokenizer_directory)).pretrained
        model = bring_up(saved, saved.config, tokenizer, ranks)
        export(model.causal_lm, destination, tokenizer=tokenizer)
    finally:
        stop_ranks()
