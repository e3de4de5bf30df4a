"""Estimate of failures: how often a run fails, when it should save, and its expected goodput.

Failures are r x (GPUs / 8) x days, r by name. A save costs the seconds that training is blocked
(bytes over the storage's bandwidth, or over the link to the host where it is asynchronous);
`checkpoint_interval` has the formulas of the interval. Goodput is work over wall time from the
first step to the last save on storage: ETTR without queue wait.

Every number is a `Quantity` with formula and sources. Limits: those of `checkpoint_interval`;
planned maintenance, stragglers and evaluation are left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from drillyard.errors import UserError
from drillyard.estimation.checkpoint_interval import (
    DALY,
    META_ETTR,
    YOUNG,
    SaveSchedule,
    choose_schedule,
    daly_interval,
    expected_wall_seconds,
    first_order_ettr,
    least_interval_steps,
    young_interval,
)
from drillyard.estimation.failure_rates import GPUS_PER_RATED_NODE, FailureRate, assumption_or_given
from drillyard.estimation.quantity import (
    SECONDS_PER_DAY,
    Quantity,
    above_zero,
    given,
    quantity,
    zero_or_above,
)
from drillyard.hardware import Accelerator, Fact, Machine
from drillyard.hardware.facts import combine

GB: Final = 1e9
GOODPUT_NAME: Final = "expected goodput (ETTR without queue wait)"


@dataclass(frozen=True, slots=True)
class CheckpointCost:
    """Seconds of a save: `blocking` training, then in the background until it is stored (`drain`);
    and of a load."""

    blocking: Quantity
    drain: Quantity
    load: Quantity


def checkpoint_cost(
    machine: Machine,
    accelerator: Accelerator,
    *,
    num_nodes: int,
    bytes_per_gpu: float,
    asynchronous: bool,
    copies: int = 1,
    storage_gb_per_s: float | None = None,
    host_device_gb_per_s: float | None = None,
) -> CheckpointCost:
    """Seconds of saving `bytes_per_gpu` from every GPU, at published bandwidths or at the user's
    own.

    With `copies` of the model each GPU holds so many times what it writes, and copies all of it to
    the host and loads it. `storage_gb_per_s` is that of all nodes together, `host_device_gb_per_s`
    that of one GPU. Both are what the hardware allows, so times are lower bounds; loading is taken
    to be as fast as writing. UserError where a bandwidth is needed and unknown.
    """
    storage = _bandwidth(
        "storage",
        storage_gb_per_s,
        machine.storage_gb_per_s(num_nodes),
        machine.name,
        "all nodes together",
    )
    total_gb = machine.fact("num_accelerators") * num_nodes * (bytes_per_gpu / GB)
    to_storage = total_gb.value / storage.value
    formula = "GPUs x bytes per GPU / storage bandwidth of all nodes"
    times = f" x {copies} copies" if copies > 1 else ""
    load = quantity(
        "load", to_storage * copies, "s", f"{formula}{times}, as fast as writing", total_gb, storage
    )
    if not asynchronous:
        blocking = quantity("blocking part of a save", to_storage, "s", formula, total_gb, storage)
        drain = quantity(
            "drain", 0.0, "s", "0: a synchronous save is on storage when training goes on"
        )
        return CheckpointCost(blocking, drain, load)
    published = accelerator.host_device_bandwidth_gb_per_s()
    link = _bandwidth("host-device", host_device_gb_per_s, published, accelerator.name, "one GPU")
    staging = bytes_per_gpu * copies / GB / link.value
    blocking = quantity(
        "blocking part of a save",
        staging,
        "s",
        f"bytes per GPU{times} / host-device bandwidth",
        link,
    )
    drain = quantity("drain", to_storage, "s", formula, total_gb, storage)
    return CheckpointCost(blocking, drain, load)


@dataclass(frozen=True, slots=True)
class RestartTime:
    """From a failure to the next step: until it is noticed, until the ranks run again, until the
    state is loaded."""

    detect: Quantity
    start: Quantity
    load: Quantity

    @property
    def total(self) -> Quantity:
        """The three together, in seconds."""
        parts = (self.detect, self.start, self.load)
        return quantity(
            "restart", sum(part.value for part in parts), "s", "detect + start + load", *parts
        )


def restart_time(
    checkpoint: CheckpointCost,
    *,
    detect_seconds: float | None = None,
    start_seconds: float | None = None,
    load_seconds: float | None = None,
) -> RestartTime:
    """Time that a failure costs besides lost work; each part can be overridden (0 or above)."""
    detect = assumption_or_given("detect_seconds", detect_seconds)
    start = assumption_or_given("start_seconds", start_seconds)
    return RestartTime(
        quantity(
            "detect", detect.value, "s", "until a failure is noticed and the ranks are down", detect
        ),
        quantity(
            "start",
            start.value,
            "s",
            "new nodes joined, containers, process groups, compiling",
            start,
        ),
        (
            checkpoint.load
            if load_seconds is None
            else quantity(
                "load",
                zero_or_above("load_seconds", load_seconds),
                "s",
                "as given",
                given(load_seconds),
            )
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureInputs:
    """A run on a cluster. `preemptions_per_node_day`: for spot; None leaves preemptions out.
    `interval_steps`: a user's own interval, from the drain of a save to the run; None: the best."""

    machine: Machine
    num_nodes: int
    steps: int
    step_seconds: Fact[float]
    checkpoint: CheckpointCost
    restart: RestartTime
    spot: bool = False
    preemptions_per_node_day: float | None = None
    interval_steps: int | None = None

    def __post_init__(self) -> None:
        if self.preemptions_per_node_day is not None:
            zero_or_above("preemptions per node-day", self.preemptions_per_node_day)
        if self.interval_steps is not None:
            least = least_interval_steps(
                self.step_seconds.value, self.checkpoint.drain.value, self.steps
            )
            assert least <= self.interval_steps <= self.steps


