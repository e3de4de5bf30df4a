"""An adapter as a directory in PEFT's format: adapter_config.json and adapter_model.safetensors.

Names in the file are those of the model's parameters behind `base_model.model.`, without peft's
name of the adapter. Each rank reads its own part of each tensor. Nothing here imports peft.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from drillyard.config.model_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    NAMES_SHOWN,
    read_adapter_config,
    unreadable_adapter,
)
from drillyard.errors import UserError
from drillyard.guarded_files import require_regular
from drillyard.models.sharding import is_adapter_name, local_region, local_tensor, without_wrappers

# Keys of adapter_config.json by the settings of a run that say the same.
_SETTINGS = {"r": "rank", "lora_alpha": "alpha", "use_dora": "variant", "use_rslora": "variant"}
# Keys that name layers, which are compared by their tensors, or that change nothing of what an
# adapter computes.
_FREE = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_dropout",
        "megatron_core",
        "parent_library",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",
        "target_parameters",
        "task_type",
    }
)
_USUAL_INITS = (True, False, "gaussian")


def adapter_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of the adapters, by their names in PEFT's files."""
    return {_stored_name(name): p for name, p in model.named_parameters() if is_adapter_name(name)}


def adapter_config(model: PreTrainedModel) -> dict[str, Any]:
    """The content of adapter_config.json for the adapters in `model`."""
    peft_configs: Any = model.peft_config
    content: dict[str, Any] = peft_configs["default"].to_dict()
    content["inference_mode"] = True
    return {
        key: sorted(value) if isinstance(value, set) else value for key, value in content.items()
    }


def require_matching_adapter(model: PreTrainedModel, path: str, base: str | None) -> None:
    """Raise UserError unless the adapter at `path` has the settings and tensors of those in
    `model`, made for `base`.

    Reads the config and the header of the weights.
    """
    found, own = read_adapter_config(path), adapter_config(model)
    trained_on = found.get("base_model_name_or_path")
    if (
        base is not None
        and isinstance(trained_on, str)
        and trained_on
        and not _is_same_model(trained_on, base)
    ):
        raise UserError(
            f"model.lora.adapter: {path} was trained on {trained_on}, and model.id is {base}\ngive"
            " that base; if it is the same, write its name into base_model_name_or_path of"
            f" {path}/{ADAPTER_CONFIG}"
        )
    for key in sorted(found.keys() - _FREE):
        theirs, ours = found[key], own.get(key)
        if theirs != ours and (theirs or ours):
            setting = f"model.lora.{_SETTINGS[key]}" if key in _SETTINGS else None
            advice = (
                f"change {setting} to fit"
                if setting
                else "give an adapter without it, or leave model.lora.adapter out"
            )
            raise UserError(
                f"model.lora.adapter: {path} has {key} {json.dumps(theirs)}, and this run"
                f" {json.dumps(ours)}\n{advice}"
            )
    if found.get("init_lora_weights", True) not in _USUAL_INITS:
        raise UserError(
            f"model.lora.adapter: {path} began by init_lora_weights"
            f" {json.dumps(found['init_lora_weights'])}, which changes its base\nconvert it to a"
            " plain LoRA adapter with peft's save_pretrained"
        )
    with _StoredAdapter(path) as stored:
        shapes = {name: tuple(tensor.shape) for name, tensor in adapter_tensors(model).items()}
        for problem, names in (
            ("lacks", shapes.keys() - stored.shapes.keys()),
            ("also has", stored.shapes.keys() - shapes.keys()),
            (
                "has other sizes of",
                {name for name in shapes if stored.shapes.get(name, shapes[name]) != shapes[name]},
            ),
        ):
            if names:
                more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
                raise UserError(
                    f"model.lora.adapter: {path} {problem}"
                    f" {', '.join(sorted(names)[:NAMES_SHOWN])}{more}\nit is of another base or"
                    " other model.lora.target_modules: give those of the adapter"
                )


def load_adapter(model: PreTrainedModel, path: str | Path) -> None:
    """Fill this rank's part of the adapters from the files of `path`. Raises UserError where they
    are damaged."""
    with _StoredAdapter(path) as stored, torch.no_grad():
        for name, tensor in adapter_tensors(model).items():
            local_tensor(tensor).copy_(stored.file.get_slice(name)[local_region(tensor)])


class _StoredAdapter:
    """The file of an adapter's weights, memory-mapped."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser() / ADAPTER_WEIGHTS
        opener: Any = safe_open
        require_regular(self.path)
        try:
            self.file: Any = opener(str(self.path), framework="pt").__enter__()
        except (SafetensorError, OSError) as error:
            raise unreadable_adapter(self.path, error) from None
        names = self.file.keys()
        self.shapes = {name: tuple(self.file.get_slice(name).get_shape()) for name in names}

    def __enter__(self) -> _StoredAdapter:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.__exit__(*error)


def _stored_name(name: str) -> str:
    name = without_wrappers(name).removesuffix(".default.weight")
    # A magnitude is a plain parameter in the files, the matrices are those of linear layers.
    return f"base_model.model.{name}" + (
        "" if name.endswith("lora_magnitude_vector") else ".weight"
    )


def _is_same_model(one: str, other: str) -> bool:
    """Whether two names can mean one model: the same path, or the same last part (an id and its
    copy on disk)."""
    paths = [os.path.realpath(Path(name).expanduser()) for name in (one, other)]
    return paths[0] == paths[1] or Path(paths[0]).name == Path(paths[1]).name
