"""Durations of steps: which durations of a log to trust, which to leave out, and their spread.

Sources of durations, the first that exists (`Basis`):

| basis | what it is | what it gives |
|---|---|---|
| steps | each logged step's own duration | mean, percentiles, jitter |
| windows | means over N steps (log_interval) | mean and median, not how single steps vary |
| time stamps | the time between lines, saves and evaluations in between taken off | as steps or windows |
| progress clock | the same from the seconds since the start that a progress bar shows | as steps or windows |
| moving averages | NeMo's timing without stamps: each value repeats those before it | mean and median |
| whole run | the training loop's time over its steps, as the log's last line states it | the mean |

A moving average is replaced by time stamps where lines have them. So are durations printed to fewer
than two digits, such as 0.06 s (0.055 to 0.065, or 8 %), where the stamps are finer.

Warm-up: the first step of every attempt is left out (it compiles, allocates, opens files), and then
leading steps until one is no longer than is usual in the second half of the attempt: its median and
2 %, or 4 robust standard deviations if that is more. Drillyard's own log says which steps compiled:
those and the first of every attempt are left out and no others, as in summary.json. A range of
steps that the user names is used unchanged. The headline is the median of the rest. Where restarts
changed the number of GPUs, it and the spread are those of the steps on the last number: a mixture
is no run's step time, and its jitter would be the difference between the numbers.

Cost: a few sorts of numpy columns; about 0.3 s for a million steps.
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from drillyard.goodput import STALL_FACTOR
from drillyard.measurement.formats.drillyard import Drillyard
from drillyard.measurement.gpu_counts import gpus_by_row
from drillyard.measurement.log_events import Wait, find_waits, overlap_microseconds
from drillyard.measurement.log_totals import seconds_per_step
from drillyard.measurement.parsed_log import COMPILED, LONGEST_SECONDS, NO_TIME, ParsedLog, Steps

Floats = NDArray[np.float64]
Basis = Literal["steps", "windows", "time stamps", "progress clock", "moving averages", "whole run"]

COARSE: Final = 0.01
"""A duration that is known to no better than this fraction is replaced by a better one where there
is one, and its precision is reported."""
SHORTEST_SECONDS: Final = 1e-7
"""No step takes less: such numbers are damage."""
USUAL_MARGIN: Final = 0.02
USUAL_DEVIATIONS: Final = 4.0
_MAD_TO_DEVIATION: Final = 1.4826
_SLOW_FACTOR: Final = 1.5
_FEWEST_TO_DETECT: Final = 6


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds per step of rows of a log. `rows` are indices into its steps; `weight` is how many
    steps each counts for.

    `window_steps` is how many steps each is the mean of, usually; `precision_seconds` how far off
    one may be.
    """

    basis: Basis
    rows: NDArray[np.intp]
    seconds: Floats
    weight: NDArray[np.int64]
    window_steps: int
    precision_seconds: float

    def select(self, kept: NDArray[np.bool_]) -> Durations:
        return replace(
            self, rows=self.rows[kept], seconds=self.seconds[kept], weight=self.weight[kept]
        )

    @property
    def single(self) -> bool:
        """Whether each value is the duration of one step."""
        return self.window_steps == 1 and self.basis not in ("moving averages", "whole run")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The spread of step times in seconds; None for what the log does not give (see the module's
    table).

    `jitter` is the robust standard deviation (1.4826 x median absolute deviation) over the median;
    `slow_fraction` the share of steps that took over 1.5 times the median. `steps` counts the steps
    that the figures rest on, `left_out` those set aside as warm-up or outside of the range. Where
    the number of GPUs changed, the figures are of the steps on the last one, `num_gpus`, and
    `on_other_gpus` counts the rest.
    """

    basis: Basis | None
    p50: float | None = None
    mean: float | None = None
    p95: float | None = None
    p99: float | None = None
    lowest: float | None = None
    highest: float | None = None
    jitter: float | None = None
    slow_fraction: float | None = None
    num_gpus: int | None = None
    on_other_gpus: int = 0
    window_steps: int = 1
    steps: int = 0
    left_out: int = 0
    first_step: int | None = None
    last_step: int | None = None
    precision_seconds: float = 0.0

    @property
    def typical(self) -> float | None:
        """The headline: the median, or the mean where only that is known."""
        return self.mean if self.p50 is None else self.p50

    @property
    def relative_precision(self) -> float:
        """Largest error of the typical step time, as a fraction, by rounding alone."""
        return self.precision_seconds / self.typical if self.typical else 0.0


@dataclass(frozen=True, slots=True)
class Stall:
    """A step, or a window of steps, that took over three times the median per step."""

    step: int
    seconds: float
    place: str
    time_us: int | None


@dataclass(frozen=True, slots=True)
class Timing:
    """Step times with what they rest on: all durations of the log, those that were kept, and of
    these the ones on the last number of GPUs, of which `times` are."""

    times: StepTimes
    all: Durations | None
    kept: Durations | None
    of_last_gpus: Durations | None = None
    stalls: tuple[Stall, ...] = ()


def measure_step_times(
    log: ParsedLog, *, start_step: int | None = None, end_step: int | None = None
) -> Timing:
    """The step times of a run, warm-up left out, or those of `start_step` to `end_step` (both
    included)."""
    found = durations(log)
    if found is None:
        return Timing(_whole_run(log), None, None)
    step = log.steps.step[found.rows]
    if start_step is None and end_step is None:
        settled = _rows_not_compiled if log.format == Drillyard.name else _rows_after_warmup
        chosen = settled(log.steps, found)
        if not chosen.any():
            chosen[:] = True
    else:
        chosen = (step >= (-math.inf if start_step is None else start_step)) & (
            step <= (math.inf if end_step is None else end_step)
        )
    kept = found.select(chosen)
    left_out = int(found.weight[~chosen].sum())
    if not len(kept.rows):
        return Timing(StepTimes(basis=None, left_out=left_out), found, None)
    gpus = gpus_by_row(log)[kept.rows]
    last = gpus == gpus[-1]
    of_last = kept.select(last)
    times = _spread(log.steps, of_last, left_out)
    if not last.all():
        others = int(kept.weight[~last].sum())
        times = replace(times, num_gpus=int(gpus[-1]) or None, on_other_gpus=others)
    return Timing(times, found, kept, of_last, tuple(_stalls(log, found, kept, times)))


def durations(log: ParsedLog) -> Durations | None:
    """The most trustworthy durations that the log has for single rows; None where it has none, or
    does not say which steps its rows are."""
    if log.numbered_lines:
        return None
    printed = _printed(log.steps)
    trusted = printed is not None and printed.basis != "moving averages"
    if printed is not None and trusted and _relative_precision(printed) <= COARSE:
        return printed
    stamped = _between_stamps(log) or _between_progress(log)
    if stamped is None or (
        printed is not None
        and trusted
        and _relative_precision(stamped) > _relative_precision(printed)
    ):
        return printed
    return stamped


def _relative_precision(found: Durations) -> float:
    return found.precision_seconds / float(np.median(found.seconds))


def _printed(steps: Steps) -> Durations | None:
    rows = np.flatnonzero((steps.seconds > SHORTEST_SECONDS) & (steps.seconds < LONGEST_SECONDS))
    if not len(rows):
        return None
    windows = steps.window_steps[rows]
    window = float(np.median(windows))
    basis: Basis = "moving averages" if window < 1 else "windows" if window > 1 else "steps"
    usable = rows if basis == "moving averages" else rows[windows > 0]
    return Durations(
        basis,
        usable,
        steps.seconds[usable],
        steps.stands_for[usable].astype(np.int64),
        max(int(window), 1),
        # Kept in 32 bits: 0.005 would come back as 0.004999999888.
        float(f"{np.median(steps.seconds_precision[usable]):.6g}"),
    )


def _between_stamps(log: ParsedLog) -> Durations | None:
    steps = log.steps
    rows = np.flatnonzero(steps.time_us != NO_TIME)
    return _between(
        log,
        rows,
        steps.time_us[rows],
        max(log.clock.resolution_us, 1),
        "time stamps",
        find_waits(log),
    )


def _between_progress(log: ParsedLog) -> Durations | None:
    """Durations where a bar shows seconds since the start. Saves and evaluations in between cannot
    be taken off."""
    elapsed = log.steps.elapsed_seconds
    rows = np.flatnonzero((elapsed >= 0) & (elapsed < LONGEST_SECONDS))
    whole = bool((elapsed[rows] == np.rint(elapsed[rows])).all())
    times = np.rint(elapsed[rows] * 1e6).astype(np.int64)
    return _between(log, rows, times, 1_000_000 if whole else 1_000, "progress clock", [])


def _between(
    log: ParsedLog,
    rows: NDArray[np.intp],
    times: NDArray[np.int64],
    tick: int,
    basis: Basis,
    waited: list[Wait],
) -> Durations | None:
    """Durations from the times of neighbouring rows of an attempt; of rows further apart where
    ticks are coarse."""
    steps = log.steps
    if len(rows) < 2:
        return None
    if float(np.median(np.diff(times))) < tick / COARSE:
        mean = max((int(times[-1]) - int(times[0])) / (len(times) - 1), 1.0)
        stride = min(max(math.ceil(tick / COARSE / mean), 1), max(len(rows) // 4, 1))
        rows, times = rows[::stride], times[::stride]
        if len(rows) < 2:
            return None
    after = rows[1:]
    advance = np.diff(steps.step[rows])
    took = np.diff(times) - overlap_microseconds(waited, times)
    good = (np.diff(steps.attempt[rows]) == 0) & (advance > 0) & (took > 0)
    if not good.any():
        return None
    window = max(int(np.median(advance[good])), 1)
    # A folded row stands for several steps of one length: its window is not a mean over different
    # ones.
    weight = steps.stands_for[after[good]].astype(np.int64)
    window = 1 if bool((weight == advance[good]).all()) else window
    seconds = took[good] / 1e6 / advance[good]
    return Durations(
        basis, after[good], seconds, weight, window, tick / 1e6 / float(np.median(advance[good]))
    )


def _rows_not_compiled(steps: Steps, found: Durations) -> NDArray[np.bool_]:
    """Select the durations that are no warm-up in a log that marks the steps that compiled."""
    first = np.diff(steps.attempt[found.rows], prepend=-1) != 0
    kept: NDArray[np.bool_] = ~first & (steps.flags[found.rows] & COMPILED == 0)
    return kept


def _rows_after_warmup(steps: Steps, found: Durations) -> NDArray[np.bool_]:
    """Select the durations that are no warm-up in any other log."""
    kept = np.ones(len(found.rows), dtype=bool)
    attempts = steps.attempt[found.rows]
    # Between two times there is no first step.
    first = 0 if found.basis in ("time stamps", "progress clock") else 1
    for attempt in np.unique(attempts):
        own = np.flatnonzero(attempts == attempt)
        kept[own[: first + _unsettled(found.seconds[own[first:]])]] = False
    return kept


def _unsettled(seconds: Floats) -> int:
    """Number of leading values longer than is usual in the second half; never more than the first
    half."""
    if len(seconds) < _FEWEST_TO_DETECT:
        return 0
    later = seconds[len(seconds) // 2 :]
    median = float(np.median(later))
    deviation = _MAD_TO_DEVIATION * float(np.median(np.abs(later - median)))
    usual = seconds[: len(seconds) // 2] <= median + max(
        USUAL_MARGIN * median, USUAL_DEVIATIONS * deviation
    )
    return int(usual.argmax()) if usual.any() else len(usual)


def _spread(steps: Steps, kept: Durations, left_out: int) -> StepTimes:
    seconds, weight = kept.seconds, kept.weight
    p50, p95, p99 = quantiles(seconds, weight, (0.5, 0.95, 0.99))
    deviation = _MAD_TO_DEVIATION * quantiles(np.abs(seconds - p50), weight, (0.5,))[0]
    total = int(weight.sum())
    step = steps.step[kept.rows]
    single = kept.single
    return StepTimes(
        basis=kept.basis,
        p50=p50,
        mean=float((seconds * weight).sum() / total),
        p95=p95 if single else None,
        p99=p99 if single else None,
        lowest=float(seconds.min()),
        highest=float(seconds.max()),
        jitter=deviation / p50 if single and total > 1 else None,
        slow_fraction=float(weight[seconds > _SLOW_FACTOR * p50].sum() / total) if single else None,
        window_steps=kept.window_steps,
        steps=total,
        left_out=left_out,
        first_step=int(step.min()),
        last_step=int(step.max()),
        precision_seconds=kept.precision_seconds,
    )


def quantiles(values: Floats, weight: NDArray[np.int64], shares: tuple[float, ...]) -> list[float]:
    """The quantiles of `values`, each counted `weight` times: what numpy's linear method gives for
    all of them."""
    if int(weight.max()) == 1:
        return [float(value) for value in np.quantile(values, shares)]
    order = np.argsort(values, kind="stable")
    ordered, counted = values[order], np.cumsum(weight[order])
    places = []
    for share in shares:
        place = share * (int(counted[-1]) - 1)
        below, above = (
            float(ordered[np.searchsorted(counted, side, "right")])
            for side in (math.floor(place), math.ceil(place))
        )
        places.append(below + (above - below) * (place - math.floor(place)))
    return places


def _stalls(log: ParsedLog, found: Durations, kept: Durations, times: StepTimes) -> Iterator[Stall]:
    """Every duration over three medians of the steps on as many GPUs, in the order of the log; not
    the first of an attempt, which is warm-up."""
    assert times.p50 is not None
    if found.basis == "moving averages":
        return
    first = np.diff(log.steps.attempt[found.rows], prepend=-1) != 0
    printed = found.basis in ("steps", "windows")
    usual = np.full(len(found.rows), times.p50)
    by_row = gpus_by_row(log)
    gpus, kept_gpus = by_row[found.rows], by_row[kept.rows]
    if len(np.unique(gpus)) > 1:
        for number in np.unique(kept_gpus).tolist():
            own = kept_gpus == number
            usual[gpus == number] = quantiles(kept.seconds[own], kept.weight[own], (0.5,))[0]
    long = np.flatnonzero((found.seconds > STALL_FACTOR * usual) & ~(first & printed))
    for row, seconds in zip(found.rows[long].tolist(), found.seconds[long].tolist(), strict=True):
        time_us = int(log.steps.time_us[row])
        yield Stall(
            int(log.steps.step[row]),
            seconds,
            log.place(row),
            None if time_us == NO_TIME else time_us,
        )


def _whole_run(log: ParsedLog) -> StepTimes:
    """The mean step of a log that has no time but that of its training loop."""
    if (found := seconds_per_step(log)) is None:
        return StepTimes(basis=None)
    mean, first, last = found
    count = last - first + 1
    return StepTimes(
        basis="whole run",
        mean=mean,
        window_steps=count,
        steps=count,
        first_step=first,
        last_step=last,
    )


def last_rows(steps: Steps) -> NDArray[np.intp]:
    """The rows that led to the run's present state, by step: a later start undoes all steps after
    the one it resumed from, also those that it has not repeated."""
    step = np.append(steps.step, np.iinfo(np.int64).max)
    lowest_from = np.minimum.accumulate(step[::-1])[::-1]
    return np.flatnonzero(step[:-1] < lowest_from[1:])


def total_tokens(steps: Steps) -> int | None:
    """Tokens of all steps that led to the run's present state; steps between two logged ones count
    like the later. None where the log does not give the tokens of each step."""
    current = steps.select(last_rows(steps))
    before_first = current.step[:1] - np.maximum(current.window_steps[:1], 1)
    tokens = float((current.tokens * np.diff(current.step, prepend=before_first)).sum())
    return round(tokens) if math.isfinite(tokens) else None
