"""Weights of a saved model, back in memory for evaluation and export, and the dtypes in which exports store them.

Models load sharded over however many ranks there are: the layout of the training run does not matter.

RUN_DIR/base/ keeps the base's config.json and generation_config.json as they were when training began, and base.json:
what `model.id` named, and the dtype of each parameter in its files. So checkpoints need nothing but the run directory,
and an export has the base's dtypes: a bf16 model comes back as bf16, except for the weights that it stored in fp32. A
model with an inline config is exported in the dtype that its config declares, or else as it was trained.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from drillyard.config.run import ModelConfig, ParallelismConfig, RunConfig
from drillyard.data.tokenizer import open_tokenizer
from drillyard.errors import UserError
from drillyard.models import export, load_config, load_generation_config, stored_dtypes
from drillyard.models.weight_layout import named_tensors
from drillyard.parallel.model_setup import ShardedModel, build_sharded_model, fill_weights
from drillyard.parallel.ranks import Ranks, start_ranks, stop_ranks
from drillyard.training.checkpoint import DamagedCheckpoint, load_checkpoint
from drillyard.training.optimizer import local_shards
from drillyard.training.resume import model_state
from drillyard.training.saved_model import (
    BASE_RECORD,
    SAVED_BASE,
    SavedModel,
    find_checkpoint_to_export,
    read_base_record,
)

Dtypes = dict[str, torch.dtype]


def save_base_record(model_config: ModelConfig, model: PreTrainedModel, directory: Path, *, begins: bool) -> Dtypes:
    """Have what `model.id` names recorded in the run directory; returns the dtype of each parameter in exports.

    `begins`: the weights have just been read from there; else what was recorded then holds. Raises OSError where it
    cannot be written.
    """
    if not begins and (record := read_base_record(directory, model_config.id)) is not None:
        return dtypes_of_record(record)
    dtypes = export_dtypes(model_config, model)
    if model_config.id is None:
        return dtypes
    base = directory / SAVED_BASE
    base.mkdir(exist_ok=True)
    load_config(model_config).to_json_file(base / "config.json")
    generation_config = load_generation_config(model_config)
    if generation_config is not None:
        generation_config.to_json_file(base / "generation_config.json")
    local = Path(model_config.id).expanduser()
    record = {
        "version": 1,
        "id": model_config.id,
        "path": os.path.realpath(local) if local.is_dir() else None,
        "dtypes": {name: str(dtype).removeprefix("torch.") for name, dtype in sorted(dtypes.items())},
    }
    draft = base / f"{BASE_RECORD}.tmp"
    draft.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    draft.replace(base / BASE_RECORD)
    return dtypes


def dtypes_of_record(record: dict[str, Any]) -> Dtypes:
    """The dtype of each parameter from what `kept_base` returned."""
    return {name: getattr(torch, dtype) for name, dtype in record["dtypes"].items()}


def export_dtypes(model_config: ModelConfig, model: PreTrainedModel) -> Dtypes:
    """The dtype of each parameter in an export: that of the base's files, else the one that its config declares, else
    none: as it was trained."""
    if model_config.init == "pretrained":
        # Weights that are gone since training began leave the config.
        with contextlib.suppress(UserError):
            return stored_dtypes(model, str(model_config.id))
    declared: torch.dtype | None = load_config(model_config).dtype  # type: ignore[assignment]
    return {} if declared is None else dict.fromkeys(named_tensors(model), declared)


def without_training_layout(config: RunConfig) -> RunConfig:
    """`config` for a host and ranks that are not those of training: what was chosen for speed there is left open.

    The batch of a step goes too: it need not divide by the ranks that are here.
    """
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
    saved: SavedModel, config: RunConfig, tokenizer: PreTrainedTokenizerFast, ranks: Ranks
) -> ShardedModel:
    """The saved model, sharded over the ranks and filled. Raises UserError when one of its files is damaged."""
    model = build_sharded_model(config, tokenizer, ranks, for_training=False)
    if not saved.is_checkpoint:
        fill_weights(config, model.causal_lm)
        return model
    try:
        load_checkpoint(saved.path, model_state(local_shards(model.root)))
    except DamagedCheckpoint as damage:
        raise UserError(f"{saved.path}: damaged: {damage}; use another checkpoint") from None
    return model


def export_checkpoint(
    path: Path, destination: Path, *, dtype: torch.dtype | None = None, overwrite: bool = False
) -> None:
    """Write the checkpoint at `path` as a Hugging Face directory, as one rank of however many there are.

    `dtype`: of all floating-point weights; default: what each has in the base model. Raises UserError when `path` is no
    checkpoint or it must not be exported to `destination`.
    """
    saved = find_checkpoint_to_export(path, destination, overwrite=overwrite)
    config = without_training_layout(saved.config_from_run())
    ranks = start_ranks(config.training, config.parallelism)
    try:
        tokenizer = open_tokenizer(str(saved.tokenizer_directory)).pretrained
        model = load_saved_model(saved, config, tokenizer, ranks)
        base = saved.base
        kept = export_dtypes(config.model, model.causal_lm) if base is None else dtypes_of_record(base)
        export(model.causal_lm, destination, tokenizer=tokenizer, dtype=dtype or kept, overwrite=overwrite)
    finally:
        stop_ranks()
