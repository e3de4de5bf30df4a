"""`--sweep KEY=VALUES` of `drillyard estimate` and `drillyard launch`: the values of each key, and
all combinations.

    --sweep micro_batch_size=1..16                    every whole number from 1 to 16
    --sweep nodes=8..64..8                            every eighth
    --sweep nodes=1..64..x2                           powers of two: 1, 2, 4, ... 64
    --sweep training.optimizer.betas=[0.9,0.95],[0.8,0.9]      lists, for `launch` only
    --sweep workload.environment.FLAGS='a=1,b=2','0..3'   texts in quotes

A key is a setting of the run config, dotted as for --set or by a short name below; `nodes` and
`machine` belong to `estimate`. Several options give every combination, the last one fastest. Ranges
stay ranges until their size is known, so a sweep of a billion points is refused at once.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from drillyard.config.problems import closest_name
from drillyard.config.run import RunConfig, WorkloadRunConfig
from drillyard.config.yaml_document import parse_document
from drillyard.deprecation import RENAMED_KEYS, warn_renamed
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
TARGETS = ("nodes", "machine")
MAX_NAME = 63
RANGE = re.compile(r"(\d+)\.\.(\d+)(?:\.\.(x?)(\d+))?")
KEY = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*=")
HOW = (
    "write KEY=1..16, KEY=8..64..8, KEY=1..64..x2 or KEY=a,b,c, and a text with = or .. in quotes:"
    " KEY='a=1','0..3'"
)


@dataclass(frozen=True, slots=True)
class Axis:
    """One key and its values in order, as they were written; `path` is the key in full."""

    key: str
    path: str
    texts: Sequence[str | int]

    @property
    def values(self) -> list[Any]:
        """The values, typed by YAML as after --set, each once. UserError for one that is no text or
        number."""
        return list(dict.fromkeys(_value(self.key, text) for text in self.texts))


@dataclass(frozen=True)
class SweepPoint:
    """One run of a launched sweep: its name (a suffix of the run's) and its overrides."""

    name: str
    overrides: tuple[str, ...]


def parse_axes(options: Sequence[str]) -> tuple[Axis, ...]:
    """The axes of all --sweep options. UserError for what is not one, a key twice, and more than
    MOST_POINTS points."""
    split = [
        [(_current_name(key), values) for key, values in _split_keys(option)] for option in options
    ]
    axes = tuple(_axis(key, values) for key, values in itertools.chain.from_iterable(split))
    paths = [axis.path for axis in axes]
    for axis in axes:
        if paths.count(axis.path) > 1:
            raise UserError(
                f"--sweep: {axis.path} is given twice; list its values: {axis.key}=1,2,4"
            )
    counts = {axis.key: _count(axis.texts) for axis in axes}
    if (size := math.prod(counts.values())) > MOST_POINTS:
        factors = " x ".join(f"{key} {count:,}" for key, count in counts.items())
        raise UserError(
            f"the sweep has {size:,} points ({factors}); at most {MOST_POINTS:,} are computed\n"
            "take wider steps, such as 1..1000..100 or 1..1024..x2, or sweep fewer keys"
        )
    for option, keys in zip(options, split, strict=True):
        if len(keys) > 1:
            new = " ".join(f"--sweep {key}={','.join(values)}" for key, values in keys)
            warn_renamed(f"--sweep {option}", new)
    return axes


def combinations(axes: Sequence[Axis]) -> Iterator[dict[str, Any]]:
    """Every combination of the axes' values, by key."""
    for values in itertools.product(*(axis.values for axis in axes)):
        yield dict(zip((axis.key for axis in axes), values, strict=True))


def launch_points(options: Sequence[str], run: str) -> list[SweepPoint]:
    """The runs of `drillyard launch --sweep`, named after what differs from `run`, or numbered
    where that would be too long or ambiguous. UserError as of `parse_axes`, for a value twice, and
    for what the cluster config says."""
    axes = parse_axes(options)
    for axis in axes:
        if axis.path in TARGETS:
            raise UserError(
                f"--sweep {axis.key}: the cluster config sets it; launch sweeps the run config"
            )
        if (
            repeated := next((text for text in axis.texts if axis.texts.count(text) > 1), None)
        ) is not None:
            raise UserError(f"--sweep {axis.key}: the value {repeated} is there twice")
    points = []
    for texts in itertools.product(*(axis.texts for axis in axes)):
        chosen = [(axis.path, str(text)) for axis, text in zip(axes, texts, strict=True)]
        points.append(SweepPoint(_name(chosen), tuple(f"{path}={value}" for path, value in chosen)))
    names = [point.name for point in points]
    if len(set(names)) < len(names) or any(len(run) + 1 + len(name) > MAX_NAME for name in names):
        width = len(str(len(points) - 1))
        points = [
            SweepPoint(f"{number:0{width}}", point.overrides) for number, point in enumerate(points)
        ]
    return points


def _current_name(key: str) -> str:
    if (new := RENAMED_KEYS.get(key)) is not None:
        warn_renamed(key, new)
    return new or key


def _split_keys(option: str) -> list[tuple[str, list[str]]]:
    """An option as its key and its values; each `key=` after a comma begins another key, as older
    versions wrote it."""
    found: list[tuple[str, list[str]]] = []
    for part in _split(option):
        if (key := KEY.match(part)) is not None and (not found or _may_be_key(key[1])):
            found.append((key[1], [part[key.end() :].strip()]))
        elif not found:
            raise UserError(f"--sweep {option}: '{part}' has no key; {HOW}")
        else:
            found[-1][1].append(part)
    return found


def _may_be_key(name: str) -> bool:
    """Whether `name=` after a comma begins another key: a known one or nearly so. Else it belongs
    to a text."""
    known = [*SHORT, *TARGETS, *RunConfig.model_fields, *RENAMED_KEYS]
    return "." in name or name in known or closest_name(name, known) is not None


def _split(text: str) -> list[str]:
    """At commas outside of brackets, braces and quotes."""
    parts, depth, quote, begin = [], 0, "", 0
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
            parts.append(text[begin:place].strip())
            begin = place + 1
    return [*parts, text[begin:].strip()]


def _axis(key: str, texts: Sequence[str]) -> Axis:
    if not all(texts):
        raise UserError(f"--sweep: {key} has an empty value; {HOW}")
    ranges = [text for text in texts if RANGE.fullmatch(text)]
    if ranges and len(texts) > 1:
        raise UserError(f"--sweep: {key} mixes a range with other values; {HOW}")
    return Axis(key, _path(key), _range(key, texts[0]) if ranges else tuple(texts))


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
        raise UserError(
            f"--sweep: {key}={text}: factors begin at 1 and multiply by at least 2, such as"
            " 1..64..x2"
        )
    values = []
    while first <= last:
        values.append(first)
        first *= step
    return tuple(values)


def _count(values: Sequence[Any]) -> int:
    """Number of values; `len` fails where a range is longer than memory could be."""
    return (
        (values.stop - values.start - 1) // values.step + 1
        if isinstance(values, range)
        else len(values)
    )


def _value(key: str, text: str | int) -> Any:
    """A machine's name is text whatever it looks like."""
    if key == "machine" or isinstance(text, int):
        return text
    value = parse_document(text, f"--sweep {key}={text}").value
    if not isinstance(value, (str, int, float, bool)):
        raise UserError(f"--sweep: {key}={text}: not a value; {HOW}")
    return value


def _path(key: str) -> str:
    if (
        key in TARGETS
        or "." in key
        or key in {*RunConfig.model_fields, *WorkloadRunConfig.model_fields}
    ):
        return key
    if key in SHORT:
        return SHORT[key]
    known = [*SHORT, *TARGETS]
    meant = closest_name(key, known)
    hint = f"did you mean {meant}?" if meant else f"known: {', '.join(known)}"
    full = (
        "any setting of the run config can be swept by its full key, such as"
        " training.micro_batch_size"
    )
    raise UserError(f"--sweep: '{key}' is not known; {hint}\n{full}")


def _name(chosen: Sequence[tuple[str, str]]) -> str:
    """`learning_rate-1e-5` of each axis, as a run's name may be written."""
    words = [f"{key.rpartition('.')[2]}-{value}".lower() for key, value in chosen]
    return "-".join(re.sub(r"[^a-z0-9._-]+", "-", word).strip("-._") for word in words)
