"""DeepSpeed's config JSON as settings of a run config.

Names and defaults: the modules config, constants and lr_schedules of deepspeed.runtime. A file
without gradient_clipping was not clipped up to release 0.19.2, and is at 1.0 in 0.19.8: null is
written, and said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drillyard.config.trainer_table import ConvertedConfig, TrainerFile, as_number, put_value

_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_ADAM = ("adam", "adamw", "fusedadam", "torch_adam")
_OPTIMIZER = {
    "lr": "learning_rate",
    "betas": "betas",
    "eps": "epsilon",
    "weight_decay": "weight_decay",
}


def from_deepspeed(file: TrainerFile, found: ConvertedConfig) -> None:
    """Write the settings of `file` into `found`."""
    accumulation = file.take("gradient_accumulation_steps")
    put_value(
        found, "training.global_batch_size", file.take("train_batch_size"), "train_batch_size"
    )
    # The batch is the same on any number of ranks; what each accumulates follows from it.
    if found.get("training.global_batch_size") is None:
        put_value(
            found, "training.gradient_accumulation", accumulation, "gradient_accumulation_steps"
        )
    if file.has("gradient_clipping"):
        file.move("gradient_clipping", found, "training.gradient_clipping")
    else:
        found.put("training.gradient_clipping", None)
        found.leave_out(
            "gradient_clipping",
            "is not in the file: releases up to 0.19.2 do not clip then, 0.19.8 does at 1.0;"
            " training.gradient_clipping: null is written",
        )
    _optimizer(file, found)
    _schedule(file, found)
    _precision(file, found)
    wandb = {
        ours: file.take(f"wandb.{theirs}")
        for theirs, ours in (("project", "project"), ("group", "group"), ("team", "entity"))
    }
    if file.take("wandb.enabled") is True:
        found.put("logging.wandb", {key: value for key, value in wandb.items() if value})
    file.take("tensorboard.enabled")


def _precision(file: TrainerFile, found: ConvertedConfig) -> None:
    enabled = {name: file.take(f"{name}.enabled") for name in ("bf16", "fp16")}
    if True in enabled.values():
        found.put("training.precision", "bf16")
        if enabled["fp16"] is True and enabled["bf16"] is not True:
            found.leave_out(
                "fp16",
                "computes in fp16 with loss scaling, which is not available; bf16 is written",
            )
    elif "auto" in enabled.values():
        for name, value in enabled.items():
            if value == "auto":
                found.leave_out(
                    f"{name}.enabled", "is auto, decided elsewhere; set training.precision"
                )
    else:
        found.put("training.precision", "fp32")


def _section(file: TrainerFile, name: str, found: ConvertedConfig) -> dict[str, Any] | None:
    """Type and parameters of the optimizer or scheduler; None where the file has none."""
    section = {
        key.removeprefix(f"{name}."): file.take(key)
        for key in [key for key in file.values if key.startswith(f"{name}.")]
    }
    if not section and not file.has(name):
        return None
    if file.has(name):
        found.leave_out(name, f"is {file.take(name)}, and no settings by name")
    if "params" in section:
        found.leave_out(f"{name}.params", f"is {section.pop('params')}, and no settings by name")
    for key in section:
        if key != "type" and not key.startswith("params.") and section[key]:
            found.leave_out(f"{name}.{key}", "is of another kind of optimizer")
    parameters = {key: value for key, value in section.items() if key.startswith("params.")}
    return {
        "type": section.get("type"),
        **{k.removeprefix("params."): v for k, v in parameters.items()},
    }


def _optimizer(file: TrainerFile, found: ConvertedConfig) -> None:
    parameters = _section(file, "optimizer", found)
    if parameters is None:
        return
    kind = parameters.pop("type")
    if str(kind).lower() not in _ADAM:
        found.leave_out(
            f"optimizer.type: {kind}", "adamw, with moments in 32 bits, is written instead"
        )
    # torch's AdamW decays by 0.01 where DeepSpeed's own Adam does not.
    torchs = parameters.pop("torch_adam", False) is True and str(kind).lower() == "adamw"
    usual = {"betas": [0.9, 0.999], "weight_decay": 0.01 if torchs else 0.0}
    for key, value in {**usual, **parameters}.items():
        where = f"optimizer.params.{key}"
        if key in _OPTIMIZER:
            put_value(found, f"training.optimizer.{_OPTIMIZER[key]}", value, where)
        elif key == "adam_w_mode":
            if value is False:
                found.leave_out(f"{where}: false", "weight decay is that of AdamW, decoupled")
        elif key == "max_grad_norm":
            found.leave_out(where, "is refused by DeepSpeed; gradient_clipping is read")
        else:
            _other(file, found, where, value)


def _other(file: TrainerFile, found: ConvertedConfig, where: str, value: Any) -> None:
    row = file.table.keys.get(where)
    if row is None:
        found.leave_out(where, "is not a constant of AdamW")
    elif row.why is not None and value != row.default:
        found.leave_out(where, row.why)


def _schedule(file: TrainerFile, found: ConvertedConfig) -> None:
    parameters = _section(file, "scheduler", found)
    if parameters is None:
        return
    kind = str(parameters.pop("type"))
    found.put("training.schedule.name", _SCHEDULES.get(kind, "cosine"))
    if kind not in _SCHEDULES:
        found.leave_out(f"scheduler.type: {kind}", "cosine is written")
    parameters = {**_usual(kind, found, parameters), **parameters}
    for key, path in (
        ("warmup_num_steps", "training.schedule.warmup_steps"),
        ("total_num_steps", "training.steps"),
        ("warmup_max_lr", "training.optimizer.learning_rate"),
        ("cos_min_ratio", "training.schedule.final_fraction"),
    ):
        put_value(found, path, as_number(parameters.pop(key, None)), f"scheduler.params.{key}")
    warmup = parameters.pop("warmup_type", "linear")
    if warmup != "linear":
        found.leave_out(f"scheduler.params.warmup_type: {warmup}", "warmup is linear")
    for key, value in parameters.items():
        begins = key in ("warmup_min_lr", "warmup_min_ratio")
        if not begins or value:
            reason = "warmup begins at 0" if begins else f"is not of {kind}, or has no counterpart"
            found.leave_out(f"scheduler.params.{key}", reason)


def _usual(kind: str, found: ConvertedConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """What DeepSpeed's schedulers take where a file says nothing."""
    if kind == "WarmupCosineLR":
        # A share of the optimizer's own rate.
        return {"warmup_num_steps": 1000, "warmup_type": "log", "cos_min_ratio": 0.0001}
    if kind not in _SCHEDULES:
        return {}
    usual = {"warmup_num_steps": 1000, "warmup_type": "log"}
    if kind == "WarmupDecayLR" or found.get("training.optimizer.learning_rate") is None:
        return {**usual, "warmup_max_lr": 0.001}
    if "warmup_max_lr" not in given:
        found.leave_out(
            "scheduler.params.warmup_max_lr",
            "is not in the file: releases up to 0.16 take 0.001, later ones the optimizer's rate,"
            " which is written",
        )
    return usual
