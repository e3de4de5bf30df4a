"""Loss spikes, gradient spikes and non-finite steps: found in every step, recorded with the samples
of their batch.

Loss and gradient norm of each step are kept on the device (`RecentSteps`, one small copy a step)
and read with the figures of the next logged step, in the same single read: steps between logged
ones are seen too, and nothing waits.

A step is a spike when its value lies more than `DEVIATIONS` robust standard deviations above the
median of the last `WINDOW` steps. The window is that of llm.c's outlier detector, seven deviations
are OLMo 2's definition of a spike (arXiv 2501.00656; a rolling mean over 1,000 steps there). Median
and MAD take their place because one spike must not raise the limit for the next; 1.4826 MAD is the
standard deviation of a normal distribution (Rousseeuw and Croux, 1993). Gradient norms are compared
by their logarithm, as they vary in proportion to their size. A smooth curve has hardly any MAD, so
a deviation is at least `LEAST_DEVIATION`: a loss is a spike from 3.5 % above the median on at the
earliest, a norm from 1.4 times the median on.

A training's start is no spike: a falling loss lies below the median of what was before, and nothing
is judged before `FIRST_JUDGED` values are there, nor in the warm-up as far as one window reaches.
After a restart the window is filled from metrics.jsonl. A spike that stays is the new level after
half a window.

Cost: on the device one copy of two numbers per step; on the host of rank 0 about 20 microseconds
per step.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch

from drillyard.data.sampler import BatchShape, Mixture, SampleRef
from drillyard.guarded_files import open_regular
from drillyard.telemetry import RunLog
from drillyard.telemetry.jsonlines import decode
from drillyard.telemetry.metrics import METRICS_FILE

WINDOW: Final = 128
DEVIATIONS: Final = 7.0
SIGMA_PER_MAD: Final = 1.4826
FIRST_JUDGED: Final = 32
LEAST_DEVIATION: Final = {"loss": 0.005, "grad_norm": 0.05}
"""Of the median for a loss, of the logarithm for a gradient norm."""
SAMPLES_LISTED: Final = 1024
"""An event lists at most so many samples; `drillyard data show` computes all of them from the
step."""
_TAIL_BYTES = 1 << 18

Kind = Literal["loss_spike", "gradient_spike", "nonfinite_step"]


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Figures of every step, logged or not. `step` counts from 1."""

    step: int
    loss: float
    grad_norm: float


