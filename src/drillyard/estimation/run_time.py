"""How long the whole run takes: its steps, its saves, and what failures take, at every failure rate that is asked for.

A step's time is a range, and so is the rate of failures where the user has chosen none: the outlook of `failures` is
made for both ends of the one under each of the other, and the run's time spans them all. Saves follow
`checkpoint.every_steps`; where it is not set the best interval is taken, and the answer says which it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from drillyard.config import RunConfig
from drillyard.config.auto_values import MASTER_BYTES
from drillyard.config.checks import steps_for_epochs
from drillyard.errors import UserError
from drillyard.estimation.checkpoint_interval import least_interval_steps
from drillyard.estimation.failure_estimate import (
    CheckpointCost,
    FailureEstimate,
    FailureInputs,
    RestartTime,
    checkpoint_cost,
    failure_estimate,
    restart_time,
)
from drillyard.estimation.failure_rates import FailureRate, custom_failure_rate, failure_rate, failure_rates
from drillyard.estimation.formatting import every_steps
from drillyard.estimation.quantity import Quantity, Range, above_zero, quantity
from drillyard.estimation.setup import Setup
from drillyard.estimation.target import Target
from drillyard.hardware import FactSource
from drillyard.modelspec import adapter_parameters

TRAINER = FactSource("Drillyard's trainer: masters and moments in fp32, in fp64 for precision fp64", None)
LEAST_GOODPUT = 0.01
"""Below this a run practically never ends, and its wall time means nothing."""
LEAST_GOODPUT_GAIN = 0.01
"""The share of goodput that a better interval must bring to be recommended over the one that is set."""


@dataclass(frozen=True, slots=True)
class MissingInput:
    """Something that cannot be answered: why, and the flag that would let it."""

    what: str
    why: str
    give: str


@dataclass(frozen=True, slots=True)
class FailureOptions:
    """What the user says of failures; None: the published figure, or left out and said so.

    `rate` is a name or a number of failures per 1,000 node-days. `restart_seconds` is a whole restart.
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

    `best` is what the best interval would give at the fast end where the config's own is used instead.
    """

    rate: FailureRate
    fast: FailureEstimate
    slow: FailureEstimate
    best: FailureEstimate | None

    @property
    def goodput(self) -> tuple[float, float]:
        """The lower and the higher end."""
        low, high = sorted((self.fast.goodput, self.slow.goodput))
        return low, high


@dataclass(frozen=True, slots=True)
class RunTime:
    """A run of `steps` steps. `wall` holds failures and saves; None where they cannot be told, see `missing`.

    `saves` says in words which interval is assumed; `warnings` are about the one that is set.
    """

    steps: int
    tokens: float
    failure_free: Range
    wall: Range | None
    missing: tuple[MissingInput, ...]
    outlooks: tuple[FailureEstimateRange, ...]
    checkpoint: CheckpointCost | None
    restart: RestartTime | None
    saves: str
    warnings: tuple[str, ...]

    @property
    def longest(self) -> Range:
        """What is paid for: with failures where they are known."""
        return self.failure_free if self.wall is None else self.wall


def planned_steps(config: RunConfig, setup: Setup, data_tokens: float | None) -> int | None:
    """The steps of the run; None where it is given in epochs and the number of tokens in the data is unknown.

    `data_tokens` are taken to fill their sequences.
    """
    if config.training.steps is not None:
        return config.training.steps
    if config.training.epochs is None or data_tokens is None:
        return None
    sequences = math.ceil(above_zero("the number of tokens in the data", data_tokens) / setup.sequence_length)
    return steps_for_epochs(config.training.epochs, sequences, setup.tokens_per_step // setup.sequence_length)


def saved_state(setup: Setup) -> Quantity:
    """What each GPU saves, in bytes: master weights and AdamW's two moments of all that is trained, each once."""
    item = MASTER_BYTES[setup.precision]
    trained = setup.spec.total_parameters
    if setup.adapters is not None:
        trained = adapter_parameters(setup.spec, setup.adapters.rank, setup.adapters.targets)
    formula = f"trained parameters x 3 ({item}-byte weight and two moments) / GPUs"
    return quantity("saved per GPU", trained * 3 * item / setup.world_size, "bytes", formula, TRAINER)


