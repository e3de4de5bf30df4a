"""A prediction as text: the answer first, then what is missing or doubtful; and every term with its formula.

`summary` fits a screen. `explanation` is the long form: the numbers in the order in which they follow from each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from drillyard.estimation.formatting import (
    DOUBT,
    dollars,
    doubt_mark,
    duration,
    every_steps,
    expected_count,
    extent_text,
    gpu_hours,
    number_list,
    number_range,
    percent,
    range_text,
    short_count,
    three_digits,
    time_range,
)
from drillyard.estimation.memory import MemoryEstimate
from drillyard.estimation.quantity import Quantity, Range
from drillyard.estimation.run_estimate import RunEstimate, StepSpeed
from drillyard.estimation.run_time import RunTime
from drillyard.estimation.step_time import StepTime
from drillyard.hardware import FactSource

STYLES = {
    "fits": "bold green", "may not fit": "bold yellow", "does not fit": "bold red", "unknown": "bold yellow",
}  # fmt: skip
MOST_ALTERNATIVES = 4
MOST_RUNS = 4
LEAST_SLOWDOWN = 1.01
"""How much longer saves and failures must make a run for the time without them to be told too."""
LEAST_SHARE = 0.05
"""The share of all that is uncertain of the memory from which a part is named."""
SMALLEST_PART_GIB = 0.05
"""Parts of memory below this are summed in the summary."""


def summary(prediction: RunEstimate) -> RenderableType:
    """The answer on one screen."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column()
    for label, text in _rows(prediction):
        rows.add_row(label, Text(text) if isinstance(text, str) else text)
    parts: list[RenderableType] = [_title(prediction), rows]
    notes = [*(Text(note) for note in prediction.warnings), *_footnotes(prediction)]
    if notes:
        parts += [Text(), *(Padding(note, (0, 0, 0, 2)) for note in notes)]
    return Group(*parts)


def explanation(prediction: RunEstimate) -> RenderableType:
    """Every term with its value, its formula and its sources by number; and what open settings became, and why."""
    parts: list[RenderableType] = []
    if prediction.resolved.decisions:
        parts.append(Text("\nsettings that were left open", style="bold"))
        decided = _columns(2)
        for decision in prediction.resolved.decisions:
            decided.add_row(Text(f"  {decision.key}: {decision.value}"), Text(decision.reason))
        parts.append(decided)
    numbers: dict[FactSource, int] = {}
    for title, terms in quantity_groups(prediction):
        table = _columns(3)
        for one in terms:
            table.add_row(*map(Text, _explained(one, numbers)))
        parts += [Text(f"\n{title}", style="bold"), table]
    parts.append(Text("\nsources", style="bold"))
    parts += [Text(f"  [{number}] {_told(source)}") for source, number in numbers.items()]
    return Group(*parts)


def _columns(number: int) -> Table:
    """A grid in which words that are wider than their column are broken, not cut."""
    grid = Table.grid(padding=(0, 2))
    for _ in range(number):
        grid.add_column(overflow="fold")
    return grid


def quantity_groups(prediction: RunEstimate) -> Iterator[tuple[str, Sequence[Quantity | Range]]]:
    """The terms by what they are about, in the order in which they follow; each name once in a group."""
    if prediction.memory is not None:
        yield "memory per GPU", (*prediction.memory.parts, prediction.memory.total)
    timed = prediction.speed
    if timed is not None:
        detail = timed.detail
        terms = (detail.compute, detail.memory, detail.activations, detail.communication, detail.bound)
        ranges = (detail.efficiency, timed.seconds, detail.exposed, timed.tokens_per_second_per_gpu)
        found = (*terms, *ranges, timed.tflops_per_gpu, timed.mfu)
        yield "step time", tuple(one for one in found if one is not None)
    run, hours = prediction.run, prediction.gpu_hours
    if run is not None and hours is not None:
        yield "run", (run.failure_free, *(() if run.wall is None else (run.wall,)), hours)
        for outlook in run.outlooks:
            pairs = zip(outlook.fast.terms, outlook.slow.terms, strict=True)
            yield f"failures at {outlook.rate.name}", tuple(_between(one, other) for one, other in pairs)
    cost = prediction.cost
    if cost is not None:
        dollars_of = (cost.of_step, cost.of_million_tokens, *(() if cost.of_run is None else (cost.of_run,)))
        yield "cost", (cost.price.of_gpu, cost.price.of_node, cost.price.of_all, *dollars_of)


def _between(one: Quantity, other: Quantity) -> Range:
    """Both ends in order."""
    low, high = sorted((one, other), key=lambda end: end.value)
    return Range(low, high)