class RecentSteps:
    """Loss and gradient norm of the last `size` steps, on the device."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.values = torch.zeros(size, 2, dtype=torch.float64, device=device)

    def keep(self, step: int, loss: torch.Tensor, norm: torch.Tensor) -> None:
        """Keep the figures of step number `step` (from 0) in place of the oldest ones."""
        torch.stack([loss, norm], out=self.values[step % len(self.values)])

    def of(self, values: Sequence[float], step: int, count: int) -> list[StepFigures]:
        """The `count` steps up to `step` (from 0) in order, from `self.values` as read, flat."""
        size = len(self.values)
        steps = range(step + 1 - min(count, size), step + 1)
        return [
            StepFigures(s + 1, values[2 * (s % size)], values[2 * (s % size) + 1]) for s in steps
        ]


class RobustWindow:
    """The last `WINDOW` values, kept sorted: their median, and the median of distances from it."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, value: float) -> None:
        """Take a finite value in, the oldest out."""
        if len(self._recent) == WINDOW:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(value)
        insort(self._sorted, value)

    def median(self) -> float:
        return self._sorted[len(self._sorted) // 2]

    def deviation(self) -> float:
        """The standard deviation of a normal distribution with this MAD."""
        median = self.median()
        distances = sorted(abs(value - median) for value in self._sorted)
        return SIGMA_PER_MAD * distances[len(distances) // 2]


@dataclass(frozen=True, slots=True)
class Anomaly:
    """A step that stands out: against which median of the recent steps, and the limit that it
    exceeds.

    Both are None for a non-finite step at the very start; the limit is None for every non-finite
    one.
    """

    kind: Kind
    figures: StepFigures
    median: float | None
    limit: float | None


class SpikeDetector:
    """Judges steps in their order; pure. `warmup_steps` as in the schedule."""

    def __init__(self, warmup_steps: int) -> None:
        self.judged_from = max(FIRST_JUDGED, min(warmup_steps, WINDOW)) + 1
        self._losses, self._log_norms = RobustWindow(), RobustWindow()

    def learn(self, figures: StepFigures) -> None:
        """Take a step into the window without judging it."""
        if math.isfinite(figures.loss) and math.isfinite(figures.grad_norm):
            self._losses.add(figures.loss)
            self._log_norms.add(math.log(max(figures.grad_norm, 1e-300)))

    def judge(self, figures: StepFigures) -> Iterator[Anomaly]:
        """Yield the anomalies of the next step, then add it to the window."""
        if not (math.isfinite(figures.loss) and math.isfinite(figures.grad_norm)):
            yield Anomaly(
                "nonfinite_step",
                figures,
                self._losses.median() if len(self._losses) else None,
                None,
            )
            return
        if figures.step >= self.judged_from and len(self._losses) >= FIRST_JUDGED:
            yield from self._spikes(figures)
        self.learn(figures)

    def _spikes(self, figures: StepFigures) -> Iterator[Anomaly]:
        median = self._losses.median()
        if figures.loss > median:
            least = LEAST_DEVIATION["loss"] * abs(median)
            limit = median + DEVIATIONS * max(self._losses.deviation(), least)
            if figures.loss > limit:
                yield Anomaly("loss_spike", figures, median, limit)
        median = self._log_norms.median()
        if figures.grad_norm > math.exp(median):
            limit = median + DEVIATIONS * max(
                self._log_norms.deviation(), LEAST_DEVIATION["grad_norm"]
            )
            if math.log(figures.grad_norm) > limit:
                yield Anomaly("gradient_spike", figures, math.exp(median), math.exp(limit))


class SpikeReporter:
    """Judges the steps read at a logged step, on rank 0, and reports anomalies."""

    def __init__(
        self,
        log: RunLog,
        run_directory: Path,
        data: Mixture,
        shape: BatchShape,
        warmup_steps: int,
    ) -> None:
        self.log = log
        self.run_directory = run_directory
        self.data = data
        self.shape = shape
        self.detector = SpikeDetector(warmup_steps)
        self._started = False
        self._reported: dict[Kind, int] = {}

    def examine(self, recent: Sequence[StepFigures]) -> None:
        """Judge the steps since the last logged one, in their order."""
        if not self._started:
            self._started = True
            for figures in last_figures(self.run_directory, before=recent[0].step):
                self.detector.learn(figures)
        for figures in recent:
            for anomaly in self.detector.judge(figures):
                self.report(anomaly)

    def report(self, anomaly: Anomaly) -> None:
        """Write the event, and a line for people at the first step of a row."""
        step, figures = anomaly.figures.step, anomaly.figures
        drawn = self.data.indices(step - 1, self.shape)
        self.log.event(
            anomaly.kind,
            step=step,
            loss=figures.loss,
            grad_norm=figures.grad_norm,
            median=anomaly.median,
            limit=anomaly.limit,
            num_samples=len(drawn),
            samples=self.by_source(drawn[:SAMPLES_LISTED]),
        )
        if self._reported.get(anomaly.kind) != step - 1:
            self.log.message(
                f"{describe_anomaly(anomaly)}; `drillyard data show {self.run_directory} --step"
                f" {step}` prints it"
            )
        self._reported[anomaly.kind] = step

    def by_source(self, samples: Sequence[SampleRef]) -> dict[str, list[int]]:
        """Samples as numbers of sequences by source, in their order."""
        found: dict[str, list[int]] = {}
        for source, index in samples:
            found.setdefault(self.data.sources[source].name, []).append(index)
        return found


def describe_anomaly(anomaly: Anomaly) -> str:
    """`step 213: the loss is 7.12, a spike (median of the recent steps 2.31, limit 2.63)`."""
    figures = anomaly.figures
    if anomaly.kind == "nonfinite_step":
        return (
            f"step {figures.step}: loss {figures.loss}, gradient norm {figures.grad_norm}: skipped"
        )
    name, value = (
        ("loss", figures.loss)
        if anomaly.kind == "loss_spike"
        else ("gradient norm", figures.grad_norm)
    )
    return (
        f"step {figures.step}: the {name} is {value:.4g}, a spike "
        f"(median of the recent steps {anomaly.median:.4g}, limit {anomaly.limit:.4g})"
    )


def last_figures(run_directory: Path, before: int) -> list[StepFigures]:
    """The newest logged steps before step `before`, at most a window of them, from the end of
    metrics.jsonl."""
    try:
        with open_regular(run_directory / METRICS_FILE) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).splitlines()
    except OSError:
        return []  # not there, or not readable now: the window starts empty
    records = [record for record in map(decode, lines) if record is not None]
    by_step: dict[int, dict[str, Any]] = {
        record["step"]: record
        for record in records
        if isinstance(record.get("step"), int) and record["step"] < before
    }
    chosen = [by_step[step] for step in sorted(by_step)[-WINDOW:]]
    return [
        StepFigures(r["step"], r["loss"], r["grad_norm"])
        for r in chosen
        if None not in (r.get("loss"), r.get("grad_norm"))
    ]
