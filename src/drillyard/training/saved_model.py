"""A saved model: where it is, what it was trained with, and its weights in memory.

Looking a model up needs no torch, so mistakes are reported at once; `load_saved_model` imports it.
Models load sharded over any number of ranks: the layout of the training run does not matter.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from drillyard import export_directory
from drillyard.config.fetch_limits import FetchLimits
from drillyard.config.load import config_from_options, resolve_section_secrets
from drillyard.config.model_files import (
    ADAPTER_CONFIG,
    read_adapted_layers,
    read_adapter_config,
)
from drillyard.config.problems import on_one_line, shown_address
from drillyard.config.run import ParallelismConfig, RunConfig
from drillyard.config.run_model import LoraConfig
from drillyard.config.saved_config import load_saved_config, settings_to_fetch
from drillyard.errors import NotFoundError, UserError
from drillyard.guarded_files import is_there, require_usual_files
from drillyard.telemetry.events import EVENTS_FILE
from drillyard.training.base_record import BASE_RECORD, read_base_record
from drillyard.training.checkpoint.inventory import (
    CHECKPOINTS_NAME,
    incomplete_error,
    inspect,
    list_checkpoints,
    newest_usable,
)
from drillyard.training.checkpoint.manifest import MANIFEST_NAME
from drillyard.training.run_directory import (
    SAVED_BASE,
    SAVED_CONFIG,
    SAVED_TOKENIZER,
    require_usual_run_files,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from drillyard.parallel.ranks import Ranks
    from drillyard.training.model_setup import ShardedModel

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


@dataclass(frozen=True)
class SavedModel:
    """Location of a saved model, and the config it was trained with (None for a model from
    elsewhere)."""

    path: Path
    is_checkpoint: bool
    config: RunConfig | None

    @property
    def tokenizer_directory(self) -> Path | None:
        """Directory of the model's tokenizer: with the weights, or in the run directory. None where
        there is none, as peft leaves an adapter."""
        owner = run_directory_above(self.path)
        if self.is_checkpoint and owner:
            return owner / SAVED_TOKENIZER
        return self.path if any((self.path / name).is_file() for name in _TOKENIZER_FILES) else None

    @property
    def base(self) -> dict[str, Any] | None:
        """Record of the base model that the checkpoint's run wrote; None where it has no base model
        or wrote none."""
        owner = run_directory_above(self.path)
        return (
            None
            if owner is None or self.config is None
            else read_base_record(owner, self.config.model.id)
        )

    def config_from_run(self) -> RunConfig:
        """The run config of a checkpoint, with the base's config as the run kept it: the base need
        not be there."""
        owner = run_directory_above(self.path)
        assert self.config is not None and owner is not None, "a checkpoint is in a run directory"
        if self.config.model.lora is not None:
            # Its checkpoints lack the base's weights, which are read where they were.
            base = (self.base or {}).get("path") or self.config.model.id
            model = self.config.model.model_copy(update={"id": base})
            return resolve_section_secrets(self.config.model_copy(update={"model": model}), "model")
        if self.base is None:
            return resolve_section_secrets(self.config, "model")
        model = self.config.model.model_copy(update={"id": str(owner / SAVED_BASE)})
        return self.config.model_copy(update={"model": model})


def find_saved_model(path: Path) -> SavedModel:
    """Find the model of `path`: a checkpoint directory, a model directory in Hugging Face format,
    or a run directory's final/.

    Raises UserError when it is none of them, or has something odd in the place of a file.
    """
    if not path.is_dir():
        raise NotFoundError(
            f"{path}: no such directory; give a checkpoint, a final/ directory or a run directory"
        )
    owner = run_directory_above(path)
    require_usual_files(path)
    if owner is not None:
        require_usual_run_files(owner)
    config = load_saved_config(owner / SAVED_CONFIG) if owner else None
    if export_directory.holds_model(path):
        return SavedModel(path, False, config)
    if (path / MANIFEST_NAME).is_file():
        if config is None:
            raise UserError(
                f"{path}: a checkpoint needs the run.yaml of its run; give"
                f" RUN_DIR/{CHECKPOINTS_NAME}/{path.name}"
            )
        if (info := inspect(path)) is not None and not info.complete:
            raise incomplete_error(info)
        return SavedModel(path, True, config)
    if export_directory.holds_model(path / "final"):
        return SavedModel(path / "final", False, config)
    raise UserError(
        f"{path}: neither a complete checkpoint (manifest.json) nor a model (config.json) nor a run"
        " with final/ or a checkpoint"
    )


def find_in_run(path: Path, *, checkpoint_only: bool = False) -> Path:
    """The model to take where `path` is a run directory: final/, else the newest complete
    checkpoint. Any other path is returned as it is.

    `checkpoint_only`: not final/, which needs no export. UserError where no checkpoint is complete,
    with those there are, or where a newer one is of a later format.
    """
    if (path / MANIFEST_NAME).is_file() or export_directory.holds_model(path):
        return path
    checkpoints = list_checkpoints(path)
    has_final = export_directory.holds_model(path / "final")
    if has_final and not checkpoint_only:
        return path / "final"
    if (newest := newest_usable(checkpoints)) is not None:
        return newest.path
    if checkpoints:
        listed = "; ".join(f"{info.path.name}: {info.reason}" for info in checkpoints[-5:])
        raise UserError(
            f"{path}: none of the checkpoints of this run is complete ({listed}). Let the run save"
            " another, or start it again"
        )
    if has_final:
        raise UserError(
            f"{path}: this run has no checkpoint to export; {path / 'final'} is its model in"
            " Hugging Face format already: copy that"
        )
    return path


def fetch_limits_of(
    saved: SavedModel, *, typed: Collection[str] = (), accepts_data: bool = False
) -> FetchLimits:
    """The limits of a command on a saved model; the arguments are those of `FetchLimits`.

    Its settings are those of the run's config, and the base that the model's own files name.
    """
    settings: tuple[str, ...] = ()
    owner = run_directory_above(saved.path)
    if saved.config is not None and owner is not None:
        settings = settings_to_fetch(saved.config, owner / SAVED_CONFIG, typed=typed)
    if saved.is_checkpoint:
        file, key, base = SAVED_BASE + "/" + BASE_RECORD, "path", (saved.base or {}).get("path")
        directory = owner
    else:
        file, key, directory = ADAPTER_CONFIG, "base_model_name_or_path", saved.path
        is_adapter = not (saved.path / "config.json").is_file()
        base = read_adapter_config(saved.path).get(key) if is_adapter else None
    if isinstance(base, str) and base not in typed and not Path(base).expanduser().is_dir():
        settings = (*settings, on_one_line(f"{directory}/{file}: {key}: {shown_address(base)}"))
    return FetchLimits(settings, frozenset(typed), accepts_data)


def run_directory_above(path: Path) -> Path | None:
    """The run directory of RUN_DIR/checkpoints/step-N, of RUN_DIR/final, or of itself; None for a
    model from elsewhere.

    The directory of a project has a run.yaml too; that of a run that has started has events as
    well.
    """
    if (path / MANIFEST_NAME).is_file():
        places, needed = (path, Path(os.path.realpath(path))), [SAVED_CONFIG]
        owners = [place.parent.parent for place in places if place.parent.name == CHECKPOINTS_NAME]
    else:
        owners, needed = [path, path.parent], [SAVED_CONFIG, EVENTS_FILE]
    return next((owner for owner in owners if all(is_there(owner / name) for name in needed)), None)


def as_pretrained(config: RunConfig, saved: SavedModel) -> RunConfig:
    """`config` with the model of a Hugging Face directory, or an adapter with the base that it
    names, and with its tokenizer: that of the directory, of the data's config, or of the base."""
    path = saved.path
    changes: dict[str, Any] = {"id": str(path), "config": None, "init": "pretrained", "lora": None}
    if (path / "config.json").is_file():
        changes["quantization"] = None
    else:
        adapter = read_adapter_config(path)
        own = None if saved.config is None else saved.config.model
        lora = _lora_of(adapter, path, None if own is None else own.lora)
        base = adapter.get("base_model_name_or_path")
        if not isinstance(base, str) or not base:
            raise UserError(
                f"{path}: its adapter_config.json names no base: write it into"
                " base_model_name_or_path"
            )
        changes |= {"id": base, "lora": lora}
        if own is not None:
            # The config may be of another run, for its data.
            changes["quantization"] = own.quantization
    tokenizer: Any = config.data.tokenizer if isinstance(config.data.tokenizer, str) else None
    template = config.data.chat_template
    if saved.tokenizer_directory is not None:
        # The template was saved with it.
        tokenizer, template = str(saved.tokenizer_directory), None
    data = config.data.model_copy(update={"tokenizer": tokenizer, "chat_template": template})
    return config.model_copy(
        update={"model": config.model.model_copy(update=changes), "data": data}
    )


