"""Configs of DeepSpeed, TRL and Axolotl as settings of a run config, for `drillyard init
--from-...`.

What a file leaves to its tool's default is written out where that default is another than ours, so
the run stays the same. Keys without a counterpart are returned with the reason: nothing is dropped
in silence.

Names and defaults: DeepSpeed's config JSON (deepspeed.ai/docs/config-json), TRL 0.24 (SFTConfig,
ModelConfig, ScriptArguments, which begin with transformers' TrainingArguments), Axolotl 0.13 (its
config reference).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drillyard.config.yaml_document import read_document
from drillyard.errors import ConfigError

NO_SOURCE = "documents.jsonl"
_FP16 = "computes in fp16 with loss scaling, which is not available; bf16 is written"
_QUANTIZED = (
    "of quantized weights only those in 4 bits beside adapters are available (model.quantization:"
    " nf4)"
)
_NESTED = "the blocks' magnitudes stay in fp32, for exactness"
_ALWAYS = "FSDP2 shards weights, gradients and moments in every run"
_REASONS = {
    "accelerator_config": _ALWAYS,
    "activation_checkpointing": (
        "says how DeepSpeed recomputes, not whether; set training.activation_checkpointing"
    ),
    "attn_implementation": "auto takes the fastest kernel that the device can train with",
    "bf16_full_eval": "evaluation computes in training.precision",
    "ddp_backend": _ALWAYS,
    "deepspeed": _ALWAYS,
    "eval_batch_size": "set evaluation.batch_size",
    "evals_per_epoch": "set evaluation.every_steps",
    "flash_attention": "auto takes the fastest kernel that the device can train with",
    "fsdp": _ALWAYS,
    "fsdp_config": _ALWAYS,
    "bnb_4bit_quant_type": _QUANTIZED,
    "use_bnb_nested_quant": _NESTED,
    "load_in_4bit": _QUANTIZED,
    "load_in_8bit": _QUANTIZED,
    "pad_to_sequence_len": "sequences always have one length",
    "per_device_eval_batch_size": "set evaluation.batch_size",
    "report_to": (
        "TensorBoard files are always written; for others set logging.wandb or logging.mlflow"
    ),
    "saves_per_epoch": "set checkpoint.every_steps",
    "special_tokens": "the tokenizer's own are used",
    "tf32": "PyTorch's default holds",
    "torch_dtype": "weights rest in fp32 under bf16; training.precision is the compute precision",
    "warmup_ratio": "needs the number of steps; set training.schedule.warmup_steps",
    "zero_optimization": _ALWAYS,
}
_SCHEDULES = {
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "WarmupLR": "constant",
    "WarmupDecayLR": "linear",
    "WarmupCosineLR": "cosine",
}
_DEEPSPEED_WARMUP = {"warmup_max_lr": 0.001, "warmup_num_steps": 1000, "warmup_type": "log"}
_DEEPSPEED_SCHEDULES = {
    "WarmupLR": _DEEPSPEED_WARMUP,
    "WarmupDecayLR": _DEEPSPEED_WARMUP,
    # A share of the optimizer's own rate.
    "WarmupCosineLR": {"warmup_num_steps": 1000, "warmup_type": "log", "cos_min_ratio": 0.0001},
}
"""What DeepSpeed's schedulers take where a file says nothing
(deepspeed.readthedocs.io/en/latest/schedulers.html)."""
_AS_THEY_ARE = {
    "learning_rate": "training.optimizer.learning_rate",
    "weight_decay": "training.optimizer.weight_decay",
    "adam_epsilon": "training.optimizer.epsilon",
    "max_grad_norm": "training.gradient_clipping",
    "gradient_accumulation_steps": "training.gradient_accumulation",
    "warmup_steps": "training.schedule.warmup_steps",
    "seed": "training.seed",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep",
    "eval_steps": "evaluation.every_steps",
    "logging_steps": "logging.every_steps",
    "lora_r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout",
}
"""Keys that TRL and Axolotl share, for settings with the same values."""
_TRL = {
    "model_name_or_path": "model.id",
    "per_device_train_batch_size": "training.micro_batch_size",
    "max_length": "data.sequence_length",
    "max_seq_length": "data.sequence_length",
    "packing": "data.packing",
}
_TRL_DEFAULTS = {
    "per_device_train_batch_size": 8,
    "learning_rate": 2.0e-5,
    "weight_decay": 0.0,
    "adam_beta2": 0.999,
    "lr_scheduler_type": "linear",
    "num_train_epochs": 3,
    "max_length": 1024,
    "packing": False,
    "seed": 42,
    "save_steps": 500,
    "logging_steps": 10,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
}
_AXOLOTL = {
    "base_model": "model.id",
    "micro_batch_size": "training.micro_batch_size",
    "sequence_len": "data.sequence_length",
    "sample_packing": "data.packing",
    "lora_model_dir": "model.lora.adapter",
    "dataset_prepared_path": "data.cache_directory",
}
_AXOLOTL_DEFAULTS = {
    "micro_batch_size": 1,
    "weight_decay": 0.0,
    "adam_beta2": 0.999,
    "lr_scheduler": "cosine",
    "num_epochs": 1,
    "sequence_len": 512,
    "sample_packing": False,
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.0,
}
_AXOLOTL_FORMATS = {
    "chat_template": "chat",
    "sharegpt": "chat",
    "alpaca": "chat",
    "completion": "text",
}


@dataclass
class ConvertedConfig:
    """Settings of a run config, nested, and what had no place in it: (key, reason)."""

    settings: dict[str, Any] = field(default_factory=dict)
    left_out: list[tuple[str, str]] = field(default_factory=list)

    def put(self, path: str, value: Any) -> None:
        """Set the setting at a dotted path."""
        *sections, last = path.split(".")
        place = self.settings
        for name in sections:
            place = place.setdefault(name, {})
        place[last] = value

    def leave_out(self, key: str, reason: str | None = None) -> None:
        self.left_out.append((key, reason or _REASONS.get(key, "has no counterpart")))


def convert(tool: str, path: str | os.PathLike[str]) -> ConvertedConfig:
    """The config of `tool` (deepspeed, trl or axolotl) in the file at `path`. Raises UserError if
    it cannot be read."""
    content = read_document(path).value
    if not isinstance(content, dict):
        raise ConfigError(f"{os.fspath(path)}: is no config of {tool}: its top level has no keys")
    found = ConvertedConfig()
    _TOOLS[tool](dict(content), found)
    found.settings.setdefault(
        "name", _name_of(found.settings.pop("output_dir", None) or Path(path).stem)
    )
    return found


def _name_of(text: str) -> str:
    name = re.sub(r"[^a-z0-9._-]", "-", Path(text).name.lower())
    return name.strip("-_.")[:63] or "run"


def _from_trl(content: dict[str, Any], found: ConvertedConfig) -> None:
    has_adapter = content.pop("use_peft", False) is True
    _defaults(content, _TRL_DEFAULTS, has_adapter)
    if "max_seq_length" in content:
        content.pop("max_length", None)
    _length(content, found, "num_train_epochs")
    dataset, test_split = (
        content.pop("dataset_name", None),
        content.pop("dataset_test_split", "test"),
    )
    _source(found, dataset, content.pop("dataset_train_split", "train"))
    _strategies(content, found)
    if content.pop("eval_strategy", "no") != "no" and dataset is not None:
        found.put("data.held_out.source", {"path": dataset, "split": test_split})
    found.put("data.format", "chat")
    # Of a chat TRL learns the assistant's turns alone only where this is set.
    if content.pop("assistant_only_loss", False) is not True:
        found.put("data.loss_on", "all")
    if (kernel := content.get("attn_implementation")) in ("sdpa", "eager"):
        found.put("model.attention", content.pop("attn_implementation", kernel))
    if has_adapter:
        targets = content.pop("lora_target_modules", None)
        found.put("model.lora.target_modules", _targets(targets) or ["q_proj", "v_proj"])
        _variant(content, found, "use_dora", "use_rslora")
        # nf4 is the default of TRL's quantization.
        if (
            content.get("load_in_4bit") is True
            and content.get("bnb_4bit_quant_type", "nf4") == "nf4"
        ):
            content.pop("bnb_4bit_quant_type", None)
            content.pop("load_in_4bit")
            found.put("model.quantization", "nf4")
    else:
        _without_adapter(content, found)
    _shared(content, found, _TRL, "lr_scheduler_type")


def _from_axolotl(content: dict[str, Any], found: ConvertedConfig) -> None:
    adapter = content.pop("adapter", None)
    has_adapter = adapter in ("lora", "qlora")
    if adapter is not None and not has_adapter:
        found.leave_out(f"adapter: {adapter}")
    # What Axolotl loads in 4 bits is nf4.
    if has_adapter and content.get("load_in_4bit") is True:
        content.pop("load_in_4bit")
        found.put("model.quantization", "nf4")
    _defaults(content, _AXOLOTL_DEFAULTS, has_adapter)
    _length(content, found, "num_epochs")
    _axolotl_datasets(content.pop("datasets", None), found)
    held_out = content.get("val_set_size")
    if isinstance(held_out, int | float) and not isinstance(held_out, bool) and 0 <= held_out < 1:
        found.put("data.held_out.fraction", float(content.pop("val_set_size")))
    if content.pop("train_on_inputs", False) is True:
        found.put("data.loss_on", "all")
    if has_adapter:
        targets = content.pop("lora_target_modules", None)
        linear = content.pop("lora_target_linear", False) is True
        found.put(
            "model.lora.target_modules",
            "all-linear" if linear else _targets(targets) or ["q_proj", "v_proj"],
        )
        _variant(content, found, "peft_use_dora", "peft_use_rslora")
    else:
        _without_adapter(content, found)
    wandb = {
        name.removeprefix("wandb_"): content.pop(name)
        for name in ("wandb_project", "wandb_entity", "wandb_name")
        if content.get(name)
    }
    if "project" in wandb:
        found.put("logging.wandb", wandb)
    _shared(content, found, _AXOLOTL, "lr_scheduler")


def _from_deepspeed(content: dict[str, Any], found: ConvertedConfig) -> None:
    simple = {
        "train_batch_size": "training.global_batch_size",
        "train_micro_batch_size_per_gpu": "training.micro_batch_size",
        "gradient_accumulation_steps": "training.gradient_accumulation",
        "gradient_clipping": "training.gradient_clipping",
        "steps_per_print": "logging.every_steps",
    }
    if "train_batch_size" in content and content["train_batch_size"] != "auto":
        # The batch is the same on any number of ranks; what each accumulates follows from it.
        content.pop("gradient_accumulation_steps", None)
    for key, path in simple.items():
        _move(content, found, key, path)
    optimizer = content.pop("optimizer", None)
    if isinstance(optimizer, dict):
        _deepspeed_optimizer(optimizer, found)
    scheduler = content.pop("scheduler", None)
    if isinstance(scheduler, dict):
        _deepspeed_schedule(scheduler, found)
    _deepspeed_precision(content, found)
    zero = content.pop("zero_optimization", None)
    if isinstance(zero, dict):
        for key in sorted(zero):
            reason = "weights and moments stay on the GPU" if key.startswith("offload") else _ALWAYS
            found.leave_out(f"zero_optimization.{key}", reason)
    wandb = content.pop("wandb", None)
    if isinstance(wandb, dict) and wandb.get("enabled") is True:
        found.put(
            "logging.wandb",
            {key: value for key, value in wandb.items() if key in ("project", "group")},
        )
    for key in content:
        found.leave_out(key)


def _deepspeed_precision(content: dict[str, Any], found: ConvertedConfig) -> None:
    sections = {name: content.pop(name, None) for name in ("bf16", "fp16")}
    enabled = {
        name: section.get("enabled")
        for name, section in sections.items()
        if isinstance(section, dict)
    }
    if True in enabled.values():
        found.put("training.precision", "bf16")
        if enabled.get("fp16") is True:
            found.leave_out("fp16", _FP16)
    elif "auto" in enabled.values():
        for name, value in enabled.items():
            if value == "auto":
                found.leave_out(
                    f"{name}.enabled", "is auto, decided elsewhere; set training.precision"
                )
    else:
        found.put("training.precision", "fp32")


def _deepspeed_optimizer(optimizer: Mapping[str, Any], found: ConvertedConfig) -> None:
    kind = optimizer.get("type")
    if kind not in ("Adam", "AdamW", "FusedAdam"):
        found.leave_out(f"optimizer.type: {kind}", "adamw is the optimizer there is")
    parameters = {
        "betas": [0.9, 0.999],
        "weight_decay": 0.0,
        **_parameters(optimizer, "optimizer", found),
    }
    names = {
        "lr": "learning_rate",
        "betas": "betas",
        "eps": "epsilon",
        "weight_decay": "weight_decay",
    }
    for key in list(parameters):
        if key in names:
            _move(
                parameters,
                found,
                key,
                f"training.optimizer.{names[key]}",
                f"optimizer.params.{key}",
            )
        elif key == "adam_w_mode" and parameters[key] is False:
            found.leave_out(
                "optimizer.params.adam_w_mode: false", "weight decay is that of AdamW, decoupled"
            )
        elif key not in ("torch_adam", "adam_w_mode"):
            found.leave_out(f"optimizer.params.{key}")


def _parameters(section: Mapping[str, Any], name: str, found: ConvertedConfig) -> dict[str, Any]:
    parameters = section.get("params") or {}
    if isinstance(parameters, dict):
        return parameters
    found.leave_out(f"{name}.params", f"is {parameters}, and no settings by name")
    return {}


def _deepspeed_schedule(scheduler: Mapping[str, Any], found: ConvertedConfig) -> None:
    kind = str(scheduler.get("type"))
    parameters = {
        **_DEEPSPEED_SCHEDULES.get(kind, {}),
        **_parameters(scheduler, "scheduler", found),
    }
    found.put("training.schedule.name", _SCHEDULES.get(kind, "cosine"))
    if kind not in _SCHEDULES:
        found.leave_out(f"scheduler.type: {kind}", "cosine is written")
    for key, path in (
        ("warmup_num_steps", "training.schedule.warmup_steps"),
        ("total_num_steps", "training.steps"),
        ("warmup_max_lr", "training.optimizer.learning_rate"),
        ("cos_min_ratio", "training.schedule.final_fraction"),
    ):
        _move(parameters, found, key, path, f"scheduler.params.{key}")
    warmup = parameters.pop("warmup_type", "linear")
    if warmup != "linear":
        found.leave_out(f"scheduler.params.warmup_type: {warmup}", "warmup is linear")
    for key in parameters:
        begins = key in ("warmup_min_lr", "warmup_min_ratio")
        if not begins or parameters[key]:
            found.leave_out(f"scheduler.params.{key}", "warmup begins at 0" if begins else None)


def _defaults(content: dict[str, Any], defaults: Mapping[str, Any], has_adapter: bool) -> None:
    for key, value in defaults.items():
        if has_adapter or not key.startswith("lora_"):
            content.setdefault(key, value)


def _length(content: dict[str, Any], found: ConvertedConfig, epochs: str) -> None:
    """Steps where there are any, else epochs: as both tools decide it."""
    steps = _as_number(content.pop("max_steps", None))
    if isinstance(steps, int) and steps > 0:
        content.pop(epochs, None)
        found.put("training.steps", steps)
        ratio = content.get("warmup_ratio")
        if isinstance(ratio, int | float) and "warmup_steps" not in content:
            found.put("training.schedule.warmup_steps", round(content.pop("warmup_ratio") * steps))
    else:
        found.put("training.epochs", content.pop(epochs))


def _without_adapter(content: dict[str, Any], found: ConvertedConfig) -> None:
    """Adapters' settings in a file that trains all weights."""
    for key in [key for key in content if key.startswith("lora_")]:
        if content.pop(key) not in (None, "", []):
            found.leave_out(key, "no adapter is trained: all weights are")


