"""Read `run.yaml` and `cluster.yaml` into configs, and save a config with every default spelled
out.

All mistakes of a file are reported at once, each with its file, line and key:

    run.yaml:7: training.optimzer: unknown key; did you mean 'optimizer'?

`--set a.b=c` changes one value before validation: its path is keys and list positions joined by
dots (`data.source.0.weight=2`), missing sections are created, and mistakes are reported at `--set
training.stps=3`.

Values are typed by YAML and never coerced: `steps: "3"` and `seed: true` are mistakes, not 3 and 1.
A text `${env:NAME}` resolves to the variable's value but is shown and saved as the reference
(`environment.py`).
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path as FilePath
from typing import Any, Final, TypeVar

import yaml
from pydantic import ValidationError

from drillyard.config.cluster import (
    ClusterConfig,
    cluster_model,
    cluster_problems,
    completed,
)
from drillyard.config.environment import OPENING, reference_problems
from drillyard.config.local_files import is_set_by_option, with_files_beside, with_found_files
from drillyard.config.partial_config import partial_config
from drillyard.config.platforms import platforms
from drillyard.config.problems import Path as KeyPath
from drillyard.config.problems import Problem, SourceLocation, dotted, raise_all
from drillyard.config.run import RunConfig, WorkloadRunConfig
from drillyard.config.strict_model import ConfigOrigin, StrictModel
from drillyard.config.validation_errors import describe_value, find_problems, pydantic_problems
from drillyard.config.yaml_document import (
    FLOAT,
    STANDARD_TAG,
    YamlDocument,
    parse_document,
    read_document,
)
from drillyard.deprecation import RENAMED_KEYS, rename_key, rename_override
from drillyard.errors import ConfigError, UserError
from drillyard.safe_files import replace_file
from drillyard.version import __version__

Config = TypeVar("Config", bound=StrictModel)
AFTER_FILES = 1_000_000_000
"""`order` of the first override: after every line of a file."""
_STAND_INS = {"name": "my-cluster"}
"""For a name that is not one, where the rest of a cluster config is checked."""
PLACEHOLDER_LEARNING_RATE = 1e-4
"""Used by commands that train nothing, where the config has no learning rate."""


def load_run_config(
    path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    *,
    resolve_environment: bool = True,
    needs_learning_rate: bool = True,
    finds_files: bool = True,
) -> RunConfig:
    """The run config in the file at `path`, changed by `overrides` (`training.steps=3`). Files that
    it names are absolute (`local_files.py`), unless `finds_files` is False.

    Commands that train nothing pass `needs_learning_rate=False`; those that only show or plan
    a run pass `resolve_environment=False`, so variables need not be set. The config of a run
    directory is loaded by `saved_config.load_saved_config`. `run_checks.require_valid` finds
    contradictions. Raises UserError with every mistake of the file and the overrides.
    """
    config = _load(RunConfig, path, overrides, resolve_environment, needs_learning_rate)
    if not finds_files:
        return config
    return with_found_files(config, path, is_set_by_option(config, AFTER_FILES))


def load_launch_config(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), *, resolve_environment: bool = True
) -> RunConfig | WorkloadRunConfig:
    """The run config at `path`, which trains a model or has a `workload`. Files that it names are
    relative to the working directory where they are below it. Raises UserError as
    `load_run_config`."""
    value = apply_overrides(read_document(path), overrides).value
    model: type[RunConfig | WorkloadRunConfig]
    model = WorkloadRunConfig if isinstance(value, dict) and "workload" in value else RunConfig
    config = _load(model, path, overrides, resolve_environment)
    is_override = is_set_by_option(config, AFTER_FILES)
    return with_found_files(config, path, is_override, for_launch=True)


def load_cluster_config(
    path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    *,
    resolve_environment: bool = True,
    rules: Callable[[ClusterConfig], Iterable[Problem]] | None = None,
) -> ClusterConfig:
    """The cluster config at `path`, changed by `overrides`. Files of this
    machine are absolute, so a copy can be saved anywhere.

    UserError as `load_run_config`, with what the platform and the caller's `rules` do not allow.
    """

    def problems(found: ClusterConfig) -> Iterator[Problem]:
        full = completed(with_files_beside(found, path))
        # The caller's first: they may refuse the platform.
        yield from rules(full) if rules is not None else ()
        yield from cluster_problems(full)

    loaded = _load(cluster_model(), path, overrides, resolve_environment, rules=problems)
    config = completed(with_files_beside(loaded, path))
    raise_all(problems(loaded), config._origin.places)
    storage = config.storage.directory
    if storage is None or OPENING in storage or not platforms()[config.platform].is_this_machine:
        # Of other machines, where no directory of this one is.
        return config
    directory = os.path.normpath(FilePath(path).absolute().parent / FilePath(storage).expanduser())
    changed = config.model_copy(
        update={"storage": config.storage.model_copy(update={"directory": directory})}
    )
    changed._origin = config._origin
    return changed


def config_model(which: str) -> type[StrictModel]:
    """The model of `run`, `cluster` or `workload`, a run config with a command of its own."""
    models: dict[str, type[StrictModel]] = {"run": RunConfig, "workload": WorkloadRunConfig}
    return cluster_model() if which == "cluster" else models[which]


def json_schema(which: str) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of `run`, `cluster` or `workload`, with meanings, defaults
    and limits."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **config_model(which).model_json_schema(),
    }


def resolve_section_secrets(config: RunConfig, section: str) -> RunConfig:
    """`config` with the references of one section resolved, but for withheld ones
    (`fetch_limits.py`). UserError, with file and key, for unset variables."""
    part: StrictModel = getattr(config, section)
    values = part.model_dump(mode="json")
    problems = [Problem((section, *each.path), each.message) for each in reference_problems(values)]
    raise_all(problems, config._origin.places)
    if OPENING not in (text := json.dumps(values)):
        return config
    return config.model_copy(update={section: type(part).model_validate_json(text, strict=True)})


def config_from_options(model: type[Config], values: dict[str, Any]) -> Config:
    """A config made of `values` that a command's options gave. Raises UserError with every mistake
    in them."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise_all(list(find_problems(model, values)) or pydantic_problems(error))
        raise


