"""How many GPUs a run had, start by start.

A restart may have another number of ranks. Every figure per GPU, and every cost, uses the number at
the time; a figure that names one number names all of them (`2, then 1`). Drillyard's own logs state
the number at each start and on each line of metrics.jsonl. Logs of other frameworks count as having
one, that of their first start or of --num-gpus; a warning names the others that they state. Step
times cannot be per GPU: their spread is that of the steps on the last number (`step_times.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from drillyard.measurement.formats.drillyard import Drillyard
from drillyard.measurement.parsed_log import ParsedLog
from drillyard.telemetry.events import started_gpus

Floats = NDArray[np.float64]


def gpus_by_attempt(log: ParsedLog) -> dict[int, int]:
    """The number of GPUs of each attempt that states it: on the lines of its steps, else where it
    starts. Empty for logs of other frameworks."""
    if log.format != Drillyard.name:
        return {}
    found = {}
    for event in log.events:
        gpus = started_gpus(event.kind, event.values.get("world_size"))
        if gpus is not None:
            found[event.attempt] = gpus
    rows = np.flatnonzero(log.steps.num_gpus)
    attempts, first = np.unique(log.steps.attempt[rows], return_index=True)
    return found | dict(
        zip(attempts.tolist(), log.steps.num_gpus[rows[first]].tolist(), strict=True)
    )


def gpu_seconds(log: ParsedLog, start_us: int, times_us: NDArray[np.int64]) -> Floats:
    """GPU-seconds of a run from `start_us` to each of `times_us`, for logs with time stamps. What
    comes before the first start that states its number counts with that number."""
    numbers, starts = gpus_by_attempt(log), []
    for event in log.events:
        gpus = started_gpus(event.kind, event.values.get("world_size"))
        if gpus is not None and event.time_us is not None:
            starts.append((event.time_us, gpus))
            numbers.pop(event.attempt, None)
    attempts, first = np.unique(log.steps.attempt, return_index=True)
    for attempt, row in zip(attempts.tolist(), first.tolist(), strict=True):
        if attempt in numbers:
            # No event says when it started: after the last step before.
            starts.append((int(log.steps.time_us[max(row - 1, 0)]), numbers[attempt]))
    starts.sort()
    spent = np.zeros(len(times_us))
    for index, (begin, gpus) in enumerate(starts):
        begin = start_us if index == 0 else max(begin, start_us)
        end = max(starts[index + 1][0], start_us) if index + 1 < len(starts) else times_us.max()
        spent += gpus * np.clip(times_us - begin, 0, max(end - begin, 0)) / 1e6
    return spent


def gpus_by_row(log: ParsedLog) -> NDArray[np.int64]:
    """The number of GPUs of each row of `log.steps`; 0 where it is not known."""
    found = gpus_by_attempt(log)
    attempts, place = np.unique(log.steps.attempt, return_inverse=True)
    numbers = [found.get(attempt, 0) for attempt in attempts.tolist()]
    by_row: NDArray[np.int64] = np.array(numbers, np.int64)[place]
    return by_row


def gpu_changes(numbers: Iterable[int]) -> tuple[int, ...]:
    """The known numbers in order, each as often as the run changed to it: 2, 2, 0, 1 is (2, 1)."""
    return tuple(number for number, _ in itertools.groupby(n for n in numbers if n > 0))


def gpus_text(changes: Sequence[int]) -> str:
    """`16`, or `2, then 1`; of more than four numbers the first and the last."""
    shown = [f"{number:,}" for number in changes]
    return ", then ".join([shown[0], "others", shown[-1]] if len(shown) > 4 else shown)
