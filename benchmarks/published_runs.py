"""Estimates published runs without the rows of their own publisher, and writes
docs/published_runs.md.

    python benchmarks/published_runs.py [--check]

The runs, and which of them are estimated, are in src/drillyard/estimation/measured_runs.yaml.
Nothing is measured here: the document follows from that file and from the code, so the same tree
gives the same bytes. `--check` writes nothing and exits with 1 where the document differs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from drillyard.estimation.efficiency import BANDS, SLOW_ATTENTION
from drillyard.estimation.measured_runs import (
    MeasuredRun,
    estimated_runs,
    left_out_runs,
    published_runs,
)
from drillyard.estimation.step_time import StepTime, step_time

B200_RUN = "gke-b200-70b-16"
DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "published_runs.md"

HEAD = """\
# Published runs, estimated

`drillyard estimate` says how long a step takes as a range. This page shows what that is worth: {count} published runs,
settled on before anything was estimated, each estimated without any run of its own publisher.
**{inside} of {count} are inside their range**, whose high over low is at most {widest:.2f}, and half of the runs are
within {median:.1%} of the middle of their range. {widened} more is inside since the ranges of long sequences were
widened, after it had been seen to be outside.

What this covers: dense models from 1B parameters, sequences that are about as long as those of the runs drawn from
(mostly to 4,096 tokens), and networks that training seldom waits for. Smaller models, longer sequences and steps that
wait for their network get a note next to the estimate.

It is written by `python benchmarks/published_runs.py`; a test keeps it in step with the code.

## How the range is made

1. *Work.* The FLOPs that a step really executes, recomputation included (for eager models they equal what torch's own
   counter counts while they run), the bytes that elementwise kernels, the loss, FSDP's copies and AdamW move, and the
   bytes of every collective, from shapes alone.
2. *Best rates.* The best matmul rate published for the accelerator, its memory's bandwidth, and the bus bandwidth
   measured on the machine for messages of that size (line rates where nothing was measured).
3. *Overlap.* Of each block's forward and backward the longer of computing and communicating counts; the root's
   collectives and the optimizer are hidden by nothing.
4. *Efficiency.* The share of the best rates at which this gives a run's measured time. Of the measured runs of the
   same class (accelerator, precision, checkpointing, sharding) the geometric mean is taken, every publisher counting
   once, and the range is that mean with {half_class:.0%} on either side.

For sequences like theirs the band around the mean is the only number that looks at results: runs of a class that are
*not* in the list of estimated ones are off by up to 8%, and an unpublished trainer may be off by more, so
{half_class:.0%} was taken. Nothing else was fitted to any run: no weights, no factor per publisher, model or framework.
Compiled and eager runs, 1B and 70B, 8 and 464 GPUs share one efficiency per class, because what they differ in is
counted.

The range is wider at its slow end where measured runs say nothing:

- *Long sequences.* As far as attention's share of the FLOPs is above that of all runs drawn from, it may take up to
  {slow_attention:g} times as long per FLOP as matrix products do. Without this none of llm-foundry's 14 H100 runs at
  8,192 to 65,536 tokens was in its range (measured up to 2.3 times the middle); with it 13 are, in ranges of up to 3.1.
  These runs settled the factor, so nothing independent confirms it.
- *The network.* Bandwidths are those of collectives alone on an idle machine. At the slow end communication takes as
  much longer as computing does. No published run confirms a step that mostly waits for its network.

Where a class has no run, its *neighbours* are taken, with {half_neighbours:.0%} on either side and marked as
unverified: other runs on the accelerator, or the same precision and checkpointing on other accelerators of its vendor.
Where there are none either, `estimate` gives the bound and calls it one.

## The estimated runs

The rule by which they were chosen: of the runs that a survey of training engines tables, every one in bf16 that states
model, GPUs, sequence, micro-batch and checkpointing, is data parallel only, and has a run of another publisher in its
class. Names carry accelerator, model, and GPUs or sequence; `eager` runs are not compiled.

"""  # noqa: E501

REST = """
## All other runs, estimated in the same way

Classes with another publisher first, then runs that only have neighbours. They were not settled on beforehand: those
of the first kind gave the band, and who counts as a neighbour was settled with those of the second kind in view. So
this table shows less than the one above. `{b200}` is Llama 3.1 70B on two a4-highgpu-8g, whose {measured:.4g} s lie
within {low:.3g} to {high:.3g} s although no other run on a B200 is drawn from.

"""  # noqa: E501

LEFT_OUT = """
## Published runs that are not estimated

"""

TAIL = """
## What this does not show

- Publishers' figures are their own claims, mostly of short runs on healthy machines in steady state: no checkpoints, no
  evaluation, no stragglers, no failures.
- Almost all are dense Llama and MPT models. Mixtures of experts and adapters rest on the counted work alone.
- Publishers are not all strangers to one another: torchao's runs were made with torchtitan as the driver, on machines
  and in settings of their own.
