"""Which faults, where and when: drawn from a seed before anything is disturbed. Pure.

A fault is a kind (kill, stop, term, disk-full, flip), a place in the program and a target: one rank, or the supervisor.
Places are dealt out in a fixed order so that each has its share; steps, ranks and moments are drawn. Several faults
share a run, one save interval each, so that every round makes progress past the fault before it: a start of ranks
costs seconds, and a run that is hit ten times tries more than ten runs that are hit once.

    campaign -> cases (one run each) -> faults, in the order in which they strike

The saves of a run with S steps, one each E, are at E, 2E, ..., S. Interval k holds the steps from kE on, and its save
is the one at (k + 1)E. The last two intervals are kept free: a fault that comes late still finds a save to strike at.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from typing import Any, Final, Literal, get_args

from drillyard.errors import UserError

FaultKind = Literal["kill", "stop", "term", "disk-full", "flip"]
InjectionPoint = Literal["step", "shards", "before-manifest", "manifest", "deletion", "cache", "export", "resume"]
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
    "resume": "in the first second of the resumed round",
}
# The order in which the faults of one kind are dealt out.
_DEALT: Final[dict[FaultKind, tuple[InjectionPoint, ...]]] = {
    "kill": ("step", "shards", "before-manifest", "manifest", "deletion", "cache", "export", "resume", "step"),
    "stop": ("step", "shards", "step", "before-manifest"),
    "term": ("step", "shards"),
    "disk-full": ("shards", "manifest"),
    "flip": ("step",),
}
_SHARES: Final[dict[FaultKind, int]] = {"kill": 12, "stop": 1, "term": 2, "disk-full": 2, "flip": 2}
# What only rank 0 does.
_OF_RANK_0: Final = ("before-manifest", "manifest", "deletion", "cache", "export")
MIN_SAVES = 6
MAX_FAULTS_PER_RUN = 10
# The supervisor gives up after three rounds in a row without a step, and rightly so.
_MOST_WITHOUT_A_STEP = 2
KEPT_CHECKPOINTS = 2


@dataclass(frozen=True)
class Fault:
    """One fault. `step`: not before this step; `fraction` in [0, 1): where exactly, in what the place offers."""

    number: int
    kind: FaultKind
    place: InjectionPoint
    target: int | None
    """The rank that is struck; None: the supervisor."""
    actor: int
    """The rank that comes upon the place and strikes."""
    step: int
    fraction: float

    @property
    def restarts(self) -> int:
        """Starts of the ranks that this fault asks for: a kill in the resumed round needs a kill before it."""
        if self.kind == "disk-full":
            return 0
        return 2 if self.place == "resume" else 1

    @property
    def phases(self) -> tuple[str, ...]:
        """The marks that it leaves, in order: where it struck, and what follows at the start of the next round."""
        if self.kind == "flip":
            return ("hit", "flipped")
        return ("hit", "again") if self.place == "resume" else ("hit",)

    @property
    def checkpoints_needed(self) -> int:
        """Complete checkpoints that must be there when it strikes."""
        if self.kind == "flip":
            return 2
        return 1 if self.place == "resume" or self.kind == "disk-full" else 0

    @property
    def first_interval(self) -> int:
        """The first save interval in which that can be so, a save in flight not counted."""
        if self.kind == "flip":
            return 3
        if self.place == "deletion":
            return KEPT_CHECKPOINTS
        return 2 if self.checkpoints_needed else 0

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
        """Starts of the ranks beyond the first that its faults ask for."""
        return sum(fault.restarts for fault in self.faults)

    def has(self, kind: FaultKind) -> bool:
        """Whether a fault of `kind` is in it."""
        return any(fault.kind == kind for fault in self.faults)

    def has_place(self, place: InjectionPoint) -> bool:
        """Whether a fault at `place` is in it."""
        return any(fault.place == place for fault in self.faults)


@dataclass(frozen=True)
class RunShape:
    """What of a run its plan depends on."""

    steps: int
    save_every: int
    num_ranks: int
    disk_limit: DiskLimit = "tmpfs"

    @property
    def intervals(self) -> int:
        """Save intervals in which faults may strike."""
        return self.steps // self.save_every - 2


def draw_faults(kinds: Sequence[FaultKind], count: int, seed: int, shape: RunShape) -> list[PlannedRun]:
    """`count` faults of `kinds` over as many runs as they need; the same for the same arguments.

    Raises UserError when `count` is less than the number of kinds, or the run saves too rarely.
    """
    require_count(kinds, count)
    require_saves(shape.steps, shape.save_every)
    generator = random.Random(seed)
    wanted = [
        _unplaced(kind, place, turn, shape, generator)
        for kind, number in _shares(kinds, count).items()
        for turn, place in enumerate(islice(cycle(_DEALT[kind]), number))
    ]
    generator.shuffle(wanted)
    cases: list[PlannedRun] = []
    for group in _groups(wanted, shape):
        placed = _in_order(group, shape, generator)
        first = 1 + sum(len(case.faults) for case in cases)
        numbered = tuple(Fault(**{**asdict(fault), "number": first + i}) for i, fault in enumerate(placed))
        cases.append(PlannedRun(f"chaos-{len(cases) + 1:02}", numbered))
    return cases


def require_count(kinds: Sequence[FaultKind], count: int) -> None:
    """Raise UserError when there are fewer faults than kinds."""
    if count < len(kinds):
        raise UserError(f"--count {count} is less than the {len(kinds)} kinds of --faults; raise it, or name fewer")


def require_saves(steps: int, save_every: int) -> None:
    """Raise UserError when a run saves too rarely to be struck between its saves."""
    if steps // save_every < MIN_SAVES:
        raise UserError(
            f"the run has {steps} steps and saves every {save_every}: faults need at least {MIN_SAVES} saves to "
            "strike at; lower checkpoint.every_steps (--set checkpoint.every_steps=N)"
        )


def _shares(kinds: Sequence[FaultKind], count: int) -> dict[FaultKind, int]:
    """How many of each kind: at least one, and the rest one by one to the kind that is furthest below its share."""
    whole = sum(_SHARES[kind] for kind in kinds)
    shares = dict.fromkeys(kinds, 1)
    for _ in range(count - len(kinds)):
        shares[max(kinds, key=lambda kind: count * _SHARES[kind] / whole - shares[kind])] += 1
    return shares


def _unplaced(kind: FaultKind, place: InjectionPoint, turn: int, shape: RunShape, generator: random.Random) -> Fault:
    """The fault that `kind` gets in its `turn`: who is struck by whom, but not yet when."""
    targets: list[int | None] = [*range(shape.num_ranks), None]
    # Shifted by one with each pass over the places, so that each place meets each target.
    target = targets[sum(divmod(turn, len(_DEALT[kind]))) % len(targets)]
    if kind == "stop" or (kind == "flip" and target is None):
        target = turn % shape.num_ranks
    actor = target if target is not None else generator.randrange(shape.num_ranks)
    if kind == "disk-full" and shape.disk_limit == "file-size":
        # Below this limit no file of the process may grow: on another rank than 0, which writes the metrics.
        place, actor = "shards", shape.num_ranks - 1
    if place in _OF_RANK_0:
        actor = 0
    if kind == "disk-full" or (kind == "stop" and place in _OF_RANK_0):
        target = actor
    return Fault(0, kind, place, target, actor, 0, generator.random())


def _groups(faults: Sequence[Fault], shape: RunShape) -> Iterator[list[Fault]]:
    """Faults that share a run: few enough for its save intervals, and for the supervisor's patience."""
    left = list(faults)
    while left:
        group: list[Fault] = []
        for fault in list(left):
            if len(group) < MAX_FAULTS_PER_RUN and _fits(fault, group, shape):
                group.append(fault)
                left.remove(fault)
        yield group


