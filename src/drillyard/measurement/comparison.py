"""Runs side by side: by step, tokens, time and dollars, with the confidence of a difference.

The first run is what the others are compared with, at a quarter, half, three quarters and the end
of what all runs have reached; a loss there is the mean of those logged in the twentieth of the
range before it.

Confidence is Student's t on blocks, at 95 %: neighbouring steps resemble each other, means of long
blocks hardly do.
- Speed: each run's durations, warm-up left out, are cut into up to 20 blocks one after the other;
  the difference of the logarithms of their medians has Welch's interval, widened by what the
  printing of durations rounds away.
- Loss: the last fifth of the common range is cut into up to 10 blocks; the differences of the two
  runs' block means have the interval of paired values, so a loss that falls in both does not blur
  it.
With fewer than five blocks no interval is given; what another seed would do is not in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from drillyard.errors import UserError
from drillyard.estimation.confidence import CONFIDENCE, student_quantile
from drillyard.formatting import count
from drillyard.measurement.gpu_counts import gpu_seconds
from drillyard.measurement.parsed_log import NO_TIME
from drillyard.measurement.run_result import RunResult
from drillyard.measurement.step_times import Floats, last_rows
from drillyard.measurement.user_facts import PRECISIONS

Axis = Literal["step", "tokens", "seconds", "dollars"]
Rate = Literal["tokens_per_second_per_gpu", "step_seconds"]
AXES: Final[tuple[Axis, ...]] = ("step", "tokens", "seconds", "dollars")
VERSION: Final = 1
FEWEST_BLOCKS: Final = 5
_SPEED_BLOCKS: Final = 20
_LOSS_BLOCKS: Final = 10
_SHARES: Final = (0.25, 0.5, 0.75, 1.0)
_SMOOTHED: Final = 0.05
_TAIL: Final = 0.2


@dataclass(frozen=True, slots=True)
class Interval:
    """A difference with its 95 % confidence interval; `low` and `high` are None with too few
    blocks."""

    value: float
    low: float | None
    high: float | None
    blocks: int

    @property
    def certain(self) -> bool | None:
        """Whether the interval excludes 0; None without one."""
        return None if self.low is None or self.high is None else not self.low <= 0 <= self.high


@dataclass(frozen=True, slots=True)
class LossPoint:
    """The losses of all runs where each has got as far as `at` on an axis; None for a run without a
    loss there."""

    axis: Axis
    at: float
    losses: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class RunDifference:
    """One run against the first. `faster` is a fraction: 0.03 is 3 % more tokens per second per GPU
    (fewer seconds a step, where tokens are not known). `loss` is what its loss is higher by, at the
    end of the common range."""

    run: str
    faster: Interval | None
    of: Rate
    loss: dict[Axis, Interval]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that `--compare` shows. `differ` are the reasons why the runs cannot be compared,
    in words."""

    runs: tuple[RunResult, ...]
    names: tuple[str, ...]
    differ: tuple[str, ...]
    not_stated: tuple[str, ...]
    points: tuple[LossPoint, ...]
    against: tuple[RunDifference, ...]
    unknown_axes: dict[Axis, str]

    @property
    def comparable(self) -> bool:
        """Whether no known fact speaks against it."""
        return not self.differ

    def as_json(self) -> dict[str, Any]:
        """The published document: the documents of the runs (metrics_document.py), and what is
        between them."""
        return {
            "version": VERSION,
            "comparable": self.comparable,
            "differ": list(self.differ),
            "not_stated": list(self.not_stated),
            "confidence": CONFIDENCE,
            "method": "Student's t on blocks of neighbouring steps",
            "against_the_first": [
                {
                    "run": against.run,
                    "of": against.of,
                    "faster": against.faster and asdict(against.faster),
                    "loss_higher_by": {
                        axis: (loss := against.loss.get(axis)) and asdict(loss) for axis in AXES
                    },
                }
                for against in self.against
            ],
            "losses": [
                {
                    "axis": point.axis,
                    "at": point.at,
                    "loss": dict(zip(self.names, point.losses, strict=True)),
                }
                for point in self.points
            ],
            "unknown_axes": dict(self.unknown_axes),
            "runs": [
                {**run.as_json(), "name": name}
                for run, name in zip(self.runs, self.names, strict=True)
            ],
        }


