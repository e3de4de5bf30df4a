"""Goodput: where the wall time of a run went, across all its restarts.

A run is a sequence of moments. The time between two neighbouring ones belongs to exactly one
category, or is split between two whose parts add up to it. All sums are in integer microseconds, so
the categories sum to wall time exactly.

| category | what it holds |
|---|---|
| startup | until the first step of the run, and what that step took over the median step (compiling, warming up) |
| productive | steps, each up to 3 times the median; a step done again never counts twice |
| stalled | what a step took beyond 3 times the median |
| recomputation | steps done again after a resume, and the one in flight at a failure |
| checkpoint | training waited for a save (the blocking part of asynchronous ones), or `final/` was written |
| evaluation | training waited for an evaluation |
| restart | from a failure (or a later start) to the first step of the new attempt, with its excess over the median |
| waiting | nothing ran because nothing could or should: after `over` or `waiting`, until the next start |
| unknown | the rest: never counted as productive, such as the gap of a kill that no event records |

A step's own time is its `seconds` where the moment has them, never more than the time since the
moment before; the rest of that time is unknown. Without `seconds` all of it is the step's, and the
first step after a launch counts as a median one (as none, if there is no other step). Where a
restart changed the number of GPUs, the median is that of the steps on as many. Goodput is
productive over wall time.

What a log prints is rounded, and this must not turn steps into unknown time. A time since the
moment before that exceeds a step's own by no more than its `slack` is the step's whole. Where
clocks tick in units longer than a microsecond (`tick_microseconds`), what a step lacks at one tick
it may take at the next, up to one unit; and stalls begin one unit later.

Limits: with `logging.every_steps: N` the window in flight at a failure counts as recomputation as a
whole. A clock that steps back by more than a second is carried on from where it was
(`clock_steps_back` counts these): the time it hid is not seen, and what a step in flight had taken
until then is unknown.

Cost: 2 to 4 microseconds a moment, 40 bytes a step.
"""  # noqa: E501

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from numpy.typing import NDArray

Kind = Literal[
    "run_start",
    "round_start",
    "resume",
    "step",
    "begin",
    "end",
    "done",
    "failure",
    "waiting",
    "over",
    "other",
]
Overlay = Literal["checkpoint", "evaluation"]


class Moment(NamedTuple):
    """One event at one time.

    run_start, round_start  the run, or an attempt of its ranks, starts
    resume                  a checkpoint of `step` was loaded: the attempt continues from there
    step                    steps up to `step` are completed; `seconds` is the duration of one, None
                            if not known
    begin, end              training waits for `overlay`, and no longer; a begin's `step` is
                            completed
    done                    training has waited `seconds` for `overlay`; when that began is not
                            known
    failure                 the attempt is over (or a new one is decided on), and what was in flight
                            is lost
    waiting, over           nothing runs until the next start: it cannot, or need not
    """

    at: int
    """Microseconds since any fixed time."""
    kind: Kind
    step: int | None = None
    seconds: float | None = None
    overlay: Overlay | None = None
    slack: float = 0.0
    """Seconds by which `seconds` may be too low because it is rounded."""
    num_gpus: int | None = None
    """How many GPUs the run has from here on, where a start says so."""


CATEGORIES: Final = (
    *("startup", "productive", "stalled", "recomputation", "checkpoint", "evaluation"),
    *("restart", "waiting", "unknown"),
)


@dataclass(frozen=True, slots=True)
class Goodput:
    """The account of a run: `times`, microseconds by category, sum to `wall_microseconds`
    exactly."""

    wall_microseconds: int
    times: dict[str, int]
    restarts: int
    steps_redone: int
    clock_steps_back: int
    microseconds_by_gpus: dict[int, int] = field(default_factory=dict)
    """Wall time without waiting, by how many GPUs the run had; what comes before the first known
    number counts with it. Empty where no moment has one."""

    @property
    def goodput(self) -> float | None:
        """Productive over wall time; None for a run without any duration."""
        return self.times["productive"] / self.wall_microseconds if self.wall_microseconds else None

    def seconds(self) -> dict[str, float]:
        return {name: microseconds / 1e6 for name, microseconds in self.times.items()}


