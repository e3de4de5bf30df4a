"""Rules that configs of several trainers share: length, schedule, optimizer, precision, adapters,
paths.

A rule takes the keys it reads from the file and writes settings; what it cannot write is reported
under the file's own key. Sources: transformers' TrainingArguments and its module optimization
(warm-up by share is rounded up, `constant` has no warm-up, cosine_with_min_lr ends at min_lr_rate).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from drillyard.config.trainer_table import ConvertedConfig, TrainerFile, as_number, put_value

ADAMW = frozenset(
    {
        "adamw",
        "adamw_hf",
        "adamw_torch",
        "adamw_torch_fused",
        "adamw_torch_xla",
        "adamw_torch_npu_fused",
        "adamw_apex_fused",
        "paged_adamw",
        "paged_adamw_32bit",
    }
)
"""Names of optimizers that compute AdamW with moments in 32 bits."""
_SCHEDULES = {
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "warmup-stable-decay",
}
_FLOORS = ("min_lr_rate", "min_lr_ratio", "min_lr")
_ATTENTION = {"sdpa": "sdpa", "eager": "eager", "flex_attention": "flex"}
_PATH_ENDINGS = (".json", ".jsonl", ".parquet", ".csv", ".txt", ".gz", ".zst", ".arrow")


def length(file: TrainerFile, found: ConvertedConfig, epochs: str) -> int | None:
    """Steps where there are any, else epochs, as all tools decide it; the steps."""
    steps = file.take("max_steps")
    passes = file.take(epochs)
    if isinstance(steps, int) and steps > 0:
        found.put("training.steps", steps)
        return steps
    put_value(found, "training.epochs", passes, file.spelled(epochs))
    return None


def optimizer(file: TrainerFile, found: ConvertedConfig, key: str) -> None:
    """AdamW's constants; any other optimizer is named."""
    name = file.take(key)
    if str(name) not in ADAMW:
        found.leave_out(
            f"{file.spelled(key)}: {name}", "adamw, with moments in 32 bits, is written instead"
        )
    betas = [file.take("adam_beta1"), file.take("adam_beta2")]
    found.put(
        "training.optimizer.betas",
        [
            given if given is not None else usual
            for given, usual in zip(betas, (0.9, 0.999), strict=True)
        ],
    )


def schedule(file: TrainerFile, found: ConvertedConfig, key: str) -> str:
    """The shape of the learning rate and where it ends; the tool's name of the shape."""
    kind = str(file.take(key))
    found.put("training.schedule.name", _SCHEDULES.get(kind, "cosine"))
    if kind not in _SCHEDULES:
        found.leave_out(f"{file.spelled(key)}: {kind}", "cosine is written")
    arguments = file.take("lr_scheduler_kwargs") or {}
    if not isinstance(arguments, dict):
        found.leave_out("lr_scheduler_kwargs", "is not settings by name")
        return kind
    for name, given in arguments.items():
        value = as_number(given)
        where = f"lr_scheduler_kwargs.{name}"
        if name in _FLOORS and kind in ("cosine_with_min_lr", "warmup_stable_decay"):
            peak = file.value("learning_rate")
            final = value / peak if name == "min_lr" and value is not None else value
            put_value(found, "training.schedule.final_fraction", final, where)
        elif name == "num_decay_steps" and kind == "warmup_stable_decay":
            put_value(found, "training.schedule.decay_steps", value, where)
        elif not (name == "decay_type" and value == "linear"):
            found.leave_out(where, "has no counterpart in training.schedule")
    if kind == "warmup_stable_decay" and arguments.get("decay_type", "cosine") == "cosine":
        found.leave_out(f"{file.spelled(key)}: {kind}", "falls as a cosine there, in a line here")
    return kind


def warmup(file: TrainerFile, found: ConvertedConfig, kind: str, steps: int | None) -> None:
    """Warm-up in steps, of transformers' two keys; none of `constant`, which ignores it."""
    number, share = file.take("warmup_steps") or 0, file.take("warmup_ratio") or 0
    key = "warmup_steps" if number else "warmup_ratio"
    share = number if 0 < number < 1 else share
    if kind == "constant":
        if number or share:
            found.leave_out(file.spelled(key), "constant has no warm-up there; none is written")
        number = 0
    elif share and not number >= 1:
        if steps is None:
            found.leave_out(file.spelled(key), share_of_steps(share))
            return
        number = math.ceil(share * steps)
    found.put("training.schedule.warmup_steps", int(number))


