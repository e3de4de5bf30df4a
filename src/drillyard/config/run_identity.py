"""Whether two configs are the same run: what a resume may change, and what would make it another run.

What decides the samples of a step and the weights that they meet (model, data, order, batch, precision) must stay:
steps that are done would not be those of the config any more. How long a run is and how it uses its gradients
(optimizer, schedule, clipping) may change at a checkpoint; training goes on under the new settings from there, and each
change is recorded. What decides only where, how fast and how visibly numbers are computed may change freely. The batch
is compared by the caller through `resolved_global_batch`, since it depends on the number of ranks: 4 ranks x 1
micro-batch is the same run as 1 rank x 4.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from drillyard.config.checks import normalized_sources
from drillyard.config.problems import dotted
from drillyard.config.run import RunConfig, TrainingConfig

MAY_CHANGE = frozenset(
    {
        "name",
        "output",
        "model.attention",
        "data.cache_directory",
        "training.micro_batch_size",
        "training.gradient_accumulation",
        "training.global_batch_size",
        "training.activation_checkpointing",
        "training.compile",
        "training.device",
        "training.deterministic",
        "training.threads_per_rank",
        "training.loss_chunk_tokens",
        "training.max_nonfinite_steps",
        "parallelism",
        "checkpoint",
        "evaluation",
        "logging",
        "timeouts",
    }
)
"""Settings, or whole sections, that a resume may change."""

RECORDED = frozenset(
    {
        "training.steps",
        "training.epochs",
        "training.optimizer",
        "training.schedule",
        "training.gradient_clipping",
    }
)
"""Settings, or whole sections, that a resume may change and that change what is trained from there on. A checkpoint
holds them, and the event `settings_changed` says what they were."""


def differences(old: RunConfig, new: RunConfig) -> list[str]:
    """What makes `new` another run than `old`: `training.seed: 0 -> 1`, in the order of the config.

    `training.global_batch_size` is among them when both configs give it; otherwise the caller compares the resolved
    batches.
    """
    before, after = _essence(old), _essence(new)
    batches = (old.training.global_batch_size, new.training.global_batch_size)
    if None not in batches:
        before["training.global_batch_size"], after["training.global_batch_size"] = batches
    keys = dict.fromkeys([*before, *after])
    return [
        f"{key}: {_shown(before, key)} -> {_shown(after, key)}"
        for key in keys
        if before.get(key, _shown) != after.get(key, _shown)
    ]


def recorded_settings(config: RunConfig) -> dict[str, Any]:
    """The settings of `RECORDED`, flat: dotted key -> plain value."""
    return {
        key: value
        for key, value in _flat({"training": config.training.model_dump(mode="json")}, "")
        if any(key == part or key.startswith(f"{part}.") for part in RECORDED)
    }


def with_recorded_settings(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """`config` with these values, as `recorded_settings` gives them."""
    values: dict[str, Any] = {"training": config.training.model_dump(mode="json")}
    for key, value in settings.items():
        *parents, last = key.split(".")
        place = values
        for parent in parents:
            place = place[parent]
        place[last] = value
    training = TrainingConfig.model_validate_json(json.dumps(values["training"]))
    return config.model_copy(update={"training": training})


def changed_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, list[Any]]:
    """{key: [old value, new value]} of recorded settings; one that `old` does not have is not compared."""
    return {key: [old[key], value] for key, value in new.items() if key in old and old[key] != value}


def describe_changes(changes: Mapping[str, Sequence[Any]]) -> str:
    """`training.steps: 60 -> 90; training.schedule.name: "cosine" -> "constant"`."""
    return "; ".join(f"{key}: {json.dumps(old)} -> {json.dumps(new)}" for key, (old, new) in changes.items())


def _flat(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else name)
    else:
        yield key, value


def _essence(config: RunConfig) -> dict[str, Any]:
    """What must stay, flat: dotted key -> value. A source has one form, however it was written."""
    values = config.model_dump(mode="json")
    values["data"]["source"] = [source.model_dump(mode="json") for source in normalized_sources(config.data.source)]
    held_out = config.data.held_out.source
    if held_out is not None:
        values["data"]["held_out"]["source"] = [
            source.model_dump(mode="json") for source in normalized_sources(held_out)
        ]
    return dict(_leaves(values, ()))


def _leaves(value: Any, path: tuple[str, ...]) -> list[tuple[str, Any]]:
    key = dotted(path)
    if key in MAY_CHANGE or key in RECORDED:
        return []
    if isinstance(value, dict) and value:
        return [leaf for name, inner in value.items() for leaf in _leaves(inner, (*path, str(name)))]
    if isinstance(value, list) and value:
        return [leaf for index, inner in enumerate(value) for leaf in _leaves(inner, (*path, str(index)))]
    return [(key, value)]


def _shown(values: dict[str, Any], key: str) -> str:
    return json.dumps(values[key], ensure_ascii=False) if key in values else "(not set)"
