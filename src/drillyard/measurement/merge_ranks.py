"""From the lanes of all sources to one table of steps: ranks joined, restarts separated, repeated
steps marked.

Each rank's lines are a sequence of their own, whatever order they were interleaved in. In such a
sequence a step number that does not rise begins a new attempt. Rows of all ranks with the same
attempt and step are one step that took as long as its slowest rank; everything else is the lowest
rank's. So any interleaving gives the same result.

Where no prefix distinguishes ranks (several print the same step without one, or with that of their
node), a repeated step close in time to its first print is another rank's; without times, if nearly
all steps are repeated. Ranks whose restarts do not show are aligned to the lowest rank's by time.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from drillyard.goodput import STALL_FACTOR
from drillyard.loglines.prefixes import Origin, rank_of
from drillyard.measurement.lanes import LINES_ONLY, Lane
from drillyard.measurement.parsed_log import COLUMN_DEFAULTS, NO_TIME, SKIPPED, ParsedLog, Steps

# Of a source's name: `rank-3.log`, `nemo_log_globalrank-3_localrank-3.txt`, torchrun's
# `attempt_0/3/stdout.log`.
_RANK_IN_NAME: Final = re.compile(
    r"rank[-_.]?(\d+)[^/]*$|/(\d+)/(?:stdout|stderr)\.log$", re.IGNORECASE
)
_SKEW_STEPS: Final = 2
_SKEW_US: Final = 2_000_000
_SKEW_SECONDS: Final = 1.0
_SLOWEST: Final[dict[str, np.ufunc]] = {
    "seconds": np.fmax,
    "time_us": np.maximum,
    "elapsed_seconds": np.fmax,
}
"""Functions that join the values of several ranks: fmax ignores NaN; NO_TIME is the smallest of all
times."""


@dataclass(slots=True)
class Track:
    """The rows of one rank in one source, with the attempt of each."""

    origin: Origin
    file: int
    columns: dict[str, NDArray[Any]]
    attempt: NDArray[np.int64]
    folding_error: float = 0.0
    begun: bool = False
    """Whether its source has a start before the first row."""

    @property
    def times(self) -> NDArray[np.int64] | None:
        """Times of its rows; None if one of them has none."""
        times = self.columns.get("time_us")
        return None if times is None or (times == NO_TIME).any() else times


def merge_ranks(
    log: ParsedLog,
    lanes: Sequence[tuple[Lane, str]],
    *,
    windowed: bool,
    starts: Sequence[NDArray[np.int64]] | None = None,
    clock_restarts: bool = False,
    taking: bool = False,
) -> dict[int, int]:
    """Set the steps and ranks of a log from lanes, each with the name of its source. Returns the
    files that repeat another's rows, each with that other.

    `windowed` formats log means since the line before. `starts` has for each lane the rows with
    which a later start begins; `clock_restarts`: `elapsed_seconds` restarts only then. `taking`
    empties the lanes, which saves memory.
    """
    tracks = [
        track
        for (lane, name), rows in zip(
            lanes, starts or [np.zeros(0, np.int64)] * len(lanes), strict=True
        )
        if lane.length
        for track in _tracks(
            lane, lane.take() if taking else lane.columns(), name, rows, clock_restarts
        )
    ]
    if not tracks:
        return {}
    chains, copies = _chains(tracks)
    ordered = sorted(
        chains, key=lambda one: (one.origin.rank is None, one.origin.rank or 0, one.origin.names)
    )
    _align(ordered)
    log.folding_error = max(chain.folding_error for chain in ordered)
    if log.folding_error and len(ordered) > 1:
        log.warnings.append(
            f"more than a million steps on {len(ordered)} ranks: only the lowest rank's lines are"
            " used"
        )
        ordered = ordered[:1]
    columns = _merge(ordered)
    _again(columns)
    if windowed:
        columns["window_steps"] = _windows(columns)
    log.steps, log.ranks = Steps.of(**columns), tuple(rank for rank in _ranks(ordered) if rank >= 0)
    return copies


def _tracks(
    lane: Lane,
    columns: dict[str, NDArray[Any]],
    source: str,
    starts: NDArray[np.int64],
    clock_restarts: bool,
) -> list[Track]:
    """The columns of a lane as one track; as one for each rank where several print without a
    prefix."""
    origin = lane.origin
    if origin.rank is None and not origin.names and (named := _RANK_IN_NAME.search(source)):
        origin = Origin(rank_of(named[1] or named[2]))
    _derive(columns)
    step = columns["step"]
    rises = step[1:] > step[:-1]
    logged = columns.pop("_attempt", None)
    changes = np.zeros(len(step) - 1, np.bool_) if logged is None else logged[1:] != logged[:-1]
    changes[starts[starts > 0] - 1] = True
    begun = bool(len(starts)) and int(starts[0]) == 0
    if clock_restarts and "elapsed_seconds" in columns:
        changes |= rises & (np.diff(columns["elapsed_seconds"]) < -_SKEW_SECONDS)
    attempt = np.append(0, np.cumsum(~rises | changes))
    times = columns.get("time_us")
    timed = times is not None and not (times == NO_TIME).any()
    copy = np.zeros(0, np.int64)
    if not (rises.all() or logged is not None or (origin.rank is not None and not timed)):
        attempt, copy = _repeated(columns, timed, changes)
    if not copy.any():
        return [Track(origin, lane.file, columns, attempt, lane.folding_error, begun)]
    tracks = []
    for number in range(int(copy.max()) + 1):
        chosen = copy == number
        rows = {name: values[chosen] for name, values in columns.items()}
        own = (
            Origin(None, (*origin.names, (number, "copy")))
            if origin.rank is None or number
            else origin
        )
        tracks.append(Track(own, lane.file, rows, attempt[chosen], lane.folding_error, begun))
    return tracks


def _repeated(
    columns: dict[str, NDArray[Any]], timed: bool, changes: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find steps that are printed again: the attempt of each row, and the number of earlier prints
    of its step. `changes` has for each row but the first whether another attempt begins with it."""
    steps = columns["step"].tolist()
    moments = columns["time_us"].tolist() if timed else [0] * len(steps)
    seconds = np.nan_to_num(columns.get("seconds", np.zeros(len(steps)))).tolist()
    distinct = len(set(steps))
    often = timed or len(steps) - distinct >= 0.9 * distinct
    attempts, copies = [], []
    attempt, highest = 0, -1
    seen: dict[int, tuple[int, int]] = {}
    stride = 1
    for step, moment, took, begin in zip(
        steps, moments, seconds, [False, *changes.tolist()], strict=True
    ):
        if begin:
            attempt, highest, seen = attempt + 1, -1, {}
        known = seen.get(step)
        close = known is not None and abs(moment - known[1]) <= max(_SKEW_US, took * 250_000)
        if step > highest:
            stride = step - highest if highest >= 0 else stride
            highest = step
            seen[step] = (1, moment)
            copies.append(0)
        elif known is not None and often and close and highest - step <= _SKEW_STEPS * stride:
            seen[step] = (known[0] + 1, known[1])
            copies.append(known[0])
        else:
            attempt, highest = attempt + 1, step
            seen = {step: (1, moment)}
            copies.append(0)
        attempts.append(attempt)
        if len(seen) > 4096:
            seen = {
                number: value
                for number, value in seen.items()
                if highest - number <= _SKEW_STEPS * stride
            }
    return np.array(attempts, np.int64), np.array(copies, np.int64)


