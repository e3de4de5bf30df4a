"""An estimate as text: the answer first, then what is missing or unverified; all formulas; a
simulation.

`summary` fits a screen. `explanation` is the long form: the numbers in the order in which they
follow from each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from drillyard.estimation.checkpoint_interval import LEAST_GAIN
from drillyard.estimation.confidence import SampleStatistics
from drillyard.estimation.memory import MemoryEstimate
from drillyard.estimation.quantity import (
    DOUBT,
    Quantity,
    Range,
    doubt_sign,
    number_range,
    range_text,
    time_range,
)
from drillyard.estimation.run_estimate import RunEstimate
from drillyard.estimation.run_time import RunTime
from drillyard.estimation.simulation_estimate import SimulatedRun
from drillyard.estimation.simulator import Simulation
from drillyard.estimation.step_time import StepTime
from drillyard.formatting import (
    every_steps,
    extent,
    number_list,
    rounded_count,
    rounded_dollars,
    rounded_duration,
    rounded_percent,
    three_digits,
)
from drillyard.hardware import FactSource

STYLES = {
    "fits": "bold green",
    "may not fit": "bold yellow",
    "does not fit": "bold red",
    "unknown": "bold yellow",
}
MOST_ALTERNATIVES = 4
MOST_RUNS = 4
LEAST_SLOWDOWN = 1.01
"""Ratio by which saves and failures must lengthen a run for the time without them to be shown
too."""
LEAST_SHARE = 0.05
"""The share of all that is uncertain of the memory from which a part is named."""
NEARLY_ALL = 0.9999
"""The share of runs that fail above which the others are not mentioned."""
MOST_DECIMALS = 4
SMALLEST_PART_GIB = 0.05
"""Parts of memory below this are summed in the summary."""


def summary(estimate: RunEstimate) -> RenderableType:
    """The answer on one screen."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column()
    for label, text in _rows(estimate):
        rows.add_row(label, Text(text) if isinstance(text, str) else text)
    parts: list[RenderableType] = [_title(estimate), rows]
    if notes := [*(Text(note) for note in estimate.warnings), *_footnotes(estimate)]:
        parts += [Text(), *(Padding(note, (0, 0, 0, 2)) for note in notes)]
    return Group(*parts)


def explanation(estimate: RunEstimate) -> RenderableType:
    """Every quantity with its value, its formula and its sources by number; and what open settings
    became, and why."""
    parts: list[RenderableType] = []
    if estimate.resolved.decisions:
        parts.append(Text("\nsettings that were left open", style="bold"))
        decided = _columns(2)
        for decision in estimate.resolved.decisions:
            decided.add_row(Text(f"  {decision.key}: {decision.value}"), Text(decision.reason))
        parts.append(decided)
    numbers: dict[FactSource, int] = {}
    for title, quantities in quantity_groups(estimate):
        table = _columns(3)
        for one in quantities:
            table.add_row(*map(Text, _explained(one, numbers)))
        parts += [Text(f"\n{title}", style="bold"), table]
    parts.append(Text("\nsources", style="bold"))
    parts += [Text(f"  [{number}] {_source_text(source)}") for source, number in numbers.items()]
    return Group(*parts)


def _columns(number: int) -> Table:
    """A grid in which words that are wider than their column are broken, not cut."""
    grid = Table.grid(padding=(0, 2))
    for _ in range(number):
        grid.add_column(overflow="fold")
    return grid


def quantity_groups(estimate: RunEstimate) -> Iterator[tuple[str, Sequence[Quantity | Range]]]:
    """The figures by what they are about, in the order in which they follow; each name once in a
    group."""
    if estimate.memory is not None:
        yield "memory per GPU", (*estimate.memory.parts, estimate.memory.total)
    if estimate.step_time is not None:
        yield "step time", estimate.step_time.quantities
    if (run := estimate.run_time) is not None:
        yield "run", (run.failure_free, *(() if run.wall is None else (run.wall,)), run.gpu_hours)
        for one in run.failures:
            yield f"failures at {one.rate.name}", one.quantities
    if (cost := estimate.cost) is not None:
        dollars_of = (
            cost.of_step,
            cost.of_million_tokens,
            *(() if cost.of_run is None else (cost.of_run,)),
        )
        yield "cost", (cost.price.of_gpu, cost.price.of_node, cost.price.of_all, *dollars_of)


