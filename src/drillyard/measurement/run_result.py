"""What a run achieved, as one value: step times, speed, goodput, loss, cost, what is missing and what is doubtful.

    result = measure(log, Asked(accelerator="b200", num_gpus=16, params=70_550_000_000, ...))
    result.timing.times.p50, result.speed.mfu, result.cost.per_step, result.goodput
    result.as_json()            # the published document (metrics_document.py)

Everything printed, compared or drawn is made from this; it computes nothing that is not in here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drillyard.goodput import Goodput
from drillyard.hardware import Catalog, catalog
from drillyard.measurement.cost import Cost, cost
from drillyard.measurement.log_goodput import JobTimes, goodput_of_log
from drillyard.measurement.losses import HeldOut, Losses, held_out, losses
from drillyard.measurement.marks import Wait, find_waits, written_seconds
from drillyard.measurement.parsed_log import ParsedLog
from drillyard.measurement.speed import Speed, speed
from drillyard.measurement.step_times import COARSE, Timing, measure_step_times
from drillyard.measurement.user_facts import Missing, UserFacts


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RunResult:
    """A measured run. `goodput` is None for a log without time stamps."""

    log: ParsedLog
    asked: UserFacts
    timing: Timing
    speed: Speed
    cost: Cost
    goodput: Goodput | None
    losses: Losses
    held_out: dict[str, HeldOut]
    waits: tuple[Wait, ...]
    written_seconds: tuple[float, ...]
    missing: tuple[Missing, ...]
    warnings: tuple[str, ...]

    @property
    def name(self) -> str:
        """What to call the run: its directory, or the first source that was used."""
        if self.log.run_directory is not None:
            return self.log.run_directory.name
        used = [source.name for source in self.log.sources if source.used]
        return used[0] if used else "-"

    def as_json(self) -> dict[str, Any]:
        """The published document, version `document.VERSION`: numbers that are not known are None."""
        from drillyard.measurement.metrics_document import build_document

        return build_document(self).model_dump(mode="json")


def measure(log: ParsedLog, asked: UserFacts | None = None, facts: Catalog | None = None) -> RunResult:
    """What the run of `log` achieved, with what the user says beside it. `facts` is the hardware catalog.

    Raises UserError for flags that contradict each other or name what is not known.
    """
    asked, facts = asked or UserFacts(), facts or catalog()
    account = goodput_of_log(log, JobTimes(asked.job_start_us, asked.job_end_us))
    timed = measure_step_times(log, start_step=asked.start_step, end_step=asked.end_step)
    fast = speed(log, timed, asked, facts)
    billed_seconds = None if account is None else (account.wall_microseconds - account.times.waiting) / 1e6
    costs = cost(fast, asked, facts, step_seconds=timed.times.typical, billed_seconds=billed_seconds)
    return RunResult(
        log=log,
        asked=asked,
        timing=timed,
        speed=fast,
        cost=costs,
        goodput=account,
        losses=losses(log),
        held_out=held_out(log),
        waits=tuple(find_waits(log)),
        written_seconds=tuple(written_seconds(log)),
        missing=(*_missing_times(log, timed, asked), *fast.missing, *_missing_goodput(account), *costs.missing),
        warnings=(*log.warnings, *_doubts(timed, account), *fast.warnings, *costs.notes),
    )


def _missing_times(log: ParsedLog, timed: Timing, asked: UserFacts) -> list[Missing]:
    times = timed.times
    if times.typical is None:
        if timed.all is not None and (asked.start_step is not None or asked.end_step is not None):
            reason = "no logged step lies in the range"
            return [Missing("step_seconds", ("--start-step", "--end-step"), reason)]
        return [Missing("step_seconds", (), "no line has the duration of a step, nor a time stamp or a clock")]
    what = f"{times.basis} of {times.window_steps} steps" if times.window_steps > 1 else f"{times.basis}"
    unknown = [name for name in ("p50", "p95", "p99") if getattr(times, name) is None]
    return [Missing(f"step_seconds.{name}", (), f"single steps are not logged ({what})") for name in unknown]


def _missing_goodput(account: Goodput | None) -> list[Missing]:
    if account is None:
        return [
            Missing("goodput", (), "the lines of the steps carry no time stamps (kubectl logs --timestamps adds them)")
        ]
    if not account.wall_microseconds:
        return [Missing("goodput", (), "the log has a single time stamp, and no time passed")]
    return []


def _doubts(timed: Timing, account: Goodput | None) -> list[str]:
    times, doubts = timed.times, []
    if times.relative_precision > COARSE:
        doubts.append(
            f"step times are known to +-{times.relative_precision:.1%} only"
            f" (+-{times.precision_seconds:g} s on {times.typical:.4g} s); so is every rate made from them"
        )
    if times.basis is not None and times.left_out == 0 and times.steps == 1:
        doubts.append("only one step has a duration: it may be a warm-up step")
    if account is not None and account.clock_steps_back:
        doubts.append(f"the clock stepped back {account.clock_steps_back} times; the time that it hid is in no figure")
    return doubts