def _derive(columns: dict[str, NDArray[Any]]) -> None:
    """Values of one step from counts over the run so far."""
    for name in LINES_ONLY & columns.keys():
        del columns[name]
    step = columns["step"]
    gap = np.diff(step).astype(np.float64)
    gap[gap <= 0] = np.nan
    for running, column in (("_samples_so_far", "samples"), ("_tokens_so_far", "tokens")):
        if (
            (total := columns.pop(running, None)) is not None
            and column not in columns
            and len(step) > 1
        ):
            each = np.diff(total) / gap
            each[~(each > 0)] = np.nan
            columns[column] = np.append(each[:1], each)
    if (skipped := columns.pop("_skipped_so_far", None)) is not None:
        more = np.append(skipped[0] > 0, np.diff(skipped) > 0)
        columns["flags"] = columns.get("flags", np.zeros(len(step), np.uint8)) | (
            more * np.uint8(SKIPPED)
        )


def _chains(tracks: list[Track]) -> tuple[list[Track], dict[int, int]]:
    """Tracks of one rank from several files put one after the other; files that repeat others are
    left out."""
    chains: dict[Origin, list[Track]] = {}
    copies: dict[int, int] = {}
    for track in sorted(
        tracks, key=lambda one: (0 if one.times is None else int(one.times[0]), one.file)
    ):
        group = chains.setdefault(track.origin, [])
        if (other := next((known for known in group if _overlap(known, track)), None)) is None:
            group.append(track)
        elif _same(other, track):
            keep, drop = (
                (other, track) if len(other.attempt) >= len(track.attempt) else (track, other)
            )
            copies[drop.file] = keep.file
            group[group.index(other)] = keep
        else:
            unnamed = Origin(None, (*track.origin.names, (track.file, "file")))
            chains.setdefault(unnamed, []).append(track)
            track.origin = unnamed
    return [_chain(group) for group in chains.values() if group], copies