def _title(estimate: RunEstimate) -> Text:
    request, setup = estimate.request, estimate.setup
    spec = setup.spec
    mixture = spec.active_parameters != spec.total_parameters
    active = f", {rounded_count(spec.active_parameters)} active" if mixture else ""
    adapters = f", LoRA of rank {setup.adapters.rank}" if setup.adapters is not None else ""
    adapters += " on nf4" if setup.quantized else ""
    mode = setup.activation_checkpointing
    recomputed = "no" if mode == "none" else mode
    copies = f" x {setup.replicate} copies" if setup.replicate > 1 else ""
    frozen = ", frozen weights whole" if setup.gathers_adapters_alone else ""
    steps = f"{setup.micro_batch_size} x {setup.sequence_length} tokens per GPU"
    if setup.gradient_accumulation > 1:
        steps += f" and micro-batch, {setup.gradient_accumulation} a step"
    return Text.assemble(
        (request.config.name, "bold"),
        f": {rounded_count(spec.total_parameters)} parameters{active}{adapters} on"
        f" {request.target.title}\n",
        f"{setup.precision}, {recomputed} activation checkpointing, sharded over"
        f" {setup.shard}{copies}{frozen}, {steps}: {setup.tokens_per_step:,} tokens a step\n",
    )


def _rows(estimate: RunEstimate) -> Iterator[tuple[str, RenderableType]]:
    for refusal in estimate.refusals:
        yield "refused", Text(f"`drillyard train` refuses this run: {refusal}", style="bold red")
    yield from _memory_rows(estimate)
    if (timed := estimate.step_time) is not None:
        yield from _speed_rows(estimate, timed)
    run = estimate.run_time
    if run is not None:
        yield "run", _run_text(run)
    yield from _cost_rows(estimate)
    if run is not None and run.failures:
        yield "failures", _failure_table(run)
        yield "checkpoints", _saves_text(run)
    for missing in estimate.missing:
        give = (
            f": give {missing.give}"
            if missing.give.startswith("-")
            else f"; {missing.give}"
            if missing.give
            else ""
        )
        yield "missing", Text(f"{missing.what}: {missing.why}{give}", style="yellow")
    if estimate.quotas:
        yield "quota", "\n".join(quota.in_words for quota in estimate.quotas)


def _memory_rows(estimate: RunEstimate) -> Iterator[tuple[str, RenderableType]]:
    memory, available, verdict = estimate.memory, estimate.available_gib, estimate.verdict
    if memory is None:
        return
    needed = number_range(memory.total, "", "at least")
    of = (
        ""
        if available is None
        else f" of {three_digits(available.value)}{DOUBT if available.unverified else ''}"
    )
    answer = Text.assemble(
        (verdict.upper(), STYLES[verdict]), f"  {needed}{of} GiB per GPU; peak: {memory.peak_at}"
    )
    yield "memory", answer
    yield "", ", ".join(_parts(memory.parts))
    if verdict == "may not fit" and available is not None:
        yield "", _undecided(memory, available.value)
    if alternatives := estimate.alternatives:
        lines = [
            change.in_words() + f"; {change.costs}" for change in alternatives[:MOST_ALTERNATIVES]
        ]
        yield "fits with", "\n".join(lines)
    elif verdict == "does not fit":
        yield (
            "fits with",
            "no setting of micro-batch, sequence, sharding or checkpointing, and no number of GPUs",
        )


def _undecided(memory: MemoryEstimate, available_gib: float) -> str:
    """Describe what decides the verdict: the parts with the widest ranges, and how much of them
    must not be needed."""
    widths = {part.low.name: part.high.value - part.low.value for part in memory.parts}
    all_widths = memory.total.high.value - memory.total.low.value
    widest = sorted(widths, key=lambda name: -widths[name])
    named = [
        f"{name} {three_digits(widths[name])}"
        for name in widest
        if widths[name] > LEAST_SHARE * all_widths
    ]
    over = memory.total.high.value - available_gib
    uncertain = f"{three_digits(over)} of the {three_digits(all_widths)} GiB that are uncertain"
    return f"fits if {uncertain} are spared: {', '.join(named)}"


def _parts(parts: Iterable[Range]) -> Iterator[str]:
    """The larger parts by name, the others summed."""
    rest = 0.0
    for part in parts:
        # What is saved (by compiling, say) is a part below 0.
        if max(abs(part.low.value), abs(part.high.value)) < SMALLEST_PART_GIB:
            rest += part.high.value
        else:
            yield f"{part.low.name} {number_range(part, '', 'at least')}"
    if rest:
        yield f"other {three_digits(rest)}"


