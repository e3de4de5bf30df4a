"""Any framework's logs -> one RunLog: the entry of this room's reading half.

    read(["run.log"])                     files, directories, gzip, zstd, `-`, gs://
    Tail(["run.log"]).poll()              the same for logs that still grow

All paths together are one run: restarts and ranks may be spread over files. What a file is, its content tells. What is
taken from which of them, merge_sources.py decides.

Cost: a core reads about 100 to 400 MB/s of text; memory is that of the steps. Limits: of a directory, files that cannot
be logs (weights, images, source code) are passed over by their names; a path that is given by itself is always read.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from datetime import tzinfo
from pathlib import Path
from typing import Final

from drillyard.errors import UserError
from drillyard.loglines.sources import GCS, LogFile, find_files, open_log, trouble
from drillyard.loglines.stamps import time_zone
from drillyard.measurement.formats import log_formats
from drillyard.measurement.merge_sources import RUN_FILES, add_directory, merge_sources
from drillyard.measurement.parsed_log import ParsedLog, ReadSource
from drillyard.measurement.source_reader import SourceContent, read_source
from drillyard.measurement.tail import FollowedSource

_NO_LOGS: Final = frozenset(
    f".{ending}"
    for ending in (
        *("safetensors", "distcp", "pt", "pth", "bin", "npy", "npz", "ckpt", "arrow", "parquet", "gguf", "model"),
        *("png", "jpg", "svg", "pdf", "html", "py", "pyc", "so", "whl", "zip", "tar", "lock", "yaml", "yml", "toml"),
    )
)
_SECONDS_BETWEEN_LOOKS: Final = 2.0


def read_logs(
    paths: Sequence[str | Path], *, timezone: str | tzinfo | None = None, framework: str | None = None
) -> ParsedLog:
    """Read one run from its logs.

    `timezone` is for time stamps without a zone: a name or offset as `--timezone` takes it. `framework` is the
    name of the only format to look for. Raises UserError for paths that cannot be read, and, naming the formats tried,
    if they hold no step and no mark.
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
    log = merge_sources(readings, zone, last=True)
    broken = [_broken(reading) for reading in readings if reading.trouble is not None]
    log.warnings += broken
    log.sources += set_aside
    add_directory(log, directory)
    if not len(log.steps) and not log.marks:
        raise UserError(_nothing_found(log, only, broken))
    return log


class Tail:
    """Follows logs that grow. `poll` reads what is new and gives the run as it stands then.

    A file that was truncated or replaced is read anew from its beginning; what it held before is forgotten. Files that
    come into a directory are followed too (another rank's log, the event file of a restart). See tail.py.
    """

    def __init__(
        self, paths: Sequence[str | Path], *, timezone: str | tzinfo | None = None, framework: str | None = None
    ) -> None:
        self._zone = time_zone(timezone) if isinstance(timezone, str) else timezone
        self._only = _format(framework)
        self._directory: Path | None = None
        self._directories: list[str] = []
        self._next_look = 0.0
        self._passed_over: set[str] = set()
        files = self._resolve([str(path) for path in paths])
        if not files:
            raise UserError("nothing to follow: give the log of a run (or - for standard input)")
        self._sources = [FollowedSource(file, number, self._zone, self._only) for number, file in enumerate(files)]

    def _resolve(self, names: list[str]) -> list[LogFile]:
        files: list[LogFile] = []
        for name in names:
            path = Path(name)
            if path.is_dir() and any((path / run_file).exists() for run_file in RUN_FILES):
                self._directory = path
                files += [LogFile(str(path / run_file)) for run_file in RUN_FILES]
            elif path.is_dir() or name.startswith(GCS):
                # Empty ones too: the logs of most ranks are empty at first.
                found = find_files([name])
                logs = [file for file in found if _may_be_log(file)]
                if not logs:
                    raise UserError(f"{name}: none of its {len(found)} files can be a log")
                files += logs
                if path.is_dir():
                    self._directories.append(name)
            else:
                files.append(LogFile(name))
        return files

    def _look_for_more(self) -> None:
        """Follow what has come into the directories."""
        if not self._directories or time.monotonic() < self._next_look:
            return
        known = {source.file.name for source in self._sources} | self._passed_over
        try:
            found = [file for directory in self._directories for file in find_files([directory])]
            for file in found:
                if file.name not in known and _may_be_log(file):
                    # Until it is followed: what was packed (a log that was rotated) cannot be.
                    self._passed_over.add(file.name)
                    self._sources.append(FollowedSource(file, len(self._sources), self._zone, self._only))
        except UserError:
            # It went away while it was looked at.
            pass
        self._next_look = time.monotonic() + _SECONDS_BETWEEN_LOOKS

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

    def poll(self) -> ParsedLog | None:
        """The run as it stands; None when nothing was written since the last poll. Raises UserError, also where all
        has ended without a step."""
        self._look_for_more()
        if not any([source.poll() for source in self._sources]):
            return None
        log = merge_sources([source.reading() for source in self._sources], self._zone)
        add_directory(log, self._directory)
        if self.ended and not len(log.steps) and not log.marks:
            raise UserError(_nothing_found(log, self._only, []))
        return log

    def close(self) -> None:
        """Close the files."""
        for source in self._sources:
            source.close()


def _format(framework: str | None) -> str | None:
    if framework is not None and framework not in log_formats():
        raise UserError(f"--framework {framework}: not known. Choose one of {', '.join(log_formats())}.")
    return framework


def _choose(names: list[str]) -> tuple[list[LogFile], list[ReadSource], Path | None]:
    """The files to read, those set aside unread, and the run directory that they are of."""
    files: list[LogFile] = []
    aside: list[ReadSource] = []
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
                aside.append(ReadSource(str(path / other), None, used=False, note=note))
    unique = {file.name: file for file in files}
    return list(unique.values()), aside, directory


def _run_files(path: Path) -> list[Path]:
    """The files to read of a Drillyard run directory; none for anything else."""
    try:
        return [path / name for name in RUN_FILES if (path / name).is_file()] if path.is_dir() else []
    except OSError:
        return []


def _may_be_log(file: LogFile) -> bool:
    path = Path(file.name)
    return not path.name.startswith(".") and path.suffix.lower() not in _NO_LOGS


def _broken(reading: SourceContent) -> str:
    """Where a compressed source ended before its end."""
    source = reading.source
    read = f"read up to line {source.lines}" if source.bytes else "nothing could be read"
    return f"{source.name}: {reading.trouble}: {read}"


def _nothing_found(log: ParsedLog, only: str | None, broken: list[str]) -> str:
    names = ", ".join(re.sub(r"(.{60}).+", r"\1...", source.name) for source in log.sources[:3])
    size = sum(source.bytes for source in log.sources)
    if not size:
        return "\n".join(broken) or f"{names}: empty. Give a log that has at least one step."
    tried = ", ".join(kind.title for name, kind in log_formats().items() if only in (None, name))
    binary = all(source.note.startswith("binary") for source in log.sources)
    lines = "binary" if binary else f"{log.lines} line{'s' * (log.lines != 1)}"
    return "\n".join([*broken, f"{names}: no step found ({lines}). Formats tried: {tried}."])