def _lora_of(adapter: dict[str, Any], path: Path, of_run: LoraConfig | None) -> LoraConfig:
    """The settings of the adapter at `path`: those of the run that made it, or what its files
    say."""
    if of_run is not None:
        return of_run.model_copy(update={"adapter": str(path)})
    layers = read_adapted_layers(path)
    variants = {"dora": adapter.get("use_dora"), "rslora": adapter.get("use_rslora")}
    settings = {
        "rank": adapter.get("r"),
        "alpha": adapter.get("lora_alpha"),
        # Experts stacked in one tensor have adapters under all-linear alone.
        "target_modules": "all-linear" if {"experts", "base_layer"} & set(layers) else layers,
        "variant": next((name for name, used in variants.items() if used), "lora"),
        "adapter": str(path),
    }
    return config_from_options(LoraConfig, settings)


def without_training_layout(config: RunConfig) -> RunConfig:
    """`config` for another host and other ranks than those of training: leaves speed and batch
    settings open."""
    training = {
        "device": "auto",
        "compile": False,
        "activation_checkpointing": "none",
        "deterministic": False,
        "gradient_accumulation": None,
        "global_batch_size": None,
    }
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"attention": "auto"}),
            "training": config.training.model_copy(update=training),
            "parallelism": ParallelismConfig(),
        }
    )


