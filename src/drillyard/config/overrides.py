"""`--set a.b=c`: change one value of a config on the command line; the value is YAML, as in the file.

A path is keys and list positions joined by dots (`data.source.0.weight=2`); missing sections are created. Overrides are
applied before validation, and their mistakes are reported at `--set training.stps=3` instead of at a line.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from drillyard.config.problems import Path, Problem, SourceLocation, dotted
from drillyard.config.validation_errors import describe_value
from drillyard.config.yaml_document import YamlDocument, parse_document
from drillyard.errors import ConfigError

AFTER_FILES = 1_000_000_000
"""`order` of the first override: after every line of a file."""


def apply_overrides(document: YamlDocument, overrides: Sequence[str]) -> YamlDocument:
    """The document with every override applied in order; mistakes in applying them are among its problems.

    UserError when an override is not `key=value` or its value is not YAML.
    """
    value = copy.deepcopy(document.value)
    places = dict(document.places)
    problems = list(document.problems)
    for number, override in enumerate(overrides):
        path, new, mistakes = _parse(override)
        place = SourceLocation(
            f"--set {override if len(override) <= 80 else override[:77] + '...'}", AFTER_FILES + number
        )
        refusal = _put(value, path, new)
        if refusal is not None:
            problems.append(Problem(path, refusal, place))
            continue
        places = {known: where for known, where in places.items() if known[: len(path)] != path}
        # A mistyped section that the override created is reported at the override.
        for depth in range(1, len(path)):
            places.setdefault(path[:depth], place)
        places[path] = place
        problems.extend(Problem((*path, *mistake.path), mistake.message, place) for mistake in mistakes)
    return YamlDocument(value, places, tuple(problems))


def _parse(override: str) -> tuple[Path, Any, tuple[Problem, ...]]:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {override}: expected KEY=VALUE, such as training.steps=100")
    if not text.strip():
        raise ConfigError(
            f"--set {override}: the value is missing; write {key}=null for none, {key}='\"\"' for empty text"
        )
    document = parse_document(text, f"--set {override}")
    path = tuple(int(part) if part.isascii() and part.isdigit() else part for part in parts)
    return path, document.value, document.problems


def _put(top: Any, path: Path, new: Any) -> str | None:
    """Set `path` in the mapping `top` and create missing sections. Returns why that is not possible, or None."""
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
            return f"{known} is {describe_value(here)}, which has no settings of its own; set {known} as a whole"
    return None
