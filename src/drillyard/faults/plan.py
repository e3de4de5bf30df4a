"""Plan of faults with place and time: drawn from a seed before the campaign starts. Pure.

A fault is a kind (kill, stop, term, disk-full, flip), an injection point and a target: one rank, or
the supervisor. Injection points are taken in a fixed order; steps, ranks and moments are drawn.
Several faults share a run, one save interval each, because a start of the ranks costs seconds.

The saves of a run with S steps, one each E, are at E, 2E, ..., S. Interval k has the steps from kE
on and the save at (k + 1)E. The last two intervals have no fault, so that a late strike still finds
a save.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Final, Literal, get_args

from drillyard.errors import UserError

FaultKind = Literal["kill", "stop", "term", "disk-full", "flip"]
InjectionPoint = Literal[
    "step", "shards", "before-manifest", "manifest", "deletion", "cache", "export", "resume"
]
DiskLimit = Literal["tmpfs", "file-size"]

FAULT_KINDS: Final[tuple[FaultKind, ...]] = get_args(FaultKind)
INJECTION_POINTS: Final[dict[InjectionPoint, str]] = {
    "step": "in a step",
    "shards": "while shards are written",
    "before-manifest": "between last shard and manifest",
    "manifest": "half of the manifest written",
    "deletion": "deleting an old checkpoint",
    "cache": "in the cache build",
    "export": "in the export",
    "resume": "in the first second of the resumed attempt",
}
# The order in which the faults of one kind take their injection points.
_POINTS: Final[dict[FaultKind, tuple[InjectionPoint, ...]]] = {
    "kill": (
        "step",
        "shards",
        "before-manifest",
        "manifest",
        "deletion",
        "cache",
        "export",
        "resume",
        "step",
    ),
    "stop": ("step", "shards", "step", "before-manifest"),
    "term": ("step", "shards"),
    "disk-full": ("shards", "manifest"),
    "flip": ("step",),
}
_SHARES: Final[dict[FaultKind, int]] = {"kill": 12, "stop": 1, "term": 2, "disk-full": 2, "flip": 2}
# Only rank 0 reaches these.
_OF_RANK_0: Final = ("before-manifest", "manifest", "deletion", "cache", "export")
MIN_SAVES = 6
MAX_FAULTS_PER_RUN = 10
# The supervisor gives up after three attempts in a row without a step.
_MAX_WITHOUT_A_STEP = 2
KEPT_CHECKPOINTS = 2


@dataclass(frozen=True)
class Fault:
    """One fault. `target`: the rank that is struck, or None for the supervisor; `actor`: the rank
    that strikes; `step`: not before this step; `fraction` in [0, 1): the exact moment at the
    injection point.
    """

    number: int
    kind: FaultKind
    place: InjectionPoint
    target: int | None
    actor: int
    step: int
    fraction: float

    @property
    def restarts(self) -> int:
        """Starts of the ranks that this fault requires: a kill in the resumed attempt needs a kill
        before it."""
        if self.kind == "disk-full":
            return 0
        return 2 if self.place == "resume" else 1

    @property
    def phases(self) -> tuple[str, ...]:
        """Its phases, in order: the strike, and the second part at the start of the next
        attempt."""
        if self.kind == "flip":
            return ("hit", "flipped")
        return ("hit", "again") if self.place == "resume" else ("hit",)

    @property
    def checkpoints_needed(self) -> int:
        """Complete checkpoints that it needs when it strikes."""
        if self.kind == "flip":
            return 2
        return 1 if self.place == "resume" or self.kind == "disk-full" else 0

    @property
    def first_interval(self) -> int:
        """The first save interval in which they can exist, not counting a save in flight."""
        if self.place == "deletion":
            return KEPT_CHECKPOINTS
        return self.checkpoints_needed + 1 if self.checkpoints_needed else 0

    @property
    def name(self) -> str:
        """`kill rank 1`, `disk-full`."""
        if self.kind == "disk-full":
            return self.kind
        struck = "supervisor" if self.target is None else f"rank {self.target}"
        return f"{self.kind}, kill {struck}" if self.kind == "flip" else f"{self.kind} {struck}"


@dataclass(frozen=True)
class PlannedRun:
    """One disturbed run: its name, and its faults in the order in which they strike."""

    name: str
    faults: tuple[Fault, ...]

    @property
    def restarts(self) -> int:
        """Starts of the ranks beyond the first that its faults require."""
        return sum(fault.restarts for fault in self.faults)

    def has(self, kind_or_place: FaultKind | InjectionPoint) -> bool:
        """Whether it has a fault of this kind or at this injection point."""
        return any(kind_or_place in (fault.kind, fault.place) for fault in self.faults)


@dataclass(frozen=True)
class RunShape:
    """The properties of a run that its faults depend on."""

    steps: int
    save_every: int
    num_ranks: int
    disk_limit: DiskLimit = "tmpfs"

    @property
    def intervals(self) -> int:
        """Save intervals in which faults may strike."""
        return self.steps // self.save_every - 2


def draw_faults(
    kinds: Sequence[FaultKind], count: int, seed: int, shape: RunShape
) -> list[PlannedRun]:
    """`count` faults of `kinds` over as many runs as they need. Raises UserError if `count` is less
    than the number of kinds, or the run saves too rarely.
    """
    require_count(kinds, count)
    require_saves(shape.steps, shape.save_every)
    generator = random.Random(seed)
    faults = [
        _without_step(kind, place, turn, shape, generator)
        for kind, number in _numbers(kinds, count).items()
        for turn, place in enumerate(islice(cycle(_POINTS[kind]), number))
    ]
    generator.shuffle(faults)
    planned: list[PlannedRun] = []
    first = 1
    for group in _groups(faults, shape):
        numbered = [
            replace(fault, number=n)
            for n, fault in enumerate(_with_steps(group, shape, generator), first)
        ]
        planned.append(PlannedRun(f"chaos-{len(planned) + 1:02}", tuple(numbered)))
        first += len(numbered)
    return planned


def require_count(kinds: Sequence[FaultKind], count: int) -> None:
    """Raise UserError if there are fewer faults than kinds."""
    if count < len(kinds):
        raise UserError(
            f"--count {count} is less than the {len(kinds)} kinds of --faults; raise it, or name"
            " fewer"
        )


def require_saves(steps: int, save_every: int) -> None:
    """Raise UserError if a run saves too rarely for faults between its saves."""
    if steps // save_every < MIN_SAVES:
        raise UserError(
            f"the run has {steps} steps and saves every {save_every}: faults need at least"
            f" {MIN_SAVES} saves to strike at; lower checkpoint.every_steps (--set"
            " checkpoint.every_steps=N)"
        )


def _numbers(kinds: Sequence[FaultKind], count: int) -> dict[FaultKind, int]:
    """Number of faults of each kind: at least one, the rest one by one to the kind that is furthest
    below its share."""
    whole = sum(_SHARES[kind] for kind in kinds)
    numbers = dict.fromkeys(kinds, 1)
    for _ in range(count - len(kinds)):
        numbers[max(kinds, key=lambda kind: count * _SHARES[kind] / whole - numbers[kind])] += 1
    return numbers


def _without_step(
    kind: FaultKind, place: InjectionPoint, turn: int, shape: RunShape, generator: random.Random
) -> Fault:
    """The fault number `turn` of its kind, with target and actor, but no step yet."""
    targets: list[int | None] = [*range(shape.num_ranks), None]
    # Shifted by one with each pass over the injection points, so that each of them meets each
    # target.
    target = targets[sum(divmod(turn, len(_POINTS[kind]))) % len(targets)]
    if kind == "stop" or (kind == "flip" and target is None):
        target = turn % shape.num_ranks
    actor = target if target is not None else generator.randrange(shape.num_ranks)
    if kind == "disk-full" and shape.disk_limit == "file-size":
        # This limit is on all files of the process, so spare rank 0, which writes the metrics.
        place, actor = "shards", shape.num_ranks - 1
    if place in _OF_RANK_0:
        actor = 0
    if kind == "disk-full" or (kind == "stop" and place in _OF_RANK_0):
        target = actor
    return Fault(0, kind, place, target, actor, 0, generator.random())


def _groups(faults: Sequence[Fault], shape: RunShape) -> Iterator[list[Fault]]:
    """Faults that share a run: few enough for its save intervals and for the supervisor's restart
    policy."""
    while faults:
        group: list[Fault] = []
        for fault in faults:
            if len(group) < MAX_FAULTS_PER_RUN and _fits(fault, group, shape):
                group.append(fault)
        yield group
        faults = [fault for fault in faults if fault not in group]


def _fits(fault: Fault, group: Sequence[Fault], shape: RunShape) -> bool:
    if fault.place in ("cache", "export"):
        return sum(other.place == fault.place for other in group) < _MAX_WITHOUT_A_STEP
    firsts = [
        other.first_interval for other in (*group, fault) if other.place not in ("cache", "export")
    ]
    # From its first interval on, each needs an interval of its own.
    return all(
        sum(other >= first for other in firsts) <= max(shape.intervals - first, 0)
        for first in firsts
    )


def _with_steps(group: Sequence[Fault], shape: RunShape, generator: random.Random) -> list[Fault]:
    """Cache first, export last; between them save intervals drawn from the seed, ascending from
    fault to fault."""
    between = [fault for fault in group if fault.place not in ("cache", "export")]
    intervals = [-1] * len(between)
    while any(
        interval < fault.first_interval for fault, interval in zip(between, intervals, strict=True)
    ):
        intervals = sorted(generator.sample(range(shape.intervals), len(between)))
        generator.shuffle(between)
        if generator.random() < 0.5:
            # Faults that need checkpoints last: this order may fit where the shuffled one never
            # does.
            between.sort(key=lambda fault: fault.first_interval)
    every = shape.save_every
    placed = []
    for fault, interval in zip(between, intervals, strict=True):
        in_steps = fault.place in ("step", "resume")
        step = (
            interval * every + 1 + generator.randrange(every)
            if in_steps
            else (interval + 1) * every
        )
        placed.append(replace(fault, step=step))
    exports = [
        replace(fault, step=shape.steps // every * every)
        for fault in group
        if fault.place == "export"
    ]
    return [*(fault for fault in group if fault.place == "cache"), *placed, *exports]
