"""`--sweep training.optimizer.learning_rate=1e-5,2e-5`: the points of a sweep, each a run of its own.

Several `--sweep` options give every combination. A point's run is named after the run and what differs, so that a
person sees from `runs list` which is which.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from drillyard.errors import UserError

MAX_NAME = 63
_AXIS = re.compile(r"(?P<key>[A-Za-z_][\w.]*)=(?P<values>.+)")


@dataclass(frozen=True)
class SweepPoint:
    """One point of a sweep: its name (a suffix of the run's) and its overrides."""

    name: str
    overrides: tuple[str, ...]


def sweep_points(sweeps: Sequence[str], run: str) -> list[SweepPoint]:
    """The points of a sweep over `run`, in order: the last option varies fastest.

    Names are the run's and `KEY-VALUE` of each axis, or a number where that would be too long or ambiguous.
    Raises UserError for an option that is no KEY=VALUE,VALUE, a repeated key or a repeated value.
    """
    axes = [_axis(text) for text in sweeps]
    keys = [key for key, _ in axes]
    for key in keys:
        if keys.count(key) > 1:
            raise UserError(f"--sweep {key}: is given twice; write all its values in one: --sweep {key}=A,B,C")
    points = []
    for combination in itertools.product(*(values for _, values in axes)):
        chosen = list(zip(keys, combination, strict=True))
        points.append(SweepPoint(_name(chosen), tuple(f"{key}={value}" for key, value in chosen)))
    names = [point.name for point in points]
    if len(set(names)) < len(names) or any(len(run) + 1 + len(name) > MAX_NAME for name in names):
        width = len(str(len(points) - 1))
        points = [SweepPoint(f"{number:0{width}}", point.overrides) for number, point in enumerate(points)]
    return points


def _axis(text: str) -> tuple[str, list[str]]:
    found = _AXIS.fullmatch(text)
    if found is None:
        raise UserError(
            f"--sweep {text}: is not KEY=VALUE,VALUE; write it like training.optimizer.learning_rate=1e-5,2e-5"
        )
    values = _split(found["values"])
    repeated = next((value for value in values if values.count(value) > 1), None)
    if repeated is not None:
        raise UserError(f"--sweep {text}: the value {repeated} is there twice")
    if "" in values:
        raise UserError(f"--sweep {text}: a value is missing between two commas")
    return found["key"], values


def _split(text: str) -> list[str]:
    """At commas outside of brackets, braces and quotes: a value may be a list."""
    values, depth, quote, begin = [], 0, "", 0
    for place, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        elif letter == "," and depth == 0:
            values.append(text[begin:place].strip())
            begin = place + 1
    return [*values, text[begin:].strip()]


def _name(chosen: Sequence[tuple[str, str]]) -> str:
    """`learning_rate-1e-5` of each axis, as a run's name may be written."""
    words = [f"{key.rpartition('.')[2]}-{value}".lower() for key, value in chosen]
    return "-".join(re.sub(r"[^a-z0-9._-]+", "-", word).strip("-._") for word in words)
