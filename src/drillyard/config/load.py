"""Read `run.yaml` and `cluster.yaml` into configs, and save a config with every default spelled out.

All mistakes of a file are reported at once, each with its file, line and key:

    run.yaml:7: training.optimzer: unknown key; did you mean 'optimizer'?

Values are typed by YAML and never coerced: `steps: "3"` and `seed: true` are mistakes, not 3 and 1. A text
`${env:NAME}` resolves to the variable's value but is shown and saved as the reference (`environment.py`).
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any, Final, TypeVar

import yaml
from pydantic import ValidationError

from drillyard.config.cluster import ClusterConfig, cluster_model, cluster_problems, with_absolute_paths
from drillyard.config.environment import OPENING, reference_problems
from drillyard.config.overrides import apply_overrides
from drillyard.config.problems import Problem, raise_all
from drillyard.config.run import RunConfig, WorkloadRunConfig
from drillyard.config.strict_model import ConfigOrigin, StrictModel
from drillyard.config.validation_errors import describe_value, find_problems, pydantic_problems
from drillyard.config.yaml_document import FLOAT, STANDARD_TAG, YamlDocument, read_document
from drillyard.deprecation import rename_keys, rename_override
from drillyard.errors import ConfigError, UserError
from drillyard.version import __version__

Config = TypeVar("Config", bound=StrictModel)
PLACEHOLDER_LEARNING_RATE = 1e-4
"""Used by commands that train nothing, where the config has no learning rate."""


def load_run_config(
    path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    *,
    resolve_environment: bool = True,
    needs_learning_rate: bool = True,
) -> RunConfig:
    """The run config in the file at `path`, changed by `overrides` (`training.steps=3`).

    Commands that train nothing pass `needs_learning_rate=False`; those that read a finished run pass
    `resolve_environment=False`, so variables need not be set. `checks.require_valid` finds contradictions.
    Raises UserError with every mistake of the file and the overrides.
    """
    return _load(RunConfig, path, overrides, resolve_environment, needs_learning_rate)


def load_launch_config(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), *, resolve_environment: bool = True
) -> RunConfig | WorkloadRunConfig:
    """The run config at `path`, which trains a model or has a `workload`. Raises UserError as `load_run_config`."""
    value = apply_overrides(read_document(path), overrides).value
    model: type[RunConfig | WorkloadRunConfig]
    model = WorkloadRunConfig if isinstance(value, dict) and "workload" in value else RunConfig
    return _load(model, path, overrides, resolve_environment)


def load_cluster_config(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), *, resolve_environment: bool = True
) -> ClusterConfig:
    """The cluster config at `path`, changed by `overrides`, its `hardware` absolute. UserError as `load_run_config`."""
    config = _load(cluster_model(), path, overrides, resolve_environment)
    raise_all(cluster_problems(config), config._origin.places)
    return with_absolute_paths(config, path)


def config_model(which: str) -> type[StrictModel]:
    """The model of `run`, `cluster` or `workload`, a run config with a command of its own."""
    models: dict[str, type[StrictModel]] = {"run": RunConfig, "workload": WorkloadRunConfig}
    return cluster_model() if which == "cluster" else models[which]


def json_schema(which: str) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of `run`, `cluster` or `workload`, with meanings, defaults and limits."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **config_model(which).model_json_schema()}


def resolve_section_secrets(config: RunConfig, section: str) -> RunConfig:
    """`config` with the references of one section resolved. UserError, with file and key, for unset variables."""
    part: StrictModel = getattr(config, section)
    values = part.model_dump(mode="json")
    problems = [Problem((section, *each.path), each.message) for each in reference_problems(values)]
    raise_all(problems, config._origin.places)
    if OPENING not in (text := json.dumps(values)):
        return config
    return config.model_copy(update={section: type(part).model_validate_json(text, strict=True)})


def config_from_options(model: type[Config], values: dict[str, Any]) -> Config:
    """A config made of `values` that a command's options gave. Raises UserError with every mistake in them."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise_all(list(find_problems(model, values)) or pydantic_problems(error))
        raise


