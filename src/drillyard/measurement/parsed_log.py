"""Content of a run's logs, whatever framework wrote them: steps as columns, everything else as
events.

`read_logs.py` turns any log into one `ParsedLog`; statistics, goodput, comparison, report and watch
use nothing else. A run may have millions of steps, so `Steps` is a table of numpy columns (about
100 bytes a step; a column that the log does not have costs nothing), while rare events are
`LogEvent` objects.

What readers of a `ParsedLog` can rely on:
- A step printed by several ranks is one row: the slowest rank's `seconds` and `time_us`, all else
  from the lowest rank.
- Restarts are joined: `attempt` is 0 for the first start of the ranks, +1 for each later one. Rows
  are ordered by attempt and, within an attempt, by step; both only rise.
- A step that an earlier attempt had done has two rows; `again` is set on the later one, which led
  to the model.
- Times are UTC in integer microseconds since 1970; a clock that steps back is left as printed.

Limits: beyond `EXACT_ROWS` rows neighbouring steps of about the same duration are one row
(`Steps.stands_for`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

NO_TIME: Final = -(2**63)
"""In `Steps.time_us`: the line carried no time stamp."""

LATEST_SECONDS: Final = 1e11
"""The year 5138: what is later is damage."""

LONGEST_SECONDS: Final = 1e9
"""Thirty years: a longer step or wait is damage."""

SKIPPED: Final = 1
"""Bit of `Steps.flags`: the log says that the update of this step was not applied."""
NONFINITE: Final = 2
"""Bit of `Steps.flags`: loss or gradient norm is NaN or infinite (Megatron-LM: its loss is missing
from the line)."""
COMPILED: Final = 4
"""Bit of `Steps.flags`: this step's time includes compilation (stated in Drillyard's own log
alone)."""

EXACT_ROWS: Final = 1_000_000
"""Up to so many steps every step has a row of its own."""

_DEFAULTS: Final = {
    "time_us": NO_TIME,
    "rank": -1,
    "stands_for": 1,
    "window_steps": 1,
    "seconds_precision": 0.0,
}


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """The logged steps: one numpy array per column, all of the same length N.

    A column that the log lacks is all NaN (floats) or all its default, and takes no memory: it is a
    read-only view of one element. `has(name)`: whether a float column holds any number.

    step                optimizer steps as the log numbers them (most count from 1, NeMo and MaxText
                        from 0)
    time_us             when the line was written, UTC microseconds since 1970; NO_TIME without a
                        time stamp
    rank                the rank whose line this is; -1 where it is not known
    attempt             0 for the first start of the ranks, +1 per restart
    again               an earlier attempt had done this step: its time is recomputation
    flags               bits SKIPPED, NONFINITE and COMPILED
    skipped_steps, nonfinite_steps
                        of a line that stands for several steps, how many were SKIPPED and
                        NONFINITE, where it says so; 0 where not
    stands_for          steps that this row stands for (step - stands_for + 1 .. step), each of
                        about `seconds`: a weight for statistics. 1 unless the run has more than
                        EXACT_ROWS rows
    window_steps        how many steps `seconds` is the mean of: 1 a single step, N a window
                        (log_interval), 0 a moving average over steps before (NeMo), whose single
                        values mean little
    seconds             duration of a step in seconds; NaN where the line has none (then time_us or
                        elapsed_seconds of neighbouring rows give it). The time of the whole window
                        is seconds x window_steps
    seconds_precision   half a unit of the last printed digit, in seconds ('0.06s': 0.005); 0 where
                        printed in full
    elapsed_seconds     seconds since this attempt began, where the log prints such (progress bars,
                        DLLogger)
    data_seconds        the part of `seconds` that the step waited for data (Drillyard's own log)
    loss, grad_norm     as printed; may be NaN or infinite by themselves: see flags
    learning_rate
    tokens, samples     of one optimizer step, whole global batch, where the line has them
    num_gpus            GPUs of the run when the line was written, where the line says so
                        (Drillyard's own log); 0 where not
    printed_tokens_per_second_per_gpu, printed_tflops_per_gpu, printed_mfu (a fraction)
                        rates as the framework printed them, under its own formula
    memory_gib          GPU memory in GiB as printed
    file, line          index into RunLog.sources, and the line there (1 is the first; for event
                        files and JSON documents the number of the record)
    """

    step: NDArray[np.int64]
    time_us: NDArray[np.int64]
    rank: NDArray[np.int32]
    attempt: NDArray[np.int16]
    again: NDArray[np.bool_]
    flags: NDArray[np.uint8]
    skipped_steps: NDArray[np.int32]
    nonfinite_steps: NDArray[np.int32]
    stands_for: NDArray[np.int32]
    window_steps: NDArray[np.int32]
    seconds: NDArray[np.float64]
    seconds_precision: NDArray[np.float32]
    elapsed_seconds: NDArray[np.float64]
    data_seconds: NDArray[np.float64]
    loss: NDArray[np.float64]
    grad_norm: NDArray[np.float64]
    learning_rate: NDArray[np.float64]
    tokens: NDArray[np.float64]
    samples: NDArray[np.float64]
    num_gpus: NDArray[np.int32]
    printed_tokens_per_second_per_gpu: NDArray[np.float64]
    printed_tflops_per_gpu: NDArray[np.float64]
    printed_mfu: NDArray[np.float64]
    memory_gib: NDArray[np.float32]
    file: NDArray[np.int16]
    line: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.step)

    @classmethod
    def of(cls, **columns: Any) -> Steps:
        """A table from the columns that there are (sequences or arrays of one length); the rest get
        their defaults.

        `Steps.of(step=[1, 2], seconds=[14.5, 14.6])`. Raises TypeError for a name that is not a
        column.
        """
        if unknown := columns.keys() - COLUMN_DEFAULTS.keys():
            raise TypeError(f"no such columns: {sorted(unknown)}")
        length = len(next(iter(columns.values()), ()))
        return cls(
            **{
                name: (
                    np.asarray(columns[name], dtype=dtype)
                    if name in columns
                    else np.broadcast_to(np.asarray(default, dtype=dtype), (length,))
                )
                for name, (dtype, default) in COLUMN_DEFAULTS.items()
            }
        )

    def select(self, where: NDArray[np.bool_] | NDArray[np.intp] | slice) -> Steps:
        """The rows that a mask, an index array or a slice picks."""
        return Steps(**{name: _pick(getattr(self, name), where) for name in COLUMN_DEFAULTS})

    def has(self, column: str) -> bool:
        """Whether any row has a number (not NaN; a time that is not NO_TIME) in this column."""
        values = getattr(self, column)
        if not len(values):
            return False
        return bool((values != NO_TIME if column == "time_us" else values == values).any())


def _column(name: str, annotation: str) -> tuple[Any, Any]:
    dtype = getattr(np, annotation.removeprefix("NDArray[np.").removesuffix("]"))
    return dtype, _DEFAULTS.get(name, math.nan if issubclass(dtype, np.floating) else 0)


COLUMN_DEFAULTS: Final = {item.name: _column(item.name, str(item.type)) for item in fields(Steps)}
"""Each column's type, and its value where the log has none."""


def _pick(values: NDArray[Any], where: Any) -> NDArray[Any]:
    """Rows of one column; a column without memory of its own stays so."""
    if values.strides == (0,) and len(values):
        return np.broadcast_to(values[0], np.arange(len(values))[where].shape)
    chosen: NDArray[Any] = values[where]
    return chosen


LogEventKind = Literal[
    "run_start",
    "round_start",
    "resume",
    "checkpoint_begin",
    "checkpoint_end",
    "checkpoint",
    "evaluation_begin",
    "evaluation_end",
    "evaluation",
    "export_begin",
    "export_end",
    "failure",
    "restart",
    "waiting",
    "end",
]


@dataclass(frozen=True, slots=True)
class LogEvent:
    """An event other than a step. `kind` is from the vocabulary of events.jsonl
    (`telemetry/events.py`):

    run_start, round_start   a program or an attempt starts;  resume: a checkpoint was loaded (`step` is its step)
    checkpoint_begin/_end    training waits for a save (`seconds` on the end, where printed)
    checkpoint               a save is complete; how long training waited is not logged
                             (asynchronous ones)
    evaluation_begin/_end    training waits for an evaluation;  evaluation: its results, in `values` ({"loss": 0.51})
    failure, restart, waiting, end   as the log states them
    """  # noqa: E501

    kind: LogEventKind
    time_us: int | None
    """UTC microseconds since 1970; None without a time stamp."""
    file: int
    """Index into RunLog.sources."""
    line: int
    attempt: int = 0
    step: int | None = None
    seconds: float | None = None
    rank: int | None = None
    text: str = ""
    """The line, at most 500 characters."""
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoggedAttempt:
    """One start of the ranks: all that the log shows between it and the next."""

    number: int
    first_time_us: int | None
    """The first time stamp on any line of the attempt (also before its first step); None without
    time stamps."""
    last_time_us: int | None
    """The last time stamp on any line of the attempt."""


@dataclass(slots=True)
class LogFacts:
    """Facts that the log itself states about the run; None for the rest. Nothing is guessed or
    looked up.

    `places` is the location of a fact ("run.log:12"), by the fact's name.
    """

    model: str | None = None
    parameters: float | None = None
    trainable_parameters: float | None = None
    global_batch_size: int | None = None
    """Sequences per optimizer step."""
    tokens_per_step: int | None = None
    """Tokens per optimizer step, of all GPUs."""
    micro_batch_size: int | None = None
    sequence_length: int | None = None
    num_gpus: int | None = None
    """World size, where the log states it: that of the first start. `gpu_counts.py` has those of
    all starts."""
    accelerator: str | None = None
    """As printed, e.g. 'NVIDIA H100 80GB HBM3'; hardware/ may or may not know it."""
    precision: str | None = None
    """As printed: bf16, fp8, fp16, fp32, ..."""
    peak_flops: float | None = None
    """The peak FLOP/s on which the printed MFU rests."""
    formula: str | None = None
    """The FLOPs formula that the log names (Drillyard's own)."""
    flops_per_token: float | None = None
    tokenizer: str | None = None
    total_steps: int | None = None
    log_interval: int | None = None
    planned_epochs: float | None = None
    """Epochs that the whole run is to have, where the log's header states it (HF Trainer)."""
    train_runtime_seconds: float | None = None
    """The whole training loop's time, where the framework prints it at the end (HF Trainer)."""
    train_steps_per_second: float | None = None
    """Beside it: all steps of the run, also those before a resume, by that time."""
    train_samples_per_second: float | None = None
    train_epochs: float | None = None
    """The epochs when training ended."""
    total_flos: float | None = None
    """FLOPs of all training by the Trainer's own count, which is 6 x parameters without
    embeddings x tokens."""
    places: dict[str, str] = field(default_factory=dict)
    other_gpus: list[int] = field(default_factory=list)
    """World sizes that later lines state instead of `num_gpus`: the last ones, in order."""

    def learn(self, place: str, **facts: Any) -> None:
        """Take over facts that are not known yet: the first place wins. Ignored are None, a
        count or size that is not above zero and below 1e30, and a value of another type than the
        fact's."""
        for name, value in facts.items():
            if name in _TEXTS:
                fits = isinstance(value, str)
            else:
                fits = (
                    isinstance(value, int | float)
                    and not isinstance(value, bool)
                    and 0 < value < _LARGEST_FACT
                )
            if fits and getattr(self, name) is None:
                setattr(self, name, value)
                self.places[name] = place
            elif fits and name == "num_gpus" and value not in (self.num_gpus, *self.other_gpus):
                self.other_gpus = [*self.other_gpus, int(value)][-_OTHER_GPUS:]


_TEXTS: Final = frozenset(
    fact.name for fact in fields(LogFacts) if str(fact.type).startswith("str")
)
_LARGEST_FACT: Final = 1e30
_OTHER_GPUS: Final = 3


@dataclass(slots=True)
class ReadSource:
    """One file (or stream) that was read or set aside."""

    name: str
    """The path, `-`, `gs://...`."""
    format: str | None
    """A name in `log_formats`; None where nothing was recognised."""
    used: bool = True
    """Whether its steps are in ParsedLog.steps; otherwise `note` says why not."""
    note: str = ""
    bytes: int = 0
    lines: int = 0
    lines_passed_over: int = 0
    """Lines that were neither a step nor an event nor a fact."""
    damaged_lines: int = 0
    """Lines that begin like a step but cannot be read as one (torn, binary)."""
    unfinished_lines: int = 0
    """1 when the last line has no newline: it is left out, as it may still be growing."""


ZoneKnowledge = Literal["stated", "given", "assumed", "none"]


@dataclass(slots=True)
class LogClock:
    """Zone, span and resolution of the log's time stamps."""

    zone: ZoneKnowledge = "none"
    """stated: the stamps carry their zone (or are UTC by their format); given: `--timezone` was
    used; assumed: they carry none and UTC was assumed (durations are right unless daylight saving
    time changes); none: no time stamps."""
    first_time_us: int | None = None
    """The stamp of its first stamped line."""
    last_time_us: int | None = None
    """The stamp of its last stamped line."""
    resolution_us: int = 1
    """The coarsest unit of the step lines' stamps: 1_000_000 when they are whole seconds."""


@dataclass(slots=True)
class ParsedLog:
    """All that was read of one run. `sources[steps.file[i]]` is where row i comes from."""

    steps: Steps
    events: list[LogEvent]
    """In the order of attempts and, within one, of the log."""
    facts: LogFacts
    attempts: list[LoggedAttempt]
    sources: list[ReadSource]
    clock: LogClock
    format: str | None
    """The format of the source that the steps come from (a name in `log_formats`)."""
    warnings: list[str] = field(default_factory=list)
    """Sentences about what was set aside, assumed or damaged."""
    ranks: tuple[int, ...] = ()
    run_directory: Path | None = None
    """Set when the steps come from a Drillyard run directory on this machine: its events.jsonl,
    run.yaml and summary.json are there."""
    numbered_lines: bool = False
    """The log does not say which step its lines are of: `steps.step` counts lines."""
    folding_error: float = 0.0
    """0 up to EXACT_ROWS rows. Beyond: each folded row's `seconds` differs from every step it
    stands for by at most this fraction, so weighted quantiles are that exact, and sums are
    exact."""

    @property
    def lines(self) -> int:
        return sum(source.lines for source in self.sources)

    def place(self, row: int) -> str:
        """Location of a row of `steps`: `run.log:123`."""
        return f"{self.sources[int(self.steps.file[row])].name}:{int(self.steps.line[row])}"


def times_us(seconds: NDArray[np.float64]) -> NDArray[np.int64]:
    """UTC microseconds of seconds since 1970; NO_TIME where these are none (NaN, infinite, not
    above 0)."""
    known = (seconds > 0) & (seconds < LATEST_SECONDS)
    return np.where(known, np.round(np.where(known, seconds, 0.0) * 1e6), NO_TIME).astype(np.int64)
