"""`drillyard init --model M --data FILE`: a run config of fifteen lines that trains, proposed after
a look at both.

Read are the model's config and tokenizer, and the first megabyte of the data. Format and columns
follow from the rows, the sequence length from their tokens, the micro-batch from this machine's
memory. Learning rates are those that published fine-tunings of the size use: 1e-5 to 2e-5 for all
weights (Llama 2, arXiv 2307.09288, 3.1; Alpaca), 2e-4 for adapters (QLoRA, arXiv 2305.14314, B.2);
small models take larger ones.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from drillyard.config.load import config_from_options
from drillyard.config.problems import raise_all
from drillyard.config.run import RunConfig
from drillyard.config.run_checks import check_run
from drillyard.config.starter import flow
from drillyard.data.chat_messages import MESSAGE_COLUMNS, is_alpaca
from drillyard.data.encode_settings import encode_settings
from drillyard.data.encoder import TRAIN, Encoder
from drillyard.data.function_rows import LAYOUTS
from drillyard.data.raw_batches import Row, first_batches
from drillyard.data.row_formats import COLUMNS
from drillyard.data.sources import resolve_sources
from drillyard.data.tokenizer import TextTokenizer, configured_tokenizer
from drillyard.errors import UserError
from drillyard.estimation.memory import memory_estimate
from drillyard.estimation.model_source import ModelOptions, find_model
from drillyard.estimation.resolved_setup import resolve_setup
from drillyard.formatting import percent, plural, three_digits
from drillyard.models.meta_model import load_config

SAMPLE_BYTES = 1 << 20
LONG_ROWS = 0.99
"""The share of rows that the sequence length must take whole."""
SHORTEST, LONGEST = 128, 8192
"""Bounds of the proposed sequence length: longer ones cost time, which is the user's choice."""
LARGEST_MICRO_BATCH, LARGEST_BATCH = 8, 64
STEPS_PER_EPOCH = 50
"""At least so many, where the data suffice, or nothing is learnt of the schedule."""
FEW_ROWS = 10_000
"""Below it three epochs, as is usual for instructions; else one."""
HELD_OUT = 0.05


