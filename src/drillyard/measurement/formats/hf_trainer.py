"""Log format of Hugging Face's Trainer (TRL, Axolotl, LLaMA-Factory and ms-swift with it).

    {'loss': 2.2091, 'grad_norm': 0.60, 'learning_rate': 1.09e-05, 'epoch': 0.09}
    {'loss': '0.6647', 'grad_norm': '0.8371', 'learning_rate': '1.09e-05', 'epoch': '0.09'}        (transformers 5)
    {'loss': 0.24, ..., 'global_step/max_steps': '50/176', 'elapsed_time': '1h 8m 9s'}             (ms-swift)
    {'train_runtime': 364.4972, 'train_samples_per_second': 1.317, 'train_steps_per_second': 0.165,
    'train_loss': 2.25, 'epoch': 0.1}

The line of the Trainer has neither step nor time. Both come from the progress bar drawn before it
(`6/60 [00:36<05:28, 6.07s/it]`), or follow from the epochs and the totals (line_steps.py). The loss
is a mean over `logging_steps`. Sources: huggingface/transformers src/transformers/trainer.py,
src/transformers/trainer_callback.py, src/transformers/trainer_pt_utils.py; modelscope/ms-swift
swift/trainers/callback.py.
"""  # noqa: E501

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from drillyard.loglines.blocks import LineBlock
from drillyard.measurement.formats.line_rules import (
    EVENT_LOSS,
    LineRule,
    RuleContext,
    event_rule,
    fact_rule,
)
from drillyard.measurement.formats.log_format import StepPattern, TextFormat
from drillyard.measurement.formats.progress_bars import COUNT, Bar, Bars, bar_of, is_described
from drillyard.measurement.formats.values import (
    NUMBER,
    Columns,
    MatchedLines,
    Value,
    Values,
    decode_values,
    half_unit,
    number,
    words_seconds,
)

_OPEN: Final = re.compile(
    rb"\{(?='(?:loss|grad_norm|learning_rate|epoch|mean_token_accuracy|num_tokens|entropy|token_acc)':)"
)
_ITEM: Final = re.compile(rb"'([^'\n]+)': (?:([-+.0-9a-zA-Z]+)(?=[,}])|'([^'\n]*)'(?=[,}]))(?:, )?")
_BAR: Final = rb"[ \t]*+\d++" + COUNT + rb"[ \t]*"
# Not from within a row of blanks or digits, which would be gone through once from each of them.
_FIRST_BAR: Final = re.compile(rb"(?:(?<![ \t])(?=[ \t])|(?<![ \t\d])(?=\d))" + _BAR)
_VALUES: Final = {
    b"loss": Value("loss"),
    b"grad_norm": Value("grad_norm"),
    b"learning_rate": Value("learning_rate"),
    b"epoch": Value("_epoch"),
    b"num_tokens": Value("_tokens_so_far"),
    b"num_input_tokens_seen": Value("_tokens_so_far"),
    b"step": Value("step"),
    b"elapsed_time_per_iteration": Value("seconds"),
    b"consumed_samples": Value("_samples_so_far"),
    b"memory(GiB)": Value("memory_gib"),
    b"memory/max_mem_allocated(gib)": Value("memory_gib"),
    b"memory/max_allocated (GiB)": Value("memory_gib"),
}
_STEP_OF_ALL: Final = rb"'(\d{1,18})/(\d{1,18})'"
_TOTALS: Final = {
    "train_runtime": "train_runtime_seconds",
    "train_steps_per_second": "train_steps_per_second",
    "train_samples_per_second": "train_samples_per_second",
    "total_flos": "total_flos",
    "epoch": "train_epochs",
}
_TOTAL: Final = re.compile(rb"['\"](\w+)['\"]: ['\"]?([-+.\deE]+)")


def learn_totals(context: RuleContext, match: re.Match[bytes]) -> None:
    """The totals of the whole training, from the line that states its duration."""
    stated = {name.decode(): text for name, text in _TOTAL.findall(context.line)}
    context.learn(
        **{fact: number(stated[name]) for name, fact in _TOTALS.items() if name in stated}
    )
    context.add("end")


def _flos(context: RuleContext, match: re.Match[bytes]) -> None:
    # The Trainer shifts the number right by 30 bits and calls the unit GF.
    context.learn(total_flos=number(match[1]) * 2**30)


