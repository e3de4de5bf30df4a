"""A trained model back in memory, from `final/` or from a checkpoint, for evaluation and export.

Both come up sharded as in training, over however many ranks there are: the layout of the training run does not matter.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from drillyard.config.run import ParallelismConfig, RunConfig
from drillyard.data.tokenizer import open_tokenizer
from drillyard.errors import UserError
from drillyard.models import export
from drillyard.parallel.model_setup import ShardedModel, build_sharded_model, fill_weights
from drillyard.parallel.ranks import Ranks, start_ranks, stop_ranks
from drillyard.training.base import dtypes_of_record, export_dtypes
from drillyard.training.checkpoint import DamagedCheckpoint, load_checkpoint
from drillyard.training.optimizer import local_shards
from drillyard.training.saved_model import SavedModel, find_checkpoint_to_export
from drillyard.training.state import model_state


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
