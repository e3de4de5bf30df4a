"""NeMo 1's progress bar (Lightning), redrawn for every step on one line with carriage returns.

    Epoch 0: : 100%|##| 2000/2000 [43:24:54<00:00, reduced_train_loss=0.139, global_step=2e+3,
    consumed_samples=2.56e+5, train_step_timing in s=68.70, val_loss=0.212]

From 1,000 on `global_step` is printed in e-notation and loses digits. The bar's own count is one more than
`global_step`; it stands in where it agrees with what is left of it. A bar is redrawn without a new step: only the first
drawing of a step counts. Times are the bar's elapsed seconds (and the prefix's stamp, where there is one).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from drillyard.measurement.formats.keyed import keyed_pattern
from drillyard.measurement.formats.line_rules import LineRule
from drillyard.measurement.formats.nemo2 import NEMO_NOTES
from drillyard.measurement.formats.text_format import LARGEST_STEP, MatchedLines, StepPattern, TextFormat
from drillyard.measurement.formats.values import Columns, Value, Values, decode_values, half_unit
from drillyard.measurement.lanes import Lane

_HEADER: Final = (
    rb"Epoch \d+:[^\n\[]{0,1000}?[| ](\d{1,18})(?:/\d{1,18}|/\?|it) \[([\d:]{1,20})(?:<[^,\]\n]{0,200})?,"
    rb"(?: *[\d.]+ ?(?:s/it|it/s),| *\?it/s,)? *"
)
_LINE: Final = re.compile(_HEADER + rb"(?=\w)")
_KEYS: Final = {
    b"global_step": Value("step"),
    b"train_step_timing in s": Value("seconds"),
    b"reduced_train_loss": Value("loss"),
    b"lr": Value("learning_rate"),
    b"grad_norm": Value("grad_norm"),
    b"consumed_samples": Value("_samples_so_far"),
}


class NeMo1(TextFormat):
    """The format."""

    name = "nemo1"
    anchor = b"train_step_timing in s="

    def message(self, line: bytes) -> StepPattern | None:
        """See TextFormat."""
        header = _LINE.search(line)
        if header is None:
            return None
        bar = line[header.end() :].partition(b"]")[0]
        pattern, values = keyed_pattern(bar, _KEYS, equals=b"=", separator=b",")
        if not any(value.column == "step" for value in values):
            return None
        place_of_step = 2 + next(index for index, value in enumerate(values) if value.column == "step")
        numbers = [Value("_count", integer=True), *values]
        decode = decode_values(numbers, {"window_steps": 0})

        def columns(groups: Sequence[Values], place: MatchedLines) -> Columns:
            read = decode([groups[0], *groups[2:]], place)
            counts = read.pop("_count")
            read["step"] = _steps(counts, read["step"], groups[place_of_step])
            read["elapsed_seconds"] = clocks(groups[1])
            return read

        return StepPattern(header.start(), _HEADER + pattern, columns)

    def notes(self) -> tuple[LineRule, ...]:
        """What else the log says."""
        return NEMO_NOTES

    def settle(self, lane: Lane) -> None:
        """Only the first drawing of a step counts."""
        step = lane.column("step")
        assert step is not None
        new = np.append(True, step[1:] != step[:-1])
        if not new.all():
            lane.keep(new)


def _steps(counts: NDArray[np.int64], printed: NDArray[np.float64], texts: Values) -> NDArray[np.int64]:
    """The steps of bars that count to `counts`; -1 where none is printed."""
    # In e-notation few different texts are printed, and their unit tells how many digits are lost.
    lost = {text: half_unit(text) if text and b"e" in text.lower() else np.nan for text in set(texts)}
    unit = np.array([lost[text] for text in texts])
    steps = np.where(np.abs(printed) < LARGEST_STEP, printed, -1.0).astype(np.int64)
    return np.where(np.abs(printed - (counts - 1)) <= unit, counts - 1, steps)


def clocks(texts: Values) -> NDArray[np.float64]:
    """Seconds of a progress bar's clocks, of which most have the same digits' places."""
    characters = np.array(texts, np.bytes_).view(np.uint8).reshape(len(texts), -1) ^ ord("0")
    colon = ord(":") ^ ord("0")
    places = characters[0] != colon
    if ((characters < 10) != places).any() or (characters[:, ~places] != colon).any():
        return np.array([clock_seconds(text) for text in texts])
    parts = bytes(texts[0] or b"").split(b":")
    unit = np.concatenate(
        [60.0 ** (len(parts) - 1 - index) * 10.0 ** np.arange(len(part))[::-1] for index, part in enumerate(parts)]
    )
    seconds: NDArray[np.float64] = characters[:, places] @ unit
    return seconds


def clock_seconds(text: bytes | None) -> float:
    """Seconds of a progress bar's clock: `06:04`, `43:24:54`."""
    seconds = 0
    for part in (text or b"0").split(b":"):
        seconds = seconds * 60 + int(part)
    return float(seconds)
