"""JSON lines that callbacks of HF Trainer write: LLaMA-Factory's trainer_log.jsonl and ms-swift's
logging.jsonl.

    {"current_steps": 10, "total_steps": 600, "loss": 1.25, "lr": 5e-05, "epoch": 0.05, "percentage":
     1.67, "elapsed_time": "0:01:40", "remaining_time": "1:38:20", "total_tokens": 163840}
    {"loss": 0.24, "grad_norm": 0.65, "learning_rate": 8.6e-07, "epoch": 0.57, "global_step/max_steps":
     "50/176", "elapsed_time": "1h 8m 9s", "memory(GiB)": 63.16}

Both have whole seconds since the training began (of a resumed run: since the resume). Losses are
means over `logging_steps`. LLaMA-Factory's `throughput` is a mean since the beginning, of all GPUs;
it is left out. Lines of evaluations have `eval_loss`; the last line has no loss and is no step.
Sources: hiyouga/LLaMA-Factory src/llamafactory/train/callbacks.py; modelscope/ms-swift
swift/trainers/callback.py.
"""  # noqa: E501

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from drillyard.loglines.blocks import LONGEST_LINE
from drillyard.measurement.formats.hf_trainer import learn_totals
from drillyard.measurement.formats.jsonlines import OBJECT, field, gather, load_all
from drillyard.measurement.formats.line_rules import EVENT_LOSS, LineRule, event_rule
from drillyard.measurement.formats.log_format import LARGEST_STEP, StepPattern, TextFormat
from drillyard.measurement.formats.values import Columns, MatchedLines, Values, words_seconds

_NAMES: Final = {
    "loss": ("loss",),
    "grad_norm": ("grad_norm",),
    "learning_rate": ("lr", "learning_rate"),
    "memory_gib": ("vram_allocated", "memory(GiB)"),
    "seconds": ("elapsed_time_per_iteration",),
    "_tokens_so_far": ("total_tokens",),
    "_samples_so_far": ("consumed_samples",),
}
_OF_ALL: Final = re.compile(r"(\d{1,18})/(\d{1,18})")


class _TrainerLines(TextFormat):
    """What both have in common."""

    name = title = "trainer_lines"
    anchor = b'"'
    windowed = True
    clock_restarts = True
    longest = LONGEST_LINE
    rules = (
        event_rule("evaluation", b'"eval_loss": ', rb'"eval_loss": "?' + EVENT_LOSS),
        LineRule(b'"train_runtime": ', rb'"train_runtime": "?[\d.]', learn_totals),
    )

    def step_pattern(self, line: bytes) -> StepPattern | None:
        begin = line.find(b"{")
        if begin < 0 or self.anchor not in line or not line.rstrip().endswith(b"}"):
            return None
        return StepPattern(begin, OBJECT, self._decode)

    def _decode(self, groups: Sequence[Values], place: MatchedLines) -> Columns:
        records = load_all(groups[0])
        columns: Columns = gather(records, _NAMES)
        steps, totals = zip(*map(self._step, records), strict=True)
        logged = np.array([record.get("loss") is not None for record in records])
        columns["step"] = np.where(logged, np.array(steps, np.int64), -1)
        columns["elapsed_seconds"] = np.array(
            [words_seconds(str(text or "").encode()) for text in field(records, "elapsed_time")]
        )
        if total := max(totals):
            self.facts["total_steps"] = total
        return columns

    @abstractmethod
    def _step(self, record: dict[str, Any]) -> tuple[int, int]:
        """The step of a record, -1 for none, and the steps in all."""


class LlamaFactory(_TrainerLines):
    name = "llama_factory"
    title = "LLaMA-Factory trainer_log.jsonl"
    preference = 92
    anchor = b'"current_steps":'

    def _step(self, record: dict[str, Any]) -> tuple[int, int]:
        step, total = (record.get(name) for name in ("current_steps", "total_steps"))
        return _whole(step, -1), _whole(total, 0)


class MsSwift(_TrainerLines):
    name = "ms_swift"
    title = "ms-swift logging.jsonl"
    preference = 94
    anchor = b'"global_step/max_steps":'

    def _step(self, record: dict[str, Any]) -> tuple[int, int]:
        found = _OF_ALL.fullmatch(str(record.get("global_step/max_steps")))
        return (-1, 0) if found is None else (int(found[1]), int(found[2]))


def _whole(value: Any, default: int) -> int:
    return value if type(value) is int and 0 <= value < LARGEST_STEP else default
