"""A checkpoint as a Hugging Face directory: which one, where it may go, and in which dtypes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drillyard import export_directory
from drillyard.config.fetch_limits import limited
from drillyard.config.kernel_rules import HALF
from drillyard.config.run import RunConfig
from drillyard.errors import UserError
from drillyard.guarded_files import require_usual_files
from drillyard.safe_files import describe_os_error
from drillyard.training.base_record import (
    dtypes_of_record,
    export_dtypes,
    saved_base_documents,
)
from drillyard.training.saved_model import (
    SavedModel,
    fetch_limits_of,
    find_saved_model,
    load_saved_model,
    run_directory_above,
    without_training_layout,
)

if TYPE_CHECKING:
    import torch


def find_checkpoint_to_export(
    path: Path, destination: Path, *, overwrite: bool = False, merge: bool = False
) -> SavedModel:
    """The checkpoint at `path`. UserError when it is none, or when it must not be exported to
    `destination`.

    `merge`: it must be one of adapters.
    """
    saved = find_saved_model(path)
    if not saved.is_checkpoint:
        raise UserError(
            f"{path}: is not a checkpoint; give RUN_DIR/checkpoints/step-N, or RUN_DIR for the"
            " newest"
        )
    if merge and (saved.config is None or saved.config.model.lora is None):
        raise UserError(
            f"{path}: has no adapters to merge: its run trained all weights; leave --merge out"
        )
    target = Path(os.path.realpath(destination))
    checkpoint = Path(os.path.realpath(path))
    here = Path.cwd()
    if target in (here, *here.parents):
        which = "the working directory" if target == here else "above the working directory"
        raise UserError(f"{destination}: is {which}; name a new directory, such as ./model")
    if target in (checkpoint, *checkpoint.parents):
        raise UserError(f"{destination}: holds the checkpoint; name a new directory")
    if checkpoint.parent in target.parents:
        raise UserError(
            f"{destination}: is among the checkpoints, which a run deletes; name a directory"
            " elsewhere"
        )
    if any((above / export_directory.RECORD).is_file() for above in target.parents):
        raise UserError(f"{destination}: is inside an exported model; name a directory elsewhere")
    assert saved.config is not None, "a checkpoint comes with its config"
    known = [saved.config.model.id, saved.config.data.tokenizer, (saved.base or {}).get("path")]
    for base in (
        Path(os.path.realpath(Path(name).expanduser())) for name in known if isinstance(name, str)
    ):
        require_usual_files(base)
        if base.is_dir() and target in (base, *base.parents):
            raise UserError(
                f"{destination}: holds the model or tokenizer that the run began from; name a new"
                " directory"
            )
    try:
        refused = export_directory.reason_to_refuse(target, overwrite=overwrite)
    except OSError as error:
        raise UserError(f"{destination}: cannot be read: {describe_os_error(error)}") from None
    if refused is not None:
        advice = (
            "give --overwrite to replace it"
            if refused == export_directory.EARLIER_EXPORT
            else "move this one away"
        )
        raise UserError(f"{destination}: {refused}; name a new directory, or {advice}")
    return saved


def export_checkpoint(
    path: Path,
    destination: Path,
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    merge: bool = False,
    trust_config: bool = False,
) -> None:
    """Write the checkpoint at `path` as a Hugging Face directory, as one rank of however many there
    are.

    `dtype`: of all floating-point weights; default: what each has in the base model. Adapters are
    written alone, in PEFT's format, or with `merge` as a model with their update added to its
    weights. Fetches nothing that the run's files name unless `trust_config` (`fetch_limits.py`).
    Raises UserError when `path` is no checkpoint or it must not be exported to
    `destination`.
    """
    saved = find_checkpoint_to_export(path, destination, overwrite=overwrite, merge=merge)
    with limited(None if trust_config else fetch_limits_of(saved)):
        _export(saved, destination, dtype, overwrite=overwrite, merge=merge)


def _export(
    saved: SavedModel,
    destination: Path,
    dtype: torch.dtype | None,
    *,
    overwrite: bool,
    merge: bool,
) -> None:
    """Export a checkpoint that `find_checkpoint_to_export` returned, as one rank."""
    from drillyard.data.tokenizer import open_saved_tokenizer
    from drillyard.data.tokenizer_files import tokenizer_files
    from drillyard.models.export import export
    from drillyard.parallel.ranks import start_ranks, stop_ranks

    config = without_training_layout(saved.config_from_run())
    has_adapters = config.model.lora is not None
    if merge and has_adapters:
        config = _for_merging(config, saved.base, dtype)
    ranks = start_ranks(config.training, config.parallelism)
    assert saved.tokenizer_directory is not None, "a checkpoint is in a run directory"
    try:
        tokenizer = open_saved_tokenizer(saved.tokenizer_directory)
        model = load_saved_model(saved, config, tokenizer.pretrained, ranks, "export")
        base = saved.base
        kept = (
            export_dtypes(config.model, model.causal_lm) if base is None else dtypes_of_record(base)
        )
        owner = run_directory_above(saved.path)
        assert owner is not None and saved.config is not None, "a checkpoint is in a run directory"
        documents = saved_base_documents(owner, saved.config.model, config.model.id)
        export(
            model.causal_lm,
            destination,
            tokenizer=tokenizer_files(tokenizer),
            base=documents,
            dtype=dtype or kept,
            overwrite=overwrite,
            adapters="left out" if not has_adapters else "merged" if merge else "alone",
        )
    finally:
        stop_ranks()


def _for_merging(
    config: RunConfig, base: dict[str, Any] | None, dtype: torch.dtype | None
) -> RunConfig:
    """`config` with a precision in which the sum of weights and update is rounded to the exported
    dtypes only once."""
    import torch

    written = {dtype} if dtype is not None else set(dtypes_of_record(base).values() if base else ())
    if config.training.precision not in HALF or written == {torch.bfloat16}:
        return config
    return config.model_copy(
        update={"training": config.training.model_copy(update={"precision": "fp32"})}
    )
