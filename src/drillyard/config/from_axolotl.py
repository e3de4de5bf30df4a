"""Axolotl's config as settings of a run config.

What it does without a key, by its own trainer builder and config module: warm-up of 3 %
of the steps but at most 100, a log line each 0.5 % of the steps, a save each epoch of which four
are kept, AdamW's usual constants, seed 42.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drillyard.config import trainer_rules as rules
from drillyard.config.trainer_sources import Source, write_sources
from drillyard.config.trainer_table import EMPTY, ConvertedConfig, TrainerFile, put_value

_FORMATS = {
    "chat_template": "chat",
    "sharegpt": "chat",
    "alpaca": "chat",
    "completion": "text",
    "pretrain": "text",
}
_READERS = ("json", "csv", "parquet", "text", "arrow")
"""Names of the datasets library's readers, which a row gives as its path beside `data_files`."""
_MESSAGE_KEYS = {"role": ("role", "from"), "content": ("content", "value")}
_TOO_LONG = {"drop": "drop", "truncate": "truncate", "raise": "error"}


def from_axolotl(file: TrainerFile, found: ConvertedConfig) -> None:
    """Write the settings of `file` into `found`."""
    steps = rules.length(file, found, "num_epochs")
    _datasets(file, found)
    _adapter(file, found)
    rules.optimizer(file, found, "optimizer")
    _schedule(file, found, steps)
    _batch(file, found)
    _intervals(file, found, steps)
    rules.precision(file, found, ("bf16", "bfloat16"), ("fp16", "float16"), "bf16")
    if file.take("float32") is True:
        found.put("training.precision", "fp32")
    rules.checkpointing(file, found, "gradient_checkpointing")
    for key, name in (
        ("sdp_attention", "sdpa"),
        ("eager_attention", "eager"),
        ("flex_attention", "flex_attention"),
    ):
        if file.take(key) is True:
            rules.attention(found, name, key)
    rules.attention(found, file.take("attn_implementation"), "attn_implementation")
    if file.take("torch_compile") is True:
        found.put("training.compile", True)
    found.put("training.seed", file.take("seed") if file.has("seed") else 42)
    put_value(
        found, "training.gradient_clipping", _or(file.take("max_grad_norm"), 1.0), "max_grad_norm"
    )
    _trackers(file, found)
    rules.output(file, found)
    found.put("model.init", "random" if file.take("reinit_weights") is True else "pretrained")
    found.put("model.id", rules.local_path(file, found, file.take("base_model"), "base_model"))


def _or(value: Any, usual: Any) -> Any:
    return usual if value is None else value