def run_time(
    config: RunConfig, setup: Setup, place: Target, step_seconds: Range, steps: int, options: FailureOptions
) -> RunTime:
    """How long `steps` steps take on `place`.

    UserError for options that make no sense, and where the run would practically never end whenever it saves.
    """
    tokens = float(steps) * setup.tokens_per_step
    fastest, slowest = (_steps_alone(end, steps) for end in (step_seconds.low, step_seconds.high))
    alone = Range(fastest, slowest, step_seconds.is_bound)
    rates = options.rates()
    missing = _missing(config, place, options)
    if missing:
        return RunTime(steps, tokens, alone, None, missing, (), None, None, "", ())
    checkpoint = checkpoint_cost(
        place.machine,
        place.accelerator,
        num_nodes=place.num_nodes,
        bytes_per_gpu=saved_state(setup).value,
        asynchronous=config.checkpoint.asynchronous,
        copies=setup.replicate,
        storage_gb_per_s=options.storage_gb_per_s,
        host_device_gb_per_s=options.host_device_gb_per_s,
    )
    restart = _restart(checkpoint, options)
    fast, slow = (
        FailureInputs(
            machine=place.machine,
            num_nodes=place.num_nodes,
            steps=steps,
            step_seconds=end.fact,
            checkpoint=checkpoint,
            restart=restart,
            spot=place.consumption == "spot",
            preemptions_per_node_day=options.preemptions_per_node_day,
        )
        for end in (step_seconds.low, step_seconds.high)
    )
    best = [(rate, failure_estimate(fast, rate), failure_estimate(slow, rate)) for rate in rates]
    outlooks, saves, warnings = _with_own_interval(config, fast, slow, best)
    wall = _wall(outlooks, step_seconds.is_bound)
    return RunTime(steps, tokens, alone, wall, (), outlooks, checkpoint, restart, saves, warnings)


def middle_failure_inputs(run: RunTime, place: Target, step_seconds: Range, options: FailureOptions) -> FailureInputs:
    """The job in the middle of the range of step times, for simulation. The run's failures must be known."""
    assert run.checkpoint is not None and run.restart is not None
    low, high = step_seconds.low, step_seconds.high
    middle = quantity("step time", math.sqrt(low.value * high.value), "s", "geometric mean of low and high", low, high)
    return FailureInputs(
        machine=place.machine,
        num_nodes=place.num_nodes,
        steps=run.steps,
        step_seconds=middle.fact,
        checkpoint=run.checkpoint,
        restart=run.restart,
        spot=place.consumption == "spot",
        preemptions_per_node_day=options.preemptions_per_node_day,
    )


def _with_own_interval(
    config: RunConfig,
    fast: FailureInputs,
    slow: FailureInputs,
    best: list[tuple[FailureRate, FailureEstimate, FailureEstimate]],
) -> tuple[tuple[FailureEstimateRange, ...], str, tuple[str, ...]]:
    """The outlooks as the config saves, how that is in words, and what is to be said about it."""
    plain = tuple(FailureEstimateRange(rate, low, high, None) for rate, low, high in best)
    intervals = sorted({outlook.schedule.interval_steps for _, low, high in best for outlook in (low, high)})
    told = f"{intervals[0]}" if len(intervals) == 1 else f"{intervals[0]} to {intervals[-1]}"
    recommended = f"{every_steps(told)}, the best interval"
    own = config.checkpoint.every_steps
    if own is None:
        return plain, recommended, _unset(fast, plain)
    own = min(own, fast.steps)
    least = least_interval_steps(fast.step_seconds.value, fast.checkpoint.drain.value, fast.steps)
    if own < least:
        warning = (
            f"checkpoint.every_steps: {own} steps are over before the save before them is on storage "
            f"({fast.checkpoint.drain.value:.3g} s); at least {least} are needed, and the best interval is taken here"
        )
        return plain, recommended, (warning,)
    outlooks = []
    for rate, low, _ in best:
        mine, slower = _outlook_at(fast, own, rate), _outlook_at(slow, own, rate)
        if mine is None or slower is None:
            warning = (
                f"checkpoint.every_steps: with a save every {own} steps the run practically never ends at {rate.name}; "
                "the best interval is taken here"
            )
            return plain, recommended, (warning,)
        outlooks.append(FailureEstimateRange(rate, mine, slower, low))
    gain = max(low.goodput - outlook.fast.goodput for (_, low, _), outlook in zip(best, outlooks, strict=True))
    better = f"checkpoint.every_steps: {told} instead of {own} brings up to {gain:.1%} more goodput"
    return tuple(outlooks), f"{every_steps(str(own))}, as configured", (better,) if gain > LEAST_GOODPUT_GAIN else ()


