"""A simulation as text. Two ranges are named apart: how well the mean is known, and where single runs lie."""

from __future__ import annotations

import math
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from drillyard.estimation.checkpoint_interval import LEAST_GAIN
from drillyard.estimation.confidence import SampleStatistics
from drillyard.estimation.formatting import DOUBT, dollars, duration, extent_text, percent
from drillyard.estimation.simulated_run import SimulatedRun
from drillyard.estimation.simulator import Simulation

NEARLY_ALL: Final = 0.9999
"""The share of runs that fail above which the others are not mentioned."""
MOST_DECIMALS: Final = 4


def simulation_text(simulated: SimulatedRun) -> RenderableType:
    """What the simulator says: goodput of the mean and of single runs, intervals and spares, the best first."""
    simulation = simulated.simulation
    goodput, wall = simulation.goodput, simulation.wall_seconds
    doubted = DOUBT if simulated.unverified else ""
    head = Text.assemble(
        ("\nsimulated", "bold"), f" at {simulated.rate}, seed {simulation.seed}: {_sample(simulation)}\n",
        f"mean goodput {_known_to(goodput)}{doubted}, mean time {duration(wall.mean)}\n",
        f"single runs: goodput {extent_text((goodput.percentile_5, goodput.percentile_95), percent)} in nine of ten",
    )  # fmt: skip
    intervals = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("save every", "expected goodput", "nine of ten runs", ""):
        intervals.add_column(heading, justify="right")
    for index, choice in enumerate(simulated.intervals):
        word = "best" if index == 0 else "as good" if choice.as_good else ""
        runs = choice.simulation.goodput
        single = extent_text((runs.percentile_5, runs.percentile_95), percent)
        intervals.add_row(f"{choice.interval_steps:,} steps", percent(choice.goodput), single, word)
    spares = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("spare nodes", "goodput", "runs that waited", "node-hours", "cost", ""):
        spares.add_column(heading, justify="right")
    for index, option in enumerate(simulated.spares):
        word = "cheapest" if index == 0 else "as cheap" if option.as_good else ""
        usd = "-" if option.usd is None else dollars(option.usd)
        waits = f"{option.simulation.waits:,} of {len(option.simulation.outcomes):,}"
        goodput_text = percent(option.simulation.goodput.mean)
        spares.add_row(str(option.spares), goodput_text, waits, f"{option.node_hours:,.0f}", usd, word)
    note = Text(
        "expected goodput: closed form, exact while a node in place of a failed one is at hand; as good: less than "
        f"{LEAST_GAIN:.1%} longer",
        style="dim",
    )
    return Group(head, Text(), intervals, note, Text(), spares)


def _sample(simulation: Simulation) -> str:
    """How many runs were drawn with how many failures, and which share of all runs they stand for."""
    if not simulation.outcomes:
        return "no run fails"
    failures = sum(outcome.failures for outcome in simulation.outcomes)
    drawn = f"{len(simulation.outcomes):,} runs with {failures:,} failures"
    failing = 1 - simulation.scenario.no_failure_share
    if failing > NEARLY_ALL:
        return drawn
    return f"{drawn}; they stand for the {percent(failing)} of runs that fail at all, the others are exact"


def _known_to(goodput: SampleStatistics) -> str:
    """The mean with its 95 % confidence interval, in as many digits as the interval has."""
    width = goodput.high - goodput.low
    if 100 * width < 10**-MOST_DECIMALS:
        return f"{goodput.mean:.{MOST_DECIMALS}%}"
    decimals = min(max(1, -math.floor(math.log10(100 * width)) + 1), MOST_DECIMALS)
    return f"{goodput.mean:.{decimals}%} (known to {goodput.low:.{decimals}%} to {goodput.high:.{decimals}%}, 95%)"