def load_saved_model(
    saved: SavedModel,
    config: RunConfig,
    tokenizer: PreTrainedTokenizerFast,
    ranks: Ranks,
    purpose: Literal["evaluation", "export"],
) -> ShardedModel:
    """The saved model, sharded and filled; `purpose`: see `build_sharded_model`. UserError when a
    file is damaged."""
    from drillyard.training.base_checksum import base_checksum
    from drillyard.training.checkpoint.dcp_storage import DamagedCheckpoint
    from drillyard.training.checkpoint.loading import load_checkpoint
    from drillyard.training.model_setup import (
        build_sharded_model,
        fill_frozen_weights,
        fill_weights,
    )
    from drillyard.training.optimizer import local_shards
    from drillyard.training.resume import model_state

    model = build_sharded_model(config, tokenizer, ranks, purpose=purpose)
    if not saved.is_checkpoint:
        fill_weights(config, model)
        return model
    try:
        loaded = load_checkpoint(saved.path, model_state(local_shards(model.root)))
    except DamagedCheckpoint as damage:
        raise UserError(f"{saved.path}: damaged: {damage}; use another checkpoint") from None
    if config.model.lora is not None and loaded.metadata.get("base") != base_checksum(
        config.model.id
    ):
        raise UserError(
            f"{saved.path}: its adapters were trained on other weights than {config.model.id} has"
            " now\nput those back: the checkpoint holds the adapters alone"
        )
    fill_frozen_weights(config, model)
    return model