def _fits(fault: Fault, group: Sequence[Fault], shape: RunShape) -> bool:
    alike = sum(other.place == fault.place for other in group)
    if fault.place in ("cache", "export"):
        return alike < _MOST_WITHOUT_A_STEP
    late = [other for other in (*group, fault) if other.place not in ("cache", "export")]
    # From its first interval on, each of them needs one of its own.
    return all(
        sum(other.first_interval >= first for other in late) <= shape.intervals - first
        for first in range(shape.intervals)
    ) and all(other.first_interval < shape.intervals for other in late)


def _in_order(group: Sequence[Fault], shape: RunShape, generator: random.Random) -> list[Fault]:
    """Cache first, export last; between them save intervals drawn from the seed, rising from fault to fault."""
    between = [fault for fault in group if fault.place not in ("cache", "export")]
    while True:
        intervals = sorted(generator.sample(range(shape.intervals), len(between)))
        generator.shuffle(between)
        if all(fault.first_interval <= k for fault, k in zip(between, intervals, strict=True)):
            break
        # Those that must wait for checkpoints go last: where a shuffle finds no order, this does.
        between.sort(key=lambda fault: fault.first_interval)
        if all(fault.first_interval <= k for fault, k in zip(between, intervals, strict=True)):
            break
    last_save = shape.steps // shape.save_every - 1
    return [
        *(fault for fault in group if fault.place == "cache"),
        *(_at(fault, k, shape, generator) for fault, k in zip(between, intervals, strict=True)),
        *(_at(fault, last_save, shape, generator) for fault in group if fault.place == "export"),
    ]


def _at(fault: Fault, interval: int, shape: RunShape, generator: random.Random) -> Fault:
    """`fault` in its save interval: at a drawn step of it, or at its save."""
    every = shape.save_every
    in_steps = fault.place in ("step", "resume")
    step = interval * every + 1 + generator.randrange(every) if in_steps else (interval + 1) * every
    return Fault(**{**asdict(fault), "step": step})


def as_json(case: PlannedRun) -> dict[str, Any]:
    """The case as JSON values."""
    return {"name": case.name, "faults": [asdict(fault) for fault in case.faults]}


def from_json(value: dict[str, Any]) -> PlannedRun:
    """What `as_json` gave."""
    return PlannedRun(value["name"], tuple(Fault(**fault) for fault in value["faults"]))
