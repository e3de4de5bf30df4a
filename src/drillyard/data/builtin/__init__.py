"""The built-in data sets: `builtin:text-to-sql`, `builtin:function-calling` and
`builtin:python-stdlib`.

Each is a stream of rows (dicts), a function of its options alone, for training or for one of its
held-out parts. Nothing is downloaded and torch is not imported.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from drillyard.data.builtin import function_calling, python_stdlib, text_to_sql
from drillyard.errors import UserError

TRAIN = "train"
NAMES = ("text-to-sql", "function-calling", "python-stdlib")

Options = dict[str, Any]

_DEFAULTS: dict[str, Options] = {
    # 1,500 steps of 32 packed sequences of 128 tokens are about 1.3 passes over 100,000 examples.
    "text-to-sql": {
        "examples": 100_000,
        "seed": 0,
        "made_up": 0.0,
        "held_out": list(text_to_sql.TEST_PARTS),
        "held_out_examples": 200,
    },
    "function-calling": {
        "examples": 50_000,
        "seed": 0,
        "held_out": list(function_calling.HELD_OUT_PARTS),
        "held_out_examples": 200,
    },
    "python-stdlib": {},
}
_PARTS = {
    "text-to-sql": text_to_sql.HELD_OUT_PARTS,
    "function-calling": function_calling.HELD_OUT_PARTS,
    "python-stdlib": ("files",),
}
_MINIMUM = {"examples": 1, "seed": 0, "held_out_examples": 1}


def validate_options(name: str, options: Options) -> Options:
    """The options with their defaults. Raises UserError for an unknown name or key, or an invalid
    value."""
    if name not in _DEFAULTS:
        raise UserError(f"builtin:{name} does not exist; {_nearest(name, NAMES)}.")
    allowed = _DEFAULTS[name]
    for key, value in options.items():
        where = f"builtin:{name}: option {key!r}"
        if key not in allowed:
            raise UserError(f"{where} does not exist; {_nearest(key, tuple(allowed))}.")
        takes = None
        if key in _MINIMUM and (type(value) is not int or value < _MINIMUM[key]):
            takes = f"a whole number of at least {_MINIMUM[key]}"
        elif key == "made_up" and not (type(value) in (int, float) and 0 <= value <= 1):
            takes = "a share from 0 to 1 of the training rows"
        elif key == "held_out" and not (
            isinstance(value, list) and len(set(map(str, value))) == len(value)
        ):
            takes = f"a list of different parts out of {', '.join(_PARTS[name])}"
        if takes:
            raise UserError(f"{where} is {value!r}; it takes {takes}.")
        for part in value if key == "held_out" else ():
            if part not in _PARTS[name]:
                raise UserError(f"{where} has {part!r}; {_nearest(str(part), _PARTS[name])}.")
    return allowed | options


def _nearest(found: str, allowed: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(found, allowed, n=1)
    listed = f"it takes {', '.join(allowed)}" if allowed else "it takes no options"
    return f"did you mean {close[0]!r}? ({listed})" if close else listed


def held_out_parts(name: str, options: Options | None = None) -> list[str]:
    """Names of the held-out parts that the options choose; of all parts without options."""
    chosen = {} if options is None else validate_options(name, options)
    return list(chosen.get("held_out", _PARTS[name]))


def documents(name: str, options: Options, part: str) -> Iterator[dict[str, Any]]:
    """The rows of "train" or of a held-out part, always in the same order. Raises UserError before
    the first row."""
    settings = validate_options(name, options)
    if part != TRAIN and part not in held_out_parts(name):
        raise UserError(
            f"builtin:{name} has no part {part!r};"
            f" {_nearest(part, (TRAIN, *held_out_parts(name)))}."
        )
    if name == "python-stdlib":
        return python_stdlib.documents(part)
    count = settings["examples" if part == TRAIN else "held_out_examples"]
    if name == "function-calling":
        return function_calling.rows(part, count, settings["seed"])
    return text_to_sql.rows(part, count, settings["seed"], settings["made_up"])


def content_key(name: str, options: Options) -> str:
    """Changes when the rows of any part change; does not depend on the chosen held-out parts."""
    settings = validate_options(name, options)
    if name == "python-stdlib":
        return f"python-stdlib {python_stdlib.content_key()}"
    version = (function_calling if name == "function-calling" else text_to_sql).VERSION
    kept = " ".join(f"{key}={value}" for key, value in settings.items() if key != "held_out")
    return f"{name} version={version} {kept}"
