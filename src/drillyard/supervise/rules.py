"""When a failed round is followed by a fresh one. Pure: values in, a decision out.

Some exit codes are final (FINAL_EXIT_CODES, which the agents of a launched run follow too). For all other failures
there are three limits:

- `max_restarts`: restarts after rounds that did at least one step;
- failures before the first step, in a row: what cannot start will not start by trying for long. They have a limit of
  their own, so that trouble of the first seconds (a port, a slow mount) does not use up the restarts of a long run;
- no progress: a round that ends at the same step with the same error as the one before it. Two such rounds show that
  the crash belongs to the run and not to the host, and more of them would only cost time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

FINAL_EXIT_CODES = {
    2: "a mistake of the user",
    126: "a command that cannot be executed",
    127: "a command that was not found",
}
"""Codes after which the same command would end in the same way again. 126 and 127 are a shell's: POSIX.1-2017,
XCU 2.8.2, Exit Status for Commands."""
MAX_FAILED_STARTS = 3
MAX_ROUNDS_WITHOUT_PROGRESS = 2


@dataclass(frozen=True)
class AttemptFailure:
    """How a round failed: the last step it told of (None: it never did one), its error in words, and its exit code."""

    step: int | None
    error: str
    exit_code: int = 1

    @property
    def signature(self) -> tuple[int | None, str]:
        """What two failures share when they are the same: step and error without addresses, ids and times."""
        return self.step, re.sub(r"0x[0-9a-fA-F]+|\d+", "#", self.error)


class RestartPolicy:
    """Counts the failures of a run and decides after each whether the ranks are started again."""

    def __init__(self, max_restarts: int) -> None:
        self.max_restarts = max_restarts
        self.restarts = 0
        self._failed_starts = 0
        self._without_progress = 0
        self._last: AttemptFailure | None = None

    def refusal(self, failure: AttemptFailure) -> str | None:
        """Why there is no further round after `failure`, or None when there is one."""
        if self.max_restarts == 0:
            return "restarts are off (--max-restarts 0)"
        if failure.exit_code in FINAL_EXIT_CODES:
            return (
                f"exit code {failure.exit_code} means {FINAL_EXIT_CODES[failure.exit_code]}: a restart would not help"
            )
        if failure.step is None:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                return f"{self._failed_starts} rounds in a row failed before their first step"
            return None
        self._failed_starts = 0
        repeats = self._last is not None and self._last.signature == failure.signature
        self._without_progress = self._without_progress + 1 if repeats else 0
        self._last = failure
        if self._without_progress >= MAX_ROUNDS_WITHOUT_PROGRESS:
            return (
                f"{self._without_progress} further rounds ended at the same step {failure.step} with the same error: "
                "another round would do the same"
            )
        if self.restarts >= self.max_restarts:
            return f"all {self.max_restarts} restarts are used (--max-restarts)"
        self.restarts += 1
        return None
