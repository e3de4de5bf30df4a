"""Step records as they are read: one growing table per origin of lines, bounded in memory.

A `Lane` holds the records of one rank (or other origin) in one file, in the order of the log.
Columns grow as plain arrays of machine numbers, and only those that the log has.

Beyond `limit` rows a lane is folded: neighbouring rows whose seconds are nearly equal become one
row with their mean, which stands for both. Outliers (first steps, stalls, changes of speed) are
never folded with others, so sums stay exact and every folded row is within `folding_error` of the
steps that it stands for. The allowed difference is doubled until a quarter of the rows is gone;
where that many cannot be joined, the limit grows.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from drillyard.loglines.prefixes import Origin
from drillyard.measurement.parsed_log import COLUMN_DEFAULTS, EXACT_ROWS, NONFINITE

# Columns that only the reader uses: counts over the whole run so far, from which those of a step
# follow, the number of the attempt, where the log has it, and what line_steps.py makes steps of.
RUNNING: Final[dict[str, tuple[Any, Any]]] = {
    "_samples_so_far": (np.float64, np.nan),
    "_tokens_so_far": (np.float64, np.nan),
    "_skipped_so_far": (np.float64, np.nan),
    "_attempt": (np.int32, -1),
    "_line": (np.int64, 0),
    "_epoch": (np.float64, np.nan),
    "_epoch_unit": (np.float64, np.nan),
    "_bar_step": (np.int64, -1),
    "_bar_total": (np.int64, 0),
    "_bar_seconds": (np.float64, np.nan),
    "_bar_described": (np.int8, 0),
}
LINES_ONLY: Final = frozenset(
    name for name in RUNNING if name.startswith(("_line", "_epoch", "_bar"))
)
"""Of these, what is no longer needed once the lines have steps."""
_KNOWN: Final = COLUMN_DEFAULTS | RUNNING
_FIRST_SPREAD: Final = 1 / 1024


@dataclass(slots=True)
class Lane:
    """The step records of one origin in one source."""

    origin: Origin
    file: int
    length: int = 0
    folding_error: float = 0.0
    limit: int = EXACT_ROWS
    _columns: dict[str, array[Any]] = field(default_factory=dict)

    def extend(self, count: int, columns: Mapping[str, NDArray[Any]]) -> None:
        """Append `count` records; columns that are not given get their defaults."""
        for name, values in columns.items():
            dtype, default = _KNOWN[name]
            values = np.asarray(values, dtype=dtype)
            kept = self._columns.get(name)
            if kept is None:
                is_default = np.isnan(values) if default != default else values == default
                if name != "step" and is_default.all():
                    continue
                kept = self._columns[name] = array(np.dtype(dtype).char.replace("?", "b"))
            if len(kept) < self.length:
                values = np.append(np.full(self.length - len(kept), default, dtype), values)
            self._grow(name, kept, values.tobytes())
        self.length += count
        if self.length > self.limit:
            self._fold()

    def _grow(self, name: str, kept: array[Any], content: bytes) -> None:
        try:
            kept.frombytes(content)
        except BufferError:
            # A view of the column is in use (a log that is followed): do not modify that array.
            grown = self._columns[name] = array(kept.typecode, kept)
            grown.frombytes(content)

    def column(self, name: str) -> NDArray[Any] | None:
        """Return a column as an array that shares its memory; None where no record has it."""
        kept = self._columns.get(name)
        if kept is None:
            return None
        dtype, default = _KNOWN[name]
        if len(kept) < self.length:
            self._grow(name, kept, np.full(self.length - len(kept), default, dtype).tobytes())
        return np.frombuffer(self._columns[name], dtype=dtype)

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return all columns that the lane has."""
        return {
            name: values
            for name in list(self._columns)
            if (values := self.column(name)) is not None
        }

    def take(self) -> dict[str, NDArray[Any]]:
        """Return all columns and remove them from the lane."""
        taken = self.columns()
        self._columns.clear()
        return taken

    def replace(self, name: str, values: NDArray[Any]) -> None:
        kept = array(np.dtype(_KNOWN[name][0]).char.replace("?", "b"))
        kept.frombytes(np.asarray(values, dtype=_KNOWN[name][0]).tobytes())
        self._columns[name] = kept

    def keep(self, chosen: NDArray[Any]) -> None:
        """Keep only the rows that a mask chooses."""
        kept = {name: values[chosen].copy() for name, values in self.columns().items()}
        self._columns.clear()
        self.length = 0
        self.extend(int(np.count_nonzero(chosen)), kept)

    def _fold(self) -> None:
        """Join neighbouring rows until a quarter of them is gone; rows without seconds are joined
        in pairs."""
        columns = self.columns()
        spread = _FIRST_SPREAD
        while len(begins := group_begins(columns, spread)) > self.length * 3 // 4 and spread < 1:
            spread *= 2
        counts = columns.get("stands_for", np.ones(self.length, np.int32))
        ends = np.append(begins[1:], self.length) - 1
        folded = {name: values[ends].copy() for name, values in columns.items()}
        folded["stands_for"] = np.add.reduceat(counts, begins)
        if "seconds" in columns:
            folded["seconds"] = (
                np.add.reduceat(columns["seconds"] * counts, begins) / folded["stands_for"]
            )
            self.folding_error += spread * (1 + self.folding_error) * (len(begins) < self.length)
        # Where rows cannot be joined (all of a run that diverged are flagged), exactness takes
        # precedence over memory.
        self.limit = max(self.limit, len(begins) * 4 // 3)
        self._columns.clear()
        self.length = 0
        self.extend(len(begins), folded)


def group_begins(columns: Mapping[str, NDArray[Any]], spread: float) -> NDArray[np.intp]:
    """Begins of the groups of rows that may be joined: pairs of neighbours whose steps rise,
    without flags, and whose seconds differ by at most `spread` of the smaller."""
    step = columns["step"]
    alike = step[1:] > step[:-1]
    if "seconds" in columns:
        first, second = columns["seconds"][:-1], columns["seconds"][1:]
        missing = np.isnan(first) & np.isnan(second)
        alike &= missing | (np.abs(second - first) <= spread * np.minimum(first, second))
    if "flags" in columns:
        alike &= (columns["flags"][:-1] == 0) & (columns["flags"][1:] == 0)
    # Of a run of rows that are alike, rows 0 and 1, 2 and 3, ... are joined.
    index = np.arange(len(step))
    follows = np.append(False, alike)
    run_begin = np.maximum.accumulate(np.where(follows, 0, index))
    begins: NDArray[np.intp] = np.flatnonzero(~(follows & ((index - run_begin) % 2 == 1)))
    return begins


class Lanes:
    """All lanes of one source, by origin."""

    def __init__(self, file: int) -> None:
        self.file = file
        self._lanes: dict[Origin, Lane] = {}

    def lane(self, origin: Origin) -> Lane:
        """Return the lane of an origin; create it if it is new."""
        return self._lanes.setdefault(origin, Lane(origin, self.file))

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes.values())


def nonfinite_flags(
    count: int, columns: Mapping[str, NDArray[Any]], printed: Mapping[str, Sequence[Any]]
) -> NDArray[np.uint8]:
    """NONFINITE where loss or gradient norm was printed (not None, not empty) and is NaN or
    infinite."""
    flags = np.zeros(count, np.uint8)
    for name in ("loss", "grad_norm"):
        if name in columns and name in printed:
            for row in np.flatnonzero(~np.isfinite(columns[name])).tolist():
                if printed[name][row]:
                    flags[row] = NONFINITE
    return flags
