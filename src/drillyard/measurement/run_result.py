"""Result of a run as one value: step times, speed, goodput, loss, cost, what is missing and what is
doubtful.

    result = measure(log, UserFacts(accelerator="b200", num_gpus=16, params=70_550_000_000, ...))
    result.timing.times.p50, result.speed.mfu, result.cost.per_step, result.goodput
    result.as_json()            # the published document (metrics_document.py)

Everything printed, compared or drawn is made from this value.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from drillyard.goodput import Goodput
from drillyard.hardware import Catalog, catalog
from drillyard.measurement.cost import Cost, cost
from drillyard.measurement.line_steps import with_logging_steps
from drillyard.measurement.log_events import Wait, WaitKind, find_waits, written_seconds
from drillyard.measurement.log_goodput import goodput_of_log
from drillyard.measurement.losses import HeldOut, Losses, flagged_steps, held_out, losses
from drillyard.measurement.parsed_log import ParsedLog
from drillyard.measurement.speed import Speed, speed
from drillyard.measurement.step_times import COARSE, Timing, measure_step_times
from drillyard.measurement.user_facts import Missing, UserFacts
from drillyard.version import __version__

_CURVE_POINTS: Final = 200
_MOST_LISTED: Final = 100
_SPEED_FIELDS: Final = (
    *(
        "num_gpus",
        "num_gpus_changes",
        "sequence_length",
        "tokens_per_step",
        "tokens_per_second_per_gpu",
        "tokens_from",
        "parameters",
    ),
    *(
        "flops_per_token",
        "formula",
        "tflops_per_gpu",
        "accelerator",
        "precision",
        "precision_from",
        "mfu",
    ),
)
_PRINTED_FIELDS: Final = ("tokens_per_second_per_gpu", "tflops_per_gpu", "mfu")
_GOODPUT_FIELDS: Final = ("goodput", "restarts", "steps_redone", "clock_steps_back")
"""Published under their own names."""


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
        """The run's directory, or the first source that was used."""
        if self.log.run_directory is not None:
            return self.log.run_directory.name
        used = [source.name for source in self.log.sources if source.used]
        return used[0] if used else "-"

    def as_json(self) -> dict[str, Any]:
        """The published document (metrics_document.py): numbers that are not known are None."""
        # Imported here: pydantic takes longer to import than most logs to read.
        from drillyard.measurement.metrics_document import VERSION, MetricsDocument

        speed, cost, account, losses, stalls = (
            self.speed,
            self.cost,
            self.goodput,
            self.losses,
            self.timing.stalls,
        )
        return MetricsDocument.model_validate(
            {
                "version": VERSION,
                "drillyard": __version__,
                "name": self.name,
                "format": self.log.format,
                "sources": self.log.sources,
                "step_seconds": self.timing.times,
                **{name: getattr(speed, name) for name in _SPEED_FIELDS},
                "peak_tflops": None if speed.peak_flops is None else speed.peak_flops / 1e12,
                "printed": {name: getattr(speed, f"printed_{name}") for name in _PRINTED_FIELDS},
                "price_per_gpu_hour": cost.usd_per_gpu_hour,
                "cost_per_step": cost.per_step,
                "cost_per_million_tokens": cost.per_million_tokens,
                "cost_so_far": cost.so_far,
                **{name: getattr(account, name, None) for name in _GOODPUT_FIELDS},
                "wall_seconds": None if account is None else account.wall_microseconds / 1e6,
                "seconds_by_category": None if account is None else account.seconds(),
                "microseconds_by_category": None if account is None else account.times,
                "loss": {
                    **{
                        name: getattr(losses, name)
                        for name in ("first", "last", "lowest", "lowest_step")
                    },
                    "curve": losses.curve(_CURVE_POINTS),
                },
                "held_out": self.held_out,
                "skipped_steps": flagged_steps(losses.skipped),
                "skipped": losses.skipped[:_MOST_LISTED],
                "nonfinite_steps": flagged_steps(losses.nonfinite),
                "nonfinite": losses.nonfinite[:_MOST_LISTED],
                "stalled_steps": len(stalls),
                "stalls": stalls[:_MOST_LISTED],
                "checkpoints": {
                    **_waited(self.waits, "checkpoint"),
                    "written": len(self.written_seconds),
                    "median_written_seconds": _median(self.written_seconds),
                },
                "evaluations": _waited(self.waits, "evaluation"),
                "missing": self.missing,
                "warnings": self.warnings,
            }
        ).model_dump(mode="json")