def _unset(fast: FailureInputs, outlooks: tuple[FailureEstimateRange, ...]) -> tuple[str, ...]:
    """A word where saving only at the end, which is what an unset interval means, costs more than the best interval."""
    worst = max(outlooks, key=lambda outlook: outlook.rate.rate.value)
    at_end = _outlook_at(fast, fast.steps, worst.rate)
    if at_end is not None and worst.fast.goodput - at_end.goodput <= LEAST_GOODPUT_GAIN:
        return ()
    ends = f"has a goodput of {at_end.goodput:.0%} at {worst.rate.name}" if at_end else "practically never ends"
    advice = f"set it to about {worst.fast.schedule.interval_steps}"
    return (f"checkpoint.every_steps is not set: a run that saves only at its end {ends}; {advice}",)


def _outlook_at(job: FailureInputs, interval_steps: int, rate: FailureRate) -> FailureEstimate | None:
    """The outlook with an own interval; None where hardly any of the time would be work."""
    try:
        outlook = failure_estimate(replace(job, interval_steps=interval_steps), rate)
    except UserError:
        return None
    return outlook if outlook.goodput >= LEAST_GOODPUT else None


def _wall(outlooks: tuple[FailureEstimateRange, ...], is_bound: bool) -> Range:
    """From the fastest end at the kindest rate to the slowest end at the worst; of a bound only the former."""
    every = [outlook.fast for outlook in outlooks] + [outlook.slow for outlook in outlooks]
    terms = sorted((outlook.term("expected wall time") for outlook in every), key=lambda one: one.value)
    return Range(terms[0], terms[0] if is_bound else terms[-1], is_bound)


def _steps_alone(step: Quantity, steps: int) -> Quantity:
    return quantity("steps alone", step.value * steps, "s", "steps x step time", step)


def _restart(checkpoint: CheckpointCost, options: FailureOptions) -> RestartTime:
    """By parts as they are known, or as a whole where the user has given it."""
    whole = options.restart_seconds
    if whole is None:
        return restart_time(checkpoint)
    return restart_time(checkpoint, detect_seconds=0, start_seconds=whole, load_seconds=0)


def _missing(config: RunConfig, place: Target, options: FailureOptions) -> tuple[MissingInput, ...]:
    """What the cost of a save needs and nobody knows."""
    what = "failures, goodput and the wall time with them"
    found = []
    if options.storage_gb_per_s is None and place.machine.storage_gb_per_s(place.num_nodes) is None:
        found.append(MissingInput(what, f"no storage bandwidth of {place.machine.name} is known", "--storage-gb-per-s"))
    link = place.accelerator.host_device_bandwidth_gb_per_s()
    if config.checkpoint.asynchronous and options.host_device_gb_per_s is None and link is None:
        why = f"no host-device bandwidth of {place.accelerator.name} is known"
        found.append(MissingInput(what, why, "--host-device-gb-per-s"))
    return tuple(found)