def _strategies(content: dict[str, Any], found: ConvertedConfig) -> None:
    """Saves and evaluations by steps; those of each epoch are left out."""
    if content.get("eval_strategy", "no") != "steps":
        content.pop("eval_steps", None)
    strategies = {
        "eval_strategy": content.get("eval_strategy", "no"),
        "save_strategy": content.pop("save_strategy", "steps"),
    }
    if strategies["save_strategy"] != "steps":
        content.pop("save_steps", None)
    for key, value in strategies.items():
        if value not in ("steps", "no"):
            name = "evaluation" if key == "eval_strategy" else "checkpoint"
            found.leave_out(
                f"{key}: {value}", f"set {name}.every_steps; the end of a run has one in any case"
            )


def _source(found: ConvertedConfig, path: Any, split: Any) -> None:
    if path is None:
        found.put("data.source", NO_SOURCE)
        found.leave_out("data.source", f"is not in the file; set it in place of {NO_SOURCE}")
    else:
        found.put("data.source", path if split == "train" else {"path": path, "split": split})


def _axolotl_datasets(datasets: Any, found: ConvertedConfig) -> None:
    rows = (
        [each for each in datasets if isinstance(each, dict)]
        if isinstance(datasets, Sequence)
        else []
    )
    if not rows:
        _source(found, None, "train")
        return
    formats = {}
    sources = []
    for number, row in enumerate(rows):
        kind = str(row.get("type"))
        formats[kind] = _AXOLOTL_FORMATS.get(kind.partition(".")[0].partition(":")[0])
        split = {"split": row["split"]} if row.get("split", "train") != "train" else {}
        sources.append({"path": row.get("path"), **split})
        for key in sorted(row.keys() - {"path", "type", "split"}):
            found.leave_out(f"datasets[{number}].{key}")
    for kind, name in formats.items():
        if name is None:
            found.leave_out(f"datasets type {kind}", "is not known; set data.format")
    known = sorted({name for name in formats.values() if name})
    if len(known) > 1:
        found.leave_out(
            "datasets",
            f"have the formats {' and '.join(known)}, and a run has one; {known[0]} is written",
        )
    found.put("data.format", known[0] if known else "chat")
    plain = len(sources) == 1 and sources[0].keys() == {"path"}
    found.put("data.source", sources[0]["path"] if plain else sources)


