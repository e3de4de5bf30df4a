"""Cost of a run, from its step time and the price that the user gives.

    $ per step             = seconds of the median step / 3600 x $ per GPU-hour x GPUs
    $ per million tokens   = $ per GPU-hour / 3600 / tokens per second per GPU x 1e6
    $ of the run so far    = (wall time - waiting) / 3600 x $ per GPU-hour x GPUs

Where a restart changed the number of GPUs, each step and each stretch of time costs what it had:
the first is the median over the steps, the third the sum over the stretches.

The first two are the price of a typical step; the third also pays for start-up, saves, failures and
unknown time. Waiting, where a log has it, is free: what is queued is not billed. No price is taken
from the catalog: a log does not say how its capacity was bought. A price per node is divided by the
GPUs of a node: `--gpus-per-node`, or the catalog's number where all machines with this accelerator
have the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from drillyard.goodput import Goodput
from drillyard.hardware import Catalog
from drillyard.measurement.speed import Speed, median_of_rows
from drillyard.measurement.step_times import Timing
from drillyard.measurement.user_facts import Figures, UserFacts


@dataclass(slots=True, kw_only=True)
class Cost(Figures):
    """US dollars."""

    usd_per_gpu_hour: float | None = None
    per_step: float | None = None
    per_million_tokens: float | None = None
    so_far: float | None = None
    notes: list[str] = field(default_factory=list)


def cost(
    speed: Speed,
    asked: UserFacts,
    catalog: Catalog,
    timing: Timing,
    account: Goodput | None,
) -> Cost:
    """The cost of a run of this speed, whose wall time is that of `account`."""
    found = Cost()
    step_seconds = timing.times.typical
    price = found.usd_per_gpu_hour = _gpu_hour(found, speed, asked, catalog)
    if price is None:
        if not found.missing:
            for name in ("cost_per_step", "cost_per_million_tokens"):
                found.lacks(
                    name, "the price is not known", "--price-per-gpu-hour", "--price-per-node-hour"
                )
        return found
    per_second = price / 3600
    if speed.num_gpus is None:
        found.lacks("cost_per_step", "the log does not say on how many GPUs it ran", "--num-gpus")
    elif step_seconds is None:
        found.lacks("cost_per_step", "no step has a duration")
    else:
        found.per_step = step_seconds * per_second * speed.num_gpus
    if speed.row_gpus is not None and timing.kept is not None:
        gpu_seconds = np.where(speed.row_gpus > 0, speed.row_gpus, np.nan)
        gpu_seconds[timing.kept.rows] *= timing.kept.seconds
        median = median_of_rows(timing, gpu_seconds)
        found.per_step = None if median is None else median * per_second
    if account is not None:
        stretches = {} if asked.num_gpus is not None else account.microseconds_by_gpus
        if not stretches and speed.num_gpus is not None:
            billed = account.wall_microseconds - account.times["waiting"]
            stretches = {speed.num_gpus: billed}
        if stretches:
            found.so_far = sum(
                microseconds / 1e6 * per_second * gpus for gpus, microseconds in stretches.items()
            )
    if speed.tokens_per_second_per_gpu:
        found.per_million_tokens = per_second / speed.tokens_per_second_per_gpu * 1e6
    else:
        flags = speed.flags_for("tokens_per_second_per_gpu")
        found.lacks("cost_per_million_tokens", "tokens per second are not known", *flags)
    return found


def _gpu_hour(found: Cost, speed: Speed, asked: UserFacts, catalog: Catalog) -> float | None:
    """The price of a GPU-hour with its share of the host."""
    if asked.price_per_node_hour is None:
        return asked.price_per_gpu_hour
    gpus = asked.gpus_per_node
    if gpus is None:
        sizes = {
            one.num_accelerators
            for one in catalog.machines.values()
            if one.accelerator == speed.accelerator
        }
        if len(sizes) != 1:
            for name in ("cost_per_step", "cost_per_million_tokens"):
                found.lacks(
                    name,
                    "the price is that of a node, of a size that is not known",
                    "--gpus-per-node",
                )
            return None
        (gpus,) = sizes
        found.notes.append(
            f"a node has {gpus} GPUs, as every machine with {speed.accelerator} in the catalog"
        )
    return asked.price_per_node_hour / gpus
