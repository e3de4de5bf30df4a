"""NVIDIA DLLogger's JSON lines.

    DLLL {"timestamp": "1711..", "datetime": "..", "elapsedtime": "12.3", "type": "LOG", "step": 5,
          "data": {"reduced_train_loss": 11.0, "train_step_timing in s": 25.7, "consumed_samples": 6144}}

`type` is LOG or METADATA; `step` is "PARAMETER", a number, a list such as [epoch, iteration], or [] for a summary. Only
LOG lines with a step and a loss or time are steps. All stamps are strings: seconds since 1970 and since the start.
`train_step_timing in s` (NeMo) is a moving average. With list steps and no `global_step`, lines are numbered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from drillyard.loglines.blocks import LONGEST_LINE
from drillyard.measurement.formats.jsonlines import OBJECT, FieldSelection, JsonRows, gather, load_all
from drillyard.measurement.formats.line_rules import LineRule, RuleContext
from drillyard.measurement.formats.log_format import LARGEST_STEP, MatchedLines, StepPattern, TextFormat
from drillyard.measurement.formats.values import Columns, Values
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
_DATA: Final = FieldSelection(*(name for names in _NAMES.values() for name in names), "global_step")
_WANTED: Final = FieldSelection("type", "step", "timestamp", "elapsedtime", data=_DATA)


class DLLogger(TextFormat):
    """See the module."""

    name = "dllogger"
    title = "DLLogger JSON"
    preference = 20
    clock_restarts = True
    longest = LONGEST_LINE
    anchor = b"DLLL {"

    def __init__(self) -> None:
        super().__init__()
        self._numbered = 0

    def step_pattern(self, line: bytes) -> StepPattern | None:
        """See TextFormat."""
        begin = line.find(self.anchor)
        return None if begin < 0 else StepPattern(begin, rb"DLLL " + OBJECT, self._decode)

    def _decode(self, groups: Sequence[Values], place: MatchedLines) -> Columns:
        lines = JsonRows(_WANTED.load_all(groups[0]))
        kinds, inside = lines.raw("type"), lines.raw("data")
        if kinds.count("LOG") < len(kinds) or set(map(type, inside)) != {_DATA.row}:
            nothing = _DATA.row()
            inside = [
                values if kind == "LOG" and values is not None else nothing
                for kind, values in zip(kinds, inside, strict=True)
            ]
        data = JsonRows(inside)
        columns: Columns = gather(data, _NAMES)
        step = self._steps(lines, data)
        is_step = np.zeros(len(step), np.bool_)
        for name in ("loss", "seconds"):
            if name in columns:
                is_step |= ~np.isnan(columns[name])
        for row in np.flatnonzero(~is_step).tolist():
            # A loss that is NaN is a step all the same.
            is_step[row] = any(data.has(row, name) for name in _NAMES["loss"])
        step[~is_step] = -1
        times = times_us(lines.floats("timestamp"))
        if (times != NO_TIME).any():
            place.stamps.zoned = True
            columns["time_us"] = times
        columns["elapsed_seconds"] = lines.floats("elapsedtime")
        window = 0 if data.anywhere("train_step_timing in s") else 1
        return {**columns, "step": step, "window_steps": np.full(len(step), window)}

    def _steps(self, lines: JsonRows, data: JsonRows) -> NDArray[np.int64]:
        """Steps by `global_step`, else by `step`; -1 for what is no step."""
        quick = data.floats("global_step")
        if ((quick >= 0) & (quick < LARGEST_STEP)).all():
            return quick.astype(np.int64)
        numbers = []
        for step, of_data in zip(lines["step"], data["global_step"], strict=True):
            number = step if of_data is None else of_data
            if isinstance(number, int | float) and 0 <= number < LARGEST_STEP:
                numbers.append(int(number))
            elif isinstance(number, list) and number:
                self._numbered += 1
                numbers.append(self._numbered)
            else:
                numbers.append(-1)
        return np.array(numbers, np.int64)

    def rules(self) -> tuple[LineRule, ...]:
        """See TextFormat."""
        return (LineRule(b'"PARAMETER"', rb"DLLL (\{[^\n]*)", _parameter),)


_PARAMETERS: Final = {
    "global_batch_size": "global_batch_size",
    "micro_batch_size": "micro_batch_size",
    "seq_length": "sequence_length",
    "world_size": "num_gpus",
}


def _parameter(context: RuleContext, match: Any) -> None:
    try:
        record = load_all([match[1][: match[1].rfind(b"}") + 1]])[0]
    except ValueError:
        return
    data = record.get("data")
    if not isinstance(data, dict):
        return
    for name, fact in _PARAMETERS.items():
        if isinstance(data.get(name), int):
            context.learn(**{fact: data[name]})