def _variant(content: dict[str, Any], found: ConvertedConfig, dora: str, rslora: str) -> None:
    chosen = [
        name
        for name, key in (("dora", dora), ("rslora", rslora))
        if content.pop(key, False) is True
    ]
    if chosen:
        found.put("model.lora.variant", chosen[0])
    if len(chosen) > 1:
        found.leave_out(rslora, "is not combined with DoRA")


def _targets(value: Any) -> str | list[str] | None:
    if isinstance(value, list):
        return value
    return value if value == "all-linear" else [value] if isinstance(value, str) else None


def _shared(
    content: dict[str, Any], found: ConvertedConfig, own: Mapping[str, str], schedule: str
) -> None:
    """What TRL and Axolotl have in common, and then whatever is left."""
    betas = [content.pop("adam_beta1", 0.9), content.pop("adam_beta2", 0.999)]
    found.put("training.optimizer.betas", betas)
    for key, path in {**_AS_THEY_ARE, **own}.items():
        _move(content, found, key, path)
    if "model" in found.settings and "id" in found.settings["model"]:
        found.put("model.init", "pretrained")
    kind = str(content.pop(schedule, "cosine"))
    found.put("training.schedule.name", _SCHEDULES.get(kind, "cosine"))
    if kind not in _SCHEDULES:
        found.leave_out(f"{schedule}: {kind}", "cosine is written")
    optimizer = content.pop("optim", None) or content.pop("optimizer", None) or "adamw"
    if "adamw" not in str(optimizer) or "8bit" in str(optimizer):
        found.leave_out(f"optimizer: {optimizer}", "adamw is the optimizer there is")
    _precision(content, found)
    if (recomputes := content.pop("gradient_checkpointing", None)) is not None:
        found.put("training.activation_checkpointing", "full" if recomputes else "none")
    if (directory := content.pop("output_dir", None)) is not None:
        found.settings["output_dir"] = str(directory)
        found.put("output", str(Path(str(directory)).parent))
    for key, value in content.items():
        if value not in (None, False, ""):
            found.leave_out(key)