def _overlap(first: Track, second: Track) -> bool:
    """Whether two tracks of one rank are of the same time; without times, whether they have the
    same steps and loss."""
    if first.file == second.file:
        return False
    times, others = first.times, second.times
    if times is not None and others is not None:
        both = min(times[-1], others[-1]) - max(times[0], others[0])
        return bool(both > 0 and both >= 0.5 * min(times[-1] - times[0], others[-1] - others[0]))
    return _same(first, second)


def _same(first: Track, second: Track) -> bool:
    """Whether nearly all steps that both have show the same loss and seconds."""
    common, here, there = np.intersect1d(
        first.columns["step"], second.columns["step"], return_indices=True
    )
    if len(common) < 0.9 * min(
        len(np.unique(first.columns["step"])), len(np.unique(second.columns["step"]))
    ):
        return False
    equal = np.ones(len(common), np.bool_)
    compared = False
    for name in ("loss", "seconds"):
        if name in first.columns and name in second.columns:
            mine, theirs = first.columns[name][here], second.columns[name][there]
            equal &= (mine == theirs) | (np.isnan(mine) & np.isnan(theirs))
            compared = True
    return compared and bool(equal.mean() >= 0.9)


def _goes_on(before: Track, track: Track) -> bool:
    """Whether a file continues another (a log that was rotated or cut): at the next step, in its
    usual time, without the sign of a start."""
    times, later = before.times, track.times
    steps, next_step = before.columns["step"], int(track.columns["step"][0])
    if track.begun or times is None or later is None or len(steps) < 3:
        return False
    taken, done = np.diff(times), np.diff(steps)
    gap = next_step - int(steps[-1])
    usual = float(np.median(taken[done > 0] / done[done > 0])) if (done > 0).any() else 0.0
    return (
        0 < gap <= np.median(done)
        and 0 <= int(later[0]) - int(times[-1]) <= STALL_FACTOR * usual * gap
    )


def _chain(group: list[Track]) -> Track:
    if len(group) == 1:
        return group[0]
    attempts = [group[0].attempt]
    for before, track in itertools.pairwise(group):
        latest = int(attempts[-1][-1])
        attempts.append(track.attempt + (latest if _goes_on(before, track) else latest + 1))
    parts = [{**track.columns, "file": np.full(len(track.attempt), track.file)} for track in group]
    return Track(
        group[0].origin,
        group[0].file,
        {name: _together(name, parts) for name in _names(parts)},
        np.concatenate(attempts),
        max(track.folding_error for track in group),
    )


def _align(chains: list[Track]) -> None:
    """Give ranks that show fewer or more attempts than the lowest rank its attempts, by time."""
    reference = chains[0]
    times = reference.times
    if times is None:
        return
    starts = np.flatnonzero(np.append(True, np.diff(reference.attempt) > 0))
    boundaries = (times[starts[1:]] + times[starts[1:] - 1]) // 2
    for chain in chains[1:]:
        if chain.attempt[-1] != reference.attempt[-1] and (own := chain.times) is not None:
            chain.attempt = np.searchsorted(boundaries, own, side="right")