STALL_FACTOR: Final = 3
"""A step longer than this many medians is a stall from there on."""

CLOCK_TOLERANCE: Final = 1_000_000
"""Microseconds by which neighbouring moments may be out of order, as several processes append to
one file."""

_STARTS: Final = frozenset({"run_start", "round_start"})
_LARGE: Final = 2**62
"""More microseconds than any run has: where sums of 64 bits could overflow, this is as good as
more."""


@dataclass(slots=True)
class _Account:
    """The state of a run while its moments are read in order."""

    tick: int
    times: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))
    stretches: array[int] = field(default_factory=lambda: array("q"))
    """Steps between two marks of progress, six numbers each: the microseconds that were theirs;
    how many they are; how many of them had been done before; the index in CATEGORIES of the launch
    that they ended, -1 after other steps; how many microseconds a step took as the log says it, -1
    where it does not; the number of GPUs, 0 where that is not known."""
    gpus: int = 0
    """The number of GPUs; 0 where it is not known."""
    phase: str = "waiting"
    """waiting, launch, training, or an overlay (checkpoint, evaluation)."""
    under: str = "launch"
    """The phase to which an overlay returns."""
    pending: int = 0
    """Microseconds in launch or training since the last mark of progress."""
    lacking: int = 0
    """Microseconds that the last steps should have taken and the ticks of the clock did not show,
    up to one tick."""
    position: int = 0
    """Steps completed in this attempt, the checkpoint's included."""
    highest: int = 0
    """Steps completed in any attempt."""

    @property
    def launch(self) -> str:
        return "restart" if self.stretches else "startup"

    def drop_pending(self, category: str) -> None:
        """No step will account for the pending time: it goes to `category`."""
        self.times[category] += self.pending
        self.pending = 0

    def elapse(self, microseconds: int, kind: Kind) -> None:
        """Account for the time before a moment, by the phase it ends."""
        phase = self.phase
        unwitnessed = (kind == "run_start" and phase == "launch") or (
            kind in _STARTS and phase not in ("launch", "waiting")
        )
        if unwitnessed:
            self.drop_pending("unknown")
            self.times["unknown"] += microseconds
        elif phase == "waiting" and kind == "over":
            # Rank 0 logs it before the supervisor does: the ranks were shutting down.
            self.times["unknown"] += microseconds
        elif phase in ("launch", "training"):
            self.pending += microseconds
        else:
            self.times[phase] += microseconds

    def enter(self, moment: Moment) -> None:
        """Change the phase at a moment."""
        kind, step = moment.kind, moment.step
        running = self.phase in ("launch", "training")
        if running and step is not None and step > self.position and kind in ("step", "begin"):
            self.progress(step, moment.seconds if kind == "step" else None, moment.slack)
        if kind in _STARTS or kind == "failure":
            if kind == "failure" or self.phase != "launch":
                # A start within a launch is a part of it; what is pending may yet be the time of a
                # step.
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
        elif (
            kind == "done" and moment.overlay is not None and moment.seconds is not None and running
        ):
            waited = min(self.pending, round(moment.seconds * 1e6))
            self.times[moment.overlay] += waited
            self.pending -= waited

    def leave(self, training_category: str) -> None:
        """The attempt is over: what was in flight goes to `training_category`, or to the launch
        that did not finish."""
        in_training = self.phase == "training" or (
            self.phase not in ("launch", "waiting") and self.under == "training"
        )
        self.drop_pending(training_category if in_training else self.launch)
        self.lacking = 0

    def step_back(self) -> None:
        """The clock was set back: it hides what a step in flight had taken so far, which becomes
        unknown."""
        if self.phase == "training":
            self.drop_pending("unknown")
            self.lacking = 0

    def progress(self, step: int, seconds: float | None, slack: float) -> None:
        """Steps up to `step` are completed: the pending time is theirs as far as they account for
        it."""
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
            self.times[launch or "unknown"] += self.pending - own
        redone = max(0, min(step, self.highest) - self.position)
        index = -1 if launch is None else CATEGORIES.index(launch)
        self.stretches.extend((own, steps, redone, index, min(per_step, _LARGE), self.gpus))
        self.pending, self.position, self.highest = 0, step, max(step, self.highest)
        self.phase = "training"

    def settle_steps(self) -> int:
        """Divide the time of all steps, now that the median is known. Returns how many steps were
        done again."""
        import numpy as np

        stretches = np.frombuffer(self.stretches, np.int64).reshape(-1, 6)
        return sum(
            self._settle(stretches[stretches[:, 5] == gpus]) for gpus in np.unique(stretches[:, 5])
        )

    def _settle(self, stretches: NDArray[Any]) -> int:
        """The same for the stretches on one number of GPUs."""
        import numpy as np

        own, steps, redone, launch, per_step, _ = stretches.T
        median = self._median(own, steps, per_step, launch < 0)
        after_launch = (launch >= 0) & ((per_step < 0) | (median is not None))
        usual = np.where(after_launch, np.minimum(own, _times(median or 0, steps)), own)
        for index in (CATEGORIES.index("startup"), CATEGORIES.index("restart")):
            self.times[CATEGORIES[index]] += int((own - usual)[launch == index].sum())
        # usual * redone // steps, in an order that cannot overflow.
        again = usual // steps * redone + usual % steps * redone // steps
        new = usual - again
        limit = new if median is None else _times(median * STALL_FACTOR, steps - redone) + self.tick
        self.times["recomputation"] += int(again.sum())
        self.times["productive"] += int(np.minimum(new, limit).sum())
        self.times["stalled"] += int(np.maximum(new - limit, 0).sum())
        return int(redone.sum())

    def _median(
        self, own: NDArray[Any], steps: NDArray[Any], per_step: NDArray[Any], later: NDArray[Any]
    ) -> int | None:
        """Microseconds of the median step of the `later` stretches, which follow no launch; None if
        there is none.

        Where ticks are longer than that, what fell between two of them says nothing about one step:
        then the steps' stated durations count, or else the mean.
        """
        if not later.any():
            return None
        median = _median_low((own // steps)[later])
        if median >= self.tick:
            return median
        stated = per_step[later & (per_step >= 0)]
        if len(stated):
            return _median_low(stated)
        return int(own[later].sum()) // int(steps[later].sum())


def _median_low(values: NDArray[Any]) -> int:
    import numpy as np

    middle = (len(values) - 1) // 2
    return int(np.partition(values, middle)[middle])


def _times(microseconds: int, steps: NDArray[Any]) -> NDArray[Any]:
    """`microseconds` of each step, for these numbers of steps."""
    import numpy as np

    total: NDArray[Any] = microseconds * np.minimum(steps, _LARGE // max(microseconds, 1))
    return total


def account(moments: Iterable[Moment], *, tick_microseconds: int = 0) -> Goodput:
    """Account for the time from the first to the last of `moments`, which are in the order in which
    they happened.

    `tick_microseconds` is the unit of the steps' times where it is coarse (1_000_000: whole
    seconds).
    """
    state = _Account(tick_microseconds)
    latest: int | None = None
    wall = starts = attempts = steps_back = 0
    gpus: int | None = None
    by_gpus: Counter[int] = Counter()
    for moment in moments:
        if latest is not None and moment.at < latest - CLOCK_TOLERANCE:
            state.step_back()
            steps_back += 1
            latest = None
        latest = moment.at if latest is None else latest
        elapsed = max(moment.at - latest, 0)
        latest += elapsed
        wall += elapsed
        state.elapse(elapsed, moment.kind)
        if moment.num_gpus is not None and moment.num_gpus != gpus:
            if gpus is not None:
                by_gpus[gpus] += wall - state.times["waiting"] - by_gpus.total()
            gpus = state.gpus = moment.num_gpus
        state.enter(moment)
        starts += moment.kind == "run_start"
        attempts += moment.kind == "round_start"
    state.leave("unknown")
    if gpus is not None:
        by_gpus[gpus] += wall - state.times["waiting"] - by_gpus.total()
    return Goodput(
        steps_redone=state.settle_steps(),
        wall_microseconds=wall,
        times=state.times,
        restarts=max(0, (attempts or starts) - 1),
        clock_steps_back=steps_back,
        microseconds_by_gpus=dict(by_gpus),
    )