def _precision(content: dict[str, Any], found: ConvertedConfig) -> None:
    bf16, fp16 = content.pop("bf16", None), content.pop("fp16", None)
    if fp16 is True:
        found.leave_out("fp16", _FP16)
    found.put("training.precision", "fp32" if bf16 is False and fp16 is not True else "bf16")


def _move(
    content: dict[str, Any], found: ConvertedConfig, key: str, path: str, shown: str | None = None
) -> None:
    value = _as_number(content.pop(key, None))
    if value == "auto":
        found.leave_out(shown or key, f"is auto, decided elsewhere; set {path}")
    elif path.endswith("_steps") and isinstance(value, float) and 0 < value < 1:
        found.leave_out(shown or key, f"is a share of all steps; set {path}")
    elif path == "training.gradient_clipping" and value == 0:
        found.put(path, None)
    elif value is not None:
        found.put(path, value)


def _as_number(value: Any) -> Any:
    """Numbers that a file has as text, and whole ones with a decimal point, as numbers."""
    if isinstance(value, str):
        try:
            value = float(value) if re.search("[.eE]", value) else int(value)
        except ValueError:
            return value
    return int(value) if isinstance(value, float) and value.is_integer() else value


_TOOLS: dict[str, Callable[[dict[str, Any], ConvertedConfig], None]] = {
    "deepspeed": _from_deepspeed,
    "trl": _from_trl,
    "axolotl": _from_axolotl,
}
