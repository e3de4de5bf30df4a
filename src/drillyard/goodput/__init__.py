"""Goodput: where the wall time of a run went, across all its restarts. The one sum that everything rests on.

It stands outside the rooms because both ends of a run's path need it and neither may import the other: `telemetry`
gives it the events of a run directory (summary.json), `measure` the lines of any framework's log. It imports nothing
of ours.

The idea: a run is a row of moments. The time between two neighbouring ones belongs to exactly one category, or is
split between two whose parts add up to it. All sums are in integer microseconds, so the categories sum to wall time
exactly, on any moments at all.

| category | what it holds |
|---|---|
| startup | until the first step of the run, and what that step took over the median step (compiling, warming up) |
| productive | steps, each up to 3 times the median; a step done again never counts twice |
| stalled | what a step took beyond 3 times the median |
| recomputation | steps done again after a resume, and the one in flight at a failure |
| checkpoint | training waited for a save (the blocking part of asynchronous ones), or `final/` was written |
| evaluation | training waited for an evaluation |
| restart | from a failure (or a later start) to the first step of the new round, with its excess over the median |
| waiting | nothing ran because nothing could or should: after `over` or `waiting`, until the next start |
| unknown | the rest: never counted as productive. A kill that nobody witnessed leaves its gap here |

A step's own time is its `seconds` where the moment has them, never more than the time since the moment before; the
rest of that time is unknown. Without `seconds` all of it is the step's, and the first step after a launch is taken for
a median one (none, if there is no other step). Goodput is productive over wall time.

What a log prints is rounded, and this must not turn steps into unknown time. A time since the moment before that
exceeds a step's own by no more than its `slack` is the step's whole. Where clocks tick in units longer than a
microsecond (`tick_microseconds`), what a step lacks at one tick it may take at the next, up to one unit; and stalls
begin one unit later.

Limits: with `logging.every_steps: N` the window in flight at a failure counts as recomputation as a whole. A clock that
steps back by more than a second is carried on from where it was (`clock_steps_back` counts these): the time it hid is
not seen, and what a step in flight had taken until then is unknown.

Cost: a few microseconds a moment; steps that come as columns (`StepRows`) cost a tenth of that.
"""

from drillyard.goodput.account import CLOCK_TOLERANCE, STALL_FACTOR, account
from drillyard.goodput.moments import CATEGORIES, Goodput, Kind, Moment, Overlay, StepRows, Times

__all__ = [
    "CATEGORIES",
    "CLOCK_TOLERANCE",
    "STALL_FACTOR",
    "Goodput",
    "Kind",
    "Moment",
    "Overlay",
    "StepRows",
    "Times",
    "account",
]
