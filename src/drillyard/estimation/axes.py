"""What a sweep varies: `micro_batch_size=1..16,nodes=1..64` as axes, before anything is computed.

    micro_batch_size=1..16        every whole number from 1 to 16
    nodes=8..64..8                every eighth
    nodes=1..64..x2               powers of two: 1, 2, 4, ... 64
    machine=a4-highgpu-8g,a3-ultragpu-8g,nodes=4      lists; the next `key=` ends a list

A key is a setting of the run config (a short name below, or dotted as for --set), or `nodes` or `machine`. Ranges stay
ranges until their size is known, so a sweep of a billion points is refused at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from drillyard.config.yaml_document import parse_document
from drillyard.errors import UserError

MOST_POINTS = 4_096
"""Some minutes of computing at most."""
SHORT = {
    "micro_batch_size": "training.micro_batch_size",
    "gradient_accumulation": "training.gradient_accumulation",
    "global_batch_size": "training.global_batch_size",
    "activation_checkpointing": "training.activation_checkpointing",
    "precision": "training.precision",
    "sequence_length": "data.sequence_length",
    "shard": "parallelism.shard",
    "replicate": "parallelism.replicate",
    "lora_rank": "model.lora.rank",
}
PLACES = ("nodes", "machine")
RANGE = re.compile(r"(\d+)\.\.(\d+)(?:\.\.(x?)(\d+))?")
HOW = "write KEY=1..16, KEY=8..64..8, KEY=1..64..x2 or KEY=a,b,c"


@dataclass(frozen=True, slots=True)
class Axis:
    """One key and its values in order. `path` is that of the run config, or `nodes` or `machine`."""

    key: str
    path: str
    values: Sequence[Any]


def parse_axes(text: str) -> tuple[Axis, ...]:
    """The axes of `--sweep`. UserError for what is not one, a key twice, and more than MOST_POINTS points."""
    keys: dict[str, list[str]] = {}
    key = None
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if equals:
            key = name.strip()
            if key in keys:
                raise UserError(f"--sweep: {key} is given twice; list its values: {key}=1,2,4")
            keys[key] = [value.strip()]
        elif key is None:
            raise UserError(f"--sweep {text}: '{part.strip()}' has no key; {HOW}")
        else:
            keys[key].append(part.strip())
    axes = tuple(_axis(key, values) for key, values in keys.items())
    check_size(axes)
    return axes


def check_size(axes: Sequence[Axis]) -> None:
    """UserError, with its size, for a sweep of more than MOST_POINTS points."""
    counts = {axis.key: _count(axis.values) for axis in axes}
    size = math.prod(counts.values())
    if size > MOST_POINTS:
        told = " x ".join(f"{key} {count:,}" for key, count in counts.items())
        raise UserError(
            f"the sweep has {size:,} points ({told}); at most {MOST_POINTS:,} are computed\n"
            "take wider steps, such as 1..1000..100 or 1..1024..x2, or sweep fewer keys"
        )


def points(axes: Sequence[Axis]) -> Iterator[dict[str, Any]]:
    """Every combination of the axes' values, by key."""
    for values in product(*(axis.values for axis in axes)):
        yield dict(zip((axis.key for axis in axes), values, strict=True))


def _count(values: Sequence[Any]) -> int:
    """How many there are; `len` fails where a range is longer than memory could be."""
    return (values.stop - values.start - 1) // values.step + 1 if isinstance(values, range) else len(values)


def _axis(key: str, texts: Sequence[str]) -> Axis:
    if not all(texts):
        raise UserError(f"--sweep: {key or 'a key'} has an empty value; {HOW}")
    ranges = [text for text in texts if RANGE.fullmatch(text)]
    if not ranges:
        return Axis(key, _path(key), tuple(dict.fromkeys(_value(key, text) for text in texts)))
    if len(texts) > 1:
        raise UserError(f"--sweep: {key} mixes a range with other values; {HOW}")
    return Axis(key, _path(key), _range(key, texts[0]))


def _range(key: str, text: str) -> Sequence[int]:
    match = RANGE.fullmatch(text)
    assert match is not None
    first, last = int(match[1]), int(match[2])
    step = int(match[4] or 1)
    if first > last:
        raise UserError(f"--sweep: {key}={text} runs backwards; write {last}..{first}")
    if not match[3]:
        if step < 1:
            raise UserError(f"--sweep: {key}={text} has a step of 0; give at least 1")
        return range(first, last + 1, step)
    if step < 2 or first < 1:
        raise UserError(f"--sweep: {key}={text}: factors begin at 1 and multiply by at least 2, such as 1..64..x2")
    values = []
    while first <= last:
        values.append(first)
        first *= step
    return tuple(values)


def _value(key: str, text: str) -> Any:
    """Typed by YAML, as after --set; a machine's name is text whatever it looks like."""
    if key == "machine":
        return text
    value = parse_document(text, f"--sweep {key}={text}").value
    if not isinstance(value, (str, int, float, bool)):
        raise UserError(f"--sweep: {key}={text}: not a value; {HOW}")
    return value


def _path(key: str) -> str:
    from drillyard.config.problems import closest_name

    if key in PLACES or "." in key:
        return key
    if key in SHORT:
        return SHORT[key]
    known = [*SHORT, *PLACES]
    meant = closest_name(key, known)
    hint = f"did you mean {meant}?" if meant else f"known: {', '.join(known)}"
    full = "any setting of the run config can be swept by its full key, such as training.micro_batch_size"
    raise UserError(f"--sweep: '{key}' is not known; {hint}\n{full}")
