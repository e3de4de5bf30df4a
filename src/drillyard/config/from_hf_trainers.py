"""Configs of TRL (`trl sft --config`) and LLaMA-Factory as settings of a run config.

Both begin with transformers' TrainingArguments, so most rules are the same. TRL truncates at
max_length and learns every token of a chat unless assistant_only_loss is set (SFTConfig);
LLaMA-Factory looks data sets up in dataset_info.json, trains adapters unless finetuning_type says
otherwise, and takes twice the rank for alpha (hparams/).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drillyard.config import trainer_rules as rules
from drillyard.config.trainer_sources import Source, write_sources
from drillyard.config.trainer_table import ConvertedConfig, TrainerFile, put_value
from drillyard.config.yaml_document import read_document
from drillyard.errors import ConfigError, UserError

_SFT_LOSSES = ("nll", "dft", "chunked_nll")


def from_trl(file: TrainerFile, found: ConvertedConfig) -> None:
    """Write the settings of `file` into `found`."""
    if file.has("loss_type") and file.values["loss_type"] not in _SFT_LOSSES:
        raise ConfigError(
            f"{file.path}: loss_type: {file.values['loss_type']} is of another trainer than SFT;"
            " training by preferences or rewards is not available"
        )
    _training_arguments(file, found)
    _trl_sources(file, found)
    _trl_format(file, found)
    if file.take("packing_strategy") in ("wrapped", "bfd_split") and file.take("packing") is True:
        found.leave_out(
            f"packing_strategy: {file.take('packing_strategy')}",
            "documents are packed whole here and longer ones cut",
        )
    file.move("packing", found)
    if file.take("truncation_mode") != "keep_start":
        found.leave_out("truncation_mode", "the end is cut here, not the begin")
    file.move("max_length", found, "data.sequence_length")
    found.put("data.too_long", "truncate")
    if file.take("use_peft") is True:
        found.put("model.lora", {})
        targets = file.take("lora_target_modules")
        whole = targets == "all-linear"
        found.put(
            "model.lora.target_modules",
            targets if whole else rules.names(targets) or ["q_proj", "v_proj"],
        )
        rules.variant(file, found, "use_dora", "use_rslora")
        kind = file.take("bnb_4bit_quant_type")
        if file.take("load_in_4bit") is True:
            if kind == "nf4":
                found.put("model.quantization", "nf4")
            else:
                found.leave_out(
                    f"bnb_4bit_quant_type: {kind}", "nf4 is the type there is; none is set"
                )
    else:
        rules.without_adapter(file, found)
    rules.attention(found, file.take("attn_implementation"), "attn_implementation")
    rules.precision(file, found, ("bf16",), ("fp16",), "bf16")
    _model(file, found)


def _trl_sources(file: TrainerFile, found: ConvertedConfig) -> None:
    streams = {"streaming": True} if file.take("dataset_streaming") is True else {}
    config, name = file.take("dataset_config"), file.take("dataset_name")
    options = ({"name": config} if config else {}) | streams
    train, test = file.take("dataset_train_split"), file.take("dataset_test_split")
    sources = [Source(name, "dataset_name", train, options)] if name is not None else []
    for key in ("datasets", "dataset_mixture"):
        mixture = file.take(key) or []
        rows = mixture.get("datasets", []) if isinstance(mixture, dict) else mixture
        sources += _mixed(found, key, rows, streams)
        for other in mixture if isinstance(mixture, dict) else ():
            if other not in ("datasets", "seed"):
                found.leave_out(f"{key}.{other}", "set data.held_out.fraction")
    write_sources(file, found, sources, "data.source")
    if file.take("eval_strategy") not in ("no", False) and name is not None:
        write_sources(
            file, found, [Source(name, "dataset_name", test, options)], "data.held_out.source"
        )


def _mixed(found: ConvertedConfig, key: str, rows: Any, streams: dict[str, Any]) -> list[Source]:
    """Rows of TRL's `datasets` (path, name) and of alignment-handbook's mixture (id, config)."""
    sources = []
    for number, row in enumerate(rows if isinstance(rows, list) else []):
        where = f"{key}[{number}]"
        path, name = row.get("path", row.get("id")), row.get("name", row.get("config"))
        files = row.get("data_files")
        options = ({"name": name} if name and name != "default" else {}) | streams
        more = {"weight": row["weight"]} if row.get("weight") not in (None, 1) else {}
        if more:
            found.leave_out(
                f"{where}.weight",
                "is the share of the set's rows there, and of the sequences drawn here",
            )
        split = row.get("split") or "train"
        if files:
            each = [files] if isinstance(files, str) else files
            sources += [Source(one, f"{where}.data_files") for one in each]
        else:
            sources.append(Source(path, f"{where}.path", split, options, more))
        for other in row.keys() - {"path", "id", "name", "config", "split", "weight", "data_files"}:
            if row[other] is not None and other != "columns":
                found.leave_out(f"{where}.{other}", "is not available; all rows are read")
    return sources


def _trl_format(file: TrainerFile, found: ConvertedConfig) -> None:
    """TRL tells the kind of rows by their columns, which the file does not have."""
    on_answers, on_completion = file.take("assistant_only_loss"), file.take("completion_only_loss")
    column = file.take("dataset_text_field")
    if on_completion is not None:
        found.put("data.format", "prompt-completion")
        found.put("data.loss_on", "completion" if on_completion else "all")
    elif file.has("dataset_text_field") and on_answers is not True:
        found.put("data.format", "text")
        if column != "text":
            found.put("data.columns", {"text": column})
    else:
        found.put("data.format", "chat")
        if on_answers is not True:
            # Of a chat TRL learns the assistant's turns alone only where this is set.
            found.put("data.loss_on", "all")
            found.leave_out(
                "data.format",
                "follows from the columns in TRL; chat is written: set text, or prompt-completion"
                " with data.loss_on: completion, where the rows are such",
            )


def _training_arguments(file: TrainerFile, found: ConvertedConfig) -> int | None:
    """What transformers' TrainingArguments say; the steps, where the file has them."""
    steps = rules.length(file, found, "num_train_epochs")
    rules.optimizer(file, found, "optim")
    kind = rules.schedule(file, found, "lr_scheduler_type")
    rules.warmup(file, found, kind, steps)
    put_value(found, "training.gradient_clipping", file.take("max_grad_norm"), "max_grad_norm")
    _strategies(file, found)
    # The newer name of the same switch decides where a file has it.
    rules.checkpointing(file, found, "gradient_checkpointing")
    rules.checkpointing(file, found, "activation_checkpointing")
    if file.take("torch_compile") is True:
        found.put("training.compile", True)
    if file.take("use_cpu") is True:
        found.put("training.device", "cpu")
    if file.take("full_determinism") is True:
        found.put("training.deterministic", True)
    file.take("do_train"), file.take("do_eval")
    rules.output(file, found)
    trackers = rules.names(file.take("report_to"))
    if "wandb" in trackers:
        found.put("logging.wandb", {"project": "huggingface"})
    if set(trackers) - {"tensorboard", "none", "wandb"}:
        found.leave_out("report_to", "other trackers are not written; set logging.mlflow")
    return steps


