"""Log format of Hugging Face's Trainer (TRL and Axolotl with it).

    {'loss': 2.2091, 'grad_norm': 0.60, 'learning_rate': 1.09e-05, 'epoch': 0.09}
    {'loss': '0.6647', 'grad_norm': '0.8371', 'learning_rate': '1.09e-05', 'epoch': '0.09'}        (transformers 5)
    {'train_runtime': 364.4972, 'train_samples_per_second': 1.317, ..., 'train_loss': 2.25, 'epoch':
    0.1}

The line has neither step nor time. Both come from the progress bar drawn before it (`6/60
[00:36<05:28, 6.07s/it]`), where it is in the same stream; else lines are numbered, with a warning.
The loss is a mean over `logging_steps`.
"""  # noqa: E501

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import numpy as np

from drillyard.loglines.blocks import LineBlock
from drillyard.loglines.prefixes import NOWHERE, LineOrigins, Origin
from drillyard.measurement.formats.line_rules import (
    EVENT_LOSS,
    LineRule,
    RuleContext,
    event_rule,
    fact_rule,
)
from drillyard.measurement.formats.log_format import StepPattern, TextFormat
from drillyard.measurement.formats.nemo import clock_seconds
from drillyard.measurement.formats.values import (
    NUMBER,
    Columns,
    MatchedLines,
    Value,
    Values,
    decode_values,
)
from drillyard.measurement.lanes import Lane

_OPEN: Final = re.compile(
    rb"\{(?='(?:loss|grad_norm|learning_rate|epoch|mean_token_accuracy|num_tokens|entropy)':)"
)
_ITEM: Final = re.compile(rb"'([^'\n]+)': ('?)([-+.0-9a-zA-Z]+)'?(?=[,}])(?:, )?")
_COUNT: Final = (
    rb"%\|[^|\n]{0,1000}\|[ \t]*(\d{1,18})/(\d{1,18})"
    rb" \[([\d:]{1,20})<[^\]\n]{0,200}(?:s/it|it/s)[^\]\n]{0,200}\]"
)
_BAR: Final = rb"[ \t]*+\d++" + _COUNT + rb"[ \t]*"
# Not from within a row of blanks or digits, which would be gone through once from each of them.
_FIRST_BAR: Final = re.compile(rb"(?:(?<![ \t])(?=[ \t])|(?<![ \t\d])(?=\d))" + _BAR)
_DRAWN: Final = re.compile(_COUNT)
"""Bars in a block, found by a literal: a pattern that may begin with blanks would retry long runs
of them."""
_Bar = tuple[bytes, ...]
"""Step, steps in all, and the bar's clock."""
_VALUES: Final = {
    b"loss": Value("loss"),
    b"grad_norm": Value("grad_norm"),
    b"learning_rate": Value("learning_rate"),
    b"num_tokens": Value("_tokens_so_far"),
    b"num_input_tokens_seen": Value("_tokens_so_far"),
    b"step": Value("step"),
    b"memory/max_mem_allocated(gib)": Value("memory_gib"),
    b"memory/max_allocated (GiB)": Value("memory_gib"),
}