def _merge(chains: list[Track]) -> dict[str, NDArray[Any]]:
    """Rows ordered by attempt and step, those of several ranks joined."""
    if len(chains) == 1:
        only = chains[0]
        columns = {**only.columns, "attempt": only.attempt}
        columns.setdefault("file", np.full(len(only.attempt), only.file))
        if only.origin.rank is not None:
            columns["rank"] = np.full(len(only.attempt), only.origin.rank)
        return columns
    parts: list[dict[str, NDArray[Any]]] = []
    for chain, rank in zip(chains, _ranks(chains), strict=True):
        each: dict[str, NDArray[Any]] = {"file": np.full(len(chain.attempt), chain.file)}
        each |= chain.columns
        each["attempt"], each["rank"] = chain.attempt, np.full(len(chain.attempt), rank, np.int32)
        parts.append(each)
        chain.columns.clear()
    step, attempt = _together("step", parts), np.concatenate([part["attempt"] for part in parts])
    order = np.lexsort((step, attempt))
    changes = (np.diff(step[order]) != 0) | (np.diff(attempt[order]) != 0)
    begins = np.flatnonzero(np.append(True, changes))
    several = len(begins) < len(order)
    firsts = order[begins] if several else order
    merged = {}
    # Column by column, each dropped when done: of millions of rows there are never two whole
    # tables. The steps come last: their number is needed for parts without a column.
    for name in [*(name for name in _names(parts) if name != "step"), "step"]:
        column = _together(name, parts)
        slowest = _SLOWEST.get(name) if several else None
        merged[name] = (
            column[firsts] if slowest is None else slowest.reduceat(column[order], begins)
        )
        for part in parts:
            part.pop(name, None)
    return merged


def _ranks(chains: Sequence[Track]) -> list[int]:
    """The ranks of tracks in order: those that they name, else their places among all; -1 for a
    single one."""
    named = [chain.origin.rank for chain in chains]
    if len(chains) == 1:
        return [-1 if named[0] is None else named[0]]
    known = [rank for rank in named if rank is not None]
    return known if len(known) == len(chains) else list(range(len(chains)))


def _names(parts: list[dict[str, NDArray[Any]]]) -> list[str]:
    return list(dict.fromkeys(name for part in parts for name in part))


def _together(name: str, parts: list[dict[str, NDArray[Any]]]) -> NDArray[Any]:
    """A column of the parts, one after the other; a part that lacks it has its default there."""
    dtype, default = COLUMN_DEFAULTS.get(name, (np.int64, 0))
    rows = [
        part[name] if name in part else np.full(len(part["step"]), default, dtype) for part in parts
    ]
    return np.concatenate(rows, dtype=dtype, casting="same_kind")


def _again(columns: dict[str, NDArray[Any]]) -> None:
    """Mark steps that an earlier attempt had done."""
    step, attempt = columns["step"], columns["attempt"]
    if not attempt[-1]:
        return
    again = np.zeros(len(step), np.bool_)
    highest = -1
    starts = np.append(np.flatnonzero(np.append(True, np.diff(attempt) > 0)), len(step))
    for begin, end in itertools.pairwise(starts.tolist()):
        again[begin:end] = step[begin:end] <= highest
        highest = max(highest, int(step[begin:end].max()))
    columns["again"] = again


def _windows(columns: dict[str, NDArray[Any]]) -> NDArray[np.int64]:
    """Number of steps that each line is the mean of: those since the line before it, in each
    attempt."""
    step, attempt = columns["step"], columns["attempt"]
    windows = np.diff(step, prepend=step[:1])
    starts = np.append(0, np.flatnonzero(attempt[1:] > attempt[:-1]) + 1)
    usual = np.delete(windows, starts)
    stride = int(np.median(usual, overwrite_input=True)) if len(usual) else 1
    # The first line of an attempt: a whole window, or the steps until then.
    rest = step[starts] % stride
    windows[starts] = np.where(rest == 0, stride, rest)
    return np.maximum(windows, 1, out=windows)
