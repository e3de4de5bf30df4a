"""Any framework's logs -> one RunLog: the entry of this room's reading half.

    read(["run.log"])                     files, directories, gzip, zstd, `-`, gs://
    Tail(["run.log"]).poll()              the same for logs that still grow

All paths together are one run: restarts and ranks may be spread over files. What a file is, its content tells. Where
the same run was logged in several formats, the steps come from the first of registry.PREFERENCE that has at least half
as many as any other; facts and marks are taken from the others too. Every source is listed in
`RunLog.sources`, with the reason if its steps were not used.

Cost: a core reads about 100 to 400 MB/s of text; memory is that of the steps. Limits: of a directory, files that cannot
be logs (weights, images, source code) are passed over by their names; a path that is given by itself is always read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import tzinfo
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml

from drillyard.errors import UserError
from drillyard.loglines.packed import trouble
from drillyard.loglines.sources import GCS, LogFile, find_files, open_log
from drillyard.loglines.stamps import time_zone
from drillyard.measure.attempts import assign_marks, find_attempts, goes_back, split_at_starts
from drillyard.measure.formats.drillyard import Drillyard
from drillyard.measure.formats.registry import CLOCK_OF_START, PREFERENCE, WINDOWED
from drillyard.measure.growing import Growing
from drillyard.measure.joining import join
from drillyard.measure.reading import Found, Reading, read_source
from drillyard.measure.records import FORMATS, Clock, RunLog, Source, empty_run_log
from drillyard.measure.starts import start_rows

_NO_LOGS: Final = frozenset(
    f".{ending}"
    for ending in (
        *("safetensors", "distcp", "pt", "pth", "bin", "npy", "npz", "ckpt", "arrow", "parquet", "gguf", "model"),
        *("png", "jpg", "svg", "pdf", "html", "py", "pyc", "so", "whl", "zip", "tar", "lock", "yaml", "yml", "toml"),
    )
)
_RUN_FILES: Final = ("metrics.jsonl", "events.jsonl")


def read(paths: Sequence[str | Path], *, timezone: str | tzinfo | None = None, framework: str | None = None) -> RunLog:
    """Read one run from its logs.

    `timezone` is for time stamps without a zone: a name or offset as `--timezone` takes it. `framework` is a key of
    records.FORMATS: only that format is looked for. Raises UserError for paths that cannot be read, and, naming the
    formats tried, when there is nothing of a run in them.
    """
    zone = time_zone(timezone) if isinstance(timezone, str) else timezone
    only = _format(framework)
    files, set_aside, directory = _choose([str(path) for path in paths])
    readings = []
    for number, file in enumerate(files):
        with open_log(file) as stream:
            reading = read_source(file, number, stream, zone, only)
            reading.trouble = trouble(stream)
        readings.append(reading)
    log = _assemble(readings, zone, last=True)
    broken = [_broken(reading) for reading in readings if reading.trouble is not None]
    log.warnings += broken
    log.sources += set_aside
    _add_directory(log, directory)
    if not len(log.steps) and not log.marks:
        raise UserError(_nothing_found(log, only, broken))
    return log


class Tail:
    """Follows logs that grow. `poll` reads what is new and gives the run as it stands then.

    A file that was truncated or replaced is read anew from its beginning; what it held before is forgotten. See
    growing.py.
    """

    def __init__(
        self, paths: Sequence[str | Path], *, timezone: str | tzinfo | None = None, framework: str | None = None
    ) -> None:
        self._zone = time_zone(timezone) if isinstance(timezone, str) else timezone
        self._only = _format(framework)
        self._directory: Path | None = None
        files = self._resolve([str(path) for path in paths])
        if not files:
            raise UserError("nothing to follow: give the log of a run (or - for standard input)")
        self._sources = [Growing(file, number, self._zone, self._only) for number, file in enumerate(files)]

    def _resolve(self, names: list[str]) -> list[LogFile]:
        files: list[LogFile] = []
        for name in names:
            path = Path(name)
            if path.is_dir() and any((path / run_file).exists() for run_file in _RUN_FILES):
                self._directory = path
                files += [LogFile(str(path / run_file)) for run_file in _RUN_FILES]
            elif path.is_dir() or name.startswith(GCS):
                # Empty ones too: the logs of most ranks are empty at first.
                found = find_files([name])
                logs = [file for file in found if _may_be_log(file)]
                if not logs:
                    raise UserError(f"{name}: none of its {len(found)} files can be a log")
                files += logs
            else:
                files.append(LogFile(name))
        return files

    def absent(self) -> list[str]:
        """What is not there yet: its first lines are waited for."""
        return [source.file.name for source in self._sources if source.absent()]

    @property
    def ended(self) -> bool:
        """Whether nothing can come any more: all was read from streams that were closed."""
        return all(source.ended for source in self._sources)

    @property
    def behind(self) -> bool:
        """Whether more was there at the last poll than one poll reads."""
        return any(source.behind for source in self._sources)

    def poll(self) -> RunLog | None:
        """The run as it stands; None when nothing was written since the last poll. Raises UserError, also where all
        has ended without a step."""
        if not any([source.poll() for source in self._sources]):
            return None
        log = _assemble([source.reading() for source in self._sources], self._zone)
        _add_directory(log, self._directory)
        if self.ended and not len(log.steps) and not log.marks:
            raise UserError(_nothing_found(log, self._only, []))
        return log

    def close(self) -> None:
        """Close the files."""
        for source in self._sources:
            source.close()


def _format(framework: str | None) -> str | None:
    if framework is not None and framework not in FORMATS:
        raise UserError(f"--framework {framework}: not known. Choose one of {', '.join(FORMATS)}.")
    return framework


def _choose(names: list[str]) -> tuple[list[LogFile], list[Source], Path | None]:
    """The files to read, those set aside unread, and the run directory that they are of."""
    files: list[LogFile] = []
    aside: list[Source] = []
    directory: Path | None = None
    for name in names:
        path = Path(name)
        run_files = [] if name == "-" or name.startswith("gs://") else _run_files(path)
        if not run_files:
            found = find_files([name])
            logs = [file for file in found if _may_be_log(file) and file.size != 0] if path.is_dir() else found
            if not logs:
                raise UserError(f"{name}: none of its {len(found)} files can be a log")
            files += logs
            continue
        directory = path
        files += find_files([str(file) for file in run_files])
        for other in ("dllogger.json", "tensorboard", "logs"):
            if (path / other).exists():
                note = f"the same run; {run_files[0].name} has more to say"
                aside.append(Source(str(path / other), None, used=False, note=note))
    unique = {file.name: file for file in files}
    return list(unique.values()), aside, directory


def _run_files(path: Path) -> list[Path]:
    """The files to read of a Drillyard run directory; none for anything else."""
    try:
        return [path / name for name in _RUN_FILES if (path / name).is_file()] if path.is_dir() else []
    except OSError:
        return []


def _may_be_log(file: LogFile) -> bool:
    path = Path(file.name)
    return not path.name.startswith(".") and path.suffix.lower() not in _NO_LOGS


def _assemble(readings: list[Reading], zone: tzinfo | None, *, last: bool = False) -> RunLog:
    """One run from all that was read; nothing may be read on after the `last` time."""
    sources = [reading.source for reading in readings]
    chosen = _best_format([found for reading in readings for found in reading.found])
    log = empty_run_log(sources)
    log.format = chosen
    lanes = []
    for reading in readings:
        mine = next((found for found in reading.found if found.format == chosen and found.lanes), None)
        _describe(reading, mine, chosen)
        if mine is not None:
            lanes += [(lane, reading.source.name) for lane in mine.lanes]
            log.warnings += mine.warnings
        for found in sorted(reading.found, key=lambda found: found.format != chosen):
            for name, place in found.facts.places.items():
                log.facts.learn(place, **{name: getattr(found.facts, name)})
    lanes = _without_echo(lanes)
    marks = _marks(readings, chosen)
    # Drillyard's own lines number their rounds.
    starts = None if chosen == Drillyard.name else start_rows([lane for lane, _ in lanes], marks)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        # Figures that are not finite are data here.
        joined = join(
            lanes,
            windowed=chosen in WINDOWED,
            starts=starts,
            clock_of_start=chosen in CLOCK_OF_START,
            taking=last,
        )
    log.steps, log.ranks, log.folding_error = joined.steps, joined.ranks, joined.folding_error
    log.warnings += joined.warnings
    for copy, original in joined.copies.items():
        sources[copy].used = False
        sources[copy].note = f"repeats {sources[original].name}"
    log.clock = _clock(readings, zone)
    if chosen == Drillyard.name and len(log.steps):
        begun = [mark.time_us for _, mark in marks if mark.kind in ("run_start", "round_start")]
        log.steps = split_at_starts(log.steps, [time for time in begun if time is not None])
    log.marks = assign_marks(marks, log.steps)
    times = {number: (reading.first_time_us, reading.last_time_us) for number, reading in enumerate(readings)}
    log.attempts = find_attempts(log.steps, log.marks, times, clock_of_start=chosen in CLOCK_OF_START)
    _widen(log)
    _warn(log)
    return log


def _best_format(found: list[Found]) -> str | None:
    """The format to take the steps from."""
    records: dict[str, int] = {}
    for one in found:
        records[one.format] = records.get(one.format, 0) + one.records
    most = max(records.values(), default=0)
    if not most:
        return None
    return next(name for name in PREFERENCE if records.get(name, 0) * 2 >= most)


def _without_echo(lanes: list[tuple[Any, str]]) -> list[tuple[Any, str]]:
    """Without the step events of events.jsonl where metrics.jsonl has the steps."""
    full = [(lane, name) for lane, name in lanes if lane.column("loss") is not None]
    return full if full and any(Path(name).name in _RUN_FILES for _, name in lanes) else lanes


def _describe(reading: Reading, mine: Found | None, chosen: str | None) -> None:
    """Say of a source what it is and whether its steps are used."""
    source = reading.source
    steps = {found.format: found for found in reading.found if found.lanes}
    if mine is not None:
        source.format, source.used, source.note = chosen, True, ""
        source.steps = sum(lane.length for lane in mine.lanes)
        ranks = {lane.origin.rank for lane in mine.lanes} - {None}
        source.ranks = tuple(sorted(rank for rank in ranks if rank is not None))
        others = [FORMATS[name] for name in steps if name != chosen]
        if others:
            source.note = f"also holds {', '.join(others)}"
    elif steps:
        other = max(steps.values(), key=lambda found: found.records)
        source.format, source.used = other.format, False
        source.steps = sum(lane.length for lane in other.lanes)
        source.note = f"taken for the same run; {FORMATS[chosen or other.format]} has more to say"
    elif source.format is None and not source.note:
        source.used = any(found.marks for found in reading.found)
        source.note = "no steps"


def _marks(readings: list[Reading], chosen: str | None) -> list[Any]:
    """The marks of the chosen format, and of others in other sources those kinds that it does not have."""
    own = [mark for reading in readings for found in reading.found if found.format == chosen for mark in found.marks]
    kinds = {mark.kind for _, mark in own}
    seen = {(mark.file, mark.line) for _, mark in own}
    for reading in readings:
        for found in reading.found:
            for origin, mark in found.marks:
                if found.format != chosen and mark.kind not in kinds and (mark.file, mark.line) not in seen:
                    own.append((origin, mark))
                    seen.add((mark.file, mark.line))
    return own


def _clock(readings: list[Reading], zone: tzinfo | None) -> Clock:
    """What the time stamps of the sources that count are worth."""
    used = [reading for reading in readings if reading.source.used]
    firsts = [reading.first_time_us for reading in used if reading.first_time_us is not None]
    lasts = [reading.last_time_us for reading in used if reading.last_time_us is not None]
    zoneless = any(reading.stamps.zoneless for reading in used)
    zoned = any(reading.stamps.zoned for reading in used)
    clock = Clock(first_time_us=min(firsts, default=None), last_time_us=max(lasts, default=None))
    clock.resolution_us = max((reading.stamps.coarsest_us for reading in used), default=1)
    if zoneless:
        clock.zone = "given" if zone is not None else "assumed"
    elif zoned:
        clock.zone = "stated"
    return clock


def _widen(log: RunLog) -> None:
    """Let the clock reach over all attempts: the first lines of a file may have no stamps."""
    clock = log.clock
    if goes_back(log.steps.time_us) and log.attempts:
        # The lowest stamp is not the earliest one, nor the highest the latest.
        clock.first_time_us, clock.last_time_us = log.attempts[0].first_time_us, log.attempts[-1].last_time_us
        return
    firsts = [clock.first_time_us, *(attempt.first_time_us for attempt in log.attempts)]
    lasts = [clock.last_time_us, *(attempt.last_time_us for attempt in log.attempts)]
    clock.first_time_us = min((time for time in firsts if time is not None), default=None)
    clock.last_time_us = max((time for time in lasts if time is not None), default=None)


def _warn(log: RunLog) -> None:
    """What people should know of how the log was read."""
    for source in log.sources:
        if source.damaged_lines:
            log.warnings.append(f"{source.name}: {source.damaged_lines} damaged lines or records were passed over")
    log.warnings += _begun_again(log)
    if log.clock.zone == "assumed":
        log.warnings.append("time stamps carry no zone: UTC was assumed (--timezone)")


def _begun_again(log: RunLog) -> list[str]:
    """Files in which a run begins anew: a restart without a checkpoint, or another run that is no part of this one."""
    steps, doubts = log.steps, []
    for row in (np.flatnonzero(np.diff(steps.attempt)) + 1).tolist():
        if steps.step[row] <= steps.step[0] and steps.file[row] != steps.file[row - 1]:
            name = log.sources[int(steps.file[row])].name
            doubts.append(
                f"{name} begins at step {steps.step[row]} again and counts as a restart that did all steps once more;"
                " for a run of its own, use --compare"
            )
    return doubts


def _broken(reading: Reading) -> str:
    """Where a compressed source ended before its end."""
    source = reading.source
    read = f"read up to line {source.lines}" if source.bytes else "nothing could be read"
    return f"{source.name}: {reading.trouble}: {read}"


def _add_directory(log: RunLog, directory: Path | None) -> None:
    """What the resolved run.yaml of a run directory says."""
    if directory is None:
        return
    log.run_directory = directory
    path = directory / "run.yaml"
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return
    sections = config if isinstance(config, dict) else {}

    def value(section: str, name: str, kind: type) -> Any:
        found = sections.get(section)
        setting = found.get(name) if isinstance(found, dict) else None
        return setting if isinstance(setting, kind) else None

    log.facts.learn(
        str(path),
        model=value("model", "id", str),
        sequence_length=value("data", "sequence_length", int),
        micro_batch_size=value("training", "micro_batch_size", int),
        total_steps=value("training", "steps", int),
        precision=value("training", "precision", str),
        log_interval=value("logging", "every_steps", int),
    )


def _nothing_found(log: RunLog, only: str | None, broken: list[str]) -> str:
    names = ", ".join(re.sub(r"(.{60}).+", r"\1...", source.name) for source in log.sources[:3])
    size = sum(source.bytes for source in log.sources)
    if not size:
        return "\n".join(broken) or f"{names}: empty. Give a log that has at least one step."
    tried = FORMATS[only] if only else ", ".join(FORMATS.values())
    binary = all(source.note.startswith("binary") for source in log.sources)
    lines = "binary" if binary else f"{log.lines} lines"
    return "\n".join([*broken, f"{names}: no step found ({lines}). Formats tried: {tried}."])
