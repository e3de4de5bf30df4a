"""nanoGPT's lines, and litgpt's, which began like them.

    iter 10: loss 3.2140, time 135.24ms, mfu 12.31%                                              (nanoGPT)
    Epoch 1 | iter 4 step 1 | loss train: 2.345, val: n/a | iter time: 123.45 ms (step) remaining time: 0:01:20
    iter 4 step 1: loss 2.3450, iter time: 123.45ms (optimizer.step)                             (lit-gpt)

nanoGPT: an `iter` is an optimizer step, counted from 0, and its time is that of this step alone. The
`mfu` is a moving average of its own formula against an A100's peak; it is -100 % until there is one.
Older versions print none.

litgpt: an `iter` is a micro-batch. The optimizer steps with the line that says `(step)`: that line
is the step, whose time is the sum of its micro-batches' (where some are not logged, this one's as
often as there are micro-batches in a step).

Sources: karpathy/nanoGPT train.py; Lightning-AI/litgpt litgpt/pretrain.py, litgpt/finetune/full.py.
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
from drillyard.measurement.formats.log_format import StepPattern, TextFormat
from drillyard.measurement.formats.values import (
    NUMBER,
    Columns,
    MatchedLines,
    Value,
    Values,
    decode_values,
    number,
)

_ITERATION: Final = re.compile(
    rb"iter (\d{1,18}): loss %s, time %s(?:, mfu %s%%)?(?=[\s,]|\Z)"
    % (NUMBER, rb"([-+.,0-9e]{1,64}|nan|inf)ms", NUMBER)
)
_MICRO: Final = re.compile(
    rb"iter (\d{1,18})(?:/\d+)? step (\d{1,18})(?:/\d+)?(?: \||:) loss(?: train)?:? %s,"
    rb"(?: val: [^|\n]{0,100}\|)? iter time: ([-+.,0-9e]{1,64}|nan|inf) ?ms"
    rb"( \((?:optimizer\.)?step\))?(?=[\s,|]|\Z)" % NUMBER
)
_OF_ITERATION: Final = (
    Value("step", integer=True),
    Value("loss"),
    Value("seconds", 1e-3),
    Value("printed_mfu", 0.01),
)
_OF_MICRO: Final = (Value("step", integer=True), Value("loss"), Value("seconds", 1e-3))


class NanoGpt(TextFormat):
    name = "nanogpt"
    title = "nanoGPT"
    preference = 72
    anchor = b": loss "
    rules = (
        fact_rule(
            b"tokens per iteration will be",
            rb"tokens per iteration will be: (?P<tokens_per_step>[\d,]+)",
        ),
        fact_rule(b"number of parameters", rb"number of parameters: (?P<parameters>[\d.]+[KMBT]?)"),
        LineRule(
            b"Initializing a new model",
            rb"Initializing a new model from scratch",
            RuleContext.begin_attempt,
        ),
        event_rule("resume", b"Resuming training from"),
        event_rule("checkpoint_begin", b"saving checkpoint to"),
        event_rule(
            "evaluation",
            b"val loss",
            rb"step (?P<step>\d+): train loss [^\n,]{1,64}, val loss " + EVENT_LOSS,
        ),
    )

    def step_pattern(self, line: bytes) -> StepPattern | None:
        match = _ITERATION.search(line)
        if match is None:
            return None
        decode = decode_values(_OF_ITERATION, {})

        def columns(groups: Sequence[Values], place: MatchedLines) -> Columns:
            read = decode(groups, place)
            mfu = read["printed_mfu"]
            return {**read, "printed_mfu": np.where(mfu < 0, np.nan, mfu)}

        return StepPattern(match.start(), _ITERATION.pattern, columns)


def _validation(context: RuleContext, match: re.Match[bytes]) -> None:
    # The number before it counts micro-batches.
    values = {"loss": number(match["loss"])}
    context.add("evaluation_end", seconds=float(match["ms"]) / 1e3)
    context.add("evaluation", values=values)


class LitGpt(TextFormat):
    name = "litgpt"
    title = "litgpt"
    preference = 74
    anchor = b" iter time: "
    rules = (
        fact_rule(
            b"trainable parameters",
            rb"Number of trainable parameters: (?P<trainable_parameters>[\d,]+)",
        ),
        fact_rule(b"Total parameters", rb"Total parameters: (?P<parameters>[\d,]+)"),
        event_rule("resume", b"Resuming training from"),
        event_rule(
            "checkpoint_begin",
            b"Saving checkpoint to",
            rb"Saving checkpoint to [^\n]{0,4096}?step-0*(?P<step>\d+)",
        ),
        LineRule(
            b"val loss",
            rb"iter \d+: val loss " + EVENT_LOSS + rb", val time: (?P<ms>[\d.]+) ?ms",
            _validation,
        ),
    )

    def __init__(self) -> None:
        super().__init__()
        self._since_step: list[tuple[int, float]] = []
        """Number and seconds of the micro-batches logged since the last step."""

    def step_pattern(self, line: bytes) -> StepPattern | None:
        match = _MICRO.search(line)
        if match is None:
            return None
        return StepPattern(match.start(), _MICRO.pattern, self._steps)

    def _steps(self, groups: Sequence[Values], place: MatchedLines) -> Columns:
        micro, *plain, stepped = groups
        read = decode_values(_OF_MICRO, {})(plain, place)
        for row, (text, ends) in enumerate(zip(micro, stepped, strict=True)):
            index, step = int(text or 0), int(read["step"][row])
            self._since_step.append((index, float(read["seconds"][row])))
            if not ends:
                read["step"][row] = -1
                continue
            each = max(round(index / step), 1) if step else 1
            own = [seconds for at, seconds in self._since_step if at > index - each]
            self._since_step = []
            read["seconds"][row] = sum(own) if len(own) == each else own[-1] * each
            read["seconds_precision"][row] *= each
        return read