def _batch(file: TrainerFile, found: ConvertedConfig) -> None:
    micro, whole = file.take("micro_batch_size"), file.take("batch_size")
    accumulation = file.take("gradient_accumulation_steps")
    if isinstance(whole, int) and not file.has("gradient_accumulation_steps"):
        accumulation = max(1, whole // micro)
    put_value(found, "training.micro_batch_size", micro, "micro_batch_size")
    put_value(found, "training.gradient_accumulation", accumulation, "gradient_accumulation_steps")
    put_value(found, "evaluation.batch_size", file.take("eval_batch_size"), "eval_batch_size")


def _schedule(file: TrainerFile, found: ConvertedConfig, steps: int | None) -> None:
    kind = rules.schedule(file, found, "lr_scheduler")
    floor = file.take("cosine_min_lr_ratio")
    if floor is not None:
        if kind == "cosine":
            put_value(found, "training.schedule.final_fraction", floor, "cosine_min_lr_ratio")
        else:
            found.leave_out("cosine_min_lr_ratio", f"is of a cosine, and lr_scheduler is {kind}")
    number, share = file.take("warmup_steps"), file.take("warmup_ratio")
    if kind == "constant":
        for key in ("warmup_steps", "warmup_ratio"):
            if file.has(key) and file.values[key]:
                found.leave_out(key, "constant has no warm-up there; none is written")
        number = 0
    elif number is None and steps is not None:
        number = int(share * steps) if share is not None else min(int(0.03 * steps), 100)
    if number is None:
        said = rules.share_of_steps(_or(share, 0.03), "" if share is not None else ", at most 100")
        found.leave_out(
            "warmup_ratio", said if share is not None else f"is not in the file: 0.03 {said}"
        )
        return
    # Axolotl's trainer builder takes 2 for 1.
    found.put("training.schedule.warmup_steps", 2 if number == 1 else int(number))


def _intervals(file: TrainerFile, found: ConvertedConfig, steps: int | None) -> None:
    """Steps between saves, evaluations and log lines."""
    if file.has("save_steps"):
        file.move("save_steps", found, "checkpoint.every_steps")
        file.take("save_strategy")
    else:
        strategy = _or(file.take("save_strategy"), "epoch")
        per_epoch = file.take("saves_per_epoch")
        if strategy is False or strategy == "no":
            pass
        elif per_epoch:
            found.leave_out("saves_per_epoch", _depends("checkpoint"))
        else:
            found.leave_out(f"save_strategy: {strategy}", _depends("checkpoint"))
    put_value(found, "checkpoint.keep", file.take("save_total_limit") or 4, "save_total_limit")
    strategy = file.take("eval_strategy")
    per_epoch = file.take("evals_per_epoch")
    if file.has("eval_steps"):
        file.move("eval_steps", found, "evaluation.every_steps")
        found.put("evaluation.at_start", True)
    elif per_epoch:
        found.leave_out("evals_per_epoch", _depends("evaluation"))
    elif strategy not in (None, False, "no"):
        found.leave_out(f"{file.spelled('eval_strategy')}: {strategy}", _depends("evaluation"))
    every = file.take("logging_steps")
    if every is None:
        every = max(min(int(0.005 * steps), 10), 1) if steps else None
    if every is None:
        found.leave_out(
            "logging_steps", "is not in the file: 0.5 % of the steps, 1 to 10; 10 is written"
        )
    put_value(found, "logging.every_steps", _or(every, 10), "logging_steps")


def _depends(section: str) -> str:
    return f"depends on the data; set {section}.every_steps; the end of a run has one in any case"


def _adapter(file: TrainerFile, found: ConvertedConfig) -> None:
    adapter = file.take("adapter")
    if adapter not in ("lora", "qlora"):
        if adapter is not None:
            found.leave_out(f"adapter: {adapter}", "is not available; all weights are trained")
        rules.without_adapter(file, found)
        return
    found.put("model.lora", {})
    # What Axolotl loads in 4 bits is nf4.
    if file.take("load_in_4bit") is True:
        found.put("model.quantization", "nf4")
    elif adapter == "qlora" and file.take("load_in_8bit") is not True:
        found.leave_out("adapter: qlora", "load_in_4bit is not set: the base stays in 16 bits")
    for key, usual in (("lora_r", 16), ("lora_alpha", 32)):
        if not file.has(key):
            found.leave_out(key, f"is not in the file; {usual} is written")
            found.put(file.table.keys[key].ours or "", usual)
    targets = file.take("lora_target_modules")
    linear = file.take("lora_target_linear") is True
    whole = linear or targets == "all-linear"
    found.put(
        "model.lora.target_modules",
        "all-linear" if whole else rules.names(targets) or ["q_proj", "v_proj"],
    )
    rules.variant(file, found, "peft_use_dora", "peft_use_rslora")
    directory = file.take("lora_model_dir")
    if directory is not None:
        found.put("model.lora.adapter", rules.local_path(file, found, directory, "lora_model_dir"))


def _datasets(file: TrainerFile, found: ConvertedConfig) -> None:
    streaming = file.take("streaming") is True
    texts = file.take("pretraining_dataset")
    name = "datasets" if texts is None else "pretraining_dataset"
    rows = file.take("datasets") if texts is None else texts
    sources = _sources(file, found, name, rows, streaming or texts is not None)
    write_sources(file, found, sources, "data.source")
    held_out = file.take("test_datasets")
    if held_out is not None:
        tests = _sources(file, found, "test_datasets", held_out, streaming)
        write_sources(file, found, tests, "data.held_out.source")
    fraction = file.take("val_set_size")
    if isinstance(fraction, int | float) and 0 <= fraction < 1:
        found.put("data.held_out.fraction", float(fraction))
    elif fraction is not None:
        found.leave_out(
            "val_set_size", "is a number of rows; set data.held_out.fraction to their share"
        )
    found.put("data.packing", file.take("sample_packing") is True)
    if file.take("train_on_inputs") is True:
        found.put("data.loss_on", "all")
    kind = str(file.take("excess_length_strategy") or "drop").lower()
    # Rows of plain text are cut into sequences before anything is too long.
    is_text = found.get("data.format") == "text"
    found.put("data.too_long", "split" if is_text else _TOO_LONG.get(kind, "drop"))


def _sources(
    file: TrainerFile, found: ConvertedConfig, name: str, rows: Any, streaming: bool
) -> list[Source]:
    """The sources of a list of data sets; the formats and columns are written at once."""
    rows = [rows] if isinstance(rows, str | dict) else rows or []
    formats: dict[str, str | None] = {}
    sources: list[Source] = []
    usual = "pretrain" if name == "pretraining_dataset" else "None"
    known = file.table.rows_of("pretraining_dataset" if usual == "pretrain" else "datasets")
    for number, row in enumerate(rows):
        row = {"path": row} if isinstance(row, str) else row
        if not isinstance(row, dict):
            found.leave_out(f"{name}[{number}]", "is not a data set")
            continue
        where = f"{name}[{number}]"
        kind = row.get("type") or usual
        kind = kind if isinstance(kind, str) else "of its own prompt"
        formats[kind] = _FORMATS.get(kind.partition(".")[0].partition(":")[0].partition("_chat")[0])
        if kind.partition("_")[0].partition(":")[0].partition(".")[0] == "alpaca":
            found.leave_out(
                f"{where}.type: {kind}",
                "writes a prompt text of its own there; here the model's chat template renders the"
                " rows",
            )
        sources += _row_sources(row, found, where, streaming)
        _columns(row, found, where, formats[kind])
        for key in row:
            if key not in known:
                found.leave_out(f"{where}.{key}", file.unknown(key, known))
            elif (why := known[key].why) and row[key] not in (
                *EMPTY,
                known[key].default,
                False,
            ):
                found.leave_out(f"{where}.{key}", why)
    for kind, form in formats.items():
        if form is None:
            found.leave_out(f"{name} type {kind}", "is not known; set data.format")
    forms = sorted({form for form in formats.values() if form})
    if len(forms) > 1:
        found.leave_out(
            name,
            f"have the formats {' and '.join(forms)}, and a run has one; {forms[0]} is written",
        )
    if name != "test_datasets":
        found.put("data.format", forms[0] if forms else "chat")
    return sources


def _row_sources(
    row: Mapping[str, Any], found: ConvertedConfig, where: str, streaming: bool
) -> list[Source]:
    path, files = row.get("path"), row.get("data_files") or []
    files = [files] if isinstance(files, str) else files
    options = {key: row[key] for key in ("name", "revision") if row.get(key)}
    if streaming and not files:
        options["streaming"] = True
    if files and path in _READERS:
        return [Source(each, f"{where}.data_files") for each in files]
    if files:
        found.leave_out(f"{where}.data_files", "of a data set of the hub all files are read")
    return [Source(path, f"{where}.path", str(row.get("split") or "train"), options)]


def _columns(row: Mapping[str, Any], found: ConvertedConfig, where: str, form: str | None) -> None:
    """Columns under other names, and names inside of a message."""
    renamed = {"messages": row.get("field_messages"), "tools": row.get("field_tools")}
    if form == "text":
        renamed = {"text": row.get("field") or row.get("text_column")}
    for ours, theirs in renamed.items():
        if theirs and theirs != ours:
            found.put(f"data.columns.{ours}", theirs)
    inside = dict(row.get("message_property_mappings") or {})
    for part in _MESSAGE_KEYS:
        if theirs := row.get(f"message_field_{part}"):
            inside[part] = theirs
    for part, theirs in inside.items():
        if theirs != part and theirs not in _MESSAGE_KEYS.get(part, ()):
            found.leave_out(f"{where}.message_property_mappings.{part}: {theirs}", "is not read")
    roles = row.get("roles_to_train")
    if roles is not None and not set(roles) <= {"assistant", "gpt"}:
        found.leave_out(f"{where}.roles_to_train", "the assistant's turns are learnt alone")


def _trackers(file: TrainerFile, found: ConvertedConfig) -> None:
    wandb = {
        name: value
        for name in ("project", "entity", "name", "mode")
        if (value := file.take(f"wandb_{name}")) is not None
    }
    if "project" in wandb and file.take("use_wandb") is not False:
        found.put("logging.wandb", wandb)
    address, experiment = file.take("mlflow_tracking_uri"), file.take("mlflow_experiment_name")
    mlflow = {"tracking_uri": address, "experiment": experiment}
    if (address or experiment) and file.take("use_mlflow") is not False:
        found.put("logging.mlflow", {key: value for key, value in mlflow.items() if value})
    for key in ("use_wandb", "use_mlflow"):
        file.take(key)