def _end(context: RuleContext, match: re.Match[bytes]) -> None:
    context.learn(train_runtime_seconds=float(match["seconds"]))
    context.add("end")


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
        LineRule(b"'train_runtime': ", rb"'train_runtime': '?(?P<seconds>[\d.]+)", _end),
    )

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[Origin, _Bar] = {}
        self._origins = LineOrigins()
        self._drawn: tuple[LineBlock | None, list[tuple[int, Origin, _Bar]]] = (None, [])
        """The bars of the last block."""
        self._numbered = 0

    def step_pattern(self, line: bytes) -> StepPattern | None:
        found = _OPEN.search(line)
        if found is None:
            return None
        bar = _FIRST_BAR.search(line, 0, found.start())
        begin = bar.start() if bar is not None and bar.end() == found.start() else found.start()
        pieces, values, position = (
            [_BAR if begin != found.start() else b"", rb"\{"],
            [],
            found.end(),
        )
        while item := _ITEM.match(line, position):
            value = _VALUES.get(item[1])
            captured = value is not None and value not in values
            number = NUMBER if captured else rb"[^',}\n]+"
            pieces.append(
                b"'"
                + re.escape(item[1])
                + b"': "
                + item[2]
                + number
                + item[2]
                + rb"(?=[,}])(?:, )?"
            )
            if captured and value is not None:
                values.append(value)
            position = item.end()
        if not any(value.column == "loss" for value in values):
            return None
        decode = decode_values(values, {})
        barred = begin != found.start()

        def columns(groups: Sequence[Values], place: MatchedLines) -> Columns:
            read = decode(groups[3:] if barred else groups, place)
            return self._numbered_columns(
                read, place, list(zip(*groups[:3], strict=True)) if barred else None
            )

        return StepPattern(begin, b"".join(pieces), columns)

    def _numbered_columns(
        self, read: Columns, place: MatchedLines, own_bars: list[_Bar] | None
    ) -> Columns:
        """Steps and elapsed times from the last bar before each line."""
        if "step" in read:
            return read
        bars: Sequence[_Bar | None] = own_bars or self._bars_before(place)
        steps: list[int] = []
        elapsed: list[float] = []
        for bar in bars:
            if bar is None:
                self._numbered += 1
                steps.append(self._numbered)
                elapsed.append(np.nan)
            else:
                steps.append(int(bar[0]))
                elapsed.append(clock_seconds(bar[2]))
        return {**read, "step": np.array(steps, np.int64), "elapsed_seconds": np.array(elapsed)}

    def _bars_before(self, place: MatchedLines) -> list[_Bar | None]:
        """For each line the last bar that its rank drew."""
        bars = self._bars(place.block)
        if not bars and len(self._last) < 2:
            return [self._last_of(NOWHERE)] * place.count
        found: list[_Bar | None] = []
        index = 0
        for begin, where in zip(
            place.begins, self._origins.at(place.block, place.begins), strict=True
        ):
            while index < len(bars) and bars[index][0] <= begin:
                self._last[bars[index][1]] = bars[index][2]
                index += 1
            found.append(self._last_of(where))
        return found

    def _last_of(self, where: Origin) -> _Bar | None:
        """The last bar of an origin; of the only one that draws any, for lines that come on another
        stream."""
        return next(iter(self._last.values())) if len(self._last) == 1 else self._last.get(where)

    def _bars(self, block: LineBlock) -> list[tuple[int, Origin, _Bar]]:
        """Place, origin and count of all bars of a block; of one block they are looked for once."""
        if self._drawn[0] is not block:
            bars = (
                list(_DRAWN.finditer(block.text))
                if b"it/s" in block.text or b"s/it" in block.text
                else []
            )
            begins = [block.text.rfind(b"\n", 0, match.start()) + 1 for match in bars]
            origins = self._origins.at(block, begins)
            self._drawn = (
                block,
                list(zip(begins, origins, (match.groups() for match in bars), strict=True)),
            )
        return self._drawn[1]

    def end_block(self, block: LineBlock) -> None:
        """Remember the last bar of each rank in a block for lines of the next one."""
        for _, where, bar in self._bars(block):
            self._last[where] = bar

    def finish_lane(self, lane: Lane) -> None:
        """Lines between two drawings of the bar have its count: they are numbered on from it."""
        step = lane.column("step")
        assert step is not None
        if self._numbered:
            self.warnings.append(
                "HF Trainer lines without a progress bar have no step: they are numbered 1, 2,"
                " 3, ..."
            )
        again = np.append(False, step[1:] == step[:-1])
        if again.any():
            index = np.arange(len(step))
            lane.replace("step", step + index - np.maximum.accumulate(np.where(again, 0, index)))