def _title(prediction: RunEstimate) -> Text:
    question, setup = prediction.question, prediction.setup
    spec = setup.spec
    active = (
        f", {short_count(spec.active_parameters)} active" if spec.active_parameters != spec.total_parameters else ""
    )
    adapters = f", LoRA of rank {setup.adapters.rank}" if setup.adapters is not None else ""
    recomputed = {"none": "no", "selective": "selective", "full": "full"}[setup.activation_checkpointing]
    copies = f" x {setup.replicate} copies" if setup.replicate > 1 else ""
    batch = f"{setup.micro_batch_size} x {setup.sequence_length} tokens per GPU"
    steps = (
        f"{batch} and micro-batch, {setup.gradient_accumulation} a step" if setup.gradient_accumulation > 1 else batch
    )
    return Text.assemble(
        (question.config.name, "bold"),
        f": {short_count(spec.total_parameters)} parameters{active}{adapters} on {question.place.title}\n",
        f"{setup.precision}, {recomputed} activation checkpointing, sharded over {setup.shard}{copies}, {steps}: "
        f"{setup.tokens_per_step:,} tokens a step\n",
    )


def _rows(prediction: RunEstimate) -> Iterator[tuple[str, RenderableType]]:
    for refusal in prediction.refusals:
        yield "refused", Text(f"`drillyard train` refuses this run: {refusal}", style="bold red")
    yield from _memory_rows(prediction)
    timed = prediction.speed
    if timed is not None:
        yield from _speed_rows(prediction, timed)
    run = prediction.run
    if run is not None:
        yield "run", _run_text(run)
    yield from _cost_rows(prediction)
    if run is not None and run.outlooks:
        yield "failures", _failure_table(run)
        yield "checkpoints", _saves_text(run)
    for missing in prediction.missing:
        give = f": give {missing.give}" if missing.give.startswith("-") else f"; {missing.give}" if missing.give else ""
        yield "missing", Text(f"{missing.what}: {missing.why}{give}", style="yellow")
    if prediction.quotas:
        yield (
            "quota",
            "\n".join(
                f"{quota.amount:,} {quota.unit} of {quota.metric}"
                + "".join(f", {key} {value}" for key, value in quota.dimensions.items())
                + (f" in {quota.region}" if quota.region else "")
                for quota in prediction.quotas
            ),
        )


def _memory_rows(prediction: RunEstimate) -> Iterator[tuple[str, RenderableType]]:
    memory, available, verdict = prediction.memory, prediction.available_gib, prediction.verdict
    if memory is None:
        return
    needed = number_range(memory.total, "", "at least")
    of = "" if available is None else f" of {three_digits(available.value)}{DOUBT if available.unverified else ''}"
    answer = Text.assemble((verdict.upper(), STYLES[verdict]), f"  {needed}{of} GiB per GPU; peak: {memory.peak_at}")
    yield "memory", answer
    yield "", ", ".join(_parts(memory.parts))
    if verdict == "may not fit" and available is not None:
        yield "", _undecided(memory, available.value)
    alternatives = prediction.alternatives()
    if alternatives:
        told = [change.in_words() + f"; {change.costs}" for change in alternatives[:MOST_ALTERNATIVES]]
        yield "fits with", "\n".join(told)
    elif verdict == "does not fit":
        yield "fits with", "no setting of micro-batch, sequence, sharding or checkpointing, and no number of GPUs"


def _undecided(memory: MemoryEstimate, available_gib: float) -> str:
    """What the verdict hangs on: the parts whose ranges are widest, and how much of them must not be needed."""
    widths = {part.low.name: part.high.value - part.low.value for part in memory.parts if isinstance(part, Range)}
    all_widths = memory.total.high.value - memory.total.low.value
    widest = sorted(widths, key=lambda name: -widths[name])
    named = [f"{name} {three_digits(widths[name])}" for name in widest if widths[name] > LEAST_SHARE * all_widths]
    over = memory.total.high.value - available_gib
    uncertain = f"{three_digits(over)} of the {three_digits(all_widths)} GiB that are uncertain"
    return f"fits if {uncertain} are spared: {', '.join(named)}"


def _parts(parts: Iterable[Quantity | Range]) -> Iterator[str]:
    """The larger parts by name, the others summed."""
    rest = 0.0
    for part in parts:
        both = part if isinstance(part, Range) else Range(part, part)
        # What is saved (by compiling, say) is a part below 0.
        if max(abs(both.low.value), abs(both.high.value)) < SMALLEST_PART_GIB:
            rest += both.high.value
        else:
            yield f"{both.low.name} {number_range(both, '', 'at least')}"
    if rest:
        yield f"other {three_digits(rest)}"


def _speed_rows(prediction: RunEstimate, timed: StepSpeed) -> Iterator[tuple[str, RenderableType]]:
    yield "step time", f"{time_range(timed.seconds)}  ({_basis(timed.detail)})"
    tflops = number_range(timed.tflops_per_gpu, " TFLOP/s", "at most")
    yield "speed", f"{number_range(timed.tokens_per_second_per_gpu, ' tokens/s', 'at most')} and {tflops} per GPU"
    if timed.mfu is not None:
        accelerator, precision = prediction.question.place.accelerator, prediction.setup.precision
        peak = f"{accelerator.peak_tflops[precision]:,g} TFLOP/s ({accelerator.name}, {precision}, dense)"
        share = f"{range_text(timed.mfu, percent, 'at most')}{doubt_mark(timed.mfu)}"
        yield "MFU", f"{share} of {peak}, FLOPs by {timed.detail.formula}"