def compare_runs(runs: Sequence[RunResult]) -> Comparison:
    """The runs side by side. UserError for fewer than two."""
    if len(runs) < 2:
        raise UserError("--compare needs two runs or more: drillyard metrics --compare RUN_A RUN_B")
    names = _names(runs)
    differ, not_stated = _identity(runs, names)
    progress: dict[Axis, list[Floats]] = {}
    unknown: dict[Axis, str] = {}
    for axis in AXES:
        values = [_progress(run, axis) for run in runs]
        lacking = [name for name, value in zip(names, values, strict=True) if value is None]
        known = [value for value in values if value is not None]
        if lacking:
            unknown[axis] = f"not known for {', '.join(lacking)}"
        elif all(len(value) for value in known):
            progress[axis] = known
        else:
            unknown[axis] = "a run has no finite loss"
    losses = [run.losses.loss for run in runs]
    points = [point for axis, along in progress.items() for point in _points(axis, along, losses)]
    against = []
    for index in range(1, len(runs)):
        tails = {
            axis: _tail(along[0], losses[0], along[index], losses[index])
            for axis, along in progress.items()
        }
        higher_by = {axis: interval for axis, interval in tails.items() if interval is not None}
        against.append(RunDifference(names[index], *_faster(runs[0], runs[index]), higher_by))
    return Comparison(
        tuple(runs), names, differ, not_stated, tuple(points), tuple(against), unknown
    )


def steps_done(run: RunResult) -> int | None:
    """How many steps the logged ones stand for, by their numbers; None where the log does not say
    of its lines which steps they are."""
    steps = run.log.steps
    if run.log.numbered_lines:
        return None
    if not len(steps):
        return 0
    step = steps.step[last_rows(steps)]
    stride = float(np.median(np.diff(step))) if len(step) > 1 else 1.0
    from_zero = int(steps.step.min() == 0)
    before = -from_zero if step[0] <= max(stride, 1) else int(step[0] - stride)
    return int(step[-1]) - before


def _names(runs: Sequence[RunResult]) -> tuple[str, ...]:
    """Distinct names of the runs: shortened paths, numbered where that is not enough."""
    parts = [run.name.rstrip("/").split("/") for run in runs]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return tuple(names)
    return tuple(f"{index + 1}: {run.name}" for index, run in enumerate(runs))


_IDENTITY: Final[dict[str, Callable[[RunResult], Any]]] = {
    "model": lambda run: run.log.facts.model,
    "parameters": lambda run: run.log.facts.parameters,
    "sequence length": lambda run: run.log.facts.sequence_length or run.asked.sequence_length,
    "precision": lambda run: run.log.facts.precision or run.asked.precision,
    "tokenizer": lambda run: run.log.facts.tokenizer,
}
_SAME_COUNT: Final = 0.01
"""Logs round parameters (70.55B)."""


