"""OLMo-core's console lines: a line for the step, and a line for each metric below it. OLMo prints
the same with other names.

    2026-08-01 12:00:00.123\tnode-0:0\tolmo_core.train.callbacks.console_logger:68\tINFO\t[step=100/2000,epoch=1,eta=5h]
        train/CE loss=6.234
        optim/total grad norm=1.250
        throughput/device/TPS=12,345
        throughput/device/BPS=0.4321

Steps without metrics have the first line alone. Rates are those of one step on one device; its time
is 1 / BPS (`throughput/device/BPS`, batches per second). `TPS` counts the tokens of this device and
divides by the ranks that share a batch. From 1,000 on numbers are whole and grouped by commas. MFU
is in percent of the peak that the log names. OLMo's rates are means over the last steps: there the
time stamps count. Source: allenai/OLMo-core src/olmo_core/train/callbacks/console_logger.py,
src/olmo_core/train/callbacks/speed_monitor.py.
"""  # noqa: E501

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from drillyard.loglines.blocks import LineBlock
from drillyard.loglines.prefixes import LineOrigins, Origin
from drillyard.measurement.formats.line_rules import LineRule, RuleContext, event_rule, fact_rule
from drillyard.measurement.formats.log_format import StepPattern, TextFormat
from drillyard.measurement.formats.values import Columns, MatchedLines, Values, half_unit, number
from drillyard.measurement.lanes import Lane, nonfinite_flags
from drillyard.measurement.parsed_log import COLUMN_DEFAULTS, SKIPPED

_STEP: Final = rb"\[step=(\d{1,18})/(\d{1,18}|\?\?\?)(?:,[^\]\n]{0,200})?\]"
_LINE: Final = re.compile(_STEP)
_METRICS: Final = {
    b"train/CE loss": "loss",
    b"train/CrossEntropyLoss": "loss",
    b"optim/total grad norm": "grad_norm",
    b"optim/total_grad_norm": "grad_norm",
    b"optim/LR": "learning_rate",
    b"optim/LR (group 0)": "learning_rate",
    b"optim/learning_rate_group0": "learning_rate",
    b"optim/step skipped": "flags",
    b"throughput/device/TPS": "printed_tokens_per_second_per_gpu",
    b"throughput/device/tokens_per_second": "printed_tokens_per_second_per_gpu",
    b"throughput/device/BPS": "seconds",
    b"throughput/device/MFU": "printed_mfu",
}
_METRIC: Final = re.compile(
    rb"    (%s)=([-+.,0-9a-zA-Z]{1,64})[ \t]*\n"
    % b"|".join(re.escape(name) for name in sorted(_METRICS, key=len, reverse=True))
)


@dataclass(slots=True)
class _Rank:
    """What one rank printed: the number of its steps so far, and its metrics by column, as rows
    and values."""

    steps: int
    metrics: dict[str, tuple[list[int], list[float]]]
    units: list[float]


class OlmoCore(TextFormat):
    name = "olmo_core"
    title = "OLMo-core"
    preference = 76
    anchor = b"[step="
    rules = (
        LineRule(
            b"Training for ",
            rb"Training for [\d,]+ (?:steps|tokens|epochs)",
            RuleContext.begin_attempt,
        ),
        fact_rule(
            b"Device peak FLOPS",
            rb"Device: (?P<accelerator>.{1,200}), Device peak FLOPS: (?P<peak_flops>\d+)",
        ),
        event_rule(
            "checkpoint_begin",
            b"aving checkpoint for step",
            rb"Saving checkpoint for step (?P<step>\d+)",
        ),
        event_rule(
            "checkpoint_end",
            b"saved successfully",
            rb"Checkpoint for step (?P<step>\d+) saved successfully",
        ),
        event_rule("resume", b"Loading checkpoint from"),
        event_rule("end", b"Training complete"),
    )

    def __init__(self) -> None:
        super().__init__()
        self._ranks: dict[Origin, _Rank] = {}
        self._last: _Rank | None = None
        self._origins = LineOrigins()
        self._begins: list[int] = []
        """Where the step lines of the current block begin."""

    def step_pattern(self, line: bytes) -> StepPattern | None:
        match = _LINE.search(line)
        return None if match is None else StepPattern(match.start(), _STEP, self._decode)

    def _decode(self, groups: Sequence[Values], place: MatchedLines) -> Columns:
        self._begins += place.begins
        total = groups[1][0] or b""
        if total.isdigit():
            self.facts["total_steps"] = int(total)
        return {"step": np.array([int(text or 0) for text in groups[0]], np.int64)}

    def end_block(self, block: LineBlock) -> None:
        """Give each metric to the last step line of its rank. Metrics may follow in the next
        block."""
        steps, self._begins = sorted(self._begins), []
        if not steps and not self._ranks:
            return
        found = list(_METRIC.finditer(block.text))
        places = [block.text.rfind(b"\n", 0, match.start()) + 1 for match in found]
        lines = sorted(
            [(begin, None) for begin in steps] + list(zip(places, found, strict=True)),
            key=lambda line: line[0],
        )
        origins = self._origins.at(block, [begin for begin, _ in lines])
        for where, (_, metric) in zip(origins, lines, strict=True):
            if metric is None:
                self._last = self._ranks.setdefault(where, _Rank(0, {}, []))
                self._last.steps += 1
            # Some prefixes are not recognised before an indented line.
            elif (rank := self._ranks.get(where, self._last)) is not None:
                self._learn(rank, metric[1], metric[2])

    def _learn(self, rank: _Rank, name: bytes, text: bytes) -> None:
        try:
            value = number(text.replace(b",", b""))
        except ValueError:
            return
        column = _METRICS[name]
        if column == "seconds":
            rank.units.append(half_unit(text) / value**2 if value > 0 else 0.0)
            value = 1 / value if value > 0 else np.nan
        elif column == "printed_mfu":
            value /= 100
        elif column == "flags":
            value = float(SKIPPED if value > 0 else 0)
        rows, values = rank.metrics.setdefault(column, ([], []))
        rows.append(rank.steps - 1)
        values.append(value)

    def finish_lane(self, lane: Lane) -> None:
        """Put the metrics beside the steps."""
        rank = self._ranks.get(lane.origin)
        if rank is None and len(self._ranks) == 1:
            (rank,) = self._ranks.values()
        if rank is None or rank.steps != lane.length:
            if self._ranks:
                self.warnings.append(
                    "OLMo-core's metrics of more than a million steps are left out"
                )
            return
        columns: dict[str, NDArray[Any]] = {}
        printed: dict[str, list[bool]] = {}
        for name, (rows, values) in rank.metrics.items():
            dtype, default = COLUMN_DEFAULTS[name]
            columns[name] = np.full(lane.length, default, dtype)
            columns[name][rows] = values
            there = set(rows)
            printed[name] = [row in there for row in range(lane.length)]
        flags = nonfinite_flags(lane.length, columns, printed)
        columns["flags"] = flags | columns.get("flags", np.zeros(lane.length, np.uint8))
        if "seconds" in rank.metrics:
            columns["seconds_precision"] = np.zeros(lane.length, np.float32)
            columns["seconds_precision"][rank.metrics["seconds"][0]] = rank.units
        for name, column in columns.items():
            lane.replace(name, column)