def save_resolved(config: StrictModel, path: str | os.PathLike[str]) -> None:
    """Write `config` to `path` with every default spelled out; loading it gives an equal config.

    Readers never see a partial file: it is renamed into place. Raises UserError when it cannot be written.
    """
    text = resolved_text(config)
    target = FilePath(path)
    try:
        partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        with open(partial, "x", encoding="utf-8") as file:
            try:
                file.write(text)
                file.close()
                os.replace(partial, target)
            except BaseException:
                os.unlink(partial)
                raise
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error.strerror}") from None


def resolved_text(config: StrictModel) -> str:
    """`config` as YAML with every default spelled out; references to the environment stay references."""
    header = f"# Resolved by drillyard {__version__}: every default is spelled out.\n"
    values = config.model_dump(mode="json")
    return header + yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _load(
    model: type[Config],
    path: str | os.PathLike[str],
    overrides: Sequence[str],
    resolve_environment: bool,
    needs_learning_rate: bool = True,
) -> Config:
    document = _with_mapping(read_document(path), model)
    rename_keys(document.value)
    document = apply_overrides(document, [rename_override(each) for each in overrides])
    _require_kind(document, model)
    if not needs_learning_rate:
        _fill_in_learning_rate(document.value)
    problems = [*document.problems, *reference_problems(document.value, must_be_set=resolve_environment)]
    try:
        config = model.model_validate_json(
            json.dumps(document.value), strict=True, context={"resolve_environment": resolve_environment}
        )
    except ValidationError as error:
        found = list(find_problems(model, document.value))
        raise_all([*problems, *(found or (() if problems else pydantic_problems(error)))], document.places)
        raise
    raise_all(problems, document.places)
    config._origin = ConfigOrigin(document.places)
    return config


def _fill_in_learning_rate(content: Any) -> None:
    training = content.get("training")
    if isinstance(training, dict):
        optimizer = training.setdefault("optimizer", {})
        if isinstance(optimizer, dict):
            optimizer.setdefault("learning_rate", PLACEHOLDER_LEARNING_RATE)


_KINDS: Final[dict[type[StrictModel], str]] = {
    RunConfig: "a run config (what to train)",
    WorkloadRunConfig: "a run of another program (workload), which only `drillyard launch` starts",
    ClusterConfig: "a cluster config (where to run), which belongs to --cluster",
}


def _require_kind(document: YamlDocument, model: type[StrictModel]) -> None:
    """Raise UserError for a file whose keys are those of another kind of config."""
    kinds = {cluster_model() if kind is ClusterConfig else kind: title for kind, title in _KINDS.items()}
    known = {kind: [key for key in document.value if key in kind.model_fields] for kind in kinds}
    likeliest = max(kinds, key=lambda kind: len(known[kind]))
    if len(known[likeliest]) > len(known[model]):
        label, needed = document.places[()].label, kinds[model].partition(",")[0]
        raise ConfigError(
            f"{label}: is {kinds[likeliest]}, as it has {', '.join(known[likeliest])}; needed here is {needed}"
        )


def _with_mapping(document: YamlDocument, model: type[StrictModel]) -> YamlDocument:
    if isinstance(document.value, dict):
        return document
    label = document.places[()].label
    keys = ", ".join(model.model_fields)
    found = "is empty" if document.value is None else f"holds {describe_value(document.value)}"
    raise ConfigError(f"{label}: {found}; a config is a mapping with the keys {keys}")


class _Dumper(yaml.SafeDumper):
    """Quotes every text that our parser or YAML 1.1 would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Text, escaped where PyYAML would write a line separator that it reads back as a line break."""
    style = '"' if any(separator in text for separator in "\x85\u2028\u2029") else None
    return dumper.represent_scalar(f"{STANDARD_TAG}str", text, style)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_implicit_resolver(f"{STANDARD_TAG}float", FLOAT, list("-+.0123456789"))
