"""The share of the best known rates that runs reach, and the range of it that a setup may expect.

A measured run's efficiency is that at which `timeline` gives its measured time. Of those of runs
that are alike the geometric mean is taken, every publisher counting once however many runs it has,
and around it a band:

| basis | drawn from | high over low |
|---|---|---|
| calibration | one run of the user's own | 1.15 |
| class | measured runs of the class | 1.3 |
| neighbours | other runs on the accelerator; else the same precision and checkpointing on others of its vendor | 1.4 |

Runs of a class that are not in `estimated` (measured_runs.yaml) are off what is estimated without
their publisher by up to 8 % either way; an unpublished trainer may be off by more, hence 1.3 (14
%). Runs chosen beforehand are in docs/published_runs.md. Neighbours are unverified. A user's own
run differs by its setup alone, not by the trainer.

Two things that the measured runs do not show widen the range at its slow end:

- The network. Bandwidths are what collectives alone reach on an idle machine; next to computing
  they reach less, and no measured run waits for its network for long. At the slow end they take as
  much longer as computing does.
- Long sequences. Attention's kernels reach less than matrix products do: on H100 FlashAttention-2
  up to 335 TFLOP/s, forward and backward (arXiv 2307.08691, section 4.1), where products reach 795.
  As far as attention's share of the FLOPs is above that of the measured runs, it takes
  SLOW_ATTENTION times as long at the slow end. Of llm-foundry's 14 H100 runs at 8,192 to 65,536
  tokens none was in the range without it (measured up to 2.3 times the middle), 13 are.

Rates are the best published ones; where the accelerator has none, peaks, for it and for the runs
alike.
"""  # noqa: E501

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal

from drillyard.estimation.measured_runs import MeasuredRun, run_class
from drillyard.estimation.quantity import Range, quantity
from drillyard.estimation.setup import Setup
from drillyard.estimation.step_work import Work, count_work
from drillyard.estimation.timeline import CollectiveNetwork, Rates, step_traffic, timeline
from drillyard.hardware import Accelerator, Bandwidth, Fact, FactSource

Basis = Literal["calibration", "class", "neighbours", "bound"]
Rate = Literal["achievable", "peak"]

BANDS: Final[Mapping[Basis, float]] = {"calibration": 1.15, "class": 1.3, "neighbours": 1.4}
"""High over low of an efficiency, by what it is drawn from."""
SLOW_ATTENTION: Final = 3.0
"""Highest ratio of attention's time per FLOP to that of matrix products: the least whole number
with which the runs of long sequences are in their ranges. It is fitted to those 14 runs."""
WORTH_WIDENING: Final = 0.02
"""The difference of attention's share of the FLOPs from which it counts."""
NEIGHBOURS: Final = FactSource(
    "no measured run of this class: those of its neighbours are taken", None, True
)


@dataclass(frozen=True, slots=True)
class ReferenceRun:
    """A measured run that the range rests on, and the efficiency that it reached."""

    row: MeasuredRun
    efficiency: float

    @property
    def attention_share(self) -> float:
        """Attention's share of the run's FLOPs."""
        return _attention_share(self.row)


@cache
def _attention_share(row: MeasuredRun) -> float:
    return count_work(row.setup).attention_share


def best_rates(accelerator: Accelerator, precision: str, kind: Rate | None = None) -> Rates | None:
    """The best published matmul rate (or the peak, where there is none) and the memory's bandwidth;
    None where they are not known. With `kind` only that one. Under fp8 both it and bf16 are needed,
    in which the rest of a step is computed."""
    computed = ("bf16", "fp8") if precision == "fp8" else (precision,)
    known = all(accelerator.achievable(each) is not None for each in computed)
    chosen: Rate = kind or ("achievable" if known else "peak")
    flops, *fp8 = (
        accelerator.peak(each) if chosen == "peak" else accelerator.achievable(each)
        for each in computed
    )
    if flops is None or None in fp8 or accelerator.memory_bandwidth_gb_per_s is None:
        return None
    memory = accelerator.fact("memory_bandwidth_gb_per_s") * 1e9
    return Rates(chosen, flops, memory, *fp8)


