"""Any framework's logs -> one ParsedLog: the entry point for reading.

    read_logs(["run.log"])                files, directories, gzip, zstd, `-`, gs://
    Tail(["run.log"]).poll()              the same for logs that still grow

All paths together are one run: restarts and ranks may be spread over files. Formats are detected by
content (source_reader.py); merge_sources.py decides what is taken from which file.

Cost: 100,000 step lines a second or more, 100 MB/s of other text; memory is that of the steps.
Limits: in a directory, files that cannot be logs (weights, images, source code) are skipped by
name; a path that is given by itself is read.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import tzinfo
from pathlib import Path
from typing import Final

from drillyard.errors import ConfigError, UserError
from drillyard.guarded_files import is_there
from drillyard.loglines.sources import GCS, LogFile, find_files, open_log, trouble
from drillyard.loglines.stamps import time_zone
from drillyard.measurement.formats import log_formats
from drillyard.measurement.merge_sources import RUN_FILES, add_directory, merge_sources
from drillyard.measurement.parsed_log import ParsedLog, ReadSource
from drillyard.measurement.source_reader import FollowedSource, SourceContent, read_source

_NO_LOGS: Final = frozenset(
    f".{ending}"
    for ending in (
        *(
            "safetensors",
            "distcp",
            "pt",
            "pth",
            "bin",
            "npy",
            "npz",
            "ckpt",
            "arrow",
            "parquet",
            "gguf",
            "model",
        ),
        *(
            "png",
            "jpg",
            "svg",
            "pdf",
            "html",
            "py",
            "pyc",
            "so",
            "whl",
            "zip",
            "tar",
            "lock",
            "yaml",
            "yml",
            "toml",
        ),
    )
)
_SECONDS_BETWEEN_LOOKS: Final = 2.0


def read_logs(
    paths: Sequence[str | Path],
    *,
    timezone: str | tzinfo | None = None,
    framework: str | None = None,
    allow_empty: bool = False,
) -> ParsedLog:
    """Read one run from its logs.

    `timezone` is for time stamps without a zone: a name or offset as `--timezone` takes it.
    `framework` is the name of the only format to look for. Raises UserError for paths that cannot
    be read, and, naming the formats tried, if they hold no step and no event, unless `allow_empty`.
    """
    zone = time_zone(timezone) if isinstance(timezone, str) else timezone
    only = _format(framework)
    chosen = _choose([str(path) for path in paths])
    readings = []
    for number, file in enumerate(chosen.files):
        with open_log(file) as stream:
            reading = read_source(file, number, stream, zone, only)
            if chosen.run_directory is not None:
                _require_text(reading.source)
            reading.trouble = trouble(stream)
        readings.append(reading)
    log = merge_sources(readings, zone, last=True)
    broken = [_broken(reading) for reading in readings if reading.trouble is not None]
    log.warnings += broken
    log.sources += chosen.aside
    add_directory(log, chosen.run_directory)
    if not len(log.steps) and not log.events and not allow_empty:
        raise UserError(_nothing_found(log, only, broken))
    return log


class Tail:
    """Follows logs that grow. `poll` reads what is new and gives the run so far.

    A file that was truncated or replaced is read again from its beginning; what it held before is
    dropped. Files that come into a directory are followed too (another rank's log, the event file
    of a restart).
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        timezone: str | tzinfo | None = None,
        framework: str | None = None,
    ) -> None:
        self._zone = time_zone(timezone) if isinstance(timezone, str) else timezone
        self._only = _format(framework)
        self._next_look = 0.0
        self._passed_over: set[str] = set()
        self._chosen = _choose([str(path) for path in paths], following=True)
        if not self._chosen.files:
            raise UserError("nothing to follow: give the log of a run (or - for standard input)")
        self._sources = [
            FollowedSource(file, number, self._zone, self._only)
            for number, file in enumerate(self._chosen.files)
        ]

    def _look_for_more(self) -> None:
        if not self._chosen.directories or time.monotonic() < self._next_look:
            return
        known = {source.file.name for source in self._sources} | self._passed_over
        # A directory may be deleted while it is listed.
        with contextlib.suppress(UserError):
            found = [
                file for directory in self._chosen.directories for file in find_files([directory])
            ]
            for file in found:
                if file.name not in known and _may_be_log(file):
                    # Not tried again where it cannot be followed: packed logs that were rotated.
                    self._passed_over.add(file.name)
                    self._sources.append(
                        FollowedSource(file, len(self._sources), self._zone, self._only)
                    )
        self._next_look = time.monotonic() + _SECONDS_BETWEEN_LOOKS

    def absent(self) -> list[str]:
        """Files that are missing: their first lines are waited for."""
        return [source.file.name for source in self._sources if source.input.absent()]

    @property
    def ended(self) -> bool:
        """Whether nothing can come any more: all was read from streams that were closed."""
        return all(source.input.ended for source in self._sources)

    @property
    def behind(self) -> bool:
        """Whether more was there at the last poll than one poll reads."""
        return any(source.input.behind for source in self._sources)

    def poll(self) -> ParsedLog | None:
        """The run so far; None when nothing was written since the last poll. Raises UserError, also
        where all input ended without a step."""
        self._look_for_more()
        if not any([source.poll() for source in self._sources]):
            return None
        log = merge_sources([source.content() for source in self._sources], self._zone)
        add_directory(log, self._chosen.run_directory)
        if self.ended and not len(log.steps) and not log.events:
            raise UserError(_nothing_found(log, self._only, []))
        return log

    def close(self) -> None:
        for source in self._sources:
            source.input.close()