@dataclass(frozen=True)
class ProposedConfig:
    """The settings of a run config, and what was seen: a comment by the dotted key it explains."""

    settings: dict[str, Any]
    comments: dict[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """run.yaml: a line per section or setting, with the comments behind."""
        lines = []
        for key, value in self.settings.items():
            if key not in ("data", "training"):
                lines.append((f"{key}: {flow(value)}", key))
                continue
            lines.append((f"{key}:", key))
            lines += [(f"  {name}: {flow(each)}", f"{key}.{name}") for name, each in value.items()]
        return "".join(
            f"{line}  # {self.comments[key]}\n" if key in self.comments else f"{line}\n"
            for line, key in lines
        )


@dataclass(frozen=True)
class SeenRows:
    """What the first rows of the data are: their format, the tokens of each document, and the share
    of all rows that they are (None: not known)."""

    format: str
    columns: dict[str, str]
    lengths: np.ndarray[Any, Any]
    rows: int
    share: float | None


def propose(
    name: str,
    model: str,
    data: str,
    *,
    lora: bool,
    columns: Mapping[str, str],
    device: str,
    memory_gib: float,
    num_gpus: int,
) -> ProposedConfig:
    """The run config that fine-tunes `model` on `data` on this machine, with `memory_gib` for each
    of `num_gpus` ranks on `device` (cuda or cpu).

    `columns`: the format's columns by their names in the data, where the rows do not say. Raises
    UserError where model or data cannot be read, no format fits, or the model does not fit.
    """
    has_weights = not (Path(model).expanduser() / "config.json").is_file() or any(
        Path(model).expanduser().glob("*.safetensors")
    )
    settings: dict[str, Any] = {
        "name": run_name(name),
        "model": {"id": model} if has_weights else {"id": model, "init": "random"},
        "data": {"source": data, "format": "text", "sequence_length": SHORTEST},
        "training": {"steps": 1, "optimizer": {"learning_rate": 1e-3}},
    }
    if lora:
        settings["model"]["lora"] = {"rank": 16, "target_modules": "all-linear"}
    config = config_from_options(RunConfig, settings)
    tokenizer = configured_tokenizer(config, None)
    seen = look_at_rows(config, tokenizer, columns)
    positions = int(getattr(load_config(config.model), "max_position_embeddings", LONGEST))
    length = sequence_length_for(seen.lengths, min(LONGEST, positions))
    if seen.format != "text" and int(seen.lengths.min()) > length:
        raise UserError(
            f"{data}: its documents have {int(seen.lengths.min()):,} tokens or more, and {model}"
            f" has {positions:,} positions, so none is learnt; give a model of a longer context"
        )
    settings["data"] = {"source": data, "format": seen.format, "sequence_length": length}
    if seen.columns:
        settings["data"]["columns"] = dict(seen.columns)
    all_rows = None if seen.share is None else round(seen.rows / seen.share)
    if all_rows is None or all_rows >= 40:
        settings["data"]["held_out"] = {"fraction": HELD_OUT}
    precision = "bf16" if device == "cuda" else "fp32"
    settings["training"] = {"steps": 1, "precision": precision, "optimizer": {"learning_rate": 1.0}}
    sequences = _sequences_per_epoch(seen, length)
    wanted = LARGEST_BATCH if sequences is None else sequences / STEPS_PER_EPOCH
    batch = 2 ** int(math.log2(min(LARGEST_BATCH, max(1.0, wanted))))
    most = min(LARGEST_MICRO_BATCH, max(1, batch // num_gpus))
    micro_batch, used_gib, parameters = _largest_micro_batch(
        settings, most, device, memory_gib, num_gpus
    )
    accumulation = max(1, batch // (micro_batch * num_gpus))
    epochs = 3 if all_rows is not None and all_rows < FEW_ROWS else 1
    per_step = micro_batch * accumulation * num_gpus
    steps = 1000 if sequences is None else max(1, math.ceil(sequences / per_step) * epochs)
    every = max(1, round(steps / 5))
    settings["training"] = {
        "epochs": epochs,
        "micro_batch_size": micro_batch,
        "gradient_accumulation": accumulation,
        "precision": precision,
        "optimizer": {"learning_rate": learning_rate(parameters, lora=lora)},
        "schedule": {"name": "cosine", "warmup_steps": max(1, round(0.03 * steps))},
    }
    settings["checkpoint"] = {"every_steps": every}
    if "held_out" in settings["data"]:
        settings["evaluation"] = {"every_steps": every}
    raise_all(check_run(config_from_options(RunConfig, settings)))
    return ProposedConfig(
        settings, _comments(seen, length, all_rows, used_gib, memory_gib, device, positions)
    )


def run_name(name: str) -> str:
    """A run's name made of a directory's: lower case, other characters as dashes."""
    plain = re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._")[:63].strip("-._")
    return plain or "first-run"


def look_at_rows(
    config: RunConfig, tokenizer: TextTokenizer, columns: Mapping[str, str]
) -> SeenRows:
    """Read and tokenise the first rows of the only source. UserError where no format fits them."""
    (source,) = resolve_sources(config.data.source)
    if source.is_megatron:
        raise UserError(
            f"{source.config.path}: holds tokens, not rows, so there is nothing to look at; write"
            " run.yaml by `drillyard init`, without --data"
        )
    batches = list(first_batches(source.batches(), SAMPLE_BYTES))
    read = [(batch.where(number), row) for batch in batches for number, row in batch.rows()]
    rows = [(where, row) for where, row in read if not isinstance(row, UserError)]
    if not rows:
        raise next(
            (row for _, row in read if isinstance(row, UserError)),
            UserError(f"{source.config.path}: has no rows"),
        )
    found = dict(columns)
    has_template = bool(tokenizer.chat_template)
    form = format_of([row for _, row in rows], found, rows[0][0], has_template=has_template)
    data = config.data.model_copy(
        update={"format": form, "columns": found, "sequence_length": 2**31 - 1}
    )
    encoder = Encoder(encode_settings(data, tokenizer))
    pieces = [encoder.encode(batch).parts[TRAIN].pieces for batch in batches]
    lengths = [each.lengths for each in pieces if each is not None]
    if not lengths:
        raise UserError(
            f"{source.config.path}: no token of its first rows carries loss; look at them by"
            " `drillyard data preview`"
        )
    nbytes = sum(batch.nbytes for batch in batches)
    share = 1.0
    if nbytes >= SAMPLE_BYTES:
        share = min(1.0, nbytes / source.nbytes) if source.nbytes else 0.0
    return SeenRows(form, found, np.concatenate(lengths), len(rows), share or None)


def format_of(rows: list[Row], columns: dict[str, str], where: str, *, has_template: bool) -> str:
    """The format whose columns these rows have; `columns` gets the names that differ.

    Raises UserError that names the columns where none fits.
    """
    names = {name for row in rows[:100] for name, value in row.items() if value is not None}
    if columns:
        for form, own in COLUMNS.items():
            if set(columns) <= {*own, "tools", "system"} and set(own) <= {*columns, *names}:
                return form
        raise UserError(
            f"--column: no format has the columns {', '.join(sorted(columns))}; formats:"
            f" {'; '.join(' '.join([f'{form}:', *own]) for form, own in COLUMNS.items() if own)}"
        )
    if any(names >= set(layout) for layout in LAYOUTS):
        return "function-calling"
    is_chat = names & set(MESSAGE_COLUMNS) or is_alpaca(rows[0])
    if is_chat and not has_template:
        raise UserError(
            f"{where}: the rows are conversations, and the model's tokenizer has no chat template;"
            " give --model the instruct version of the model"
        )
    if is_chat:
        return "chat"
    for form in ("text-to-sql", "prompt-completion", "text"):
        if all(names & set(known) for known in COLUMNS[form].values()):
            return form
    raise UserError(
        f"{where}: the columns are {', '.join(sorted(names)) or '(none)'}, and no format has these;"
        " say which is which: --column prompt=NAME --column completion=NAME, or --column text=NAME"
    )


def sequence_length_for(lengths: np.ndarray[Any, Any], most: int) -> int:
    """The power of two that takes `LONG_ROWS` of the documents whole, within bounds."""
    needed = float(np.quantile(lengths, LONG_ROWS, method="inverted_cdf"))
    return int(min(most, max(SHORTEST, 2 ** math.ceil(math.log2(max(1.0, needed))))))


def _largest_micro_batch(
    settings: dict[str, Any], most: int, device: str, memory_gib: float, num_gpus: int
) -> tuple[int, float, float]:
    """The largest micro-batch up to `most` that surely fits, the GiB it needs, and the model's
    parameters.

    UserError where not even one sequence fits.
    """
    used = 0.0
    size = most
    while size >= 1:
        changed = {**settings, "training": {**settings["training"], "micro_batch_size": size}}
        config = config_from_options(RunConfig, changed)
        model = find_model(config, ModelOptions())
        setup = resolve_setup(
            config,
            model.spec,
            num_gpus=num_gpus,
            gpus_per_node=num_gpus,
            memory_gib=memory_gib,
            device_type="cuda" if device == "cuda" else "cpu",
            model_config=model.config,
        ).setup
        used = memory_estimate(setup).total.high.value
        if used <= memory_gib:
            return size, used, float(model.spec.total_parameters)
        size //= 2
    advice = (
        "give a smaller model, or a machine with more memory"
        if "lora" in settings["model"]
        else "give --lora to train adapters alone, or a smaller model"
    )
    raise UserError(
        f"{settings['model']['id']}: training needs up to {three_digits(used)} GiB a rank, and"
        f" there are {three_digits(memory_gib)}; {advice}"
    )


def _sequences_per_epoch(seen: SeenRows, length: int) -> float | None:
    """Packed sequences of all rows, about; None where their number is not known."""
    if seen.share is None:
        return None
    return max(1.0, float(np.minimum(seen.lengths, length).sum()) / length / seen.share)


def learning_rate(parameters: float, *, lora: bool) -> float:
    """The peak learning rate for a model of so many parameters (sources: above)."""
    if lora:
        return 2e-4
    bounds = ((1e9, 1e-5), (1e8, 2e-5), (1e7, 1e-4))
    return next((rate for least, rate in bounds if parameters >= least), 1e-3)


def _comments(
    seen: SeenRows,
    length: int,
    all_rows: int | None,
    used_gib: float,
    memory_gib: float,
    device: str,
    positions: int,
) -> dict[str, str]:
    rows = "rows" if all_rows is None else f"about {all_rows:,} rows" if seen.share != 1 else ""
    rows = rows or plural(seen.rows, "row")
    long = int((seen.lengths > length).sum())
    fits = "all of them fit" if not long else f"{percent(long / len(seen.lengths))} are longer"
    return {
        "data.source": rows,
        "data.sequence_length": (
            f"documents have {int(np.median(seen.lengths)):,} tokens, at most"
            f" {int(seen.lengths.max()):,}: {fits}; the model has {positions:,} positions"
        ),
        "training.micro_batch_size": (
            f"up to {three_digits(used_gib)} of {three_digits(memory_gib)} GiB"
            f" {'of a GPU' if device == 'cuda' else 'of memory'}"
        ),
    }
