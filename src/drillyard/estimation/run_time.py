"""Time of the whole run: its steps, its saves, and the time lost to failures, at every failure rate
given.

A step's time is a range, and so is the rate of failures where the user has chosen none: failures
are estimated for both ends of the one under each of the other, and the run's time spans them all.
Saves follow `checkpoint.every_steps`; where it is not set, the best interval is taken, and the
answer names it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from drillyard.config.kernel_rules import MASTER_BYTES
from drillyard.config.run import RunConfig
from drillyard.config.run_checks import steps_for_epochs
from drillyard.errors import UserError
from drillyard.estimation.checkpoint_interval import least_interval_steps
from drillyard.estimation.failure_estimate import (
    GOODPUT_NAME,
    CheckpointCost,
    FailureEstimate,
    FailureInputs,
    RestartTime,
    checkpoint_cost,
    failure_estimate,
    restart_time,
)
from drillyard.estimation.failure_rates import (
    FailureRate,
    custom_failure_rate,
    failure_rate,
    failure_rates,
)
from drillyard.estimation.quantity import SECONDS_PER_HOUR, Quantity, Range, above_zero, quantity
from drillyard.estimation.setup import Setup
from drillyard.estimation.target import Target
from drillyard.formatting import every_steps
from drillyard.hardware import FactSource

TRAINER = FactSource(
    "Drillyard's trainer: masters and moments in fp32, in fp64 for precision fp64", None
)
LEAST_GOODPUT = 0.01
"""Below this a run practically never ends, and its wall time means nothing."""
LEAST_GOODPUT_GAIN = 0.01
"""The share of goodput that a better interval must bring to be recommended over the one that is
set."""


@dataclass(frozen=True, slots=True)
class MissingInput:
    """Something that cannot be estimated: why, and the flag that gives what is missing."""

    what: str
    why: str
    give: str


@dataclass(frozen=True, slots=True)
class FailureOptions:
    """The user's figures for failures; None: the published one, or left out with a note.

    `rate` is a name or a number of failures per 1,000 node-days. `restart_seconds` is a whole
    restart.
    """

    rate: str | None = None
    preemptions_per_node_day: float | None = None
    restart_seconds: float | None = None
    storage_gb_per_s: float | None = None
    host_device_gb_per_s: float | None = None

    def rates(self) -> tuple[FailureRate, ...]:
        """The rate that was chosen, or every named one. UserError for a name that is not known."""
        if self.rate is None:
            return tuple(failure_rates().values())
        try:
            number = float(self.rate)
        except ValueError:
            return (failure_rate(self.rate),)
        return (custom_failure_rate(number),)


@dataclass(frozen=True, slots=True)
class FailureEstimateRange:
    """One failure rate at both ends of the step time: `fast` and `slow` save as the answer assumes.

    `best` is what the best interval would give at the fast end where the config's own is used
    instead.
    """

    rate: FailureRate
    fast: FailureEstimate
    slow: FailureEstimate
    best: FailureEstimate | None

    @property
    def quantities(self) -> list[Range]:
        """All figures, as ranges from the lower to the higher end."""
        return [
            _between(one, other)
            for one, other in zip(self.fast.quantities, self.slow.quantities, strict=True)
        ]

    @property
    def interruptions(self) -> Range:
        return self._range("expected interruptions")

    @property
    def checkpoint_interval_steps(self) -> Range:
        return self._range("interval in steps")

    @property
    def goodput(self) -> Range:
        """ETTR without queue wait."""
        return self._range(GOODPUT_NAME)

    @property
    def wall_seconds(self) -> Range:
        return self._range("expected wall time")

    @property
    def best_interval_steps(self) -> int:
        return (self.best or self.fast).schedule.interval_steps

    def _range(self, name: str) -> Range:
        return _between(self.fast.named(name), self.slow.named(name))


@dataclass(frozen=True, slots=True)
class RunTime:
    """A run of `steps` steps. `wall` holds failures and saves; None where these are not known, see
    `missing`.

    `saves` says in words which interval is assumed; `warnings` are about the one that is set.
    """

    steps: int
    tokens: float
    num_gpus: int
    failure_free: Range
    wall: Range | None = None
    missing: tuple[MissingInput, ...] = ()
    failures: tuple[FailureEstimateRange, ...] = ()
    checkpoint: CheckpointCost | None = None
    restart: RestartTime | None = None
    saves: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def longest(self) -> Range:
        """Time that is paid for: with failures where they are known."""
        return self.failure_free if self.wall is None else self.wall

    @property
    def gpu_hours(self) -> Range:
        """Hours of all GPUs, with failures where they are known."""
        return self.longest.map(
            "GPU-hours",
            lambda seconds: seconds * self.num_gpus / SECONDS_PER_HOUR,
            "h",
            "wall time x GPUs",
        )


def planned_steps(config: RunConfig, setup: Setup, data_tokens: float | None) -> int | None:
    """The steps of the run; None where it is given in epochs and the number of tokens in the data
    is unknown.

    `data_tokens` are taken to fill their sequences.
    """
    if config.training.steps is not None:
        return config.training.steps
    if config.training.epochs is None or data_tokens is None:
        return None
    sequences = math.ceil(
        above_zero("the number of tokens in the data", data_tokens) / setup.sequence_length
    )
    return steps_for_epochs(
        config.training.epochs, sequences, setup.tokens_per_step // setup.sequence_length
    )


def saved_state(setup: Setup) -> Quantity:
    """Bytes that each GPU saves: master weights and AdamW's two moments of all that is trained,
    each once."""
    item, trained = MASTER_BYTES[setup.precision], setup.adapter_parameters
    if trained is None:
        trained = setup.spec.total_parameters
    each = item + 2 * setup.moment_bytes
    formula = f"trained parameters x {each:.4g} ({item}-byte weight and two moments) / GPUs"
    return quantity("saved per GPU", trained * each / setup.world_size, "bytes", formula, TRAINER)


def run_time(
    config: RunConfig,
    setup: Setup,
    target: Target,
    step_seconds: Range,
    steps: int,
    options: FailureOptions,
) -> RunTime:
    """Estimate the time of `steps` steps on `target`.

    UserError for options that make no sense, and where the run would practically never end at any
    save interval.
    """
    alone = step_seconds.map(
        "steps alone", lambda seconds: seconds * steps, "s", "steps x step time"
    )
    run = RunTime(steps, float(steps) * setup.tokens_per_step, target.num_gpus, alone)
    rates = options.rates()
    if missing := _missing(config, target, options):
        return replace(run, missing=missing)
    checkpoint = checkpoint_cost(
        target.machine,
        target.accelerator,
        num_nodes=target.num_nodes,
        bytes_per_gpu=saved_state(setup).value,
        asynchronous=config.checkpoint.asynchronous,
        copies=setup.replicate,
        storage_gb_per_s=options.storage_gb_per_s,
        host_device_gb_per_s=options.host_device_gb_per_s,
    )
    restart = restart_time(checkpoint)
    if options.restart_seconds is not None:
        restart = restart_time(
            checkpoint, detect_seconds=0, start_seconds=options.restart_seconds, load_seconds=0
        )
    run = replace(run, checkpoint=checkpoint, restart=restart)
    fast = _failure_inputs(run, target, step_seconds.low, options)
    slow = replace(fast, step_seconds=step_seconds.high)
    best = [
        FailureEstimateRange(rate, failure_estimate(fast, rate), failure_estimate(slow, rate), None)
        for rate in rates
    ]
    failures, saves, warnings = _with_own_interval(config, fast, slow, best)
    # From the fastest end at the lowest rate to the slowest end at the highest; of a bound only the
    # former.
    ends = [end for one in failures for end in (one.wall_seconds.low, one.wall_seconds.high)]
    ends.sort(key=lambda one: one.value)
    wall = Range(ends[0], ends[0] if step_seconds.is_bound else ends[-1], step_seconds.is_bound)
    return replace(run, wall=wall, failures=tuple(failures), saves=saves, warnings=warnings)


def middle_failure_inputs(
    run: RunTime, target: Target, step_seconds: Range, options: FailureOptions
) -> FailureInputs:
    """The job in the middle of the range of step times, for simulation. The run's failures must be
    known."""
    ends = step_seconds.low, step_seconds.high
    middle = quantity(
        "step time", step_seconds.middle, "s", "geometric mean of low and high", *ends
    )
    return _failure_inputs(run, target, middle, options)


def _failure_inputs(
    run: RunTime, target: Target, step: Quantity, options: FailureOptions
) -> FailureInputs:
    assert run.checkpoint is not None and run.restart is not None
    return FailureInputs(
        machine=target.machine,
        num_nodes=target.num_nodes,
        steps=run.steps,
        step_seconds=step,
        checkpoint=run.checkpoint,
        restart=run.restart,
        spot=target.consumption == "spot",
        preemptions_per_node_day=options.preemptions_per_node_day,
    )


def _with_own_interval(
    config: RunConfig, fast: FailureInputs, slow: FailureInputs, best: list[FailureEstimateRange]
) -> tuple[list[FailureEstimateRange], str, tuple[str, ...]]:
    """The failures as the config saves, how it saves in words, and warnings about that."""
    intervals = sorted(
        {end.schedule.interval_steps for one in best for end in (one.fast, one.slow)}
    )
    span = f"{intervals[0]}" if len(intervals) == 1 else f"{intervals[0]} to {intervals[-1]}"
    recommended = f"{every_steps(span)}, the best interval"
    own = config.checkpoint.every_steps
    if own is None:
        return best, recommended, _unset(fast, best)
    own = min(own, fast.steps)
    least = least_interval_steps(fast.step_seconds.value, fast.checkpoint.drain.value, fast.steps)
    if own < least:
        warning = (
            f"checkpoint.every_steps: {own} steps are over before the save before them is on"
            f" storage ({fast.checkpoint.drain.value:.3g} s); at least {least} are needed, and the"
            " best interval is taken here"
        )
        return best, recommended, (warning,)
    found = []
    for one in best:
        mine, slower = _at_interval(fast, own, one.rate), _at_interval(slow, own, one.rate)
        if mine is None or slower is None:
            warning = (
                f"checkpoint.every_steps: with a save every {own} steps the run practically never"
                f" ends at {one.rate.name}; the best interval is taken here"
            )
            return best, recommended, (warning,)
        found.append(FailureEstimateRange(one.rate, mine, slower, one.fast))
    gain = max(one.fast.goodput - mine.fast.goodput for one, mine in zip(best, found, strict=True))
    better = f"checkpoint.every_steps: {span} instead of {own} brings up to {gain:.1%} more goodput"
    return (
        found,
        f"{every_steps(str(own))}, as configured",
        (better,) if gain > LEAST_GOODPUT_GAIN else (),
    )


def _unset(fast: FailureInputs, best: list[FailureEstimateRange]) -> tuple[str, ...]:
    """A warning where saving only at the end, as an unset interval means, costs more than the best
    interval."""
    worst = max(best, key=lambda one: one.rate.rate.value)
    at_end = _at_interval(fast, fast.steps, worst.rate)
    if at_end is not None and worst.fast.goodput - at_end.goodput <= LEAST_GOODPUT_GAIN:
        return ()
    ends = (
        f"has a goodput of {at_end.goodput:.0%} at {worst.rate.name}"
        if at_end
        else "practically never ends"
    )
    advice = f"set it to about {worst.fast.schedule.interval_steps}"
    return (
        f"checkpoint.every_steps is not set: a run that saves only at its end {ends}; {advice}",
    )


def _at_interval(
    job: FailureInputs, interval_steps: int, rate: FailureRate
) -> FailureEstimate | None:
    """The failures with a given interval; None where hardly any of the time would be work."""
    try:
        found = failure_estimate(replace(job, interval_steps=interval_steps), rate)
    except UserError:
        return None
    return found if found.goodput >= LEAST_GOODPUT else None


def _between(one: Quantity, other: Quantity) -> Range:
    """Both ends in order."""
    low, high = sorted((one, other), key=lambda end: end.value)
    return Range(low, high)


def _missing(
    config: RunConfig, target: Target, options: FailureOptions
) -> tuple[MissingInput, ...]:
    """Unknown inputs of the cost of a save."""
    what = "failures, goodput and the wall time with them"
    found = []
    if (
        options.storage_gb_per_s is None
        and target.machine.storage_gb_per_s(target.num_nodes) is None
    ):
        found.append(
            MissingInput(
                what,
                f"no storage bandwidth of {target.machine.name} is known",
                "--storage-gb-per-s",
            )
        )
    link = target.accelerator.host_device_bandwidth_gb_per_s()
    if config.checkpoint.asynchronous and options.host_device_gb_per_s is None and link is None:
        why = f"no host-device bandwidth of {target.accelerator.name} is known"
        found.append(MissingInput(what, why, "--host-device-gb-per-s"))
    return tuple(found)
