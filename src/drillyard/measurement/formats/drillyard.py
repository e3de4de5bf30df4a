"""Drillyard's own logs: metrics.jsonl, events.jsonl, and the console's JSON lines, which hold the same.

A line with `step` and `step_seconds` is a logged step; other events are marks. `round` tells the starts apart, floats
that are not finite are restored from `nonfinite` (telemetry/jsonlines.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, get_args

import numpy as np
from numpy.typing import NDArray

from drillyard.loglines.blocks import LONGEST_LINE
from drillyard.measurement.formats.jsonlines import OBJECT, FieldSelection, JsonRows, gather, load
from drillyard.measurement.formats.line_rules import LineRule, RuleContext
from drillyard.measurement.formats.log_format import LARGEST_STEP, MatchedLines, StepPattern, TextFormat
from drillyard.measurement.formats.values import Columns, Values
from drillyard.measurement.parsed_log import COMPILED, MarkKind

_NAMES: Final = {
    "seconds": ("step_seconds",),
    "loss": ("loss",),
    "grad_norm": ("grad_norm",),
    "learning_rate": ("learning_rate",),
    "tokens": ("tokens",),
    "printed_tokens_per_second_per_gpu": ("tokens_per_second_per_gpu",),
    "printed_tflops_per_gpu": ("tflops_per_gpu",),
    "printed_mfu": ("mfu",),
    "memory_gib": ("memory_gib",),
    "_skipped_so_far": ("skipped_steps",),
}
_OTHERS: Final = ("step", "time", "round", "window_steps", "compile_seconds", "num_gpus", "formula", "nonfinite")
_WANTED: Final = FieldSelection(*(name for names in _NAMES.values() for name in names), *_OTHERS)
_KINDS: Final = frozenset(get_args(MarkKind))


class Drillyard(TextFormat):
    """See the module."""

    name = "drillyard"
    title = "Drillyard run directory (metrics.jsonl, events.jsonl)"
    preference = 10
    longest = LONGEST_LINE
    anchor = b'"step_seconds"'

    def step_pattern(self, line: bytes) -> StepPattern | None:
        """See TextFormat."""
        begin = line.find(b"{")
        if begin < 0 or b'"step":' not in line or not line.rstrip().endswith(b"}"):
            return None
        return StepPattern(begin, OBJECT, self._decode)

    def _decode(self, groups: Sequence[Values], place: MatchedLines) -> Columns:
        records = _WANTED.load_all(groups[0])
        rows = JsonRows(records)
        if rows.anywhere("nonfinite"):
            for record in records:
                _restore(record)
            rows = JsonRows(records)
        columns: Columns = dict(gather(rows, _NAMES))
        columns["step"] = _whole(rows.raw("step"))
        # Other events name a step too; only those with its time are its record.
        columns["step"][np.isnan(columns.get("seconds", np.full(place.count, np.nan)))] = -1
        columns["window_steps"] = np.nan_to_num(rows.floats("window_steps"), nan=1.0)
        if rows.anywhere("compile_seconds"):
            compiled = np.nan_to_num(rows.floats("compile_seconds")) > 0
            columns["flags"] = columns["flags"] | (compiled * np.uint8(COMPILED))
        columns["_round"] = np.nan_to_num(rows.floats("round"), nan=-1.0)
        times = rows.raw("time")
        if set(map(type, times)) == {str}:
            columns["time_us"] = place.stamps.column("iso", [time.encode() for time in times])
        if isinstance(records[0].num_gpus, int):
            self.facts["num_gpus"] = records[0].num_gpus
        if isinstance(records[0].formula, str):
            self.facts["formula"] = records[0].formula
        return columns

    def rules(self) -> tuple[LineRule, ...]:
        """See TextFormat."""
        return (LineRule(b'"event": "', rb'"event": "(?!step")\w', _event),)


def _whole(steps: Sequence[Any]) -> NDArray[np.int64]:
    """Steps as whole numbers; -1 for what is none."""
    if set(map(type, steps)) != {int} or max(steps) >= LARGEST_STEP:
        steps = [step if type(step) is int and step < LARGEST_STEP else -1 for step in steps]
    return np.fromiter(steps, np.int64, len(steps))


def _restore(record: Any) -> None:
    if isinstance(record.nonfinite, dict):
        for name, text in record.nonfinite.items():
            if isinstance(text, str) and name in record.__struct_fields__:
                setattr(record, name, float(text))


def _event(context: RuleContext, match: re.Match[bytes]) -> None:
    try:
        record = load(context.line[context.line.find(b"{") : context.line.rfind(b"}") + 1])
    except ValueError:
        return
    if not isinstance(record, dict):
        return
    kind: Any = record.get("event") if isinstance(record.get("event"), str) else None
    if kind == "parameters":
        context.learn(
            parameters=record.get("count"),
            trainable_parameters=record.get("trainable"),
            formula=record.get("formula"),
            flops_per_token=record.get("flops_per_token"),
            accelerator=record.get("accelerator"),
            precision=record.get("precision"),
            peak_flops=record.get("peak_flops"),
        )
    if kind in ("run_start", "round_start"):
        context.learn(num_gpus=record.get("world_size"))
    if kind not in _KINDS:
        return
    time = str(record.get("time", "")).encode()
    known = ("time", "event", "round", "rank", "step", "seconds")
    values = {name: value for name, value in record.items() if name not in known}
    if kind == "evaluation" and isinstance(values.get("results"), dict):
        values = values["results"]
    context.add(
        kind,
        match,
        time_us=context.stamps.convert("iso", [time])[0] if time else None,
        attempt=record["round"] if isinstance(record.get("round"), int) else 0,
        step=record.get("step") if isinstance(record.get("step"), int) else None,
        seconds=record.get("seconds") if isinstance(record.get("seconds"), int | float) else None,
        values=values,
    )
