"""`drillyard eval`: measure a saved model on held-out data, on any number of ranks.

Only `evaluate_saved` imports torch: the request is checked before.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drillyard.config.fetch_limits import FetchLimits, limited
from drillyard.config.load import config_from_options, load_run_config, resolve_section_secrets
from drillyard.config.model_files import require_usual_model_files
from drillyard.config.run import ParallelismConfig, RunConfig
from drillyard.config.run_checks import require_valid
from drillyard.config.run_data import DataConfig
from drillyard.config.saved_config import (
    is_saved_config,
    load_saved_config,
    settings_to_fetch,
    typed_texts,
)
from drillyard.data.data_changes import DataRecord, read_record
from drillyard.errors import UserError
from drillyard.guarded_files import read_json, require_regular
from drillyard.training.saved_model import (
    SavedModel,
    as_pretrained,
    fetch_limits_of,
    find_saved_model,
    load_saved_model,
    run_directory_above,
    without_training_layout,
)

OTHER_FIGURES = (
    "What is held out of it is not what the run's own figures are of: undo the change, or name what"
    " to measure on by --data"
)
DEFAULT_SEQUENCE_LENGTH = 1024
CONFIG_SUFFIXES = (".yaml", ".yml")
FLAGS = {
    "data.source": "--data",
    "data.format": "--format",
    "data.sequence_length": "--sequence-length",
    "evaluation.metrics": "--metric",
    "evaluation.parts": "--part",
    "evaluation.samples": "--samples",
}
"""The flags of `drillyard eval` by the settings that they stand for."""


@dataclass(frozen=True)
class EvaluationRequest:
    """Evaluation request. `data`: a run config (*.yaml) or a source of held-out documents; None:
    the run's own. `trust_config`: fetch what the run's files name (`fetch_limits.py`)."""

    model: Path
    output: Path
    data: str | None = None
    format: str | None = None
    metrics: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    samples: int | None = None
    sequence_length: int | None = None
    trust_config: bool = False


def evaluate_saved(
    request: EvaluationRequest, note: Callable[[str], None]
) -> dict[str, dict[str, Any]] | None:
    """All figures by held-out part on rank 0, None on the others; predictions are written below
    `request.output`.

    `note` is called with each note about the data. Raises UserError for a model, data or metric
    that cannot be used.
    """
    saved, config = check_request(request)
    with limited(None if request.trust_config else limits_of_request(request, saved)):
        config = resolve_section_secrets(without_training_layout(config), "data")
        return _evaluate(request, saved, config, note)


def _evaluate(
    request: EvaluationRequest,
    saved: SavedModel,
    config: RunConfig,
    note: Callable[[str], None],
) -> dict[str, dict[str, Any]] | None:
    """`evaluate_saved` of a checked request."""
    from drillyard.data.prepared_data import prepare
    from drillyard.data.tokenizer import today
    from drillyard.evaluation.evaluator import HeldOutEvaluator
    from drillyard.parallel.collectives import from_first_rank
    from drillyard.parallel.ranks import start_ranks, stop_ranks

    ranks = start_ranks(config.training, config.parallelism)
    try:
        known = known_data(request, saved)
        date = from_first_rank(lambda: date_of_run(saved) or today())
        with ranks.in_turn() as is_first:
            data = prepare(
                config,
                saved.tokenizer_directory,
                known=known,
                if_changed=OTHER_FIGURES,
                only_open=not is_first,
                date=date,
            )
        if ranks.rank == 0:
            for text in data.report.notes:
                note(text)
        if not data.held_out:
            raise UserError(
                f"{request.model}: its run held no data out; name a source of documents by --data"
            )
        model = load_saved_model(saved, config, data.tokenizer, ranks, "evaluation")
        held_out = HeldOutEvaluator(
            config, data, model.root, ranks, request.output, attention=model.attention
        )
        evaluated = held_out.evaluate(request.model.name)
        for failure in evaluated.failures:
            text = f"{failure.metric} of {failure.part}: {failure.reason}"
            raise (
                UserError(text)
                if failure.stack is None
                else RuntimeError(f"{text}\n\n{failure.stack}")
            )
        return evaluated.results if ranks.rank == 0 else None
    finally:
        stop_ranks()


def date_of_run(saved: SavedModel) -> str | None:
    """The day that the chat template of the model's run sees; None for a template without a clock,
    and for a model from elsewhere."""
    owner = run_directory_above(saved.path)
    record = None if owner is None else read_record(owner)
    return None if record is None else record.date


def known_data(request: EvaluationRequest, saved: SavedModel) -> DataRecord | None:
    """The record of the run's own data at training; None for other data, or a model from
    elsewhere."""
    owner = run_directory_above(saved.path)
    known = read_record(owner) if owner is not None and request.data is None else None
    # Its tokens are made by the tokenizer that was saved with the model, not by what the config
    # names.
    return None if known is None else replace(known, tokenizer="")


def check_request(request: EvaluationRequest) -> tuple[SavedModel, RunConfig]:
    """The model and the config to measure it under, without torch. Raises UserError for mistakes
    visible by now."""
    saved = find_saved_model(request.model)
    with limited(None if request.trust_config else limits_of_request(request, saved)):
        config = evaluation_config(request, saved)
    require_valid(config)
    require_usual_model_files(config)
    if request.data is not None and not Path(request.data).is_dir():
        require_regular(Path(request.data))
    return saved, config


def limits_of_request(request: EvaluationRequest, saved: SavedModel) -> FetchLimits:
    """What the evaluation may fetch and fill in: what the user typed, in --data or in a config that
    --data names."""
    if request.data is None:
        return fetch_limits_of(saved, accepts_data=True)
    if (config := named_config(request)) is None:
        return fetch_limits_of(saved, typed={request.data})
    if not is_saved_config(file := Path(request.data)):
        return fetch_limits_of(saved, typed=typed_texts(config))
    limits = fetch_limits_of(saved)
    settings = dict.fromkeys([*limits.settings, *settings_to_fetch(config, file)])
    return replace(limits, settings=tuple(settings))


def named_config(request: EvaluationRequest) -> RunConfig | None:
    """The run config that --data names; None where it names none. UserError for its mistakes."""
    if request.data is None or Path(request.data).suffix not in CONFIG_SUFFIXES:
        return None
    file = Path(request.data)
    return load_saved_config(file) if is_saved_config(file) else load_run_config(file)


def evaluation_config(request: EvaluationRequest, saved: SavedModel) -> RunConfig:
    """The run config under which the model is measured: the run's own, with what the request names
    put in."""
    own = saved.config
    config_of_data = named_config(request)
    base = config_of_data or own or config_without_run(request)
    data = base.data
    if request.data is not None and config_of_data is None:
        data = config_of_source(request, base.data, saved)
    elif request.format or request.sequence_length:
        raise UserError(
            "--format and --sequence-length belong to a source of documents: name it by --data"
        )
    evaluation = base.evaluation.model_copy(
        update={
            "metrics": list(request.metrics) or base.evaluation.metrics,
            "parts": list(request.parts) or (None if request.data else base.evaluation.parts),
            "samples": request.samples or base.evaluation.samples,
        }
    )
    # Another number of ranks may evaluate.
    config = base.model_copy(
        update={"data": data, "evaluation": evaluation, "parallelism": ParallelismConfig()}
    )
    if saved.is_checkpoint:
        own = saved.config_from_run()
        return config.model_copy(update={"model": own.model, "training": own.training})
    return as_pretrained(config, saved)


def config_of_source(request: EvaluationRequest, data: DataConfig, saved: SavedModel) -> DataConfig:
    """`data` with the request's source as the only and held-out one, tokenised and packed as in
    training."""
    assert request.data is not None
    changes: dict[str, Any] = {
        "source": request.data,
        "held_out": {} if request.data.startswith("builtin:") else {"source": request.data},
        "sequence_length": request.sequence_length or data.sequence_length,
    }
    if saved.tokenizer_directory is not None:
        changes |= {"tokenizer": str(saved.tokenizer_directory), "chat_template": None}
    if request.format not in (None, data.format):
        changes |= {"format": request.format, "columns": {}, "loss_on": None, "too_long": None}
    return config_from_options(DataConfig, data.model_dump() | changes)


def config_without_run(request: EvaluationRequest) -> RunConfig:
    """A config for a model from elsewhere. The training section is never used."""
    if request.data is None:
        raise UserError(
            f"{request.model}: no run made it, so none says what to measure it on; name a source by"
            " --data"
        )
    return config_from_options(
        RunConfig,
        {
            "name": "evaluation",
            "model": {"id": str(request.model)},
            "data": {
                "source": request.data,
                "format": request.format or "text",
                "sequence_length": (
                    request.sequence_length
                    or min(DEFAULT_SEQUENCE_LENGTH, positions_of(request.model))
                ),
            },
            "training": {"steps": 1, "precision": "fp32", "optimizer": {"learning_rate": 1e-3}},
        },
    )


def positions_of(model: Path) -> int:
    """The number of positions in a model's config.json, under any name in use; at most
    DEFAULT_SEQUENCE_LENGTH."""
    try:
        config = read_json(model / "config.json")
        found = [
            config[key]
            for key in ("max_position_embeddings", "n_positions")
            if isinstance(config.get(key), int)
        ]
    except (OSError, ValueError, AttributeError, RecursionError):
        found = []  # reported where the model is built
    return min(found, default=DEFAULT_SEQUENCE_LENGTH)


def flags_for(message: str, request: EvaluationRequest) -> str:
    """A line that names the flags for the settings in an error message; empty where run.yaml has
    them."""
    if request.data is None or Path(request.data).suffix in CONFIG_SUFFIXES:
        return ""
    found = [f"{key} is {flag} here" for key, flag in FLAGS.items() if key in message]
    if "data.columns" in message and request.format is None:
        found.append(
            "rows are read as text: --format names another one (chat, prompt-completion,"
            " text-to-sql)"
        )
    others = re.findall(r"\b(?:data|evaluation)\.[a-z_]+", message)
    if any(key not in FLAGS for key in others):
        found.append("other settings: write them into a run.yaml and give --data run.yaml")
    return f"\n{'; '.join(found)}" if found else ""
