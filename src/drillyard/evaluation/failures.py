"""An error in an evaluation is an error on every rank: training goes on, and no rank waits for
another.

Often only one of several ranks fails (out of memory with the longest prompts, a full local disk)
while the others are in a collective that it would never join. So everything that can fail in an
evaluation runs in one of two ways, after which all ranks continue or all raise EvaluationFailed:

- `alone`: work without a collective;
- `forward`: work that calls the model once. A sharded model gathers its weights block by block, so
  the rank that failed takes part in the remaining gathers and computes nothing
  (`join_remaining_gathers` in parallel/parallelize.py).

Cost: one all-reduce of one number between CPUs each. Limits: an error in a collective itself, or in
the remaining gathers, ends the attempt like any error in training; so does a killed rank.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from drillyard.errors import UserError
from drillyard.models.loss import LanguageModelLoss
from drillyard.parallel.collectives import gather
from drillyard.parallel.parallelize import finished_modules, join_remaining_gathers
from drillyard.parallel.ranks import Ranks

T = TypeVar("T")
_RANKS_NAMED = 3


class EvaluationStopped(Exception):
    """All ranks have agreed to stop while they evaluate."""


class EvaluationFailed(Exception):
    """Part of an evaluation raised on at least one rank; raised on all of them, with the same
    contents.

    `reason` is one line. `stack` is the traceback of the first rank that failed; None where all
    errors are UserErrors.
    """

    def __init__(self, reason: str, stack: str | None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.stack = stack


@dataclass(frozen=True)
class _Error:
    """Exception that one rank raised."""

    rank: int
    text: str
    stack: str | None


@dataclass(frozen=True)
class FailureAgreement:
    """Runs the parts of an evaluation of `root`; all ranks call it alike.

    `before_forward` is called before each forward. It may raise EvaluationStopped, on all ranks at
    once.
    """

    root: LanguageModelLoss
    ranks: Ranks
    before_forward: Callable[[], None] = lambda: None

    def alone(self, work: Callable[[], T]) -> T:
        """The result of `work`, which contains no collective. Raises EvaluationFailed."""
        return self._agreed(*self._attempt(work))

    def forward(self, work: Callable[[], T]) -> T:
        """The result of `work`, which calls the model once. Raises EvaluationFailed, or
        EvaluationStopped."""
        self.before_forward()
        with finished_modules(self.root) as finished:
            result, error = self._attempt(work)
        if error is not None:
            join_remaining_gathers(self.root, finished)
        return self._agreed(result, error)

    def _attempt(self, work: Callable[[], T]) -> tuple[T | None, _Error | None]:
        """The result, or the error as text: its frames would keep the tensors of the failed forward
        in memory."""
        try:
            return work(), None
        except Exception as error:
            text = " ".join(str(error).split())
            if isinstance(error, UserError):
                return None, _Error(self.ranks.rank, text, None)
            stack = "".join(traceback.format_exception(error))
            return None, _Error(self.ranks.rank, f"{type(error).__name__}: {text}", stack)

    def _agreed(self, result: T | None, error: _Error | None) -> T:
        failed = torch.tensor([error is not None], dtype=torch.int32)
        if self.ranks.world_size > 1:
            dist.all_reduce(failed, op=dist.ReduceOp.MAX)
        if failed.item():
            errors = [each for each in gather(error) if each is not None]
            stack = next((each.stack for each in errors if each.stack), None)
            raise EvaluationFailed(_in_words(errors, self.ranks.world_size), stack)
        return result  # type: ignore[return-value]


def _in_words(errors: list[_Error], world_size: int) -> str:
    """One line; without rank numbers where all ranks raised the same."""
    texts = {error.text for error in errors}
    if len(errors) == world_size and len(texts) == 1:
        return texts.pop()
    shown = [f"rank {error.rank}: {error.text}" for error in errors[:_RANKS_NAMED]]
    return "; ".join(
        [
            *shown,
            *([f"and {len(errors) - _RANKS_NAMED} more ranks"] if errors[_RANKS_NAMED:] else []),
        ]
    )