def _speed_rows(estimate: RunEstimate, timed: StepTime) -> Iterator[tuple[str, RenderableType]]:
    yield "step time", f"{time_range(timed.seconds)}  ({_basis(timed)})"
    tflops = number_range(timed.tflops_per_gpu, " TFLOP/s", "at most")
    yield (
        "speed",
        (
            f"{number_range(timed.tokens_per_second_per_gpu, ' tokens/s', 'at most')} and {tflops}"
            " per GPU"
        ),
    )
    if timed.mfu is not None:
        accelerator, precision = estimate.request.target.accelerator, estimate.setup.precision
        peak = (
            f"{accelerator.peak_tflops[precision]:,g} TFLOP/s ({accelerator.name}, {precision},"
            " dense)"
        )
        share = f"{range_text(timed.mfu, rounded_percent, 'at most')}{doubt_sign(timed.mfu)}"
        yield "MFU", f"{share} of {peak}, FLOPs by {timed.formula}"


def _basis(timed: StepTime) -> str:
    """Describe the basis of the step time in a few words; --explain and --json have every run."""
    if timed.basis == "bound":
        return "a bound: no measured run is like this one"
    names = [used.row.name for used in timed.rows]
    if timed.basis == "calibration":
        return f"from your run {names[0]}"
    shown = ", ".join(names[:MOST_RUNS]) + (", ..." if len(names) > MOST_RUNS else "")
    elsewhere = " of neighbouring classes" if timed.basis == "neighbours" else ""
    return f"from {len(names)} measured run{'s' if len(names) > 1 else ''}{elsewhere}: {shown}"


def _run_text(run: RunTime) -> str:
    """Steps, tokens and time, with failures where they are known."""
    what = f"{run.steps:,} steps, {rounded_count(run.tokens)} tokens: "
    if run.wall is None:
        return f"{what}{time_range(run.failure_free)} without saves and failures"
    alone = time_range(run.failure_free)
    without = (
        f", {alone} without"
        if run.wall.high.value > LEAST_SLOWDOWN * run.failure_free.high.value
        else ""
    )
    return f"{what}{time_range(run.wall)} with saves and failures{without}"


def _saves_text(run: RunTime) -> str:
    """Interval of saves, and the time that saves and restarts take."""
    assert run.checkpoint is not None and run.restart is not None
    blocking, drain, restart = run.checkpoint.blocking, run.checkpoint.drain, run.restart.total
    save = f"a save stops training for {rounded_duration(blocking.value)}{doubt_sign(blocking)}"
    written = (
        f", is stored {rounded_duration(drain.value)}{doubt_sign(drain)} later"
        if drain.value
        else ""
    )
    return (
        f"{run.saves}\n{save}{written}; a restart takes"
        f" {rounded_duration(restart.value)}{doubt_sign(restart)}"
    )


def _cost_rows(estimate: RunEstimate) -> Iterator[tuple[str, RenderableType]]:
    cost, run = estimate.cost, estimate.run_time
    if run is not None:
        hours = run.gpu_hours
        yield "GPU-hours", range_text(hours, _gpu_hours, "at least") + doubt_sign(hours)
    if cost is None:
        return
    per_step = (
        f"{range_text(cost.of_step, rounded_dollars, 'at least')}{doubt_sign(cost.of_step)} a step"
    )
    per_tokens = (
        f"{range_text(cost.of_million_tokens, rounded_dollars, 'at least')} per million tokens"
    )
    of_run = (
        ""
        if cost.of_run is None
        else f", {range_text(cost.of_run, rounded_dollars, 'at least')} for the run"
    )
    price = (
        f"at ${cost.price.of_gpu.value:,.2f} per GPU-hour"
        f" ({cost.price.about}){doubt_sign(cost.price.of_gpu)}"
    )
    yield "cost", f"{per_step}, {per_tokens}{of_run}\n{price}"


def _gpu_hours(value: float) -> str:
    """In full below a million."""
    return three_digits(value) if value < 1e6 else rounded_count(value)


def _failure_table(run: RunTime) -> RenderableType:
    """One line for each rate: failures in the run, when to save, goodput."""
    table = Table.grid(padding=(0, 2))
    table.add_row("rate", "in this run", "best save", "goodput")
    for one in run.failures:
        best = [one.best] if one.best is not None else [one.fast, one.slow]
        table.add_row(
            f"{one.rate.name} {three_digits(one.rate.rate.value)}",
            range_text(one.interruptions, _expected_count, ""),
            every_steps(
                extent([end.schedule.interval_steps for end in best], lambda steps: f"{steps:,.0f}")
            ),
            range_text(one.goodput, rounded_percent, "") + (DOUBT if one.fast.unverified else ""),
        )
    return table


def _expected_count(value: float) -> str:
    return "<0.001" if 0 < value < 0.001 else three_digits(value)