def _strategies(file: TrainerFile, found: ConvertedConfig) -> None:
    """Saves and evaluations by steps; those of each epoch are left out."""
    evaluates, saves = file.take("eval_strategy"), file.take("save_strategy")
    every, batch = file.take("eval_steps"), file.take("per_device_eval_batch_size")
    if evaluates in ("no", False):
        file.take("eval_on_start")
    else:
        put_value(found, "evaluation.batch_size", batch, file.spelled("per_device_eval_batch_size"))
        if file.take("eval_on_start") is True:
            found.put("evaluation.at_start", True)
    if evaluates == "steps":
        put_value(
            found, "evaluation.every_steps", every or file.take("logging_steps"), "eval_steps"
        )
    interval = file.take("save_steps")
    if saves == "steps":
        put_value(found, "checkpoint.every_steps", interval, "save_steps")
    for key, value, section in (
        ("eval_strategy", evaluates, "evaluation"),
        ("save_strategy", saves, "checkpoint"),
    ):
        if value not in ("steps", "no", False):
            found.leave_out(
                f"{file.spelled(key)}: {value}",
                f"depends on the data; set {section}.every_steps; the end of a run has one in any"
                " case",
            )
    if file.has("save_total_limit"):
        file.move("save_total_limit", found, "checkpoint.keep")
    elif saves not in ("no", False):
        found.leave_out(
            "save_total_limit", "is not in the file: all checkpoints are kept there, 3 here"
        )
        file.take("save_total_limit")
    file.move("logging_steps", found)


