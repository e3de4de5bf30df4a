"""NeMo's step lines: NeMo 2's text lines and NeMo 1's progress bar (Lightning).

NeMo 2 prints one line per optimizer step:

    Training epoch 1, iteration 10/999 | lr: 4.498e-06 | global_step: 29 | reduced_train_loss: 11.03
    | ...

`iteration` restarts with each epoch, so the step is `global_step`. The timing is a moving average
in the field's recipes (`buffer_size`), so it is taken for one. Memory is in bytes.

NeMo 1 redraws its bar for every step on one line with carriage returns:

    Epoch 0: : 100%|##| 2000/2000 [43:24:54<00:00, reduced_train_loss=0.139, global_step=2e+3, ...]

From 1,000 on `global_step` is printed in e-notation and loses digits. The bar's own count is one
more than `global_step`; it is used where it agrees with the digits that are left. A bar is redrawn
without a new step: only the first drawing of a step counts. Times are the bar's elapsed seconds
(and the prefix's stamp, where it has one).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from drillyard.measurement.formats.line_rules import LineRule, RuleContext, event_rule
from drillyard.measurement.formats.log_format import LARGEST_STEP, StepPattern, TextFormat
from drillyard.measurement.formats.progress_bars import clock_seconds, keep_first_drawings
from drillyard.measurement.formats.values import (
    BAR,
    Columns,
    MatchedLines,
    Value,
    Values,
    decode_values,
    half_unit,
    keyed_pattern,
)
from drillyard.measurement.lanes import Lane

_LINE_2: Final = re.compile(rb"Training epoch \d+, iteration \d+/\d+" + BAR)
_GIB: Final = 1 / 2**30
_KEYS_1: Final = {
    b"global_step": Value("step"),
    b"train_step_timing in s": Value("seconds"),
    b"reduced_train_loss": Value("loss"),
    b"lr": Value("learning_rate"),
    b"grad_norm": Value("grad_norm"),
    b"consumed_samples": Value("_samples_so_far"),
}
_KEYS_2: Final = {
    **_KEYS_1,
    b"global_batch_size": Value("samples"),
    b"TFLOPS_per_GPU": Value("printed_tflops_per_gpu"),
    b"tokens_per_sec_per_gpu": Value("printed_tokens_per_second_per_gpu"),
    b"max_memory_allocated": Value("memory_gib", _GIB),
    b"peak_memory_usage": Value("memory_gib", _GIB),
}


NEMO_RULES: Final = (
    event_rule(
        "checkpoint_begin",
        b"heckpoint save for step",
        rb"heckpoint save for step (?P<step>\d+) started",
    ),
    event_rule(
        "checkpoint",
        b"finalized successfully",
        rb"sync checkpoint save for step (?P<step>\d+) \([^\n]{0,1000}finalized successfully",
    ),
    event_rule(
        "checkpoint",
        b"Global Checkpoint Save",
        rb"Iteration: (?P<step>\d+) : Start time: [\d.]+s : Save duration: (?P<seconds>[\d.]+)s",
    ),
    event_rule(
        "resume",
        b"Restored all states from the checkpoint",
        rb"Restored all states from the checkpoint.*?(?:\bstep=(?P<step>\d+)|$)",
    ),
    LineRule(
        b"Starting with ", rb"Starting with (?P<num_gpus>\d+) processes", RuleContext.begin_attempt
    ),
)
"""Of NeMo 1 and 2: checkpoints (nemo_logging), and the number of processes that Lightning prints at
each start."""


class NeMo2(TextFormat):
    name = "nemo2"
    title = "NeMo 2 text"
    preference = 80
    anchor = b"Training epoch "
    rules = NEMO_RULES

    def step_pattern(self, line: bytes) -> StepPattern | None:
        header = _LINE_2.search(line)
        if header is None:
            return None
        pattern, values = keyed_pattern(line[header.end() :], _KEYS_2)
        if not values:
            return None
        if any(value.column == "step" for value in values):
            opening = rb"Training epoch \d++, iteration \d++/\d++"
        else:
            opening = rb"Training epoch \d++, iteration (\d{1,18}+)/\d++"
            values.insert(0, Value("step"))
        return StepPattern(
            header.start(), opening + BAR + pattern, decode_values(values, {"window_steps": 0})
        )


_HEADER_1: Final = (
    rb"Epoch \d+:[^\n\[]{0,1000}?[| ](\d{1,18})(?:/\d{1,18}|/\?|it)"
    rb" \[([\d:]{1,20})(?:<[^,\]\n]{0,200})?,"
    rb"(?: *[\d.]+ ?(?:s/it|it/s),| *\?it/s,)? *"
)
_LINE_1: Final = re.compile(_HEADER_1 + rb"(?=\w)")


class NeMo1(TextFormat):
    name = "nemo1"
    title = "NeMo 1 / Lightning progress bar"
    preference = 120
    anchor = b"train_step_timing in s="
    rules = NEMO_RULES

    def step_pattern(self, line: bytes) -> StepPattern | None:
        header = _LINE_1.search(line)
        if header is None:
            return None
        pattern, values = keyed_pattern(
            line[header.end() :].partition(b"]")[0], _KEYS_1, equals=b"=", separator=b","
        )
        if not any(value.column == "step" for value in values):
            return None
        place_of_step = 2 + next(
            index for index, value in enumerate(values) if value.column == "step"
        )
        decode = decode_values([Value("_count", integer=True), *values], {"window_steps": 0})

        def columns(groups: Sequence[Values], place: MatchedLines) -> Columns:
            read = decode([groups[0], *groups[2:]], place)
            counts = read.pop("_count")
            read["step"] = _steps(counts, read["step"], groups[place_of_step])
            read["elapsed_seconds"] = np.array([clock_seconds(text) for text in groups[1]])
            return read

        return StepPattern(header.start(), _HEADER_1 + pattern, columns)

    def finish_lane(self, lane: Lane) -> None:
        keep_first_drawings(lane)


def _steps(
    counts: NDArray[np.int64], printed: NDArray[np.float64], texts: Values
) -> NDArray[np.int64]:
    """The steps of bars that count to `counts`; -1 where none is printed."""
    # In e-notation few different texts are printed, and their unit tells how many digits are lost.
    lost = {
        text: half_unit(text) if text and b"e" in text.lower() else np.nan for text in set(texts)
    }
    unit = np.array([lost[text] for text in texts])
    steps = np.where(np.abs(printed) < LARGEST_STEP, printed, -1.0).astype(np.int64)
    return np.where(np.abs(printed - (counts - 1)) <= unit, counts - 1, steps)
