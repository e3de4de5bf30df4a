"""What srun says of its tasks, in the log of the job script: a node whose agent has ended is known before it joins.

Each agent is one task, and a task's number is its node's rank. srun writes `srun: error: n3: task 2: Exited with exit
code 2`, or `n[1-2]: tasks 1-2: Killed` where several end at once; with --label each line of a task begins with its
number, as in `2: error: ...`.
"""

from __future__ import annotations

import re

from .shared_modules import cause

_ENDED = re.compile(r"^srun: error: \S+: tasks? ([\d,-]+): (.+)$", re.MULTILINE)


class Allocation:
    """What Slurm says of the nodes of this start of the job; nothing where another scheduler, or none, starts agents.

    `hosts`: their names by rank. `log` and `offset`: the file that srun writes to, and where this start begins in it.
    """

    def __init__(self, hosts: str | None = None, log: tuple[str, int] | None = None) -> None:
        self.hosts = dict(enumerate(hosts.split(","))) if hosts else {}
        self._log = log

    def ended(self) -> dict[int, str]:
        """Why agents have ended, by node rank: their last words and srun's. Without those that exited with 0."""
        if self._log is None:
            return {}
        path, offset = self._log
        try:
            with open(path, "rb") as file:
                file.seek(offset)
                text = file.read().decode(errors="replace")
        except OSError:
            return {}
        # A line that is still being written tells nothing yet.
        text = text[: text.rfind("\n") + 1]
        ends = {node: found[2] for found in _ENDED.finditer(text) for node in _numbers(found[1])}
        return {node: _with_last_words(text, node, how) for node, how in ends.items()}


def _numbers(listed: str) -> list[int]:
    """`0-2,5` -> 0, 1, 2, 5."""
    bounds = [each.partition("-") for each in listed.split(",") if each]
    return [node for first, _, last in bounds for node in range(int(first), int(last or first) + 1)]


def _with_last_words(text: str, node: int, how: str) -> str:
    said = re.findall(rf"^ *0*{node}: (.*)$", text, re.MULTILINE)
    line = cause.error_line(cause.last_words("\n".join(said)))
    return f"{line} ({how})" if line else how