def save_resolved(config: StrictModel, path: str | os.PathLike[str]) -> None:
    """Write `config` to `path` with every default spelled out; loading it gives an equal config.

    Readers never see a partial file. Raises UserError when it cannot be written.
    """
    try:
        replace_file(FilePath(path), resolved_text(config).encode())
    except OSError as error:
        raise UserError(f"{FilePath(path)}: cannot be written: {error.strerror}") from None


def resolved_text(config: StrictModel) -> str:
    """`config` as YAML with every default spelled out; references to the environment stay
    references."""
    header = f"# Resolved by drillyard {__version__}: every default is spelled out.\n"
    return header + yaml_text(config.model_dump(mode="json"), width=120)


def yaml_text(values: Any, *, flow: bool = False, width: int) -> str:
    """`values` as YAML that our parser reads as the same values; `flow`: within braces."""
    return yaml.dump(
        values,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=width,
        default_flow_style=flow,
    )


def _load(
    model: type[Config],
    path: str | os.PathLike[str],
    overrides: Sequence[str],
    resolve_environment: bool,
    needs_learning_rate: bool = True,
    rules: Callable[[Config], Iterable[Problem]] | None = None,
) -> Config:
    document = _with_mapping(read_document(path), model)
    for old, new in RENAMED_KEYS.items():
        rename_key(old, new, document.value)
        overrides = [rename_override(old, new, override) for override in overrides]
    document = apply_overrides(document, overrides)
    _require_kind(document, model)
    if not needs_learning_rate:
        _fill_in_learning_rate(document.value)
    problems = [
        *document.problems,
        *reference_problems(document.value, must_be_set=resolve_environment),
    ]
    try:
        config = model.model_validate_json(
            json.dumps(document.value),
            strict=True,
            context={"resolve_environment": resolve_environment},
        )
    except ValidationError as error:
        found = list(find_problems(model, document.value))
        if found and rules is not None:
            context = {"resolve_environment": False}
            rest = partial_config(model, document.value, _STAND_INS, context)
            if rest is not None:
                rest.config._origin = ConfigOrigin(document.places)
                found += rest.own(rules(rest.config))
        raise_all(
            [*problems, *(found or (() if problems else pydantic_problems(error)))], document.places
        )
        raise
    raise_all(problems, document.places)
    config._origin = ConfigOrigin(document.places)
    return config


