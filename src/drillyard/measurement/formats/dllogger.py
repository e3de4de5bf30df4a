"""NVIDIA DLLogger's JSON lines.

    DLLL {"timestamp": "1711..", "datetime": "..", "elapsedtime": "12.3", "type": "LOG", "step": 5,
          "data": {"reduced_train_loss": 11.0, "train_step_timing in s": 25.7, "consumed_samples":
          6144}}

`type` is LOG or METADATA; `step` is "PARAMETER", a number, a list such as [epoch, iteration], or []
for a summary. Only LOG lines with a step and a loss or time are steps. All stamps are strings:
seconds since 1970 and since the start. `train_step_timing in s` (NeMo) is a moving average. With
list steps and no `global_step`, lines are numbered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from drillyard.loglines.blocks import LONGEST_LINE
from drillyard.measurement.formats.jsonlines import OBJECT, field, floats, gather, load_all
from drillyard.measurement.formats.line_rules import LineRule, RuleContext
from drillyard.measurement.formats.log_format import LARGEST_STEP, StepPattern, TextFormat
from drillyard.measurement.formats.values import Columns, MatchedLines, Values
from drillyard.measurement.parsed_log import NO_TIME, times_us

_NAMES: Final = {
    "seconds": ("train_step_timing in s", "step_time", "iteration_time", "train_iteration_time"),
    "loss": ("reduced_train_loss", "train_loss", "loss", "lm loss"),
    "grad_norm": ("grad_norm",),
    "learning_rate": ("lr", "learning_rate"),
    "_samples_so_far": ("consumed_samples",),
    "samples": ("global_batch_size",),
    "printed_tflops_per_gpu": ("TFLOPS_per_GPU",),
    "printed_tokens_per_second_per_gpu": ("tokens_per_sec_per_gpu",),
}
_LOSSES: Final = frozenset(_NAMES["loss"])
_PARAMETERS: Final = {
    "global_batch_size": "global_batch_size",
    "micro_batch_size": "micro_batch_size",
    "seq_length": "sequence_length",
    "world_size": "num_gpus",
}


def _parameter(context: RuleContext, match: Any) -> None:
    (record,) = load_all([match[1][: match[1].rfind(b"}") + 1]])
    data = record.get("data")
    if isinstance(data, dict):
        known = {fact: data.get(name) for name, fact in _PARAMETERS.items()}
        context.learn(**{fact: value for fact, value in known.items() if isinstance(value, int)})


class DLLogger(TextFormat):
    name = "dllogger"
    title = "DLLogger JSON"
    preference = 20
    clock_restarts = True
    longest = LONGEST_LINE
    anchor = b"DLLL {"
    rules = (LineRule(b'"PARAMETER"', rb"DLLL (\{[^\n]*)", _parameter),)

    def __init__(self) -> None:
        super().__init__()
        self._numbered = 0

    def step_pattern(self, line: bytes) -> StepPattern | None:
        begin = line.find(self.anchor)
        return None if begin < 0 else StepPattern(begin, rb"DLLL " + OBJECT, self._decode)

    def _decode(self, groups: Sequence[Values], place: MatchedLines) -> Columns:
        lines = load_all(groups[0])
        logged = [line.get("data") if line.get("type") == "LOG" else None for line in lines]
        data = [values if isinstance(values, dict) else {} for values in logged]
        columns: Columns = gather(data, _NAMES)
        # A loss that is NaN is a step all the same.
        is_step = np.array([not _LOSSES.isdisjoint(values) for values in data])
        if "seconds" in columns:
            is_step |= ~np.isnan(columns["seconds"])
        columns["step"] = np.where(is_step, self._steps(lines, data), -1)
        times = times_us(floats(field(lines, "timestamp")))
        if (times != NO_TIME).any():
            place.stamps.zoned = True
            columns["time_us"] = times
        columns["elapsed_seconds"] = floats(field(lines, "elapsedtime"))
        moving = any("train_step_timing in s" in values for values in data)
        return {**columns, "window_steps": np.full(len(lines), 0 if moving else 1)}

    def _steps(self, lines: list[dict[str, Any]], data: list[dict[str, Any]]) -> NDArray[np.int64]:
        """Steps by `global_step`, else by `step`; -1 for what is no step."""
        quick = floats(field(data, "global_step"))
        if ((quick >= 0) & (quick < LARGEST_STEP)).all():
            return quick.astype(np.int64)
        numbers = []
        for line, values in zip(lines, data, strict=True):
            number = values.get("global_step")
            number = line.get("step") if number is None else number
            if isinstance(number, int | float) and 0 <= number < LARGEST_STEP:
                numbers.append(int(number))
            elif isinstance(number, list) and number:
                self._numbered += 1
                numbers.append(self._numbered)
            else:
                numbers.append(-1)
        return np.array(numbers, np.int64)
