"""torchtune's metric lines, of StdoutLogger and DiskLogger (and of its copies: torchforge and
others print the same).

    Step 2 | loss:1.8745 lr:2e-05 tokens_per_second_per_gpu:405.04 peak_memory_active:11.2
    peak_memory_alloc:11.2 peak_memory_reserved:12.9 grad_norm:3.1

A line is one optimizer step, every `log_every_n_steps`; the count continues over epochs and
restarts. It has no step
time: that follows from a launcher's time stamps, or from the progress bar before it (`1|2|Loss: 1.8745:   3%|3 | 2/65
[00:05<02:40,  2.5s/it]`) where both are in one stream; the bar's clock restarts with each epoch.
A log of bars alone (its metrics went to W&B) has steps, losses and that clock. The rate is that of
this step alone and counts tokens that carry loss only: neither padding nor masked ones. Memory is
in GiB (before 0.5 in units of 1e9 bytes). Lines with other keys alone are passed over but for
`val_loss`. Source: pytorch/torchtune torchtune/training/metric_logging.py,
recipes/full_finetune_distributed.py, torchtune/training/memory.py.
"""  # noqa: E501

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import numpy as np

from drillyard.measurement.formats.line_rules import (
    EVENT_LOSS,
    LineRule,
    RuleContext,
    event_rule,
    fact_rule,
)
from drillyard.measurement.formats.log_format import ENDS, StepPattern, TextFormat
from drillyard.measurement.formats.progress_bars import clock_seconds, keep_first_drawings
from drillyard.measurement.formats.values import (
    NUMBER,
    Columns,
    MatchedLines,
    Value,
    Values,
    decode_values,
)
from drillyard.measurement.lanes import Lane

_BAR: Final = (
    rb"(?:(?<!\d)\d++\|\d++\|Loss: [^\n\[]{0,1000}+\[([\d:]{1,20})<[^\]\n]{0,200}\][ \t]*)?"
)
_HEADER: Final = _BAR + rb"Step (\d{1,18}) \|"
_LINE: Final = re.compile(_HEADER + rb"(?= [^\s:|]+:)")
_ITEM: Final = re.compile(rb" +([^\s:|]+):([^ \n]+)")
_IS_NUMBER: Final = re.compile(rb"[-+]?(?:\d|\.\d|nan|inf)[-+.,\dea-z]*", re.IGNORECASE)
_VALUES: Final = {
    b"loss": Value("loss"),
    b"lr": Value("learning_rate"),
    b"grad_norm": Value("grad_norm"),
    b"tokens_per_second_per_gpu": Value("printed_tokens_per_second_per_gpu"),
    b"peak_memory_alloc": Value("memory_gib"),
}


_DRAWN: Final = re.compile(
    rb"(?<!\d)\d++\|(\d{1,18})\|Loss: %s: +\d++%%\|[^|\n]{0,1000}\| *\d++/\d++ \[([\d:]{1,20})<"
    % NUMBER
)


class TorchTune(TextFormat):
    name = "torchtune"
    title = "torchtune"
    preference = 50
    anchor = b"Step "
    rules = (
        LineRule(
            b" with resolved config:",
            rb"Running \w+ with resolved config:",
            RuleContext.begin_attempt,
        ),
        fact_rule(b"dtype: ", rb"(?<!\w)dtype: (?P<precision>bf16|fp16|fp32)\s*$"),
        event_rule(
            "evaluation",
            b"| val_loss:",
            rb"Step (?P<step>\d+) \| val_loss:" + EVENT_LOSS,
        ),
        event_rule(
            "checkpoint_end",
            b"Saving checkpoint took ",
            rb"Saving checkpoint took (?P<seconds>[\d.]+) secs",
        ),
    )

    def step_pattern(self, line: bytes) -> StepPattern | None:
        header = _LINE.search(line)
        if header is None:
            return None
        pieces, values, position = [_HEADER], [], header.end()
        while item := _ITEM.match(line, position):
            value = _VALUES.get(item[1])
            if value is not None and _IS_NUMBER.fullmatch(item[2]):
                pieces.append(re.escape(item[1]) + b":" + NUMBER + ENDS)
                values.append(value)
            else:
                pieces.append(re.escape(item[1]) + rb":[^ \n]++")
            position = item.end()
        if not any(value.column == "loss" for value in values):
            return None
        decode = decode_values([Value("step", integer=True), *values], {})

        def columns(groups: Sequence[Values], place: MatchedLines) -> Columns:
            clocks, *numbers = groups
            read = decode(numbers, place)
            read["elapsed_seconds"] = np.array(
                [clock_seconds(text) if text else np.nan for text in clocks]
            )
            return read

        # Without the end a line with fewer keys would match one that has more.
        whole = rb"[ \t\r]*+(?=\n)" if not line[position:].strip() else b""
        return StepPattern(header.start(), rb" ++".join(pieces) + whole, columns)


class TorchTuneBars(TextFormat):
    """The bars where no metric lines are in the log. The bar is drawn once with the step before in
    its description: the first drawing of a step counts."""

    name = "torchtune_bars"
    title = "torchtune progress bar"
    preference = 125
    yields_to = TorchTune.name
    anchor = b"|Loss: "
    rules = TorchTune.rules

    def step_pattern(self, line: bytes) -> StepPattern | None:
        found = _DRAWN.search(line)
        if found is None:
            return None
        decode = decode_values([Value("step", integer=True), Value("loss")], {})

        def columns(groups: Sequence[Values], place: MatchedLines) -> Columns:
            read = decode(groups[:2], place)
            return {
                **read,
                "elapsed_seconds": np.array([clock_seconds(text) for text in groups[2]]),
            }

        return StepPattern(found.start(), _DRAWN.pattern, columns)

    def finish_lane(self, lane: Lane) -> None:
        keep_first_drawings(lane)
