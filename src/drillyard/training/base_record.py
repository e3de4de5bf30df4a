"""What a run directory keeps of the model that training began from (RUN_DIR/base/).

The base's config.json and generation_config.json as they were when training began, and base.json:
what `model.id` named, and the dtype of each parameter in its files. So checkpoints need nothing but
the run directory, and an export has the base's dtypes: a bf16 model comes back as bf16, except for
the weights that it stored in fp32. A model with an inline config is exported in the dtype that its
config declares, or else as it was trained.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from drillyard.config.environment import hide_secrets
from drillyard.config.run_model import ModelConfig
from drillyard.errors import UserError
from drillyard.guarded_files import read_json
from drillyard.safe_files import make_directory
from drillyard.training.checkpoint.manifest import write_durably
from drillyard.training.run_directory import SAVED_BASE

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

BASE_RECORD = "base.json"
Dtypes: TypeAlias = "dict[str, torch.dtype]"
"""The dtype of each parameter in an export, by name."""


def read_base_record(run_directory: Path, model_id: str | None) -> dict[str, Any] | None:
    """Read a run's record of the base model `model_id`; None where it has none."""
    try:
        record = read_json(run_directory / SAVED_BASE / BASE_RECORD)
        is_known = (
            record["version"] == 1
            # Earlier versions recorded a reference to the environment as its value.
            and record["id"] in (hide_secrets(model_id), model_id)
            and isinstance(record["dtypes"], dict)
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return dict(record) if is_known else None


def save_base_record(
    model_config: ModelConfig, model: PreTrainedModel, directory: Path, *, begins: bool
) -> Dtypes:
    """Record the base model of `model.id` in the run directory; returns the dtype of each parameter
    in exports.

    `begins`: training starts from the base's weights now; else an earlier record holds. Raises
    OSError.
    """
    from drillyard.models.export_documents import CONFIG, GENERATION_CONFIG

    if not begins and (record := read_base_record(directory, model_config.id)) is not None:
        return dtypes_of_record(record)
    dtypes = export_dtypes(model_config, model)
    if model_config.id is None:
        return dtypes
    base = directory / SAVED_BASE
    make_directory(base)
    documents = _documents_of(model_config, model_config.id)
    for name in (CONFIG, GENERATION_CONFIG):
        if name in documents:
            write_durably(base / name, documents[name])
        else:
            (base / name).unlink(missing_ok=True)
    local = Path(model_config.id).expanduser()
    record = {
        "version": 1,
        "id": hide_secrets(model_config.id),
        "path": os.path.realpath(local) if local.is_dir() else None,
        "dtypes": {
            name: str(dtype).removeprefix("torch.") for name, dtype in sorted(dtypes.items())
        },
    }
    write_durably(base / BASE_RECORD, f"{json.dumps(record, indent=1)}\n".encode())
    return dtypes


def saved_base_documents(
    run_directory: Path, model_config: ModelConfig, source: str | None
) -> dict[str, bytes]:
    """The documents that an export keeps of the base model `model_config.id`, by name: those that
    the run kept, or where it kept none those of `source`; empty without a base."""
    if model_config.id is None or source is None:
        return {}
    is_kept = read_base_record(run_directory, model_config.id) is not None
    with contextlib.suppress(OSError):
        return _documents_of(model_config, run_directory / SAVED_BASE if is_kept else source)
    return {}


def _documents_of(model_config: ModelConfig, source: str | Path) -> dict[str, bytes]:
    from drillyard.models.export_documents import GENERATION_CONFIG, base_documents

    documents = base_documents(source)
    if model_config.init != "pretrained":
        # Settings of text generation are those of the base's weights and tokenizer.
        documents.pop(GENERATION_CONFIG, None)
    return documents


def dtypes_of_record(record: dict[str, Any]) -> Dtypes:
    """The dtypes in what `read_base_record` returned. Raises UserError for a dtype that no weight
    is stored in."""
    from drillyard.models.weight_layout import DTYPES

    known = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
    for name, dtype in record["dtypes"].items():
        if not isinstance(dtype, str) or dtype not in known:
            raise UserError(
                f"{SAVED_BASE}/{BASE_RECORD}: {name} has the dtype {dtype!r:.80}; known are"
                f" {', '.join(known)}\ncopy the file again from where the run wrote it"
            )
    return {name: known[dtype] for name, dtype in record["dtypes"].items()}


def export_dtypes(model_config: ModelConfig, model: PreTrainedModel) -> Dtypes:
    """The dtype of each parameter in the base's files, else the one that its config declares, else
    none."""
    from drillyard.models.meta_model import load_config
    from drillyard.models.pretrained import stored_dtypes
    from drillyard.models.weight_layout import named_tensors

    if model_config.init == "pretrained":
        # Where the base's files are gone, its config decides.
        with contextlib.suppress(UserError):
            return stored_dtypes(model, str(model_config.id))
    declared: torch.dtype | None = load_config(model_config).dtype  # type: ignore[assignment]
    return {} if declared is None else dict.fromkeys(named_tensors(model), declared)
