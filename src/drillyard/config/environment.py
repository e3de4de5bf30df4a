"""`${env:NAME}` in a config: a secret is used where it is needed and written nowhere.

The idea: a text that holds a reference becomes an `EnvironmentText`. It *is* the resolved value (a str, so `open`,
`Path` and a client library take it as it is), but its repr, its pickle and everything pydantic serialises give the
reference back. So a saved `run.yaml`, the config inside a checkpoint, `repr(config)`, `config.model_dump()` and a
config sent to Weights & Biases show `${env:WANDB_API_KEY}`, and no room has to remember to take secrets out.

What a caller derives from the text (a slice, a concatenation, an f-string without `!r`, a plain `json.dumps` of a part
that did not go through pydantic) is an ordinary str with the value in it. So a value that is resolved is made known to
`drillyard.redaction`, which takes it out of everything that this process writes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from drillyard import redaction
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


def resolve_secrets(value: Any) -> Any:
    """`value` (text, list, mapping, or anything else) with every referring text made an EnvironmentText."""
    if isinstance(value, str):
        return EnvironmentText(value) if REFERENCE.search(value) and not isinstance(value, EnvironmentText) else value
    if isinstance(value, list):
        return [resolve_secrets(item) for item in value]
    if isinstance(value, dict):
        return {key: resolve_secrets(item) for key, item in value.items()}
    return value


def hide_secrets(value: Any) -> Any:
    """The inverse of `resolve_secrets`: every EnvironmentText replaced by the reference it came from."""
    if isinstance(value, EnvironmentText):
        return value.reference
    if isinstance(value, list):
        return [hide_secrets(item) for item in value]
    if isinstance(value, dict):
        return {key: hide_secrets(item) for key, item in value.items()}
    return value


def reference_problems(value: Any, path: Path = (), *, must_be_set: bool = True) -> Iterator[Problem]:
    """References that are malformed or, where `must_be_set`, name a variable that the environment lacks."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from reference_problems(item, (*path, index), must_be_set=must_be_set)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from reference_problems(item, (*path, key), must_be_set=must_be_set)
    elif isinstance(value, str):
        if OPENING in REFERENCE.sub("", value):
            yield Problem(path, f"found {value!r}: a reference reads ${{env:NAME}}, NAME of letters, digits and '_'")
        for name in dict.fromkeys(REFERENCE.findall(value)) if must_be_set else ():
            if name not in os.environ:
                near = closest_name(name, os.environ)
                hint = f" (there is {near})" if near else ""
                yield Problem(path, f"environment variable {name} is not set{hint}; set it: export {name}=...")
