"""Whether two configs are the same run: what a resume may change, and what would make it another
run.

Settings that decide the samples of a step or the weights they meet (model, data, order, batch,
precision) must stay. The length of a run and its use of gradients (optimizer, schedule, clipping)
may change at a checkpoint; changes are recorded. Settings of where, how fast and how visibly a run
computes may change freely. The caller compares batches by `resolve_global_batch`: 4 ranks x 1
micro-batch is the same run as 1 rank x 4.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from drillyard.config.data_checks import normalized_sources
from drillyard.config.kernel_rules import resolve_fp8_scaling, resolve_loss_on, resolve_too_long
from drillyard.config.problems import dotted
from drillyard.config.run import RunConfig, TrainingConfig

MAY_CHANGE = frozenset(
    {
        "name",
        "output",
        "model.attention",
        "data.cache_directory",
        "data.on_error",
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
        "training.optimizer.learning_rate",
        "training.optimizer.betas",
        "training.optimizer.epsilon",
        "training.optimizer.weight_decay",
        "training.schedule",
        "training.gradient_clipping",
    }
)
"""Settings, or whole sections, that a resume may change and that change training from there on. A
checkpoint has them; the event `settings_changed` has old and new values."""


def differences(old: RunConfig, new: RunConfig) -> list[str]:
    """List the changes that make `new` another run than `old`: `training.seed: 0 -> 1`, in the
    order of the config.

    `training.global_batch_size` is compared when both configs give it.
    """
    before, after = _fixed_settings(old), _fixed_settings(new)
    batches = (old.training.global_batch_size, new.training.global_batch_size)
    if None not in batches:
        before["training.global_batch_size"], after["training.global_batch_size"] = batches
    changed = {
        key: (before.get(key, _NOT_SET), after.get(key, _NOT_SET)) for key in {**before, **after}
    }
    return [
        f"{key}: {_text(was)} -> {_text(now)}"
        for key, (was, now) in changed.items()
        if was != now and not _same_file(key, was, now)
    ]


def recorded_settings(config: RunConfig) -> dict[str, Any]:
    """The settings of `RECORDED`, flat: dotted key -> plain value."""
    values = _leaves({"training": config.training.model_dump(mode="json")})
    return {
        key: value
        for key, value in values
        if any(f"{key}.".startswith(f"{part}.") for part in RECORDED)
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
    return config.model_copy(
        update={"training": TrainingConfig.model_validate_json(json.dumps(values["training"]))}
    )


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """`config` with these values of its settings (`section.name`), which are not checked."""
    for key, value in values.items():
        section, name = key.split(".")
        config = config.model_copy(
            update={section: getattr(config, section).model_copy(update={name: value})}
        )
    return config


def changed_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, list[Any]]:
    """{key: [old value, new value]} of recorded settings; one that `old` does not have is not
    compared."""
    return {
        key: [old[key], value] for key, value in new.items() if key in old and old[key] != value
    }


def describe_changes(changes: Mapping[str, Sequence[Any]]) -> str:
    """`training.steps: 60 -> 90; training.schedule.name: "cosine" -> "constant"`."""
    return "; ".join(
        f"{key}: {json.dumps(old)} -> {json.dumps(new)}" for key, (old, new) in changes.items()
    )


_NOT_SET: Any = object()
_FILES = re.compile(
    r"model\.id|model\.lora\.adapter|data\.tokenizer|data\.(held_out\.)?source\.\d+\.path"
)


def _same_file(key: str, was: Any, now: Any) -> bool:
    """Whether a setting names the same file as before, written in another way, or one of the same
    name where the old path has nothing any more: configs of earlier versions have relative paths,
    and a project may be moved. What is in the file is compared elsewhere."""
    if not (_FILES.fullmatch(key) and isinstance(was, str) and isinstance(now, str)):
        return False
    if not os.path.isabs(now) or "://" in was:
        return False
    if os.path.abspath(was) == now:
        return True
    return os.path.basename(was) == os.path.basename(now) and not os.path.lexists(was)


def _text(value: Any) -> str:
    return "(not set)" if value is _NOT_SET else json.dumps(value, ensure_ascii=False)


def _fixed_settings(config: RunConfig) -> dict[str, Any]:
    """The settings that must stay, flat: dotted key -> value, sources in their full form, and the
    default in place of null."""
    values = config.model_dump(mode="json")
    for section, source in (
        ("data", config.data.source),
        ("held_out", config.data.held_out.source),
    ):
        if source is not None:
            part = values["data"] if section == "data" else values["data"]["held_out"]
            part["source"] = dict(
                enumerate(each.model_dump(mode="json") for each in normalized_sources(source))
            )
    values["data"]["loss_on"] = resolve_loss_on(config.data)
    values["data"]["too_long"] = resolve_too_long(config.data)
    values["training"]["fp8_scaling"] = resolve_fp8_scaling(config.training)
    return dict(_leaves(values, skip=MAY_CHANGE | RECORDED))


def _leaves(
    value: Any, path: tuple[str, ...] = (), skip: frozenset[str] = frozenset()
) -> Iterator[tuple[str, Any]]:
    """Dotted keys and values below `path`, without those below a key of `skip`; a list is a
    value."""
    key = dotted(path)
    if key in skip:
        return
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, (*path, str(name)), skip)
    else:
        yield key, value