def _model(file: TrainerFile, found: ConvertedConfig) -> None:
    model = rules.local_path(file, found, file.take("model_name_or_path"), "model_name_or_path")
    if model is not None:
        found.put("model.id", model)
        found.put("model.init", "pretrained")


def from_llamafactory(file: TrainerFile, found: ConvertedConfig) -> None:
    """Write the settings of `file` into `found`."""
    stage, kind = file.take("stage"), file.take("finetuning_type")
    if stage not in ("sft", "pt"):
        raise ConfigError(
            f"{file.path}: stage: {stage} is training by preferences or rewards, which is not"
            " available; sft and pt are"
        )
    if kind not in ("lora", "full"):
        raise ConfigError(
            f"{file.path}: finetuning_type: {kind} is not available; lora and full are"
        )
    _training_arguments(file, found)
    _factory_data(file, found, stage)
    if kind == "lora":
        _factory_adapter(file, found)
    else:
        rules.without_adapter(file, found)
    flash = file.take("flash_attn")
    rules.attention(found, "eager" if flash == "disabled" else flash, "flash_attn")
    if file.has("disable_gradient_checkpointing"):
        chosen = "none" if file.values["disable_gradient_checkpointing"] else "full"
        found.put("training.activation_checkpointing", chosen)
    file.take("disable_gradient_checkpointing")
    if file.take("pure_bf16") is True:
        found.leave_out("pure_bf16", "weights rest in fp32 under bf16")
    elif not any(file.has(key) for key in ("bf16", "fp16")):
        found.leave_out(
            "bf16", "is not in the file: the model's own type decides there; bf16 is written"
        )
    rules.precision(file, found, ("bf16",), ("fp16",), "bf16")
    _model(file, found)
    if file.take("train_from_scratch") is True:
        found.put("model.init", "random")


def _factory_data(file: TrainerFile, found: ConvertedConfig, stage: str) -> None:
    packs, clean = file.take("packing"), file.take("neat_packing")
    found.put("data.packing", bool(stage == "pt" if packs is None else packs) or clean is True)
    if packs is True and not clean and stage == "sft":
        found.leave_out("packing", "packed documents see each other there, and never here")
    file.move("cutoff_len", found, "data.sequence_length")
    found.put("data.too_long", "split" if stage == "pt" else "truncate")
    if stage == "sft":
        found.leave_out(
            "cutoff_len", "question and answer are each cut in proportion there, the end here"
        )
    forms = {
        setting: _named_sets(file, found, key, setting)
        for key, setting in (("dataset", "data.source"), ("eval_dataset", "data.held_out.source"))
        if key == "dataset" or file.has(key)
    }
    file.take("dataset_dir"), file.take("eval_dataset")
    found.put("data.format", "text" if stage == "pt" else "chat")
    if stage == "pt" and forms["data.source"]:
        found.put("data.columns", {"text": forms["data.source"]})
    if file.take("train_on_prompt") is True:
        found.put("data.loss_on", "all")
    if file.take("mask_history") is True:
        found.put("data.train_on", "last")
    size = file.take("val_size")
    if isinstance(size, int | float) and 0 < size < 1:
        found.put("data.held_out.fraction", float(size))
    elif size:
        found.leave_out(
            "val_size", "is a number of rows; set data.held_out.fraction to their share"
        )
    mix = file.take("mix_strategy")
    if mix != "concat":
        found.leave_out(f"mix_strategy: {mix}", "sequences are drawn by each source's weight")
    if file.has("tokenized_path"):
        found.put("data.cache_directory", file.take("tokenized_path"))