def _basis(detail: StepTime) -> str:
    """What the step time is drawn from, in a few words; --explain and --json have every run."""
    if detail.basis == "bound":
        return "a bound: no measured run is like this one"
    names = [used.row.name for used in detail.rows]
    if detail.basis == "calibration":
        return f"from your run {names[0]}"
    shown = ", ".join(names[:MOST_RUNS]) + (", ..." if len(names) > MOST_RUNS else "")
    elsewhere = " of neighbouring classes" if detail.basis == "neighbours" else ""
    return f"from {len(names)} measured run{'s' if len(names) > 1 else ''}{elsewhere}: {shown}"


def _run_text(run: RunTime) -> str:
    """Steps, tokens and time, with failures where they are known."""
    what = f"{run.steps:,} steps, {short_count(run.tokens)} tokens: "
    if run.wall is None:
        return f"{what}{time_range(run.failure_free)} without saves and failures"
    alone = time_range(run.failure_free)
    without = f", {alone} without" if run.wall.high.value > LEAST_SLOWDOWN * run.failure_free.high.value else ""
    return f"{what}{time_range(run.wall)} with saves and failures{without}"


def _saves_text(run: RunTime) -> str:
    """When is saved, and what saves and restarts take."""
    assert run.checkpoint is not None and run.restart is not None
    blocking, drain, restart = run.checkpoint.blocking, run.checkpoint.drain, run.restart.total
    save = f"a save stops training for {duration(blocking.value)}{doubt_mark(blocking)}"
    written = f", is stored {duration(drain.value)}{doubt_mark(drain)} later" if drain.value else ""
    return f"{run.saves}\n{save}{written}; a restart takes {duration(restart.value)}{doubt_mark(restart)}"


def _cost_rows(prediction: RunEstimate) -> Iterator[tuple[str, RenderableType]]:
    cost, hours = prediction.cost, prediction.gpu_hours
    if hours is not None:
        yield "GPU-hours", range_text(hours, gpu_hours, "at least") + doubt_mark(hours)
    if cost is None:
        return
    per_step = f"{range_text(cost.of_step, dollars, 'at least')}{doubt_mark(cost.of_step)} a step"
    per_tokens = f"{range_text(cost.of_million_tokens, dollars, 'at least')} per million tokens"
    of_run = "" if cost.of_run is None else f", {range_text(cost.of_run, dollars, 'at least')} for the run"
    price = f"at ${cost.price.of_gpu.value:,.2f} per GPU-hour ({cost.price.about}){doubt_mark(cost.price.of_gpu)}"
    yield "cost", f"{per_step}, {per_tokens}{of_run}\n{price}"


def _failure_table(run: RunTime) -> RenderableType:
    """One line for each rate: failures in the run, when to save, goodput."""
    table = Table.grid(padding=(0, 2))
    table.add_row("rate", "in this run", "best save", "goodput")
    for outlook in run.outlooks:
        both = (outlook.fast, outlook.slow)
        counts = [one.term("expected interruptions").value for one in both]
        best = [outlook.best] if outlook.best is not None else list(both)
        table.add_row(
            f"{outlook.rate.name} {three_digits(outlook.rate.rate.value)}",
            extent_text(counts, expected_count),
            every_steps(extent_text([one.schedule.interval_steps for one in best], lambda steps: f"{steps:,.0f}")),
            extent_text(outlook.goodput, percent) + (DOUBT if outlook.fast.unverified else ""),
        )
    return table


def _footnotes(prediction: RunEstimate) -> Iterator[RenderableType]:
    run = prediction.run
    if run is not None and run.outlooks:
        left_out = dict.fromkeys(part for outlook in run.outlooks for part in outlook.fast.left_out)
        yield Text(
            f"rate: per 1,000 node-days; goodput: ETTR without queue wait; left out: {', '.join(left_out)}", style="dim"
        )
    ends_of = (
        end
        for _, terms in quantity_groups(prediction)
        for one in terms
        for end in ((one,) if isinstance(one, Quantity) else (one.low, one.high))
    )
    if any(end.unverified for end in ends_of):
        yield Text(f"{DOUBT} rests on values that nothing primary confirms; --explain names them", style="dim")


def _explained(one: Quantity | Range, numbers: dict[FactSource, int]) -> tuple[str, str, str]:
    """Name, value, and the formula with the numbers of its sources, which are counted on in `numbers`."""
    both = one if isinstance(one, Range) else Range(one, one)
    unit = f" {both.low.unit}" if both.low.unit else ""
    value = range_text(both, three_digits, "bound:") + unit + doubt_mark(both)
    sources = dict.fromkeys(source for end in (both.low, both.high) for source in end.fact.sources)
    marks = number_list(numbers.setdefault(source, len(numbers) + 1) for source in sources)
    return f"  {both.low.name}", value, f"{both.low.formula} {f'[{marks}]' if marks else ''}".rstrip()


def _told(source: FactSource) -> str:
    date = f", {source.date}" if source.date else ""
    return f"{source.text}{date}{'  unverified' if source.unverified else ''}"
