"""MaxText's step lines.

    completed step: 11, seconds: 28.294, TFLOP/s/device: 1520.276, Tokens/s/device: 579.059,
    total_weights: 4194304, loss: 13.652

    completed step: 2, seconds: 0.206, TFLOP/s: 72.958, loss: 9.352                 (2023)
    completed step: 2, seconds: 3.033, TFLOP/s/device: 340.650, loss: 1.989         (to July 2024)
    completed step: 2, seconds: 3.033, loss: 1.989                                  (the first)

Each line is one step, counted from 0. JAX dispatches asynchronously: the time of step 1 is that of
putting it into the queue, and step 2 pays for it. `total_weights` counts the tokens that carry
loss, not all tokens. A line may have more losses (`main_model_loss`); the first one is read.
Source: AI-Hypercomputer/maxtext metric_logger.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from drillyard.measurement.formats.line_rules import EVENT_LOSS, LineRule, RuleContext, event_rule
from drillyard.measurement.formats.log_format import ENDS, StepPattern, TextFormat
from drillyard.measurement.formats.values import NUMBER, TIME_SPEED_LOSS, decode_values

_LINE: Final = re.compile(
    rb"completed step: (\d{1,18}), seconds: %s%s(?:, TFLOP/s(?:/device)?: %s%s)?"
    rb"(?:, Tokens/s/device: %s%s)?"
    rb"(?:, total_weights: \d+)?(?:,[ \t]+[^\n]*?loss: %s%s)?"
    % (NUMBER, ENDS, NUMBER, ENDS, NUMBER, ENDS, NUMBER, ENDS)
)
_CONFIG: Final[dict[bytes, tuple[str, Callable[[bytes], Any]]]] = {
    b"max_target_length": ("sequence_length", int),
    b"steps": ("total_steps", int),
    b"global_batch_size_to_train_on": ("global_batch_size", int),
    b"model_name": ("model", bytes.decode),
    b"dtype": ("precision", bytes.decode),
    b"tokenizer_path": ("tokenizer", bytes.decode),
}


def _parameters(context: RuleContext, match: re.Match[bytes]) -> None:
    context.learn(parameters=float(match[1]) * 1e9)


def _config(context: RuleContext, match: re.Match[bytes]) -> None:
    if (known := _CONFIG.get(match[1])) is not None and (known[1] is not int or match[2].isdigit()):
        context.learn(**{known[0]: known[1](match[2])})


class MaxText(TextFormat):
    name = "maxtext"
    title = "MaxText"
    preference = 60
    anchor = b"completed step: "
    rules = (
        LineRule(
            b"number parameters: ", rb"number parameters: ([\d.]+) billion", _parameters, once=True
        ),
        LineRule(b"Num_devices: ", rb"Num_devices: (?P<num_gpus>\d+)", RuleContext.begin_attempt),
        LineRule(b"Config param ", rb"Config param (\w+): (\S+)", _config),
        event_rule(
            "resume",
            b"restoring from this run's directory",
            rb"restoring from this run's directory (?:latest )?step +(?P<step>\d+)",
        ),
        event_rule(
            "checkpoint",
            b"saved a checkpoint at step",
            rb"saved a checkpoint at step (?P<step>\d+)",
        ),
        event_rule(
            "evaluation",
            b"eval after train step",
            rb"ompleted eval after train step (?P<step>\d+), loss=" + EVENT_LOSS,
        ),
        event_rule(
            "evaluation",
            b"eval metrics after step",
            rb"eval metrics after step: (?P<step>\d+), loss=" + EVENT_LOSS,
        ),
    )

    def step_pattern(self, line: bytes) -> StepPattern | None:
        match = _LINE.search(line)
        return (
            None
            if match is None
            else StepPattern(match.start(), _LINE.pattern, decode_values(TIME_SPEED_LOSS, {}))
        )
