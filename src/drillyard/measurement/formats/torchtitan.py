"""torchtitan's metric lines, one every `log_freq` steps.

    [titan] 2026-08-01 12:00:00,123 - root - INFO - step: 10  loss:  8.12345  grad_norm:  1.2345  memory:
    45.12GiB(57.01%)  tps: 5,762  tflops: 333.75  mfu: 33.75%

The line has no step time: it follows from the time stamps. `tps` is tokens per second of the steps
since the line before, per device (divided by the degrees of parallelism that are not data
parallel); that of step 1 is divided by `log_freq` and means nothing. `mfu: N/A` is printed for
quantised training. Source: pytorch/torchtitan torchtitan/components/metrics.py.
"""  # noqa: E501

from __future__ import annotations

import re
from typing import Final

from drillyard.measurement.formats.line_rules import (
    EVENT_LOSS,
    LineRule,
    RuleContext,
    event_rule,
    fact_rule,
)
from drillyard.measurement.formats.log_format import StepPattern, TextFormat
from drillyard.measurement.formats.values import NUMBER, Value, decode_values

_GAP: Final = rb"[ \t]++"
_LINE: Final = re.compile(rb"step:[ \t]*(\d+)(?=[ \t]+\w+:[ \t])")
_ITEM: Final = re.compile(rb"[ \t]+([A-Za-z_]\w*):[ \t]*([^ \t\n]+)")
_VALUES: Final = {
    b"loss": (Value("loss"), NUMBER),
    b"grad_norm": (Value("grad_norm"), NUMBER),
    b"lr": (Value("learning_rate"), rb"([-+.,\deE]{1,64}+)"),
    b"memory": (Value("memory_gib"), rb"([\d.,]{1,64})GiB\([\d.,]+%\)"),
    b"tps": (Value("printed_tokens_per_second_per_gpu", commas=True), rb"([\d,.]{1,64}+)"),
    b"wps": (Value("printed_tokens_per_second_per_gpu", commas=True), rb"([\d,.]{1,64}+)"),
    b"tflops": (Value("printed_tflops_per_gpu", commas=True), rb"([\d,.]{1,64}+)"),
    b"mfu": (Value("printed_mfu", 0.01), rb"(?:([\d.,]{1,64})%|N/A)"),
}


def _mesh(context: RuleContext, match: re.Match[bytes]) -> None:
    size = 1
    for axis in match[1].split(b","):
        size *= int(axis)
    context.learn(num_gpus=size)


class TorchTitan(TextFormat):
    name = "torchtitan"
    title = "torchtitan"
    preference = 40
    windowed = True
    anchor = b"GiB("
    rules = (
        LineRule(b"Starting job: ", rb"Starting job: ", RuleContext.begin_attempt),
        fact_rule(
            b"total parameters",
            rb"Model (?P<model>.{1,200}?) size: (?P<parameters>[\d,]+) total parameters",
        ),
        fact_rule(
            b"Peak FLOPS used", rb"Peak FLOPS used for computing MFU: (?P<peak_flops>[\d.eE+]+)"
        ),
        fact_rule(b"capacity: ", rb"capacity: (?P<accelerator>.{1,200}) with [\d.]+GiB memory"),
        fact_rule(
            b"global batch size",
            rb"local batch size:? (?P<micro_batch_size>\d+), global batch size:?"
            rb" (?P<global_batch_size>\d+)",
        ),
        fact_rule(
            b"total steps",
            rb"sequence length:? (?P<sequence_length>\d+), total steps:? (?P<total_steps>\d+)",
        ),
        LineRule(b"device mesh with", rb"\[([\d, ]{1,100})\]", _mesh, once=True),
        event_rule("checkpoint_begin", b"ing the checkpoint", rb"Saving the checkpoint"),
        event_rule(
            "checkpoint_end",
            b"ing the checkpoint",
            rb"Finished saving the checkpoint.{0,500}?\bin (?P<seconds>[\d.]+) seconds",
        ),
        event_rule("resume", b"ing the checkpoint", rb"Finished loading the checkpoint"),
        event_rule(
            "evaluation",
            b"validate step:",
            rb"validate step:[ \t]*(?P<step>\d+)[ \t]+loss:[ \t]*" + EVENT_LOSS,
        ),
        event_rule("end", b"Training completed"),
    )

    def step_pattern(self, line: bytes) -> StepPattern | None:
        header = _LINE.search(line)
        if header is None or line[: header.start()].endswith(b"validate "):
            return None
        pieces, values, position = (
            [rb"step:[ \t]*+(\d{1,18}+)"],
            [Value("step", integer=True)],
            header.end(),
        )
        while item := _ITEM.match(line, position):
            value, pattern = _VALUES.get(item[1], (None, rb"[^ \t\n]++"))
            pieces.append(item[1] + rb":[ \t]*+" + pattern)
            if value is not None:
                values.append(value)
            position = item.end()
        if not {"loss", "printed_tokens_per_second_per_gpu"} & {value.column for value in values}:
            return None
        return StepPattern(
            header.start(), _GAP.join(pieces) + rb"(?=[ \t\n]|\Z)", decode_values(values, {})
        )