- Power limits are not known to the model. Of the H100 runs torchtitan's were made at 500 W; they are not set apart.
- Drillyard's own trainer is not among the publishers. `drillyard estimate --calibrate RUN_DIR` takes a run of yours
  instead of all of these.
"""  # noqa: E501


@dataclass(frozen=True)
class Outcome:
    """A run and what was estimated of it without its publisher."""

    row: MeasuredRun
    estimated: StepTime

    @property
    def ends(self) -> tuple[float, float]:
        """Low and high seconds."""
        return self.estimated.seconds.low.value, self.estimated.seconds.high.value

    @property
    def is_range(self) -> bool:
        return not self.estimated.seconds.is_bound

    @property
    def inside(self) -> bool:
        low, high = self.ends
        return low <= self.row.seconds <= high

    @property
    def inside_unwidened(self) -> bool:
        """Whether it is inside without what is added for longer sequences than the measured runs
        have."""
        low, high = self.ends
        assert self.estimated.basis is not None
        return low <= self.row.seconds <= min(high, low * BANDS[self.estimated.basis] * (1 + 1e-9))

    @property
    def width(self) -> float:
        """High over low."""
        low, high = self.ends
        return high / low

    @property
    def off(self) -> float:
        """Measured over the geometric middle of the range, less 1."""
        low, high = self.ends
        return self.row.seconds / math.sqrt(low * high) - 1


def outcome(row: MeasuredRun) -> Outcome:
    """`row`, estimated without the runs of its publisher."""
    return Outcome(
        row, step_time(row.setup, row.machine, row.accelerator, without_source=row.publisher)
    )


def outcomes(names: Iterable[str]) -> list[Outcome]:
    return [outcome(published_runs()[name]) for name in names]


def document() -> str:
    """The whole page."""
    chosen = outcomes(estimated_runs())
    others = outcomes(name for name in published_runs() if name not in estimated_runs())
    others.sort(
        key=lambda one: ("class", "neighbours", "bound").index(one.estimated.basis or "bound")
    )
    errors = sorted(abs(one.off) for one in chosen)
    head = HEAD.format(
        count=len(chosen),
        inside=sum(one.inside_unwidened for one in chosen),
        widened=sum(one.inside and not one.inside_unwidened for one in chosen),
        widest=max(one.width for one in chosen if one.inside_unwidened),
        median=errors[len(errors) // 2],
        half_class=math.sqrt(BANDS["class"]) - 1,
        half_neighbours=math.sqrt(BANDS["neighbours"]) - 1,
        slow_attention=SLOW_ATTENTION,
    )
    b200 = outcome(published_runs()[B200_RUN])
    rest = REST.format(
        b200=B200_RUN, measured=b200.row.seconds, low=b200.ends[0], high=b200.ends[1]
    )
    left_out = "\n".join(f"- {one['run']}: {one['why']}." for one in left_out_runs())
    sources = "\n".join(f"- {text}" for text in _sources())
    tables = ("\n".join(table(rows)) for rows in (chosen, others))
    return (
        f"{head}{next(tables)}\n{rest}{next(tables)}\n{LEFT_OUT}{left_out}\n{TAIL}\n##"
        f" Sources\n\n{sources}\n"
    )


def table(rows: Iterable[Outcome]) -> Iterator[str]:
    """A Markdown table of outcomes."""
    yield (
        "| run | GPUs | checkpointing | measured s | estimated s | off the middle | inside | drawn"
        " from |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for one in rows:
        setup = one.row.setup
        start = (
            f"| {one.row.name} | {setup.world_size} | {setup.activation_checkpointing} |"
            f" {one.row.seconds:.4g} |"
        )
        if not one.is_range:
            yield f"{start} at least {one.ends[0]:.4g} | | | nothing is like it |"
            continue
        low, high = one.ends
        publishers = ", ".join(sorted({used.row.publisher for used in one.estimated.rows}))
        word, number = (
            "neighbour" if one.estimated.basis == "neighbours" else "run",
            len(one.estimated.rows),
        )
        drawn = f"{number} {word}{'s' if number > 1 else ''}: {publishers}"
        inside = "yes" if one.inside_unwidened else "only widened" if one.inside else "**no**"
        yield f"{start} {low:.4g} to {high:.4g} | {one.off:+.1%} | {inside} | {drawn} |"


def _sources() -> list[str]:
    """Where the runs were published, in the order of the data file."""
    return list(
        dict.fromkeys(
            f"{source.text} ({source.date})"
            for row in published_runs().values()
            for source in row.tokens_per_second_per_gpu.sources[:1]
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="only say whether the document is up to date"
    )
    arguments = parser.parse_args()
    text = document()
    if arguments.check:
        raise SystemExit(
            0 if DOCUMENT.is_file() and DOCUMENT.read_text(encoding="utf-8") == text else 1
        )
    DOCUMENT.write_text(text, encoding="utf-8")
    print(f"{DOCUMENT}: {len(estimated_runs())} runs estimated")


if __name__ == "__main__":
    main()
