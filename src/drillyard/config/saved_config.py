"""The run.yaml of a run directory: loaded without the environment, and what it would fetch.

`load_run_config` is for the config that a user typed; here are those of run directories, which may
come from somebody else (`fetch_limits.py`).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from drillyard.config.environment import REFERENCE
from drillyard.config.load import load_run_config
from drillyard.config.problems import (
    HUB_ID,
    location_of,
    on_one_line,
    remote_scheme,
    shown_address,
)
from drillyard.config.problems import Path as KeyPath
from drillyard.config.run import RunConfig
from drillyard.config.yaml_document import read_document
from drillyard.errors import UserError

FETCHED_SECTIONS = ("model", "data")
"""The sections of which commands on a saved model or its data fetch something."""
_RUN_FILES = ("events.jsonl", "metrics.jsonl", "checkpoints", "final")
_LAUNCH = "launch"


def load_saved_config(file: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """The run config saved at `file`, references to the environment unresolved, and the files that
    it names as they were saved. UserError as `load_run_config`."""
    return load_run_config(file, overrides, resolve_environment=False, finds_files=False)


def is_saved_config(file: Path) -> bool:
    """Whether a config file is one that a run saved: it is in a run directory, or in its launch
    directory, or it spells out every default, as no one types it."""
    directory = file.parent.parent if file.parent.name == _LAUNCH else file.parent
    return any((directory / name).exists() for name in _RUN_FILES) or _has_every_section(file)


def _has_every_section(file: Path) -> bool:
    try:
        value = read_document(file).value
    except UserError:
        return False  # the one that loads it reports this
    return isinstance(value, dict) and set(RunConfig.model_fields) <= set(value)


def typed_texts(config: RunConfig) -> frozenset[str]:
    """Every text in a config that the user typed, references unresolved."""
    return frozenset(text for _, text in _texts(config.model_dump(mode="json")))


def settings_to_fetch(
    config: RunConfig,
    file: Path,
    *,
    sections: Collection[str] = FETCHED_SECTIONS,
    typed: Collection[str] = (),
) -> tuple[str, ...]:
    """A line for each setting that is fetched or has a reference: `run.yaml:7: data.source:
    https://host/rows.jsonl, with the variable NAME`, addresses without their queries.

    `typed`: texts that are left out.
    """
    values = config.model_dump(mode="json", include=set(sections))
    lines = []
    for path, text in _texts(values):
        names = list(dict.fromkeys(REFERENCE.findall(text)))
        if text in typed or not (names or remote_scheme(text) or _is_hub_id(path, text)):
            continue
        places = config._origin.places
        label = str(file) if places is None else location_of(path, places).label
        key = ".".join(str(part) for part in path)
        filled = f", with the variable {', '.join(names)}" if names else ""
        lines.append(on_one_line(f"{label}: {key}: {shown_address(text)}{filled}"))
    return tuple(lines)


def _is_hub_id(path: KeyPath, text: str) -> bool:
    """Whether the setting at `path` names something of the Hugging Face hub."""
    names_model = path in (("model", "id"), ("data", "tokenizer"))
    is_source = path[-1] in ("path", "source") or isinstance(path[-1], int)
    if not names_model and not ("source" in path and is_source):
        return False
    is_file = not names_model and bool(Path(text).suffix)
    return bool(HUB_ID.fullmatch(text)) and not is_file and not Path(text).exists()


def _texts(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(inner, (*path, key))