class HfTrainer(TextFormat):
    name = "hf_trainer"
    title = "HF Trainer stdout"
    preference = 110
    windowed = True
    clock_restarts = True
    anchor = b"'loss': "
    rules = (
        LineRule(b"***** Running training *****", rb"Running training", RuleContext.begin_attempt),
        fact_rule(
            b"Total optimization steps", rb"Total optimization steps = (?P<total_steps>[\d,]+)"
        ),
        fact_rule(
            b"Total train batch size",
            rb"Total train batch size [^=\n]{0,200}= (?P<global_batch_size>\d+)",
        ),
        fact_rule(
            b"batch size per device",
            rb"nstantaneous batch size per device = (?P<micro_batch_size>\d+)",
        ),
        fact_rule(
            b"Number of trainable parameters",
            rb"Number of trainable parameters = (?P<trainable_parameters>[\d,]+)",
        ),
        event_rule(
            "resume",
            b"Continuing training from global step",
            rb"Continuing training from global step (?P<step>\d+)",
        ),
        event_rule("checkpoint_begin", b"Saving model checkpoint to", rb"checkpoint-(?P<step>\d+)"),
        event_rule("evaluation", b"'eval_loss': ", rb"'eval_loss': '?" + EVENT_LOSS),
        fact_rule(b"Num Epochs", rb"Num Epochs = (?P<planned_epochs>[\d,.]+)"),
        LineRule(b"'train_runtime': ", rb"'train_runtime': '?[\d.]", learn_totals),
        LineRule(b"total_flos ", rb"total_flos +=\s+(\d+)GF", _flos, once=True),
    )

    def __init__(self) -> None:
        super().__init__()
        self._bars = Bars()
        self._lines = 0

    def step_pattern(self, line: bytes) -> StepPattern | None:
        found = _OPEN.search(line)
        if found is None:
            return None
        bar = _FIRST_BAR.search(line, 0, found.start())
        barred = bar is not None and bar.end() == found.start()
        begin = bar.start() if bar is not None and barred else found.start()
        pieces = [_BAR if barred else b"", rb"\{"]
        values: list[Value] = []
        special: dict[str, int] = {}
        groups, position = 0, found.end()
        while item := _ITEM.match(line, position):
            name, value = item[1], _VALUES.get(item[1])
            quote, printed = (b"", item[2]) if item[3] is None else (b"'", item[3])
            pieces.append(b"'" + re.escape(name) + b"': ")
            if name == b"global_step/max_steps" and re.fullmatch(_STEP_OF_ALL, b"'%s'" % printed):
                pieces.append(_STEP_OF_ALL)
                special["step"] = groups
                groups += 2
            elif name == b"elapsed_time" and quote:
                pieces.append(rb"'([^'\n]{1,60})'")
                special["elapsed"] = groups
                groups += 1
            elif value is not None and value not in values:
                pieces.append(quote + NUMBER + quote)
                values.append(value)
                special[value.column] = groups
                groups += 1
            else:
                pieces.append(rb"'[^'\n]*'" if quote else rb"[^',}\n]+")
            pieces.append(rb"(?=[,}])(?:, )?")
            position = item.end()
        if not any(value.column == "loss" for value in values):
            return None
        decode = decode_values(values, {})
        plain = [special[value.column] for value in values]
        described = is_described(line[:begin])

        def columns(groups: Sequence[Values], place: MatchedLines) -> Columns:
            drawn, groups = (groups[:3], groups[3:]) if barred else ((), groups)
            read = decode([groups[index] for index in plain], place)
            if "_epoch" in read:
                unit = half_unit(max((text or b"" for text in groups[special["_epoch"]]), key=len))
                read["_epoch_unit"] = np.full(place.count, unit)
            if "elapsed" in special:
                texts = groups[special["elapsed"]]
                read["elapsed_seconds"] = np.array([words_seconds(text) for text in texts])
            if "step" in special and special["step"] not in plain:
                at = special["step"]
                read["step"] = np.array([int(text or 0) for text in groups[at]], np.int64)
                self.facts["total_steps"] = int(groups[at + 1][0] or 0)
            if "step" in read:
                return read
            bars = [bar_of(texts, described=described) for texts in zip(*drawn, strict=True)]
            return read | self._counted(place, bars or self._bars.before(place.block, place.begins))

        return StepPattern(begin, b"".join(pieces), columns)

    def _counted(self, place: MatchedLines, bars: Sequence[Bar | None]) -> dict[str, Any]:
        """Numbers of the lines, and what the last bar before each says: line_steps.py makes steps
        of them."""
        lines = np.arange(self._lines + 1, self._lines + 1 + place.count)
        self._lines += place.count
        if not any(bars):
            return {"step": lines, "_line": lines}
        return {
            "step": lines,
            "_line": lines,
            "_bar_step": np.array([-1 if bar is None else bar.step for bar in bars], np.int64),
            "_bar_total": np.array([0 if bar is None else bar.total for bar in bars], np.int64),
            "_bar_seconds": np.array([np.nan if bar is None else bar.seconds for bar in bars]),
            "_bar_described": np.array(
                [bar is not None and bar.described for bar in bars], np.int8
            ),
        }

    def end_block(self, block: LineBlock) -> None:
        """Remember the last bar of each rank in a block for lines of the next one."""
        self._bars.end_block(block)
