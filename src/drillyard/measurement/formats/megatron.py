"""Megatron-LM's log lines, and those of its descendants (MindSpeed, Megatron-DeepSpeed, Primus,
FlagScale, GPT-NeoX, whose loss is `lm_loss`).

     [2026-08-01 12:00:00.123456] iteration       10/     100 | consumed samples:         1280 | elapsed time per
     iteration (ms): 14530.1 | throughput per GPU (TFLOP/s/GPU): 954.0 | learning rate: 1.5E-06 |
     global batch size:
     128 | lm loss: 1.103E+01 | ... | number of skipped iterations:   0 | number of nan iterations:   0 |

The time is a mean over `log_interval` iterations. A loss that is NaN or negative is not printed at
all (only if `avg >= 0.0`), so where other lines have a loss, a line without one is taken for
non-finite, unless all steps of the line were skipped and none was NaN (a loss scale that is too
high). Source of this and of the fields: NVIDIA/Megatron-LM megatron/training/training.py.
"""  # noqa: E501

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from drillyard.measurement.formats.line_rules import EVENT_LOSS, LineRule, RuleContext, event_rule
from drillyard.measurement.formats.log_format import StepPattern, TextFormat
from drillyard.measurement.formats.values import (
    BAR,
    Columns,
    MatchedLines,
    Value,
    Values,
    decode_values,
    keyed_pattern,
)
from drillyard.measurement.lanes import Lane
from drillyard.measurement.parsed_log import NONFINITE, SKIPPED

_NOT_FINITE: Final = SKIPPED | NONFINITE
"""Of a step with a NaN Megatron-LM applies no update."""
_HEADER: Final = rb"iteration[ \t]++(\d{1,18}+)[ \t]*+/[ \t]*+\d++"
_LINE: Final = re.compile(
    rb"iteration[ \t]+\d{1,18}[ \t]*/[ \t]*(\d{1,18})[ \t]*\|[ \t]*(?=[A-Za-z][^|]*:)"
)
_KEYS: Final = {
    b"elapsed time per iteration (ms)": Value("seconds", 1e-3),
    b"throughput per GPU (TFLOP/s/GPU)": Value("printed_tflops_per_gpu"),
    b"TFLOPs": Value("printed_tflops_per_gpu"),
    b"tokens per second per GPU": Value("printed_tokens_per_second_per_gpu"),
    b"tokens per GPU (tokens/s/GPU)": Value("printed_tokens_per_second_per_gpu"),
    b"tokens-per-second-per-gpu": Value("printed_tokens_per_second_per_gpu"),
    b"learning rate": Value("learning_rate"),
    b"global batch size": Value("samples"),
    b"gloabl batch size": Value("samples"),
    b"consumed samples": Value("_samples_so_far"),
    b"consumed tokens": Value("_tokens_so_far"),
    b"lm loss": Value("loss"),
    b"lm_loss": Value("loss"),
    b"loss": Value("loss"),
    b"grad norm": Value("grad_norm"),
    b"grad_norm": Value("grad_norm"),
    b"number of skipped iterations": Value("skipped_steps"),
    b"number of nan iterations": Value("nonfinite_steps"),
}


_ARGUMENTS: Final = {
    b"seq_length": "sequence_length",
    b"micro_batch_size": "micro_batch_size",
    b"global_batch_size": "global_batch_size",
    b"world_size": "num_gpus",
    b"train_iters": "total_steps",
    b"log_interval": "log_interval",
}


def _argument(context: RuleContext, match: re.Match[bytes]) -> None:
    name, value = match[1], match[2]
    if name in _ARGUMENTS and value.isdigit():
        context.learn(**{_ARGUMENTS[name]: int(value)})
    elif name == b"fp8" and value != b"None":
        context.learn(precision="fp8")
    elif name == b"params_dtype":
        context.learn(
            precision={
                b"torch.bfloat16": "bf16",
                b"torch.float16": "fp16",
                b"torch.float32": "fp32",
            }.get(value)
        )
    elif name in (b"tokenizer_model", b"tokenizer_type") and value != b"None":
        context.learn(tokenizer=value.decode("utf-8", "replace"))