def select_reference_runs(
    setup: Setup,
    accelerator: Accelerator,
    rows: Iterable[MeasuredRun],
    kind: Rate,
    bandwidths: tuple[Bandwidth, ...],
) -> tuple[Basis, tuple[ReferenceRun, ...]]:
    """The runs that say most about `setup` on `accelerator`, with the efficiencies they reached by
    rates of `kind`."""
    wanted = run_class(setup, accelerator.name)
    same_class, same_accelerator, same_vendor = [], [], []
    for row in rows:
        its = row.run_class
        if its == wanted:
            same_class.append(row)
        elif (its.accelerator, its.precision) == (wanted.accelerator, wanted.precision):
            same_accelerator.append(row)
        elif _vendor(row.accelerator) == _vendor(accelerator) and (
            (its.precision, its.activation_checkpointing)
            == (wanted.precision, wanted.activation_checkpointing)
        ):
            same_vendor.append(row)
    for basis, candidates in (
        ("class", same_class),
        ("neighbours", same_accelerator),
        ("neighbours", same_vendor),
    ):
        used = [
            ReferenceRun(row, reached)
            for row in candidates
            if (reached := efficiency_of(row, kind, bandwidths))
        ]
        if used:
            return "class" if basis == "class" else "neighbours", tuple(used)
    return "bound", ()


def efficiency_of(row: MeasuredRun, kind: Rate, bandwidths: tuple[Bandwidth, ...]) -> float | None:
    """The share of its accelerator's rates that a measured run reached; None where these are not
    known, or where communication alone would take longer than the run did. Computed once for a row
    and a tuple of bandwidths."""
    key = (row, kind, id(bandwidths))
    if key not in _REACHED:
        _REACHED[key] = (bandwidths, _efficiency(row, kind, bandwidths))
    return _REACHED[key][1]


_REACHED: dict[tuple[MeasuredRun, Rate, int], tuple[tuple[Bandwidth, ...], float | None]] = {}
"""Kept with the bandwidths themselves, so that no others can get their id."""


def _efficiency(row: MeasuredRun, kind: Rate, bandwidths: tuple[Bandwidth, ...]) -> float | None:
    rates = best_rates(row.accelerator, row.setup.precision, kind)
    if rates is None:
        return None
    work = count_work(row.setup)
    network = CollectiveNetwork(row.accelerator, row.machine, row.setup.gpus_per_node, bandwidths)
    return timeline(row.setup, work, step_traffic(row.setup, work, network), rates).efficiency(
        row.seconds
    )


def central_efficiency(used: Iterable[ReferenceRun]) -> float:
    """The geometric mean over publishers of the geometric means of their runs."""
    logs: dict[str, list[float]] = defaultdict(list)
    for one in used:
        logs[one.row.publisher].append(math.log(one.efficiency))
    means = [math.fsum(values) / len(values) for values in logs.values()]
    return math.exp(math.fsum(means) / len(means))


def unmeasured_attention(work: Work, used: tuple[ReferenceRun, ...]) -> float:
    """By how much attention's share of the FLOPs of `work` is above that of all runs that are drawn
    from; 0 or more."""
    excess = work.attention_share - max(one.attention_share for one in used)
    return excess if excess > WORTH_WIDENING else 0.0


def efficiency_range(basis: Basis, used: tuple[ReferenceRun, ...]) -> Range:
    """The band around the centre of `used`, which are not empty; never above 1."""
    centre, half = central_efficiency(used), math.sqrt(BANDS[basis])
    sources: list[Fact[Any] | FactSource] = [one.row.tokens_per_second_per_gpu for one in used]
    if basis == "neighbours":
        sources.append(NEIGHBOURS)
    runs = "1 measured run" if len(used) == 1 else f"{len(used)} measured runs, publishers alike"
    mean = f"geometric mean of {runs}: {centre:.3f}"
    return Range(
        quantity("efficiency", centre / half, "", f"{mean} / {half:.3f}", *sources),
        quantity("efficiency", min(1.0, centre * half), "", f"{mean} x {half:.3f}", *sources),
    )


def _vendor(accelerator: Accelerator) -> str:
    """The first word of its title: kernels and libraries differ between vendors more than between
    accelerators."""
    return accelerator.title.split()[0].casefold()