def apply_overrides(document: YamlDocument, overrides: Sequence[str]) -> YamlDocument:
    """The document with every override applied in order; mistakes in applying them are among its
    problems.

    UserError when an override is not `key=value` or its value is not YAML.
    """
    value = copy.deepcopy(document.value)
    places = dict(document.places)
    problems = list(document.problems)
    for number, override in enumerate(overrides):
        path, new, mistakes = _parse_override(override)
        place = SourceLocation(
            f"--set {override if len(override) <= 80 else override[:77] + '...'}",
            AFTER_FILES + number,
        )
        if (refusal := _put(value, path, new)) is not None:
            problems.append(Problem(path, refusal, place))
            continue
        places = {known: where for known, where in places.items() if known[: len(path)] != path}
        # A mistyped section that the override created is reported at the override.
        for depth in range(1, len(path)):
            places.setdefault(path[:depth], place)
        places[path] = place
        problems.extend(
            Problem((*path, *mistake.path), mistake.message, place) for mistake in mistakes
        )
    return YamlDocument(value, places, tuple(problems))


def _parse_override(override: str) -> tuple[KeyPath, Any, tuple[Problem, ...]]:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {override}: expected KEY=VALUE, such as training.steps=100")
    if not text.strip():
        raise ConfigError(
            f"--set {override}: the value is missing; write {key}=null for none, {key}='\"\"' for"
            " empty text"
        )
    document = parse_document(text, f"--set {override}")
    path = tuple(int(part) if part.isascii() and part.isdigit() else part for part in parts)
    return path, document.value, document.problems


def _put(top: Any, path: KeyPath, new: Any) -> str | None:
    """Set `path` in the mapping `top` and create missing sections. Returns why that is not
    possible, or None."""
    here = top
    for depth, key in enumerate(path):
        known = dotted(path[:depth]) or "the file"
        last = depth == len(path) - 1
        if isinstance(here, dict):
            key = str(key)
            if last:
                here[key] = new
            elif here.get(key) is None:
                here[key] = {}
            here = here[key]
        elif isinstance(here, list):
            if not isinstance(key, int):
                return f"{known} is a list; name a position: {known}.0.{key}"
            if key >= len(here):
                return f"{known} has {len(here)} entries, counted from 0; there is no {known}.{key}"
            if last:
                here[key] = new
            here = here[key]
        else:
            return (
                f"{known} is {describe_value(here)}, which has no settings of its own; set {known}"
                " as a whole"
            )
    return None


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
    kinds = {
        cluster_model() if kind is ClusterConfig else kind: title for kind, title in _KINDS.items()
    }
    known = {kind: [key for key in document.value if key in kind.model_fields] for kind in kinds}
    likeliest = max(kinds, key=lambda kind: len(known[kind]))
    if len(known[likeliest]) > len(known[model]):
        label, needed = document.places[()].label, kinds[model].partition(",")[0]
        raise ConfigError(
            f"{label}: is {kinds[likeliest]}, as it has {', '.join(known[likeliest])}; needed here"
            f" is {needed}"
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
    """Text, escaped where PyYAML would write a line separator that it reads back as a line
    break."""
    style = '"' if any(separator in text for separator in "\x85\u2028\u2029") else None
    return dumper.represent_scalar(f"{STANDARD_TAG}str", text, style)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_implicit_resolver(f"{STANDARD_TAG}float", FLOAT, list("-+.0123456789"))