def _identity(
    runs: Sequence[RunResult], names: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """List the known differences in what makes runs comparable, and what a log does not state."""
    differ, not_stated = [], []
    for what, of in _IDENTITY.items():
        values = {name: of(run) for name, run in zip(names, runs, strict=True)}
        stated = {name: value for name, value in values.items() if value is not None}
        if not all(_same(value, next(iter(stated.values()))) for value in stated.values()):
            shown = {
                name: count(value) if what == "parameters" else value
                for name, value in stated.items()
            }
            differ.append(
                f"{what}: {', '.join(f'{value} ({name})' for name, value in shown.items())}"
            )
        if len(stated) < len(values) and what != "parameters":
            not_stated.append(what)
    return tuple(differ), tuple(not_stated)


def _same(one: Any, other: Any) -> bool:
    """Whether two logs mean the same thing: names without their directory or organisation, in any
    case."""
    if isinstance(one, str) and isinstance(other, str):
        short, known = (value.rstrip("/").rsplit("/", 1)[-1].lower() for value in (one, other))
        return PRECISIONS.get(short, short) == PRECISIONS.get(known, known)
    if isinstance(one, float) or isinstance(other, float):
        return bool(abs(one - other) <= _SAME_COUNT * max(abs(one), abs(other)))
    return bool(one == other)


def _progress(run: RunResult, axis: Axis) -> Floats | None:
    """Position of each finite loss of a run along an axis; None where that is not known."""
    if run.log.numbered_lines and axis in ("step", "tokens"):
        return None
    steps = run.losses.step.astype(np.float64)
    if axis == "step":
        return steps
    if axis == "tokens":
        of_step = run.speed.tokens_per_step
        # Frameworks that count from 0 have done one step more than they print.
        from_zero = bool(len(run.log.steps) and run.log.steps.step.min() == 0)
        by_row, row_gpus = run.speed.row_tokens_per_gpu, run.speed.row_gpus
        if of_step is None or by_row is None or row_gpus is None:
            return None if of_step is None else (steps + from_zero) * of_step
        rows = last_rows(run.log.steps)
        rows = rows[np.isfinite(run.log.steps.loss[rows])]
        tokens = (by_row * row_gpus)[rows]
        each = np.where(np.isfinite(tokens), tokens, of_step)
        return np.cumsum(each * np.diff(steps, prepend=-float(from_zero)))
    if axis == "seconds":
        return _seconds(run)
    price, gpus = run.cost.usd_per_gpu_hour, run.speed.num_gpus
    if price is None or gpus is None:
        return None
    if run.speed.row_gpus is not None:
        spent = _seconds(run, run.speed.row_gpus)
        return None if spent is None else spent / 3600 * price
    seconds = _seconds(run)
    return None if seconds is None else seconds / 3600 * price * gpus


def _seconds(run: RunResult, row_gpus: NDArray[np.int64] | None = None) -> Floats | None:
    """Seconds since the start for each finite loss: by time stamps, else the durations of the steps
    until then. With `row_gpus`, GPU-seconds."""
    steps = run.log.steps
    rows = last_rows(steps)
    rows = rows[np.isfinite(steps.loss[rows])]
    if len(rows) and bool((steps.time_us[rows] != NO_TIME).all()):
        first = run.log.clock.first_time_us
        start = int(steps.time_us[rows[0]]) if first is None else first
        if row_gpus is None:
            elapsed: Floats = (steps.time_us[rows] - start) / 1e6
            return np.maximum.accumulate(elapsed)
        return gpu_seconds(run.log, start, np.maximum.accumulate(steps.time_us[rows]))
    typical = run.timing.times.typical
    if typical is None or run.log.numbered_lines:
        return None
    if run.timing.all is None:
        return run.losses.step.astype(np.float64) * typical
    took = np.full(len(steps), typical)
    took[run.timing.all.rows] = run.timing.all.seconds
    advance = np.maximum(np.diff(steps.step, prepend=steps.step[0] - 1), 1)
    took = took if row_gpus is None else took * row_gpus
    passed: Floats = np.cumsum(took * advance)[rows]
    return passed


def _points(axis: Axis, along: Sequence[Floats], losses: Sequence[Floats]) -> list[LossPoint]:
    """The losses at shares of the range that all runs have covered."""
    reach = min(float(progress[-1]) for progress in along)
    if not reach > 0:
        return []
    return [
        LossPoint(
            axis,
            share * reach,
            tuple(
                _mean_loss(progress, loss, share * reach - _SMOOTHED * reach, share * reach)
                for progress, loss in zip(along, losses, strict=True)
            ),
        )
        for share in _SHARES
    ]


def _mean_loss(along: Floats, loss: Floats, low: float, high: float) -> float | None:
    """The mean loss in (low, high] of an axis; the last one before where none falls there."""
    first, last = np.searchsorted(along, [low, high], side="right")
    return float(loss[min(first, last - 1) : last].mean()) if last else None


def _faster(base: RunResult, run: RunResult) -> tuple[Interval | None, Rate]:
    """By which fraction `run` is faster than `base`."""
    rates = [one.speed.tokens_per_second_per_gpu for one in (base, run)]
    times = [one.timing.times.typical for one in (base, run)]
    of: Rate = "step_seconds"
    if rates[0] and rates[1]:
        of, ratio = "tokens_per_second_per_gpu", rates[1] / rates[0]
    elif times[0] and times[1]:
        ratio = times[0] / times[1]
    else:
        return None, of
    before, after = _log_medians(base), _log_medians(run)
    blocks = min(len(before), len(after))
    if blocks < FEWEST_BLOCKS:
        return Interval(ratio - 1, None, None, blocks), of
    variances = [float(np.var(values, ddof=1)) / len(values) for values in (before, after)]
    error = math.sqrt(sum(variances))
    half = (
        student_quantile((1 + CONFIDENCE) / 2, _welch_degrees(variances, (len(before), len(after))))
        * error
    )
    half += base.timing.times.relative_precision + run.timing.times.relative_precision
    low, high = math.log(ratio) - half, math.log(ratio) + half
    return Interval(ratio - 1, math.exp(low) - 1, math.exp(high) - 1, blocks), of


def _log_medians(run: RunResult) -> Floats:
    if run.timing.kept is None:
        return np.empty(0)
    seconds = run.timing.kept.seconds
    if run.speed.row_tokens_per_gpu is not None:
        seconds = seconds / run.speed.row_tokens_per_gpu[run.timing.kept.rows]
    blocks = np.array_split(seconds, min(_SPEED_BLOCKS, max(len(seconds) // 2, 1)))
    return np.log([float(np.median(block)) for block in blocks])


def _welch_degrees(variances: Sequence[float], counts: Sequence[int]) -> int:
    """Welch and Satterthwaite's degrees of freedom, rounded down; not below what the quantile is
    good for."""
    total = sum(variances)
    if total == 0:
        return sum(counts) - 2
    spread = sum(
        variance**2 / (count - 1) for variance, count in zip(variances, counts, strict=True)
    )
    return max(int(total**2 / spread), FEWEST_BLOCKS - 1)


def _tail(base_along: Floats, base_loss: Floats, along: Floats, loss: Floats) -> Interval | None:
    """Excess of a run's loss over the first run's in the last fifth of the range that they
    share."""
    reach = min(float(base_along[-1]), float(along[-1]))
    edges = np.linspace(reach * (1 - _TAIL), reach, _LOSS_BLOCKS + 1)
    differences = []
    for low, high in pairwise(edges.tolist()):
        means = []
        for progress, values in ((base_along, base_loss), (along, loss)):
            first, last = np.searchsorted(progress, [low, high], side="right")
            means.append(float(values[first:last].mean()) if last > first else math.nan)
        if not any(map(math.isnan, means)):
            differences.append(means[1] - means[0])
    if not differences:
        before, after = (
            _mean_loss(base_along, base_loss, reach, reach),
            _mean_loss(along, loss, reach, reach),
        )
        return None if before is None or after is None else Interval(after - before, None, None, 0)
    mean = float(np.mean(differences))
    if len(differences) < FEWEST_BLOCKS:
        return Interval(mean, None, None, len(differences))
    error = float(np.std(differences, ddof=1)) / math.sqrt(len(differences))
    half = student_quantile((1 + CONFIDENCE) / 2, len(differences) - 1) * error
    return Interval(mean, mean - half, mean + half, len(differences))