class Megatron(TextFormat):
    name = "megatron"
    title = "Megatron-LM"
    preference = 30
    windowed = True
    anchor = b"iteration "
    rules = (
        LineRule(
            b"using world size: ",
            rb"using world size: (?P<num_gpus>\d+)",
            RuleContext.begin_attempt,
        ),
        LineRule(b" ......", rb"[ \t](\w+) \.{3,} (\S+)", _argument),
        event_rule(
            "checkpoint_begin", b" checkpoint ", rb"saving checkpoint at iteration +(?P<step>\d+)"
        ),
        event_rule(
            "checkpoint_end",
            b" checkpoint ",
            rb"successfully saved checkpoint (?:at|from) iteration +(?P<step>\d+)",
        ),
        event_rule(
            "evaluation",
            b"validation loss at iteration",
            rb"validation loss at iteration +(?P<step>\d+)[^|\n]{0,200}\|[^|\n]{0,200}?value:"
            rb" " + EVENT_LOSS,
        ),
        event_rule(
            "resume",
            b" checkpoint ",
            rb"successfully loaded checkpoint from [^\n]{0,4096}at iteration +(?P<step>\d+)",
        ),
        event_rule("end", b"] after training is done"),
    )

    def __init__(self) -> None:
        super().__init__()
        self._prints_loss = False

    def step_pattern(self, line: bytes) -> StepPattern | None:
        header = _LINE.search(line)
        if header is None or b"Training epoch" in line[: header.start()]:
            return None
        # The count so far is needed only where a step's own is not printed.
        keys = _KEYS if b"batch size:" not in line else {**_KEYS, b"consumed samples": None}
        pattern, values = keyed_pattern(line[header.end() :], keys)
        if not values:
            return None
        self.facts["total_steps"] = int(header[1])
        decode = decode_values([Value("step", integer=True), *values], {})
        has_loss = any(value.column == "loss" for value in values)
        self._prints_loss |= has_loss

        def columns(groups: Sequence[Values], place: MatchedLines) -> Columns:
            read = decode(groups, place)
            flags = read["flags"] if has_loss else np.full(place.count, NONFINITE, np.uint8)
            for name, bits in (("skipped_steps", SKIPPED), ("nonfinite_steps", _NOT_FINITE)):
                read[name] = np.nan_to_num(read.get(name, np.zeros(place.count)))
                flags[read[name] > 0] |= np.uint8(bits)
            return {**read, "flags": flags}

        return StepPattern(header.start(), _HEADER + BAR + pattern, columns)

    def finish_lane(self, lane: Lane) -> None:
        """A log that never prints a loss means nothing by leaving it out; nor does a line all of
        whose steps were skipped, none of them for NaN."""
        if (flags := lane.column("flags")) is None:
            return
        unsaid = np.ones(len(flags), np.bool_)
        if self._prints_loss:
            loss, skipped = lane.column("loss"), lane.column("skipped_steps")
            if skipped is None:
                return
            unsaid &= skipped >= _windows(lane.column("step"), skipped)
            unsaid &= True if loss is None else np.isnan(loss)
        if (nan := lane.column("nonfinite_steps")) is not None:
            unsaid &= nan == 0
        lane.replace("flags", np.where(unsaid, flags & ~np.uint8(NONFINITE), flags))


def _windows(step: NDArray[np.int64] | None, skipped: NDArray[Any]) -> NDArray[np.int64]:
    """How many steps each line stands for: those since the line before, at a start as usual."""
    assert step is not None
    window = np.diff(step, prepend=0)
    known = window[1:][window[1:] > 0]
    usual = np.median(known) if len(known) else skipped[0]
    window[:1] = min(window[0], max(usual, 1))
    window[window <= 0] = usual
    return window