def _waited(waits: Sequence[Wait], what: WaitKind) -> dict[str, Any]:
    found = [wait.seconds for wait in waits if wait.what == what]
    seconds = [value for value in found if value is not None]
    return {
        "count": len(found),
        "median_seconds": _median(seconds),
        "longest_seconds": max(seconds, default=None),
        "total_seconds": sum(seconds) if seconds else None,
    }


def _median(seconds: Sequence[float]) -> float | None:
    return statistics.median(seconds) if seconds else None


def measure(
    log: ParsedLog, asked: UserFacts | None = None, facts: Catalog | None = None
) -> RunResult:
    """Measure the run of `log`, with facts from the user. `facts` is the hardware catalog.

    Raises UserError for flags that contradict each other or name what is not known.
    """
    asked, facts = asked or UserFacts(), facts or catalog()
    numbered = log.numbered_lines
    log = with_logging_steps(log, asked.logging_steps)
    account = goodput_of_log(log, asked.job_start_us, asked.job_end_us)
    timed = measure_step_times(log, start_step=asked.start_step, end_step=asked.end_step)
    fast = speed(log, timed, asked, facts)
    costs = cost(fast, asked, facts, timed, account)
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
        missing=(
            *_missing_times(log, timed, asked),
            *fast.missing,
            *_missing_goodput(account),
            *costs.missing,
        ),
        warnings=(
            *log.warnings,
            *_unused(asked, numbered=numbered),
            *_doubts(timed, account),
            *fast.warnings,
            *costs.notes,
        ),
    )


def _unused(asked: UserFacts, *, numbered: bool) -> Iterator[str]:
    if asked.logging_steps is not None and not numbered:
        yield (
            f"--logging-steps {asked.logging_steps} is not used: the log says which steps its lines"
            " are"
        )


def _missing_times(log: ParsedLog, timed: Timing, asked: UserFacts) -> list[Missing]:
    times = timed.times
    if times.typical is None:
        if timed.all is not None and (asked.start_step is not None or asked.end_step is not None):
            return [
                Missing(
                    "step_seconds",
                    ("--start-step", "--end-step"),
                    "no logged step lies in the range",
                )
            ]
        if log.numbered_lines:
            reason = "the log does not say how many steps lie between two lines"
            return [Missing("step_seconds", ("--logging-steps",), reason)]
        return [
            Missing(
                "step_seconds",
                (),
                "no line has the duration of a step, nor a time stamp or a clock",
            )
        ]
    what = (
        f"{times.basis} of {times.window_steps} steps"
        if times.window_steps > 1
        else f"{times.basis}"
    )
    unknown = [name for name in ("p50", "p95", "p99") if getattr(times, name) is None]
    return [
        Missing(f"step_seconds.{name}", (), f"single steps are not logged ({what})")
        for name in unknown
    ]


def _missing_goodput(account: Goodput | None) -> Iterator[Missing]:
    if account is None:
        yield Missing(
            "goodput",
            (),
            "the lines of the steps carry no time stamps (kubectl logs --timestamps adds them)",
        )
    elif not account.wall_microseconds:
        yield Missing("goodput", (), "the log has a single time stamp, and no time passed")


def _doubts(timed: Timing, account: Goodput | None) -> Iterator[str]:
    times = timed.times
    if times.relative_precision > COARSE:
        yield (
            f"step times are known to +-{times.relative_precision:.1%} only"
            f" (+-{times.precision_seconds:g} s on {times.typical:.4g} s); so is every rate made"
            " from them"
        )
    if times.basis is not None and times.left_out == 0 and times.steps == 1:
        yield "only one step has a duration: it may be a warm-up step"
    if account is not None and account.clock_steps_back:
        yield (
            f"the clock stepped back {account.clock_steps_back} times; the time that it hid is in"
            " no figure"
        )