@dataclass(frozen=True, slots=True)
class FailureEstimate:
    """Effect of one failure rate on a job. `quantities` are all numbers, in the order in which they
    follow."""

    rate: FailureRate
    schedule: SaveSchedule
    mtbf_seconds: float
    goodput: float
    wall_seconds: float
    quantities: tuple[Quantity, ...]
    left_out: tuple[str, ...]

    def named(self, name: str) -> Quantity:
        return next(one for one in self.quantities if one.name == name)

    @property
    def unverified(self) -> bool:
        """Whether the goodput rests on an assumption or an unconfirmed value."""
        return self.named(GOODPUT_NAME).unverified


def failure_estimate(job: FailureInputs, rate: FailureRate) -> FailureEstimate:
    """Estimate the effect of failures at `rate` on `job`. UserError where the run would practically
    never end."""
    frequency = _frequency(job, rate)
    per_day = frequency[-1]
    mtbf_seconds = SECONDS_PER_DAY / per_day.value if per_day.value else math.inf
    schedule = _schedule(job, mtbf_seconds)
    wall_seconds = expected_wall_seconds(schedule, job.restart.total.value, mtbf_seconds)
    goodput = schedule.work_seconds / wall_seconds
    if not goodput > 0:
        raise UserError(
            f"{job.num_nodes} nodes fail every {mtbf_seconds:.3g} s at {rate.name}, too often for a"
            f" restart of {job.restart.total.value:.3g} s and saves every"
            f" {schedule.interval_seconds:.3g} s: the run never ends\nshorten the restart, save"
            " faster, or use fewer nodes"
        )
    saving = _saving_parts(job, schedule, mtbf_seconds, per_day)
    quantities = (*frequency, *saving, *_result_parts(job, schedule, wall_seconds, per_day, saving))
    left_out: tuple[str, ...] = (
        "queue wait before a start and after a failure",
        "planned maintenance",
    )
    if job.preemptions_per_node_day is None and job.spot:
        left_out = ("preemptions, though the nodes are spot", *left_out)
    return FailureEstimate(
        rate, schedule, mtbf_seconds, goodput, wall_seconds, quantities, left_out
    )


def _bandwidth(
    kind: str, own: float | None, published: Fact[float] | None, of: str, extent: str
) -> Fact[float]:
    """The user's own bandwidth in GB/s, else the published one of `of`. UserError without both."""
    if own is not None:
        return given(above_zero(f"the {kind} bandwidth in GB/s", own))
    if published is None:
        raise UserError(f"no {kind} bandwidth of {of} is known: give that of {extent}, in GB/s")
    return published


def _frequency(job: FailureInputs, rate: FailureRate) -> tuple[Quantity, ...]:
    """Failures, preemptions and both together, per day."""
    nodes = job.machine.fact("num_accelerators") * job.num_nodes / GPUS_PER_RATED_NODE
    failures = quantity(
        "failures per day",
        rate.rate.value * nodes.value / 1000,
        "1/day",
        f"r / 1000 x GPUs / {GPUS_PER_RATED_NODE}, r = {rate.rate.value:g} ({rate.name})",
        rate.rate,
        nodes,
    )
    if job.preemptions_per_node_day is None:
        return (
            failures,
            quantity("interruptions per day", failures.value, "1/day", "failures", failures),
        )
    own = given(job.preemptions_per_node_day)
    preemptions = quantity(
        "preemptions per day",
        own.value * job.num_nodes,
        "1/day",
        "preemptions per node-day x nodes",
        own,
    )
    both = failures.value + preemptions.value
    return (
        failures,
        preemptions,
        quantity(
            "interruptions per day", both, "1/day", "failures + preemptions", failures, preemptions
        ),
    )


