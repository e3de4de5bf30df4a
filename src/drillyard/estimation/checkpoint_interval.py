"""Best interval between checkpoints, and the time that a run then takes, in closed form.

Letters, all in seconds: tau = useful work between two saves, C = what a save blocks training for, D
= how long it then drains to storage in the background, R = a restart, M = mean time between
failures of the whole job. Failures come at a constant rate (exponential gaps), also while the job
restarts; a restart that fails is repeated.

- Young 1974 (CACM 17:530): tau = sqrt(2 C M). First order, for C and tau far below M; a cross check
  here.
- Daly 2006 (FGCS 22:303-312): tau = sqrt(2 C M) [1 + sqrt(C/2M)/3 + (C/2M)/9] - C where C < 2M,
  else tau = M.
- Time of a run: T = M e^(R/M) [e^(D/M) sum_i (e^((tau_i + C)/M) - 1) + e^(D/M) - 1] over its saves
  i. With D = 0 and equal intervals this is Daly's complete wall time, M e^(R/M) (e^((tau + C)/M) -
  1) work/tau. D follows from the same renewal argument: work counts from the moment when its save
  is on storage, so an attempt that lasts X secures the saves i with sum_(j<=i) (tau_j + C) + D <=
  X. Its e^(D/M) does not depend on tau: draining moves the best interval only by the bound tau >= D
  (one save is written before the next begins). To first order a failure loses tau/2 + D.

Limits: one tier of checkpoints, one failure at a time, nodes for a restart at hand (see `simulator`
for spares).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from drillyard.hardware.facts import FactSource

DALY = FactSource("J. T. Daly, Future Generation Computer Systems 22 (2006) 303-312", None)
YOUNG = FactSource("J. W. Young, Communications of the ACM 17 (1974) 530-531", None)
META_ETTR = FactSource("arXiv 2410.21680: expected effective training time ratio", None)
LEAST_GAIN: Final = 1e-3
"""The share of a run's time that another interval than Daly's must save to be chosen."""


@dataclass(frozen=True, slots=True)
class SaveSchedule:
    """The steps of a run and when it saves: every `interval_steps` steps, and after the last one.

    A save blocks training for `blocking_seconds` and is on storage `drain_seconds` later.
    """

    steps: int
    step_seconds: float
    interval_steps: int
    blocking_seconds: float
    drain_seconds: float

    @property
    def interval_seconds(self) -> float:
        """Useful work between two saves."""
        return self.interval_steps * self.step_seconds

    @property
    def cycle_seconds(self) -> float:
        """From one save to the next, the blocking part included."""
        return self.interval_seconds + self.blocking_seconds

    @property
    def work_seconds(self) -> float:
        return self.steps * self.step_seconds

    @property
    def saves(self) -> int:
        """Number of saves of the run, the last one included."""
        return -(-self.steps // self.interval_steps)

    @property
    def failure_free_seconds(self) -> float:
        """The run without any failure: steps, blocking parts, and the last save's way to
        storage."""
        return self.work_seconds + self.saves * self.blocking_seconds + self.drain_seconds


def young_interval(blocking_seconds: float, mtbf_seconds: float) -> float:
    """The best interval to first order (Young 1974), in seconds of work."""
    return math.sqrt(2 * blocking_seconds * mtbf_seconds) if blocking_seconds else 0.0


def daly_interval(blocking_seconds: float, mtbf_seconds: float) -> float:
    """The best interval to higher order (Daly 2006), in seconds of work; infinite for a job that
    never fails."""
    if math.isinf(mtbf_seconds):
        return math.inf
    if blocking_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = blocking_seconds / (2 * mtbf_seconds)
    return (
        young_interval(blocking_seconds, mtbf_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9)
        - blocking_seconds
    )


def expected_wall_seconds(
    schedule: SaveSchedule, restart_seconds: float, mtbf_seconds: float
) -> float:
    """Mean wall time of the run, failures included; infinite where it practically never ends."""
    if math.isinf(mtbf_seconds):
        return schedule.failure_free_seconds
    full, rest = divmod(schedule.steps, schedule.interval_steps)
    last = rest * schedule.step_seconds + schedule.blocking_seconds if rest else 0.0
    drain = schedule.drain_seconds / mtbf_seconds
    try:
        segments = full * math.expm1(schedule.cycle_seconds / mtbf_seconds) + math.expm1(
            last / mtbf_seconds
        )
        total = math.exp(drain) * segments + math.expm1(drain)
        return mtbf_seconds * math.exp(restart_seconds / mtbf_seconds) * total
    except OverflowError:
        return math.inf


def first_order_ettr(
    failures_per_second: float,
    restart_seconds: float,
    interval_seconds: float,
    blocking_seconds: float,
) -> float:
    """Meta's expected effective training time ratio, (1 - rate (R + tau/2)) / (1 + C/tau), without
    queue wait.

    To first order in the failure rate: it counts failures as if none hit a restart and each lost
    half an interval, and goes below 0 where they are frequent. A cross check, not the estimate.
    """
    lost = failures_per_second * (restart_seconds + interval_seconds / 2)
    return (1 - lost) / (1 + blocking_seconds / interval_seconds)


def least_interval_steps(step_seconds: float, drain_seconds: float, steps: int) -> int:
    """The shortest interval in steps: a save is on storage before the next begins; never more than
    the run."""
    return min(steps, max(1, math.ceil(drain_seconds / step_seconds)))


def choose_schedule(
    *,
    steps: int,
    step_seconds: float,
    blocking_seconds: float,
    drain_seconds: float,
    restart_seconds: float,
    mtbf_seconds: float,
) -> SaveSchedule:
    """Interval of saves: max(Daly, drain), at most the run, rounded to steps.

    Where the run is only a few intervals long, a short last one would waste a save: as many saves,
    or one fewer, evenly spread, and one save at the end, are chosen where they take at least
    LEAST_GAIN less time.
    """
    least = least_interval_steps(step_seconds, drain_seconds, steps)
    target = daly_interval(blocking_seconds, mtbf_seconds) / step_seconds
    plain = steps if target >= steps else max(least, round(target))
    candidates = {
        max(least, math.ceil(steps / saves)) for saves in (1, steps // plain, steps // plain + 1)
    }

    def wall_seconds(interval_steps: int) -> float:
        schedule = SaveSchedule(
            steps, step_seconds, interval_steps, blocking_seconds, drain_seconds
        )
        return expected_wall_seconds(schedule, restart_seconds, mtbf_seconds)

    best = min(sorted(candidates), key=wall_seconds)
    chosen = best if wall_seconds(best) < wall_seconds(plain) * (1 - LEAST_GAIN) else plain
    return SaveSchedule(steps, step_seconds, chosen, blocking_seconds, drain_seconds)