def _format(framework: str | None) -> str | None:
    if framework is not None and framework not in log_formats():
        raise ConfigError(
            f"--framework {framework}: not known. Choose one of {', '.join(log_formats())}."
        )
    return framework


@dataclass(slots=True)
class _Chosen:
    """Content of the given paths: files to read, sources set aside unread, the run directory that
    they are of, other directories."""

    files: list[LogFile] = field(default_factory=list)
    aside: list[ReadSource] = field(default_factory=list)
    run_directory: Path | None = None
    directories: list[str] = field(default_factory=list)


def _choose(names: list[str], *, following: bool = False) -> _Chosen:
    """Choose what to read. With `following`, empty and missing files too: they may grow."""
    chosen = _Chosen()
    for name in names:
        path = Path(name)
        if run_files := _run_files(path):
            chosen.run_directory = path
            chosen.files += (
                [LogFile(str(path / file)) for file in RUN_FILES]
                if following
                else find_files(run_files)
            )
            for other in ("dllogger.json", "tensorboard", "logs"):
                if (path / other).exists():
                    note = f"the same run; {Path(run_files[0]).name} has more to say"
                    chosen.aside.append(ReadSource(str(path / other), None, used=False, note=note))
        elif following and not path.is_dir() and not name.startswith(GCS):
            chosen.files.append(LogFile(name))
        else:
            found = logs = find_files([name])
            if path.is_dir():
                chosen.directories.append(name)
                logs = [
                    file for file in found if _may_be_log(file) and (following or file.size != 0)
                ]
            if not logs:
                raise UserError(f"{name}: none of its {len(found)} files can be a log")
            chosen.files += logs
    chosen.files = list({file.name: file for file in chosen.files}.values())
    return chosen


def _run_files(path: Path) -> list[str]:
    """The files to read of a Drillyard run directory; none for anything else."""
    try:
        return (
            [str(path / name) for name in RUN_FILES if is_there(path / name)]
            if path.is_dir()
            else []
        )
    except OSError:
        return []


def _may_be_log(file: LogFile) -> bool:
    path = Path(file.name)
    return not path.name.startswith(".") and path.suffix.lower() not in _NO_LOGS


def _require_text(source: ReadSource) -> None:
    """Raise UserError for a binary file in the place of a run's own."""
    if source.note.startswith("binary") and Path(source.name).name in RUN_FILES:
        raise UserError(
            f"{source.name}: is binary, and a run writes lines of JSON; copy it again from where it"
            " was written, or remove it"
        )


def _broken(reading: SourceContent) -> str:
    """Say up to which line a truncated compressed source was read."""
    source = reading.source
    read = f"read up to line {source.lines}" if source.bytes else "nothing could be read"
    return f"{source.name}: {reading.trouble}: {read}"


def _nothing_found(log: ParsedLog, only: str | None, broken: list[str]) -> str:
    names = ", ".join(re.sub(r"(.{60}).+", r"\1...", source.name) for source in log.sources[:3])
    if not sum(source.bytes for source in log.sources):
        return "\n".join(broken) or f"{names}: empty. Give a log that has at least one step."
    tried = ", ".join(kind.title for name, kind in log_formats().items() if only in (None, name))
    binary = all(source.note.startswith("binary") for source in log.sources)
    lines = "binary" if binary else f"{log.lines} line{'s' * (log.lines != 1)}"
    return "\n".join([*broken, f"{names}: no step found ({lines}). Formats tried: {tried}."])
