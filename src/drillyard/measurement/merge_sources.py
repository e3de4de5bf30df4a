"""Merge of the content of all sources into the ParsedLog of one run.

Where the same run was logged in several formats, the steps come from the first of `log_formats`
that has at least half as many as any other; facts and events are taken from the others too. Every
source is in `ParsedLog.sources`, with the reason if its steps were not used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import tzinfo
from pathlib import Path
from typing import Any, Final

import numpy as np

from drillyard.errors import NotFoundError
from drillyard.measurement.formats import log_formats
from drillyard.measurement.formats.drillyard import Drillyard
from drillyard.measurement.line_steps import number_steps
from drillyard.measurement.log_events import (
    assign_events,
    find_attempts,
    goes_back,
    split_at_starts,
    start_rows,
)
from drillyard.measurement.log_totals import learn_batch
from drillyard.measurement.merge_ranks import merge_ranks
from drillyard.measurement.parsed_log import LogClock, LogFacts, LoggedAttempt, ParsedLog, Steps
from drillyard.measurement.source_reader import FormatContent, SourceContent

RUN_FILES: Final = ("metrics.jsonl", "events.jsonl")
"""Of a Drillyard run directory, what is read."""


def merge_sources(
    readings: list[SourceContent], zone: tzinfo | None, *, last: bool = False
) -> ParsedLog:
    """One run from all that was read; nothing may be read on after the `last` time."""
    sources = [reading.source for reading in readings]
    chosen = _best_format([found for reading in readings for found in reading.found])
    kind = None if chosen is None else log_formats()[chosen]
    clock_restarts = kind is not None and kind.clock_restarts
    log = ParsedLog(Steps.of(), [], LogFacts(), [], sources, LogClock(), chosen)
    lanes = []
    for reading in readings:
        mine = next(
            (found for found in reading.found if found.format == chosen and found.lanes), None
        )
        _describe(reading, mine, chosen)
        if mine is not None:
            lanes += [(lane, reading.source.name) for lane in mine.lanes]
            log.warnings += mine.warnings
        for found in sorted(reading.found, key=lambda found: found.format != chosen):
            for name, place in found.facts.places.items():
                log.facts.learn(place, **{name: getattr(found.facts, name)})
            for number in found.facts.other_gpus:
                log.facts.learn("", num_gpus=number)
    learn_batch(log.facts)
    # Without the step events of events.jsonl where metrics.jsonl has the steps. A column of NaN
    # alone is dropped: where no loss is finite, the tokens decide.
    full = [
        (lane, name)
        for lane, name in lanes
        if any(lane.column(key) is not None for key in ("loss", "tokens"))
    ]
    lanes = full if full and any(Path(name).name in RUN_FILES for _, name in lanes) else lanes
    events = _events(readings, chosen)
    # Drillyard's own lines number their attempts.
    starts = None if chosen == Drillyard.name else start_rows([lane for lane, _ in lanes], events)
    if starts is not None:
        log.numbered_lines, said = number_steps(
            [lane for lane, _ in lanes], starts, log.facts, events
        )
        log.warnings += said
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        # Figures that are not finite are data here.
        copies = merge_ranks(
            log,
            lanes,
            windowed=kind is not None and kind.windowed,
            starts=starts,
            clock_restarts=clock_restarts,
            taking=last,
        )
    for copy, original in copies.items():
        sources[copy].used = False
        sources[copy].note = f"repeats {sources[original].name}"
    if chosen == Drillyard.name and len(log.steps):
        begun = [event.time_us for _, event in events if event.kind in ("run_start", "round_start")]
        log.steps = split_at_starts(log.steps, [time for time in begun if time is not None])
    log.events = assign_events(events, log.steps)
    times = {
        number: (reading.first_time_us, reading.last_time_us)
        for number, reading in enumerate(readings)
    }
    log.attempts = find_attempts(log.steps, log.events, times, clock_restarts=clock_restarts)
    log.clock = _clock(log, readings, zone)
    _warn(log)
    return log


def _best_format(found: list[FormatContent]) -> str | None:
    records: Counter[str] = Counter()
    for one in found:
        records[one.format] += one.records
    for name in list(records):
        if records.get(log_formats()[name].yields_to):
            del records[name]
    most = max(records.values(), default=0)
    return next(name for name in log_formats() if records[name] * 2 >= most) if most else None


def _describe(reading: SourceContent, mine: FormatContent | None, chosen: str | None) -> None:
    """Say of a source what it is and whether its steps are used."""
    source = reading.source
    steps = {found.format: found for found in reading.found if found.lanes}
    if mine is not None:
        source.format, source.used, source.note = chosen, True, ""
        if others := [log_formats()[name].title for name in steps if name != chosen]:
            source.note = f"also holds {', '.join(others)}"
    elif steps:
        other = max(steps.values(), key=lambda found: found.records)
        source.format, source.used = other.format, False
        source.note = (
            f"taken for the same run; {log_formats()[chosen or other.format].title} has more to say"
        )
    elif source.format is None and not source.note:
        source.used = any(found.events for found in reading.found)
        source.note = "no steps"


def _events(readings: list[SourceContent], chosen: str | None) -> list[Any]:
    """The events of the chosen format, and of others in other sources those kinds that it does not
    have."""
    found = [one for reading in readings for one in reading.found]
    own = [event for one in found if one.format == chosen for event in one.events]
    kinds = {event.kind for _, event in own}
    seen = {(event.file, event.line) for _, event in own}
    for origin, event in (pair for one in found if one.format != chosen for pair in one.events):
        if event.kind not in kinds and (event.file, event.line) not in seen:
            own.append((origin, event))
            seen.add((event.file, event.line))
    return own


def _clock(log: ParsedLog, readings: list[SourceContent], zone: tzinfo | None) -> LogClock:
    """Determine the clock of the sources that count: zone and resolution of its stamps, and the
    times it spans."""
    used = [reading for reading in readings if reading.source.used]
    clock = LogClock(resolution_us=max((reading.stamps.coarsest_us for reading in used), default=1))
    if any(reading.stamps.zoneless for reading in used):
        clock.zone = "given" if zone is not None else "assumed"
    elif any(reading.stamps.zoned for reading in used):
        clock.zone = "stated"
    if goes_back(log.steps.time_us) and log.attempts:
        # The lowest stamp is not the earliest one, nor the highest the latest.
        clock.first_time_us, clock.last_time_us = (
            log.attempts[0].first_time_us,
            log.attempts[-1].last_time_us,
        )
    else:
        parts: list[SourceContent | LoggedAttempt] = [*used, *log.attempts]
        firsts = [part.first_time_us for part in parts if part.first_time_us is not None]
        lasts = [part.last_time_us for part in parts if part.last_time_us is not None]
        clock.first_time_us, clock.last_time_us = (
            min(firsts, default=None),
            max(lasts, default=None),
        )
    return clock


def _warn(log: ParsedLog) -> None:
    for source in log.sources:
        if source.damaged_lines:
            log.warnings.append(
                f"{source.name}: {source.damaged_lines} damaged lines or records were passed over"
            )
    log.warnings += _begun_again(log)
    if log.clock.zone == "assumed":
        log.warnings.append("time stamps carry no zone: UTC was assumed (--timezone)")


def _begun_again(log: ParsedLog) -> Iterator[str]:
    """Files in which a run begins again: a restart without a checkpoint, or another run that is no
    part of this one."""
    steps = log.steps
    for row in (np.flatnonzero(np.diff(steps.attempt)) + 1).tolist():
        if steps.step[row] <= steps.step[0] and steps.file[row] != steps.file[row - 1]:
            name = log.sources[int(steps.file[row])].name
            yield (
                f"{name} begins at step {steps.step[row]} again and counts as a restart that did"
                " all steps once more; for a run of its own, use --compare"
            )


def add_directory(log: ParsedLog, directory: Path | None) -> None:
    """Add the settings of a run directory's resolved run.yaml. UserError where it is odd."""
    if directory is None:
        return
    log.run_directory = directory
    path = directory / "run.yaml"
    # It brings pydantic, which logs of other programs do not need.
    from drillyard.config.yaml_document import read_document

    try:
        config = read_document(path).value
    except NotFoundError:
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
