"""Output of the ranks: a log per rank, rank 0's lines to the console, a progress bar on a terminal.

Ranks write straight into their logs (opened for appending), which costs the supervisor nothing;
only rank 0's standard output comes through a pipe, is appended to its log as it is and forwarded in
whole lines, many per write. On a terminal the lines scroll above a bar with the time that is left;
elsewhere they are passed on unchanged, and the supervisor's own messages go to standard error so
that rank 0's JSON lines stay clean.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from drillyard.errors import UserError
from drillyard.safe_files import describe_os_error
from drillyard.supervise.heartbeat import Heartbeat

if TYPE_CHECKING:
    from rich.console import Console

_LONGEST_LINE_BYTES = 1 << 20


class PlainOutput:
    """Output of the supervisor to files, pipes and other programs: rank 0's lines to `stream`, its
    own messages to standard error. A closed reader ends no run."""

    refresh_seconds: float | None = None
    """Seconds between calls of `refresh`; None: never."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def lines(self, text: str) -> None:
        """Print whole lines of rank 0; if the reader is gone (`| head`), the log still has
        everything."""
        self._print(text, end="")

    def say(self, text: str) -> None:
        self._print(f"drillyard: {text}", style="yellow")

    def error(self, text: str) -> None:
        """Print a rank's message to the user unchanged."""
        self._print(text, style="red")

    def _print(self, text: str, style: str | None = None, end: str = "\n") -> None:
        """Print `text`; lines of rank 0 have no style."""
        stream = self._stream if style is None else sys.stderr
        try:
            print(text, end=end, file=stream, flush=True)
        except OSError:
            _redirect_to_null(stream)

    def refresh(self, heartbeat: Heartbeat) -> None:
        """Show rank 0's last heartbeat; does nothing here."""

    def close(self) -> None:
        """Stop printing."""


MESSAGES = PlainOutput(sys.stderr)
"""For messages before and after a run's own output."""


def _redirect_to_null(stream: IO[str]) -> None:
    """Redirect a stream whose reader is gone, so that later flushes, also the interpreter's at
    exit, do not fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class TerminalOutput(PlainOutput):
    """Rank 0's lines above a progress bar with the phase, the steps done, the time elapsed and the
    time left."""

    refresh_seconds = 0.5

    def __init__(self, console: Console, name: str, total_steps: int | None) -> None:
        # rich takes 50 ms to import its bars: only on a terminal.
        from rich import progress

        super().__init__(console.file)
        # No thread of rich's: ranks are forked from this process. Steps may take minutes; the time
        # left is estimated from those of the last ten.
        self._progress = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(None),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("left"),
            progress.TimeRemainingColumn(compact=True),
            console=console,
            auto_refresh=False,
            expand=True,
            speed_estimate_period=600.0,
        )
        self._name = name
        self._task = self._progress.add_task(name, total=total_steps)
        self._is_placed = False
        self._is_watched = True
        self._show(self._progress.start)

    def _show(self, action: Callable[[], object]) -> None:
        """Draw, unless the terminal was closed; that ends no run. rich raises SystemExit for a
        closed pipe."""
        if self._is_watched:
            try:
                action()
            except (OSError, SystemExit):
                self._is_watched = False
                _redirect_to_null(sys.stdout)
                _redirect_to_null(sys.stderr)

    def _print(self, text: str, style: str | None = None, end: str = "\n") -> None:
        options: dict[str, Any] = {
            "style": style,
            "end": end,
            "markup": False,
            "highlight": False,
            "soft_wrap": True,
        }
        self._show(lambda: self._progress.console.print(text, **options))

    def refresh(self, heartbeat: Heartbeat) -> None:
        doing = "" if heartbeat.phase in ("training", "between steps") else heartbeat.phase
        self._progress.update(
            self._task, description=f"{self._name} | {doing}" if doing else self._name
        )
        if heartbeat.step is not None:
            self._move(heartbeat.step, heartbeat.total_steps)
        self._show(self._progress.refresh)

    def close(self) -> None:
        self._progress.update(self._task, description=self._name)
        self._show(self._progress.stop)

    def _move(self, step: int, total_steps: int | None) -> None:
        """Move to a step. After a resume, the steps of earlier attempts are not counted in the
        speed."""
        task = self._progress.tasks[0]
        total = total_steps or task.total
        if not self._is_placed or step < task.completed:
            elapsed_from, self._is_placed = task.start_time, True
            self._progress.reset(
                self._task, completed=step, total=None if total is None else int(total)
            )
            task.start_time = elapsed_from
        else:
            self._progress.update(self._task, completed=step, total=total)


class LineForwarder:
    """Forwarder of rank 0's standard output in whole lines: unchanged into its log, as text to the
    console.

    Whole lines, because the rank writes its standard error into the same log meanwhile.
    """

    def __init__(self, log: int, output: PlainOutput) -> None:
        self._log = log
        self._output = output
        self._rest = b""
        self._log_failed = False

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes, cut anywhere. A line without an end is passed on when it reaches 1
        MiB."""
        whole, newline, self._rest = (self._rest + chunk).rpartition(b"\n")
        if newline:
            self._pass_on(whole + newline)
        if len(self._rest) >= _LONGEST_LINE_BYTES:
            self.finish()

    def finish(self) -> None:
        """End the input: pass on a last line that has no end."""
        if self._rest:
            self._pass_on(self._rest, end="\n")
            self._rest = b""

    def _pass_on(self, chunk: bytes, end: str = "") -> None:
        left = chunk
        try:
            while left:
                left = left[os.write(self._log, left) :]
        except OSError as error:
            if not self._log_failed:
                self._output.say(f"logs/rank-0.log: {error.strerror}; the run goes on without it")
            self._log_failed = True
        self._output.lines(chunk.decode(errors="replace") + end)


def log_path(run_directory: Path, rank: int) -> Path:
    """The log of one rank, over all attempts."""
    return run_directory / "logs" / f"rank-{rank}.log"


def open_log(path: Path, header: str) -> tuple[int, int]:
    """Open a rank's log for appending; returns its descriptor and the offset just after this
    attempt's header."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be opened: {describe_os_error(error)}, then start again"
        ) from None
    status = os.fstat(descriptor)
    if stat.S_ISFIFO(status.st_mode):
        os.close(descriptor)
        raise UserError(f"{path}: is a named pipe, not a log; remove it, then start again")
    size = status.st_size
    torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
    with contextlib.suppress(OSError):  # a full disk: the ranks will report it
        os.write(descriptor, (b"\n" if torn else b"") + header.encode() + b"\n")
    return descriptor, os.fstat(descriptor).st_size


def attempt_header(attempt: int, rank: int, num_ranks: int) -> str:
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return f"=== attempt {attempt} | {moment} | rank {rank} of {num_ranks}"
