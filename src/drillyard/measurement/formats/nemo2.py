"""NeMo 2's text lines, one per optimizer step.

    Training epoch 1, iteration 10/999 | lr: 4.498e-06 | global_batch_size: 512 | global_step: 29 | reduced_train_loss:
    11.03 | train_step_timing in s: 46.84 | consumed_samples: 15360

`iteration` begins anew with each epoch, so the step is `global_step`. The timing is a moving average in the field's
recipes (`buffer_size`), so it is taken for one. Memory is in bytes.
"""

from __future__ import annotations

import re
from typing import Final

from drillyard.measurement.formats.keyed import BAR, keyed_pattern
from drillyard.measurement.formats.line_rules import LineRule, RuleContext
from drillyard.measurement.formats.text_format import StepPattern, TextFormat
from drillyard.measurement.formats.values import Value, decode_values

_LINE: Final = re.compile(rb"Training epoch \d+, iteration \d+/\d+" + BAR)
_GIB: Final = 1 / 2**30
KEYS: Final = {
    b"global_step": Value("step"),
    b"train_step_timing in s": Value("seconds"),
    b"reduced_train_loss": Value("loss"),
    b"lr": Value("learning_rate"),
    b"grad_norm": Value("grad_norm"),
    b"global_batch_size": Value("samples"),
    b"consumed_samples": Value("_samples_so_far"),
    b"TFLOPS_per_GPU": Value("printed_tflops_per_gpu"),
    b"tokens_per_sec_per_gpu": Value("printed_tokens_per_second_per_gpu"),
    b"max_memory_allocated": Value("memory_gib", _GIB),
    b"peak_memory_usage": Value("memory_gib", _GIB),
}


class NeMo2(TextFormat):
    """The format."""

    name = "nemo2"
    anchor = b"Training epoch "

    def message(self, line: bytes) -> StepPattern | None:
        """See TextFormat."""
        header = _LINE.search(line)
        if header is None:
            return None
        pattern, values = keyed_pattern(line[header.end() :], KEYS)
        if not values:
            return None
        if any(value.column == "step" for value in values):
            opening = rb"Training epoch \d++, iteration \d++/\d++"
        else:
            opening = rb"Training epoch \d++, iteration (\d{1,18}+)/\d++"
            values.insert(0, Value("step"))
        return StepPattern(header.start(), opening + BAR + pattern, decode_values(values, {"window_steps": 0}))

    def notes(self) -> tuple[LineRule, ...]:
        """What else the log says."""
        return NEMO_NOTES


def _processes(book: RuleContext, match: re.Match[bytes]) -> None:
    book.begin_round(match)
    book.learn(num_gpus=int(match[1]))


NEMO_NOTES: Final = (
    LineRule(
        b"heckpoint save for step",
        rb"heckpoint save for step (?P<step>\d+) started",
        RuleContext.mark("checkpoint_begin"),
    ),
    LineRule(
        b"finalized successfully",
        rb"sync checkpoint save for step (?P<step>\d+) \([^\n]{0,1000}finalized successfully",
        RuleContext.mark("checkpoint"),
    ),
    LineRule(
        b"Global Checkpoint Save",
        rb"Iteration: (?P<step>\d+) : Start time: [\d.]+s : Save duration: (?P<seconds>[\d.]+)s",
        RuleContext.mark("checkpoint"),
    ),
    LineRule(
        b"Restored all states from the checkpoint",
        rb"Restored all states from the checkpoint.*?(?:\bstep=(?P<step>\d+)|$)",
        RuleContext.mark("resume"),
    ),
    LineRule(b"Starting with ", rb"Starting with (\d+) processes", _processes),
)
"""Of NeMo 1 and 2: checkpoints (nemo_logging), and Lightning's word on the number of processes at each start."""