def _named_sets(file: TrainerFile, found: ConvertedConfig, key: str, setting: str) -> str | None:
    """Data sets by name, found in dataset_info.json; the column that Alpaca's rows keep text in."""
    wanted = rules.names(file.take(key))
    directory = str(file.take("dataset_dir"))
    index = _index(file, directory)
    shares = rules.names(file.take("interleave_probs"))
    streams = {"streaming": True} if file.take("streaming") is True else {}
    limit = file.take("max_samples")
    sources, column = [], None
    for number, name in enumerate(wanted):
        entry = index[1].get(name) if index else None
        more = {"max_samples": limit} if limit else {}
        if number < len(shares):
            more["weight"] = float(shares[number])
        if not isinstance(entry, dict):
            found.leave_out(
                f"{key}: {name}",
                f"is a name of {directory}/dataset_info.json, which is not found here or does not"
                f" have it; set its path in {setting}",
            )
            sources.append(Source(f"{name}.jsonl", "", more=more))
            continue
        local = entry.get("file_name")
        path = str(index[0] / local) if index and local else entry.get("hf_hub_url", name)
        options = ({"name": entry["subset"]} if entry.get("subset") else {}) | (
            streams if not local else {}
        )
        sources.append(Source(path, key, entry.get("split") or "train", options, more))
        columns = entry.get("columns") or {}
        column = columns.get("prompt") or column
        for ours, theirs in columns.items():
            if ours in ("messages", "tools") and theirs != ours and setting == "data.source":
                found.put(f"data.columns.{ours}", theirs)
        for other in entry.keys() & {
            "ranking",
            "tags",
            "system",
            "num_samples",
            "script_url",
            "folder",
        }:
            found.leave_out(f"{name}.{other} of dataset_info.json", "is not read")
    write_sources(file, found, sources, setting)
    return column


def _index(file: TrainerFile, directory: str) -> tuple[Path, dict[str, Any]] | None:
    """The directory of dataset_info.json and its content, or None where it is not found."""
    path = rules.local_path(
        file, ConvertedConfig(), f"{directory}/dataset_info.json", "dataset_dir"
    )
    try:
        content = read_document(path).value
    except UserError:
        return None
    return (Path(path).parent, content) if isinstance(content, dict) else None


def _factory_adapter(file: TrainerFile, found: ConvertedConfig) -> None:
    found.put("model.lora", {})
    rank, alpha = file.take("lora_rank"), file.take("lora_alpha")
    put_value(found, "model.lora.rank", rank, "lora_rank")
    put_value(found, "model.lora.alpha", 2 * rank if alpha is None else alpha, "lora_alpha")
    targets = rules.names(file.take("lora_target"))
    found.put("model.lora.target_modules", "all-linear" if targets == ["all"] else targets)
    rules.variant(file, found, "use_dora", "use_rslora")
    bits, kind = file.take("quantization_bit"), file.take("quantization_type")
    method = file.take("quantization_method")
    if bits == 4 and kind == "nf4" and method in ("bnb", "bitsandbytes"):
        found.put("model.quantization", "nf4")
    elif bits is not None:
        found.leave_out("quantization_bit", "only nf4 of 4 bits is available; none is set")
    adapter = file.take("adapter_name_or_path")
    if adapter is not None:
        found.put(
            "model.lora.adapter",
            rules.local_path(file, found, str(adapter), "adapter_name_or_path"),
        )
