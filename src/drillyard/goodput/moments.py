"""What goodput is computed from (moments), and what comes out (microseconds by category)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from numpy.typing import NDArray

Kind = Literal[
    "run_start", "round_start", "resume", "step", "begin", "end", "done", "failure", "waiting", "over", "other"
]
Overlay = Literal["checkpoint", "evaluation"]


class Moment(NamedTuple):
    """Something that happened at a time.

    run_start, round_start  the run, or a round of its ranks, starts
    resume                  a checkpoint of `step` was loaded: the round goes on from there
    step                    steps up to `step` are completed; `seconds` is the duration of one, None if not known
    begin, end              training waits for what `overlay` says, and no longer; a begin's `step` is completed
    done                    training has waited `seconds` for what `overlay` says; when that began is not known
    failure                 the round is over (or a new one is decided on), and what was in flight is lost
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


class StepRows(NamedTuple):
    """Many moments of kind `step`, one after the other, as numpy columns of one length: the same, but fast.

    at, step: int64; seconds: float64, NaN where it is not known; slack: float.
    """

    at: NDArray[Any]
    step: NDArray[Any]
    seconds: NDArray[Any]
    slack: NDArray[Any]

    def moment(self, row: int) -> Moment:
        """One row by itself."""
        seconds = float(self.seconds[row])
        known = seconds if seconds == seconds else None
        return Moment(int(self.at[row]), "step", int(self.step[row]), known, None, float(self.slack[row]))

    def part(self, start: int, stop: int) -> StepRows:
        """Rows `start` to `stop` - 1."""
        return StepRows(*(column[start:stop] for column in self))


@dataclass(slots=True)
class Times:
    """Microseconds by category."""

    startup: int = 0
    productive: int = 0
    stalled: int = 0
    recomputation: int = 0
    checkpoint: int = 0
    evaluation: int = 0
    restart: int = 0
    waiting: int = 0
    unknown: int = 0

    def add(self, category: str, microseconds: int) -> None:
        setattr(self, category, getattr(self, category) + microseconds)


CATEGORIES: Final = tuple(item.name for item in fields(Times))


@dataclass(frozen=True, slots=True)
class Goodput:
    """The account of a run: `times` in microseconds sums to `wall_microseconds` exactly."""

    wall_microseconds: int
    times: Times
    restarts: int
    steps_redone: int
    clock_steps_back: int

    @property
    def goodput(self) -> float | None:
        """Productive over wall time; None for a run without any duration."""
        return self.times.productive / self.wall_microseconds if self.wall_microseconds else None

    def microseconds(self) -> dict[str, int]:
        """Microseconds by category."""
        return asdict(self.times)

    def seconds(self) -> dict[str, float]:
        """Seconds by category."""
        return {name: microseconds / 1e6 for name, microseconds in asdict(self.times).items()}
