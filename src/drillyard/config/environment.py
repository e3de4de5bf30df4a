"""`${env:NAME}` in a config: a secret is resolved where it is used and never written.

A text with a reference becomes an `EnvironmentText`: a str with the resolved value, whose repr,
pickle and pydantic serialisation are the reference. So a saved `run.yaml`, a checkpoint's config,
`repr(config)` and a config sent to a tracker show `${env:WANDB_API_KEY}`.

A text derived from it (a slice, a concatenation, an f-string without `!r`, a plain `json.dumps`) is
an ordinary str with the value. So each resolved value goes to `drillyard.redaction`, which removes
it from everything that this process writes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from drillyard import redaction
from drillyard.config.fetch_limits import is_withheld
from drillyard.config.problems import Path, Problem, closest_name

REFERENCE = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")
OPENING = "${env:"


class EnvironmentText(str):
    """A text with its `${env:NAME}` references resolved, which shows only the references.

    Raises ValueError, naming the variable, when one is not set.
    """

    reference: str

    def __new__(cls, reference: str) -> EnvironmentText:
        for name in REFERENCE.findall(reference):
            if name not in os.environ:
                raise ValueError(f"environment variable {name} is not set")
            redaction.add_secret(name, os.environ[name])
        text = super().__new__(cls, REFERENCE.sub(lambda match: os.environ[match[1]], reference))
        text.reference = reference
        return text

    def __repr__(self) -> str:
        return repr(self.reference)

    def __reduce__(self) -> tuple[type[EnvironmentText], tuple[str]]:
        """Pickled and copied as the reference: the process that reads it resolves it again."""
        return EnvironmentText, (self.reference,)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """`value` (text, list, mapping, or anything else) with `change` applied to each text in it."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_texts(item, change) for item in value]
    return (
        {key: _map_texts(item, change) for key, item in value.items()}
        if isinstance(value, dict)
        else value
    )


def _resolved(text: str) -> str:
    # A resolved value may look like a reference itself; it is not resolved again.
    if not REFERENCE.search(text) or isinstance(text, EnvironmentText) or is_withheld(text):
        return text
    return EnvironmentText(text)


def resolve_secrets(value: Any) -> Any:
    """`value` with every text that has a reference made an EnvironmentText, but for withheld ones
    (`fetch_limits.py`)."""
    return _map_texts(value, _resolved)


def hide_secrets(value: Any) -> Any:
    """`value` with every EnvironmentText replaced by its reference."""
    return _map_texts(
        value, lambda text: text.reference if isinstance(text, EnvironmentText) else text
    )


def reference_problems(
    value: Any, path: Path = (), *, must_be_set: bool = True
) -> Iterator[Problem]:
    """References that are malformed or, where `must_be_set`, name a variable that the environment
    lacks."""
    if isinstance(value, list | dict):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from reference_problems(item, (*path, key), must_be_set=must_be_set)
    elif isinstance(value, str):
        if OPENING in REFERENCE.sub("", value):
            yield Problem(
                path,
                f"found {value!r}: a reference reads ${{env:NAME}}, NAME of letters, digits"
                " and '_'",
            )
        is_resolved = must_be_set and not is_withheld(value)
        for name in dict.fromkeys(REFERENCE.findall(value)) if is_resolved else ():
            if name not in os.environ:
                near = closest_name(name, os.environ)
                hint = f" (there is {near})" if near else ""
                yield Problem(
                    path, f"environment variable {name} is not set{hint}; set it: export {name}=..."
                )
