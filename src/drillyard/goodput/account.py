"""The sum itself: a state machine over moments, and its fast path over columns of steps. See the package for the rules.

numpy is imported where columns are used, so that whoever only appends to a run directory does not pay for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from drillyard.goodput.moments import CATEGORIES, Goodput, Kind, Moment, StepRows, Times

if TYPE_CHECKING:
    from numpy.typing import NDArray

STALL_FACTOR: Final = 3
"""A step longer than this many medians is a stall from there on."""

CLOCK_TOLERANCE: Final = 1_000_000
"""Microseconds by which neighbouring moments may be out of order, as several processes append to one file."""

_STARTS: Final = frozenset({"run_start", "round_start"})
_CHUNK_ROWS: Final = 1 << 16
_LARGE: Final = 2**62
"""More microseconds than any run has: where sums of 64 bits could overflow, this is as good as more."""


class _Stretch(NamedTuple):
    """Steps done between two marks of progress. `own` microseconds were theirs; `redone` of the steps had been done.

    `launch` is the index in CATEGORIES of the launch that this stretch ended; -1 when it followed other steps.
    `per_step` is how long a step took by its own word; -1 where that is not known and `own` is all of the time since
    the mark before, a launch included.
    """

    own: int
    steps: int
    redone: int
    launch: int
    per_step: int


@dataclass(slots=True)
class _Account:
    """The state of a run while its moments are read in order."""

    tick: int
    times: Times = field(default_factory=Times)
    stretches: list[_Stretch] = field(default_factory=list)
    columns: list[tuple[NDArray[Any], ...]] = field(default_factory=list)
    """Further stretches: the fields of _Stretch as arrays."""
    phase: str = "waiting"
    """waiting, launch, training, or an overlay (checkpoint, evaluation)."""
    under: str = "launch"
    """The phase to which an overlay returns."""
    pending: int = 0
    """Microseconds in launch or training since the last mark of progress."""
    lacking: int = 0
    """Microseconds that the last steps should have taken and the ticks of the clock did not show, up to one tick."""
    position: int = 0
    """Steps completed in this round, the checkpoint's included."""
    highest: int = 0
    """Steps completed in any round."""

    @property
    def launch(self) -> str:
        return "restart" if self.stretches else "startup"

    def drop_pending(self, category: str) -> None:
        """No step will account for the pending time: it goes to `category`."""
        self.times.add(category, self.pending)
        self.pending = 0

    def elapse(self, microseconds: int, kind: Kind) -> None:
        """Account for the time before a moment, by the phase it ends."""
        phase = self.phase
        unwitnessed = (kind == "run_start" and phase == "launch") or (
            kind in _STARTS and phase not in ("launch", "waiting")
        )
        if unwitnessed:
            self.drop_pending("unknown")
            self.times.add("unknown", microseconds)
        elif phase == "waiting" and kind == "over":
            # Rank 0 has said so before the supervisor: the ranks were shutting down.
            self.times.add("unknown", microseconds)
        elif phase in ("launch", "training"):
            self.pending += microseconds
        else:
            self.times.add(phase, microseconds)

    def enter(self, moment: Moment) -> None:
        """Change the phase as a moment says."""
        kind, step = moment.kind, moment.step
        running = self.phase in ("launch", "training")
        if running and step is not None and step > self.position and kind in ("step", "begin"):
            self.progress(step, moment.seconds if kind == "step" else None, moment.slack)
        if kind in _STARTS or kind == "failure":
            if kind == "failure" or self.phase != "launch":
                # A start within a launch is a part of it; what is pending may yet be the time of a step.
                self.leave("recomputation")
            self.phase, self.position = "launch", 0
        elif kind == "resume" and step is not None:
            self.position = step
            if not self.stretches:
                self.highest = step
        elif kind in ("over", "waiting"):
            self.leave("unknown")
            self.phase = "waiting"
        elif kind == "begin" and moment.overlay is not None:
            if running:
                self.under = "training" if self.phase == "training" else "launch"
            self.phase = moment.overlay
        elif kind == "end" and self.phase == moment.overlay:
            self.phase = self.under
        elif kind == "done" and moment.overlay is not None and moment.seconds is not None and running:
            waited = min(self.pending, round(moment.seconds * 1e6))
            self.times.add(moment.overlay, waited)
            self.pending -= waited

    def leave(self, training_category: str) -> None:
        """The round is over: what was in flight goes to `training_category`, or to the launch that did not finish."""
        in_training = self.phase == "training" or (self.phase not in ("launch", "waiting") and self.under == "training")
        self.drop_pending(training_category if in_training else self.launch)
        self.lacking = 0

    def step_back(self) -> None:
        """The clock was set back: what a step in flight had taken so far cannot be told from what the clock hid."""
        if self.phase == "training":
            self.drop_pending("unknown")
            self.lacking = 0

    def progress(self, step: int, seconds: float | None, slack: float) -> None:
        """Steps up to `step` are completed: the pending time is theirs as far as they account for it."""
        steps = step - self.position
        per_step, own = -1, self.pending
        if seconds is not None:
            per_step = round(seconds * 1e6)
            claimed = per_step * steps + self.lacking
            if own > claimed + round(slack * 1e6) * steps:
                own = claimed
            self.lacking = min(max(claimed - own, 0), self.tick)
        launch = self.launch if self.phase == "launch" else None
        if self.pending > own:
            self.times.add(launch or "unknown", self.pending - own)
        redone = max(0, min(step, self.highest) - self.position)
        index = -1 if launch is None else CATEGORIES.index(launch)
        self.stretches.append(_Stretch(own, steps, redone, index, min(per_step, _LARGE)))
        self.pending, self.position, self.highest = 0, step, max(step, self.highest)
        self.phase = "training"

    def progress_rows(self, elapsed: NDArray[Any], rows: StepRows) -> None:
        """`elapse` and `progress` for many steps in training at once; `elapsed` microseconds since the one before."""
        import numpy as np

        pending = elapsed.copy()
        pending[0] += self.pending
        steps = np.diff(rows.step, prepend=self.position)
        known = ~np.isnan(rows.seconds)
        per_step = np.rint(np.where(known, np.clip(rows.seconds, 0, _LARGE / 1e6 / steps), 0) * 1e6).astype(np.int64)
        claimed = per_step * steps
        lacking = self._lacking(np.where(known, claimed - pending, 0))
        claimed += lacking
        slack = np.rint(rows.slack.astype(np.float64) * 1e6).astype(np.int64) * steps
        own = np.where(known & (pending > claimed + slack), claimed, pending)
        self.times.unknown += int((pending - own).sum())
        redone = np.clip(np.minimum(rows.step, self.highest) - (rows.step - steps), 0, None)
        launch = np.broadcast_to(np.int8(-1), own.shape)
        stated = np.where(known, per_step, -1)
        self.columns.append((own, _narrow(steps), _narrow(redone), launch, stated))
        self.pending, self.position = 0, int(rows.step[-1])
        self.highest = max(self.position, self.highest)

    def _lacking(self, shortfall: NDArray[Any]) -> NDArray[Any]:
        """For each step what the ones before it lacked, given by how much each claims more than it got."""
        import numpy as np

        if self.tick == 0 or (self.lacking == 0 and bool((shortfall <= 0).all())):
            return np.zeros(len(shortfall), dtype=np.int64)
        before, lacking, tick = [], self.lacking, self.tick
        for missing in shortfall.tolist():
            before.append(lacking)
            lacking += missing
            if lacking < 0:
                lacking = 0
            elif lacking > tick:
                lacking = tick
        self.lacking = lacking
        return np.asarray(before, dtype=np.int64)

    def settle_steps(self) -> int:
        """Divide the time of all steps, now that the median is known. Returns how many steps were done again."""
        import numpy as np

        if not self.stretches:
            return 0
        parts = [tuple(np.asarray(self.stretches, dtype=np.int64).T), *self.columns]
        median = self._median(parts)
        return sum(self._settle(part, median) for part in parts)

    def _settle(self, stretches: tuple[NDArray[Any], ...], median: int | None) -> int:
        """`settle_steps` for some of the stretches."""
        import numpy as np

        own, narrow_steps, narrow_redone, launch, per_step = stretches
        steps, redone = narrow_steps.astype(np.int64), narrow_redone.astype(np.int64)
        after_launch = (launch >= 0) & ((per_step < 0) | (median is not None))
        usual = np.where(after_launch, np.minimum(own, _times(median or 0, steps)), own)
        for index in (CATEGORIES.index("startup"), CATEGORIES.index("restart")):
            self.times.add(CATEGORIES[index], int((own - usual)[launch == index].sum()))
        # usual * redone // steps, in an order that cannot overflow.
        again = usual // steps * redone + usual % steps * redone // steps
        new = usual - again
        limit = new if median is None else _times(median * STALL_FACTOR, steps - redone) + self.tick
        self.times.recomputation += int(again.sum())
        self.times.productive += int(np.minimum(new, limit).sum())
        self.times.stalled += int(np.maximum(new - limit, 0).sum())
        return int(redone.sum())

    def _median(self, parts: list[tuple[NDArray[Any], ...]]) -> int | None:
        """Microseconds of the median step of those stretches that no launch precedes; None if there is none.

        Where ticks are longer than that, what fell between two of them says nothing about one step: then the steps'
        own word counts, or else the mean.
        """
        import numpy as np

        first, *others = parts
        later = [tuple(column[first[3] < 0] for column in first), *others]
        each = np.concatenate([own // steps.astype(np.int64) for own, steps, *_ in later])
        if not len(each):
            return None
        median = _median_low(each)
        if median >= self.tick:
            return median
        stated = np.concatenate([part[4][part[4] >= 0] for part in later])
        if len(stated):
            return _median_low(stated)
        return sum(int(part[0].sum()) for part in later) // sum(int(part[1].sum()) for part in later)


def _narrow(counts: NDArray[Any]) -> NDArray[Any]:
    """Counts in a byte each where they fit: of a million stretches each byte is a megabyte."""
    import numpy as np

    return counts.astype(np.uint8) if int(counts.max(initial=0)) < 256 else counts


def _median_low(values: NDArray[Any]) -> int:
    import numpy as np

    middle = (len(values) - 1) // 2
    return int(np.partition(values, middle)[middle])


def _times(microseconds: int, steps: NDArray[Any]) -> NDArray[Any]:
    """`microseconds` of each step, for these numbers of steps."""
    import numpy as np

    total: NDArray[Any] = microseconds * np.minimum(steps, _LARGE // max(microseconds, 1))
    return total


@dataclass(slots=True)
class _Clock:
    """A clock that only goes forward, made from one that may be set back."""

    start: int | None = None
    now: int = 0
    offset: int = 0
    steps_back: int = 0

    def advance(self, at: int) -> tuple[int, bool]:
        """Microseconds since the moment before, and whether the clock was set back in between."""
        at += self.offset
        if self.start is None:
            self.start = self.now = at
        set_back = at < self.now - CLOCK_TOLERANCE
        if set_back:
            self.offset += self.now - at
            self.steps_back += 1
        elapsed = max(at - self.now, 0)
        self.now += elapsed
        return elapsed, set_back


def account(moments: Iterable[Moment | StepRows], *, tick_microseconds: int = 0) -> Goodput:
    """Where the time from the first to the last of `moments` went, these in the order in which they happened.

    `tick_microseconds` is the unit in which the times of the steps come where it is coarse (1_000_000: whole seconds).
    """
    state, clock = _Account(tick_microseconds), _Clock()
    starts = rounds = 0
    for item in moments:
        for moment in _singly(item, state, clock) if isinstance(item, StepRows) else (item,):
            elapsed, set_back = clock.advance(moment.at)
            if set_back:
                state.step_back()
            state.elapse(elapsed, moment.kind)
            state.enter(moment)
            starts += moment.kind == "run_start"
            rounds += moment.kind == "round_start"
    state.leave("unknown")
    steps_redone = state.settle_steps()
    return Goodput(
        wall_microseconds=0 if clock.start is None else clock.now - clock.start,
        times=state.times,
        restarts=max(0, (rounds or starts) - 1),
        steps_redone=steps_redone,
        clock_steps_back=clock.steps_back,
    )


def _singly(rows: StepRows, state: _Account, clock: _Clock) -> Iterator[Moment]:
    """Account for `rows`, and hand out those that must be looked at one by one: the first after a launch, one before
    which the clock was set back, and one that is no progress."""
    import numpy as np

    first = 0
    while first < len(rows.at):
        part = rows.part(first, first + _CHUNK_ROWS)
        at = part.at + clock.offset
        latest = np.maximum.accumulate(np.maximum(at, clock.now))
        ordinary = (at >= latest - CLOCK_TOLERANCE) & (np.diff(part.step, prepend=state.position) > 0)
        length = len(at) if ordinary.all() else int(ordinary.argmin())
        if state.phase == "training" and length:
            elapsed = np.diff(latest[:length], prepend=clock.now)
            state.progress_rows(elapsed, part.part(0, length))
            clock.now = int(latest[length - 1])
            first += length
        else:
            yield rows.moment(first)
            first += 1
