"""`drillyard eval`: measure a saved model on held-out data, as one rank of however many there are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drillyard.config import load_run_config
from drillyard.config.run import DataConfig, OptimizerConfig, RunConfig, TrainingConfig
from drillyard.data import prepare
from drillyard.evaluation.held_out import HeldOut
from drillyard.parallel.ranks import start_ranks, stop_ranks
from drillyard.training.saved import SavedModel, as_pretrained, bring_up, find_saved_model

DEFAULT_SEQUENCE_LENGTH = 1024


@dataclass(frozen=True)
class Request:
    """What is to be measured. `data`: a run config (*.yaml), a source of held-out documents; None: the run's own."""

    model: Path
    output: Path
    data: str | None = None
    format: str | None = None
    metrics: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    samples: int | None = None
    sequence_length: int | None = None


def evaluate_saved(request: Request) -> dict[str, dict[str, Any]] | None:
    """All figures by held-out part on rank 0, None on the others; predictions are written below `request.output`.

    Raises UserError for a model, data or metric that cannot be used.
    """
    saved = find_saved_model(request.model)
    config = evaluation_config(request, saved)
    ranks = start_ranks(config.training, config.parallelism)
    try:
        data = ranks.in_turn(lambda first: prepare(config, saved.tokenizer_directory, only_open=not first))
        model = bring_up(saved, config, data.tokenizer, ranks)
        held_out = HeldOut(config, data, model.root, ranks, request.output, attention=model.attention)
        results = held_out.evaluate(request.model.name)
        return results if ranks.rank == 0 else None
    finally:
        stop_ranks()


def evaluation_config(request: Request, saved: SavedModel) -> RunConfig:
    """The run config under which the model is measured: the run's own, with what the request names put in."""
    own = saved.config
    if request.data is None or Path(request.data).suffix not in (".yaml", ".yml"):
        base = own or bare_config(request)
    else:
        base = load_run_config(Path(request.data))
    data = base.data
    if request.data is not None and Path(request.data).suffix not in (".yaml", ".yml"):
        data = DataConfig.model_validate(
            {
                "source": request.data,
                "held_out": {"source": request.data} if not request.data.startswith("builtin:") else {},
                "format": request.format or data.format,
                "sequence_length": request.sequence_length or data.sequence_length,
                "cache_directory": data.cache_directory,
                "tokenizer": str(saved.tokenizer_directory),
            }
        )
    evaluation = base.evaluation.model_copy(
        update={
            "metrics": list(request.metrics) or base.evaluation.metrics,
            "parts": list(request.parts) or (None if request.data else base.evaluation.parts),
            "samples": request.samples or base.evaluation.samples,
        }
    )
    config = base.model_copy(update={"data": data, "evaluation": evaluation})
    if saved.is_checkpoint:
        assert own is not None
        return config.model_copy(update={"model": own.model, "training": own.training})
    return as_pretrained(config, saved.path)


def bare_config(request: Request) -> RunConfig:
    """A config for a model that no run of ours made: its own precision does not matter, it is only measured."""
    return RunConfig.model_validate(
        {
            "name": "evaluation",
            "model": {"id": str(request.model)},
            "data": {
                "source": request.data or "builtin:python-stdlib",
                "format": request.format or "text",
                "sequence_length": request.sequence_length or DEFAULT_SEQUENCE_LENGTH,
            },
            "training": TrainingConfig(steps=1, precision="fp32", optimizer=OptimizerConfig(learning_rate=1e-3)),
        }
    )
