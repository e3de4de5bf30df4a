"""What a run keeps of the model that it began from, so that its checkpoints need nothing but the run directory.

RUN_DIR/base/ holds the base's config.json and generation_config.json as they were when training began, and base.json:
what `model.id` named, and in which dtype its files hold each parameter. An export writes each parameter in that dtype,
so a bf16 model comes back as bf16, with those weights in fp32 that it had in fp32. A model with an inline config is in
run.yaml; it is exported in the dtype that its config declares, or else as it was trained.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from drillyard.config.run import ModelConfig
from drillyard.errors import UserError
from drillyard.models import load_config, load_generation_config, stored_dtypes
from drillyard.models.weight_layout import named_tensors
from drillyard.training.saved_model import BASE_RECORD, SAVED_BASE, read_base_record

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
