"""Drillyard's own logs: metrics.jsonl, events.jsonl and the console, as JSON lines or as PerfLogger
lines.

A JSON line with `step` and `step_seconds` is a logged step; others are its events. `round` numbers
the attempts, floats that are not finite are restored from `nonfinite` (telemetry/jsonlines.py). The
PerfLogger prints:

    [PerfLogger] Using 70.55B parameters for TFLOPs calculation.
    Step: 5 | Time: 14.54s | TFLOPs/s/GPU: 954.0 | Tokens/s/GPU: 2254 | Loss: 0.6620
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, get_args

import numpy as np

from drillyard.loglines.blocks import LONGEST_LINE
from drillyard.measurement.formats.jsonlines import OBJECT, field, floats, gather, load, load_all
from drillyard.measurement.formats.line_rules import LineRule, RuleContext, fact_rule
from drillyard.measurement.formats.log_format import (
    ENDS,
    LARGEST_STEP,
    StepPattern,
    TextFormat,
)
from drillyard.measurement.formats.values import (
    NUMBER,
    TIME_SPEED_LOSS,
    Columns,
    MatchedLines,
    Values,
    decode_values,
)
from drillyard.measurement.parsed_log import COMPILED, LogEventKind

_NAMES: Final = {
    "seconds": ("step_seconds",),
    "data_seconds": ("data_seconds",),
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
_KINDS: Final = frozenset(get_args(LogEventKind))
_PERF_LINE: Final = re.compile(
    rb"Step: *(\d{1,18}) *\| *Time: *%s ?s *\| *TFLOPs/s/GPU: *%s *\| *Tokens/s/GPU: *%s *\|"
    rb" *Loss: *%s" % (rb"([-+.,0-9eE]{1,64}|[-+]?nan|[-+]?inf)", NUMBER, NUMBER, NUMBER) + ENDS
)


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
    if kind == "order":
        context.learn(total_steps=record.get("total_steps"))
    if kind not in _KINDS:
        return
    time = str(record.get("time", "")).encode()
    known = ("time", "event", "round", "rank", "step", "seconds")
    values = {name: value for name, value in record.items() if name not in known}
    if kind == "evaluation" and isinstance(values.get("results"), dict):
        values = values["results"]
    context.add(
        kind,
        time_us=context.stamps.convert("iso", [time])[0] if time else None,
        attempt=record["round"] if isinstance(record.get("round"), int) else 0,
        step=record.get("step") if isinstance(record.get("step"), int) else None,
        seconds=record.get("seconds") if isinstance(record.get("seconds"), int | float) else None,
        values=values,
    )


class Drillyard(TextFormat):
    name = "drillyard"
    title = "Drillyard run directory (metrics.jsonl, events.jsonl)"
    preference = 10
    longest = LONGEST_LINE
    anchor = b'"step_seconds"'
    rules = (LineRule(b'"event": "', rb'"event": "(?!step")\w', _event),)

    def step_pattern(self, line: bytes) -> StepPattern | None:
        begin = line.find(b"{")
        if begin < 0 or b'"step":' not in line or not line.rstrip().endswith(b"}"):
            return None
        return StepPattern(begin, OBJECT, self._decode)

    def _decode(self, groups: Sequence[Values], place: MatchedLines) -> Columns:
        records = load_all(groups[0])
        for record in records:
            if isinstance(words := record.get("nonfinite"), dict):
                # Floats that JSON cannot hold.
                record |= {
                    name: float(word)
                    for name, word in words.items()
                    if name in record and isinstance(word, str)
                }
        columns: Columns = gather(records, _NAMES)
        # A larger step is damage. Other events name a step too: only those with its time are its
        # record.
        steps = [
            step if type(step) is int and step < LARGEST_STEP else -1
            for step in field(records, "step")
        ]
        timed = ~np.isnan(columns.get("seconds", np.full(place.count, np.nan)))
        columns["step"] = np.where(timed, np.array(steps, np.int64), -1)
        columns["window_steps"] = np.nan_to_num(floats(field(records, "window_steps")), nan=1.0)
        compiled = np.nan_to_num(floats(field(records, "compile_seconds"))) > 0
        columns["flags"] = columns["flags"] | (compiled * np.uint8(COMPILED))
        columns["_attempt"] = np.nan_to_num(floats(field(records, "round")), nan=-1.0)
        gpus = np.nan_to_num(floats(field(records, "num_gpus")))
        if (known := (gpus > 0) & (gpus < 2**31)).any():
            columns["num_gpus"] = np.where(known, gpus, 0).astype(np.int32)
        times = field(records, "time")
        if all(isinstance(time, str) for time in times):
            columns["time_us"] = place.stamps.column("iso", [time.encode() for time in times])
        for name, kind in (("num_gpus", int), ("formula", str)):
            if isinstance(records[0].get(name), kind):
                self.facts[name] = records[0][name]
        return columns


class PerfLogger(TextFormat):
    """The step lines of the PerfLogger, which Drillyard's own console prints too. `Time` is that of
    one step."""

    name = "perflogger"
    title = "PerfLogger"
    preference = 70
    anchor = b"TFLOPs/s/GPU: "
    rules = (
        fact_rule(b"[PerfLogger] Using ", rb"Using (?P<parameters>[\d.]+[KMBT]?) parameters"),
        LineRule(b"Starting FSDP training", rb"Starting FSDP training", RuleContext.begin_attempt),
    )

    def step_pattern(self, line: bytes) -> StepPattern | None:
        match = _PERF_LINE.search(line)
        return (
            None
            if match is None
            else StepPattern(match.start(), _PERF_LINE.pattern, decode_values(TIME_SPEED_LOSS, {}))
        )