def _schedule(job: FailureInputs, mtbf_seconds: float) -> SaveSchedule:
    blocking, drain = job.checkpoint.blocking.value, job.checkpoint.drain.value
    if job.interval_steps is not None:
        return SaveSchedule(job.steps, job.step_seconds.value, job.interval_steps, blocking, drain)
    return choose_schedule(
        steps=job.steps,
        step_seconds=job.step_seconds.value,
        blocking_seconds=blocking,
        drain_seconds=drain,
        restart_seconds=job.restart.total.value,
        mtbf_seconds=mtbf_seconds,
    )


def _saving_parts(
    job: FailureInputs, schedule: SaveSchedule, mtbf_seconds: float, per_day: Quantity
) -> list[Quantity]:
    """Save interval and cost of a failure; without failures there is nothing to weigh."""
    blocking, drain, restart = job.checkpoint.blocking, job.checkpoint.drain, job.restart
    parts = [blocking, drain, restart.detect, restart.start, restart.load, restart.total]
    optimum: list[Quantity] = []
    if not math.isinf(mtbf_seconds):
        mtbf = quantity(
            "mean time between interruptions",
            mtbf_seconds,
            "s",
            "86400 / interruptions per day",
            per_day,
        )
        C, M = blocking.value, mtbf_seconds
        series = "sqrt(2 C M) (1 + sqrt(C/2M)/3 + (C/2M)/9) - C for C < 2M, else M"
        optimum = [
            mtbf,
            quantity(
                "Young's interval",
                young_interval(C, M),
                "s",
                "sqrt(2 C M), first order",
                YOUNG,
                blocking,
                mtbf,
            ),
            quantity("Daly's interval", daly_interval(C, M), "s", series, DALY, blocking, mtbf),
        ]
    chosen = (
        "as given"
        if job.interval_steps is not None
        else "max(Daly, drain), at most the run, in whole steps"
    )
    interval = quantity(
        "checkpoint interval",
        schedule.interval_seconds,
        "s",
        chosen,
        *optimum,
        blocking,
        drain,
        job.step_seconds,
    )
    lost = quantity(
        "lost work per interruption",
        interval.value / 2 + drain.value,
        "s",
        "interval / 2 + drain",
        interval,
        drain,
    )
    return [
        *parts,
        *optimum,
        interval,
        quantity(
            "interval in steps", schedule.interval_steps, "steps", "interval / step time", interval
        ),
        quantity(
            "saves",
            schedule.saves,
            "",
            "steps / interval in steps, rounded up: one at the end",
            interval,
        ),
        lost,
    ]


def _result_parts(
    job: FailureInputs,
    schedule: SaveSchedule,
    wall_seconds: float,
    per_day: Quantity,
    saving: list[Quantity],
) -> list[Quantity]:
    support = combine(None, *saving)
    formula = "M e^(R/M) [e^(D/M) sum(e^((tau+C)/M) - 1) + e^(D/M) - 1], the sum over all saves"
    wall = quantity(
        "expected wall time", wall_seconds, "s", formula, DALY, per_day, support, job.step_seconds
    )
    count = per_day.value * wall_seconds / SECONDS_PER_DAY
    per_second = per_day.value / SECONDS_PER_DAY
    tau, C = schedule.interval_seconds, schedule.blocking_seconds
    # To first order the drain is lost like restart time, once per interruption.
    ettr = first_order_ettr(per_second, job.restart.total.value + schedule.drain_seconds, tau, C)
    return [
        quantity(
            "failure-free time",
            schedule.failure_free_seconds,
            "s",
            "steps x step time + saves x C + D",
            support,
        ),
        wall,
        quantity(
            "expected interruptions",
            count,
            "",
            "interruptions per day x expected wall days",
            per_day,
            wall,
        ),
        quantity(
            GOODPUT_NAME,
            schedule.work_seconds / wall_seconds,
            "",
            "steps x step time / expected wall time",
            wall,
        ),
        quantity(
            "goodput to first order",
            ettr,
            "",
            "(1 - rate (R + D + tau/2)) / (1 + C/tau), a cross check",
            META_ETTR,
            per_day,
            support,
        ),
    ]