def _footnotes(estimate: RunEstimate) -> Iterator[RenderableType]:
    if (run := estimate.run_time) is not None and run.failures:
        left_out = dict.fromkeys(part for one in run.failures for part in one.fast.left_out)
        yield Text(
            "rate: per 1,000 node-days; goodput: ETTR without queue wait; left out:"
            f" {', '.join(left_out)}",
            style="dim",
        )
    if any(one.unverified for _, quantities in quantity_groups(estimate) for one in quantities):
        yield Text(
            f"{DOUBT} rests on values without a primary source; --explain names them", style="dim"
        )


def _explained(one: Quantity | Range, numbers: dict[FactSource, int]) -> tuple[str, str, str]:
    """Name, value, and the formula with the numbers of its sources, which are counted on in
    `numbers`."""
    both = one if isinstance(one, Range) else Range(one, one)
    unit = f" {both.low.unit}" if both.low.unit else ""
    value = range_text(both, three_digits, "bound:") + unit + doubt_sign(both)
    sources = dict.fromkeys(source for end in (both.low, both.high) for source in end.sources)
    references = number_list(numbers.setdefault(source, len(numbers) + 1) for source in sources)
    return (
        f"  {both.low.name}",
        value,
        f"{both.low.formula} {f'[{references}]' if references else ''}".rstrip(),
    )


def _source_text(source: FactSource) -> str:
    date = f", {source.date}" if source.date else ""
    return f"{source.text}{date}{'  unverified' if source.unverified else ''}"


def simulation_text(simulated: SimulatedRun) -> RenderableType:
    """Goodput, intervals and spares, the best first. Two ranges are named apart: how well the mean
    is known, and where single runs lie."""
    simulation = simulated.simulation
    goodput, wall = simulation.goodput, simulation.wall_seconds
    doubt = DOUBT if simulated.unverified else ""
    head = Text.assemble(
        ("\nsimulated", "bold"),
        f" at {simulated.rate}, seed {simulation.seed}: {_sample(simulation)}\n",
        f"mean goodput {_known_to(goodput)}{doubt}, mean time {rounded_duration(wall.mean)}\n",
        "single runs: goodput"
        f" {extent((goodput.percentile_5, goodput.percentile_95), rounded_percent)} in nine of ten",
    )
    intervals = _right_aligned("save every", "expected goodput", "nine of ten runs", "")
    for index, choice in enumerate(simulated.intervals):
        word = "best" if index == 0 else "as good" if choice.as_good else ""
        runs = choice.simulation.goodput
        single = extent((runs.percentile_5, runs.percentile_95), rounded_percent)
        intervals.add_row(
            f"{choice.interval_steps:,} steps",
            rounded_percent(choice.expected_goodput),
            single,
            word,
        )
    spares = _right_aligned("spare nodes", "goodput", "runs that waited", "node-hours", "cost", "")
    for index, option in enumerate(simulated.spares):
        word = "cheapest" if index == 0 else "as cheap" if option.as_good else ""
        usd = "-" if option.usd is None else rounded_dollars(option.usd)
        waits = f"{option.simulation.waits:,} of {len(option.simulation.outcomes):,}"
        goodput_text = rounded_percent(option.simulation.goodput.mean)
        spares.add_row(
            str(option.spares), goodput_text, waits, f"{option.node_hours:,.0f}", usd, word
        )
    note = Text(
        "expected goodput: closed form, exact while a node in place of a failed one is at hand; as"
        f" good: less than {LEAST_GAIN:.1%} longer",
        style="dim",
    )
    return Group(head, Text(), intervals, note, Text(), spares)


def _right_aligned(*headings: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _sample(simulation: Simulation) -> str:
    """Describe the sample: number of runs, number of their failures, and the share of all runs that
    they represent."""
    if not simulation.outcomes:
        return "no run fails"
    failures = sum(outcome.failures for outcome in simulation.outcomes)
    drawn = f"{len(simulation.outcomes):,} runs with {failures:,} failures"
    failing = 1 - simulation.scenario.no_failure_share
    if failing > NEARLY_ALL:
        return drawn
    return (
        f"{drawn}; they stand for the {rounded_percent(failing)} of runs that fail at all, the"
        " others are exact"
    )


def _known_to(goodput: SampleStatistics) -> str:
    """The mean with its 95 % confidence interval, in as many digits as the interval has."""
    width = goodput.high - goodput.low
    if 100 * width < 10**-MOST_DECIMALS:
        return f"{goodput.mean:.{MOST_DECIMALS}%}"
    decimals = min(max(1, -math.floor(math.log10(100 * width)) + 1), MOST_DECIMALS)
    return (
        f"{goodput.mean:.{decimals}%} (known to {goodput.low:.{decimals}%} to"
        f" {goodput.high:.{decimals}%}, 95%)"
    )