def share_of_steps(share: float, most: str = "") -> str:
    """What is said where the number of steps depends on the data."""
    return (
        f"is a share of all steps, which depend on the data; set training.schedule.warmup_steps to"
        f" {share:g} of them{most}"
    )


def precision(
    file: TrainerFile,
    found: ConvertedConfig,
    bf16: tuple[str, ...],
    fp16: tuple[str, ...],
    default: str,
) -> None:
    """bf16 or fp32; `bf16` and `fp16` are the tool's names for each, `default` without either."""
    wide = {key: file.take(key) for key in bf16}
    narrow = {key: file.take(key) for key in fp16}
    said = [value for key, value in wide.items() if file.has(key)]
    chosen = default
    if any(value not in (None, False) for value in said):
        chosen = "bf16"
    elif half := [key for key, value in narrow.items() if value is True]:
        chosen = "bf16"
        found.leave_out(
            file.spelled(half[0]),
            "computes in fp16 with loss scaling, which is not available; bf16 is written",
        )
    elif False in said:
        chosen = "fp32"
    found.put("training.precision", chosen)


def attention(found: ConvertedConfig, name: Any, key: str) -> None:
    """A kernel of ours where the file names one; others compute the same, and auto is left."""
    if name in _ATTENTION:
        found.put("model.attention", _ATTENTION[name])
    elif name is not None and not any(each in str(name) for each in ("flash", "auto", "fa2")):
        found.leave_out(
            f"{key}: {name}", "auto takes the fastest kernel that the device can train with"
        )


def checkpointing(file: TrainerFile, found: ConvertedConfig, key: str) -> None:
    """Recomputation where the file, or its tool, says whether."""
    value = file.take(key)
    if value is not None:
        found.put("training.activation_checkpointing", "full" if value else "none")
    if isinstance(value, str) and value not in ("full", "true"):
        found.leave_out(f"{file.spelled(key)}: {value}", "full is written; nothing is offloaded")


def without_adapter(file: TrainerFile, found: ConvertedConfig) -> None:
    """Adapters' settings in a file that trains all weights."""
    for key in file.table.keys:
        ours = file.table.keys[key].ours or ""
        if ours.startswith("model.lora") or ours == "model.quantization":
            if file.is_left(key) and file.values[key] not in (False, file.default(key)):
                found.leave_out(file.spelled(key), "no adapter is trained: all weights are")
            file.take(key)
    found.settings.get("model", {}).pop("lora", None)


def variant(file: TrainerFile, found: ConvertedConfig, dora: str, rslora: str) -> None:
    """DoRA or rsLoRA; both together are not available."""
    chosen = [name for name, key in (("dora", dora), ("rslora", rslora)) if file.take(key) is True]
    if chosen:
        found.put("model.lora.variant", chosen[0])
    if len(chosen) > 1:
        found.leave_out(file.spelled(rslora), "is not combined with DoRA")


def names(value: Any) -> list[str]:
    """A list of names, of which some tools write one text with commas."""
    if isinstance(value, str):
        return [each.strip() for each in value.split(",") if each.strip()]
    return [str(each) for each in value] if isinstance(value, list) else []


def output(file: TrainerFile, found: ConvertedConfig) -> None:
    """The last part of the directory is the run's name, the rest is `output`."""
    if (directory := file.take("output_dir")) is not None:
        found.settings["output_dir"] = str(directory)
        found.put("output", str(Path(str(directory)).parent))


def local_path(file: TrainerFile, found: ConvertedConfig, value: Any, key: str) -> Any:
    """A path of the file as an absolute one, where it exists.

    All tools take relative paths from where they are started, which the file does not say: they are
    looked for from here, then from the file's directory and those above it.
    """
    if not isinstance(value, str) or "://" in value:
        return value
    path = Path(value).expanduser()
    beside = file.path.absolute().parent
    for directory in (Path.cwd(), beside, *beside.parents):
        if (directory / path).exists() and str(path) not in (".", "/"):
            return str((directory / path).absolute())
    if value.endswith(_PATH_ENDINGS) or value.startswith((".", "/", "~")):
        found.leave_out(
            key, f"{value} is not found here nor beside the file; it is written as it is"
        )
    return value
