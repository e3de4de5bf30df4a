"""tqdm's progress bars in a log: which of them may count the steps of training, and how far each
rank's was at a line.

    Loading checkpoint shards: 100%|##########| 30/30 [00:12<00:00,  2.44it/s]
      3%|3         | 2/60 [00:12<05:52,  6.07s/it]

A bar of training has no description (HF Trainer) or one that begins with a word for training
(`Train:` of ms-swift, `Epoch 1/3`). Any other description counts only where a log has no such bar;
line_steps.py then asks whether the bar goes along with the lines of losses. So it does with bars of
evaluation, which have no description either.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from drillyard.loglines.blocks import LineBlock
from drillyard.loglines.prefixes import NOWHERE, LineOrigins, Origin, split_prefix
from drillyard.measurement.lanes import Lane

COUNT: Final = (
    rb"%\|[^|\n]{0,1000}\|[ \t]*(\d{1,18})/(\d{1,18})"
    rb" \[(\d{1,9}(?::\d{1,9}){0,3})<[^\]\n]{0,200}(?:s/it|it/s)[^\]\n]{0,200}\]"
)
"""Of a bar, from the percent sign on: its count, its total, its clock."""
_DRAWN: Final = re.compile(COUNT)
"""Found by a literal: a pattern that may begin with blanks would retry long runs of them."""
_TRAINING: Final = re.compile(
    rb"(?:fine-?tun(?:e|ing)|train(?:ing)?|epochs?|(?:global[ _])?steps?|iter(?:ation)?s?)"
    rb"(?![a-z])(?![^\n]*(?:data|split|shard|file|example|sample|token|eval|valid|load|sav))",
    re.IGNORECASE,
)
_LONGEST_DESCRIPTION: Final = 200


@dataclass(frozen=True, slots=True)
class Bar:
    """A drawing of a bar. `described`: it has a description that names no training."""

    step: int
    total: int
    seconds: float
    described: bool = False


def bar_of(groups: Sequence[bytes | None], *, described: bool) -> Bar:
    """The bar of the groups of `COUNT`."""
    count, total, clock = groups
    return Bar(int(count or 0), int(total or 0), clock_seconds(clock), described)


def is_described(before: bytes) -> bool:
    """Whether what stands before a bar's percentage on its line is a description that names no
    training. A launcher's prefix is none."""
    if not before.strip(b" \t\r0123456789"):
        return False
    text = before[-_LONGEST_DESCRIPTION:]
    if len(before) <= _LONGEST_DESCRIPTION:
        text = before[split_prefix(before + b"%")[3] :]
    text = text.rstrip(b"0123456789")
    # A bar may follow other text on its line.
    text = re.split(rb"[\]}]", text)[-1].strip(b" \t\r:")
    return bool(text) and _TRAINING.match(text) is None


class Bars:
    """The last bar of training that each rank drew, at any line of a log that is read on."""

    def __init__(self) -> None:
        self._last: dict[Origin, Bar] = {}
        self._origins = LineOrigins()
        self._drawn: tuple[LineBlock | None, list[tuple[int, Origin, Bar]]] = (None, [])
        """The bars of the last block."""

    def before(self, block: LineBlock, begins: Sequence[int]) -> list[Bar | None]:
        """For the lines that begin there the last bar that their rank drew."""
        bars = self._of_block(block)
        if not bars and len(self._last) < 2:
            return [self._last_of(NOWHERE)] * len(begins)
        found: list[Bar | None] = []
        index = 0
        for begin, where in zip(begins, self._origins.at(block, begins), strict=True):
            while index < len(bars) and bars[index][0] <= begin:
                self._draw(*bars[index][1:])
                index += 1
            found.append(self._last_of(where))
        return found

    def end_block(self, block: LineBlock) -> None:
        """Remember the last bar of each rank in a block for lines of the next one."""
        for _, where, bar in self._of_block(block):
            self._draw(where, bar)

    def _draw(self, where: Origin, bar: Bar) -> None:
        known = self._last.get(where)
        if known is None or known.described or not bar.described:
            self._last[where] = bar

    def _last_of(self, where: Origin) -> Bar | None:
        """The last bar of an origin; of the only one that draws any, for lines that come on another
        stream."""
        return next(iter(self._last.values())) if len(self._last) == 1 else self._last.get(where)

    def _of_block(self, block: LineBlock) -> list[tuple[int, Origin, Bar]]:
        """Place, origin and count of all bars of a block; of one block they are looked for once."""
        if self._drawn[0] is not block:
            text = block.text
            drawn = b"%|" in text and (b"it/s" in text or b"s/it" in text)
            found = list(_DRAWN.finditer(text)) if drawn else []
            begins = [text.rfind(b"\n", 0, match.start()) + 1 for match in found]
            bars = [
                bar_of(match.groups(), described=is_described(text[begin : match.start()]))
                for begin, match in zip(begins, found, strict=True)
            ]
            origins = self._origins.at(block, begins)
            self._drawn = (block, list(zip(begins, origins, bars, strict=True)))
        return self._drawn[1]


def clock_seconds(text: bytes | None) -> float:
    """Seconds of a progress bar's clock: `06:04`, `43:24:54`."""
    seconds = 0
    for part in (text or b"0").split(b":"):
        seconds = seconds * 60 + int(part)
    return float(seconds)


def keep_first_drawings(lane: Lane) -> None:
    """Of several drawings of a step only the first counts."""
    step = lane.column("step")
    assert step is not None
    new = np.append(True, step[1:] != step[:-1])
    if not new.all():
        lane.keep(new)
