"""Commented starters of `run.yaml` and `cluster.yaml`, made from the config models themselves.

Settings that the starter chooses are written out; all others are commented out with their defaults,
so that deleting a `#` changes nothing. Comments are the fields' own descriptions. What every run is
refused for is left out.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from drillyard.config.load import config_from_options, config_model
from drillyard.config.platforms import THIS_MACHINE
from drillyard.config.problems import raise_all
from drillyard.config.run import RunConfig
from drillyard.config.run_checks import NOT_AVAILABLE, check_run
from drillyard.config.trainer_table import ConvertedConfig
from drillyard.errors import UserError

# A model of 0.3 million parameters that learns text-to-SQL on two CPU cores in minutes.
RUN: dict[str, Any] = {
    "name": "text-to-sql-small",
    "model": {
        "config": {
            "architecture": "llama",
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 256,
        },
        "init": "random",
    },
    "data": {
        "source": "builtin:text-to-sql",
        "format": "text-to-sql",
        "sequence_length": 128,
        "tokenizer": {"train": "bpe", "vocab_size": 1024},
    },
    "training": {
        "steps": 1500,
        "micro_batch_size": 16,
        "precision": "fp32",
        "optimizer": {"learning_rate": 4e-3},
        "schedule": {"name": "cosine", "warmup_steps": 100},
        "seed": 0,
    },
    "parallelism": {"shard": "auto"},
    "checkpoint": {"every_steps": 500},
    "evaluation": {"every_steps": 500, "metrics": ["loss", "sql-execution"]},
    "logging": {"every_steps": 10},
}

CLUSTER: dict[str, Any] = {"name": "this-machine", "platform": THIS_MACHINE, "nodes": 1}

HEADERS = {
    "run": (
        "What to train. `drillyard train run.yaml` trains it; any setting can be changed for one"
        " run by\n`--set training.steps=100`. Settings behind a # show their defaults. Secrets:"
        " ${env:NAME}."
    ),
    "cluster": (
        "Where to train. `drillyard launch run.yaml --cluster cluster.yaml` hands the run to it.\n"
        "Settings behind a # show their defaults; a platform needs only its own."
    ),
}

WIDTH = 110


def starter(which: str, chosen: dict[str, Any] | None = None) -> str:
    """The text of a starter: `run` or `cluster`. `chosen`: the settings to write out, instead of
    the usual ones."""
    chosen = chosen or {"run": RUN, "cluster": CLUSTER}[which]
    header = "".join(f"# {line}\n" for line in HEADERS[which].splitlines())
    return header + "\n" + "\n".join(_settings(config_model(which), chosen, "")).rstrip() + "\n"


def completed(found: ConvertedConfig) -> dict[str, Any]:
    """The settings of another trainer's config, with the starter's where a run needs more; those
    are noted in it.

    Raises UserError for values that no run config may have.
    """
    chosen, training = found.settings, found.settings.setdefault("training", {})
    for section in ("model", "data"):
        if section not in chosen:
            chosen[section] = RUN[section]
            found.leave_out(section, "is not in the file; the starter's is written")
    if not {"steps", "epochs"} & training.keys():
        training["steps"] = RUN["training"]["steps"]
        found.leave_out("training.steps", f"is not in the file; {training['steps']} is written")
    optimizer = training.setdefault("optimizer", {})
    if "learning_rate" not in optimizer:
        optimizer["learning_rate"] = RUN["training"]["optimizer"]["learning_rate"]
        found.leave_out(
            "learning_rate", f"is not in the file; {optimizer['learning_rate']} is written"
        )
    config = config_from_options(RunConfig, chosen)
    raise_all(check_run(config))
    return chosen


def write_starters(directory: Path, run: str) -> list[Path]:
    """Write `run.yaml` (`run`: its text) and a commented `cluster.yaml` into `directory`, making it
    if need be.

    Raises UserError, with nothing written, when one of them is there already or cannot be written.
    """
    refuse_existing(directory)
    paths = _paths_in(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for which, path in paths.items():
            with open(path, "x", encoding="utf-8") as file:
                file.write(run if which == "run" else starter(which))
    except OSError as error:
        raise UserError(
            f"{error.filename or directory}: cannot be written: {error.strerror}"
        ) from None
    return list(paths.values())


def refuse_existing(directory: Path) -> None:
    """Raise UserError where `write_starters` would find one of its files."""
    paths = _paths_in(directory).values()
    if there := [str(path) for path in paths if path.exists() or path.is_symlink()]:
        raise UserError(
            f"{' and '.join(there)}: there already, and nothing is overwritten; name another"
            " directory"
        )


def _paths_in(directory: Path) -> dict[str, Path]:
    return {which: directory / f"{which}.yaml" for which in ("run", "cluster")}


def _settings(
    model: type[BaseModel], chosen: dict[str, Any], indent: str, path: str = ""
) -> Iterator[str]:
    """The lines of a section: what is chosen as it is, everything else behind a `#`."""
    for key, field in model.model_fields.items():
        section = _section(field)
        if path + key in NOT_AVAILABLE:
            continue
        if key in chosen:
            yield from _comment(field, section, indent)
            if section is not None:
                yield f"{indent}{key}:"
                yield from _settings(section, chosen[key], f"{indent}  ", f"{path}{key}.")
            else:
                yield f"{indent}{key}: {flow(chosen[key])}"
        else:
            yield from (f"{indent}{line}" for line in _comment(field, section, ""))
            yield from (f"{indent}#{line}" for line in _default(key, field, section))
        if not indent:
            yield ""


def _default(key: str, field: FieldInfo, section: type[BaseModel] | None) -> Iterator[str]:
    """The lines of a setting that is not chosen, as they read without the `#` before each."""
    if section is None:
        yield (
            f"{key}:"
            if field.default is PydanticUndefined
            else f"{key}: {flow(field.get_default())}"
        )
        return
    yield f"{key}:"
    # A list of sections shows one.
    first = "- " if get_origin(field.annotation) is list else "  "
    for inner, inner_field in section.model_fields.items():
        its_section = _section(inner_field)
        for line in (
            *_comment(inner_field, its_section, ""),
            *_default(inner, inner_field, its_section),
        ):
            yield f"{first}{line}"
            first = "  "


def _comment(field: FieldInfo, section: type[BaseModel] | None, indent: str) -> Iterator[str]:
    text = field.description or (section.__doc__ if section is not None else "") or ""
    for line in textwrap.wrap(
        text.split("\n\n")[0], WIDTH - len(indent) - 2, break_on_hyphens=False
    ):
        yield f"{indent}# {line}"


def _section(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a setting that is a section, given always or only if wanted; None for a
    value."""
    members = [
        member
        for member in get_args(field.annotation) or (field.annotation,)
        if member is not type(None)
    ]
    only = members[0] if len(members) == 1 else None
    return only if isinstance(only, type) and issubclass(only, BaseModel) else None


def flow(value: Any) -> str:
    """A value on one line: `{train: bpe, vocab_size: 1024}`."""
    text: str = yaml.safe_dump(
        value, default_flow_style=True, sort_keys=False, width=10_000, allow_unicode=True
    )
    return text.removesuffix("\n").removesuffix("\n...")
