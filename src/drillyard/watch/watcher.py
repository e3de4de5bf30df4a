"""Follow a run's files and redraw the screen every second; print plain lines without a terminal.

The watch only reads: several people may watch a run, from any host that sees its directory. It ends
with the run, or on q or Ctrl-C, and prints the last screen once more.
"""

from __future__ import annotations

import contextlib
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.live import Live

from drillyard.errors import UserError
from drillyard.guarded_files import LONGEST_LINE_BYTES, is_there, too_long_line
from drillyard.loglines.followers import FileFollower
from drillyard.reporting.event_text import EventText
from drillyard.reporting.gpu_price import GpuPrice
from drillyard.safe_files import describe_os_error
from drillyard.telemetry.events import EVENTS_FILE, is_event, refusing_odd_values
from drillyard.telemetry.jsonlines import decode
from drillyard.telemetry.metrics import METRICS_FILE, is_step
from drillyard.watch.live_run import LiveRun
from drillyard.watch.screen import event_line, progress_line, screen, text_lines

SETTLED_SECONDS: Final = 2.0
"""After an `end` the supervisor may still add events, such as a restart."""
FIRST_EVENTS: Final = 5
HINT: Final = "q quits; the run continues"


class _NewRecords:
    """The records that a growing file of JSON lines has gained since the last poll."""

    def __init__(self, path: Path) -> None:
        self._follower = FileFollower(path)
        self._torn = b""
        self.lines = 0
        """Whole lines so far, records or not."""

    def poll(self) -> Iterator[dict[str, Any]]:
        """Whole lines only: a last one without a newline waits. Raises OSError."""
        for piece in self._follower.poll():
            if piece is None:
                self._torn = b""
                continue
            *lines, self._torn = (self._torn + piece).split(b"\n")
            if len(self._torn) > LONGEST_LINE_BYTES:
                raise too_long_line(self._follower.path, LONGEST_LINE_BYTES)
            self.lines += len(lines)
            yield from (record for line in lines if (record := decode(line)) is not None)


class FollowedRun:
    """A run directory whose lines go into a `LiveRun` as they come."""

    def __init__(self, run_directory: Path, price: GpuPrice | None = None) -> None:
        if run_directory.is_file():
            raise UserError(
                f"{run_directory}: is a file, and watch shows run directories; follow any log with"
                f" drillyard metrics -f {run_directory}"
            )
        if not is_there(run_directory / EVENTS_FILE):
            raise UserError(
                f"{run_directory}: no {EVENTS_FILE}: this is not the directory of a run that has"
                " started."
            )
        self.run = LiveRun(run_directory.resolve().name, price=price)
        self.directory = run_directory
        self._events = _NewRecords(run_directory / EVENTS_FILE)
        self._metrics = _NewRecords(run_directory / METRICS_FILE)
        self._last_line_time = time.monotonic()

    def poll(self) -> None:
        """Read new lines. Raises UserError when the directory cannot be read, or has no event."""
        has_new = False
        with refusing_odd_values(self.directory):
            try:
                for event in filter(is_event, self._events.poll()):
                    self.run.add_event(event)
                    has_new = True
                for record in filter(is_step, self._metrics.poll()):
                    self.run.add_metrics(record)
                    has_new = True
            except OSError as error:
                raise UserError(
                    f"{self.directory}: cannot be read: {describe_os_error(error)}"
                ) from error
            self.run.refresh_goodput()
        if self._events.lines and self.run.last_us is None:
            path = self.directory / EVENTS_FILE
            raise UserError(
                f"{path}: no line is an event of a run; follow any log with drillyard metrics -f"
                f" {path}"
            )
        if has_new:
            self._last_line_time = time.monotonic()

    @property
    def ended(self) -> bool:
        """Whether the run has been over for so long that nothing will follow."""
        quiet = time.monotonic() - self._last_line_time
        since = (_now_us() - (self.run.last_us or 0)) / 1e6
        return self.run.over and (quiet >= SETTLED_SECONDS or since >= SETTLED_SECONDS)


def watch_run(
    followed: FollowedRun, console: Console, interval_seconds: float | None = None
) -> LiveRun:
    """Show the run until it ends or the user quits; returns its last state.

    `interval_seconds` between two polls of the files: by default 1 on a terminal, 10 elsewhere.
    """
    with refusing_odd_values(followed.directory):
        if console.is_terminal:
            _watch_screen(followed, console, interval_seconds or 1.0)
        else:
            _watch_lines(followed, console, interval_seconds or 10.0)
    return followed.run


def _watch_screen(followed: FollowedRun, console: Console, interval: float) -> None:
    followed.poll()
    try:
        with _Keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
            while not followed.ended:
                live.update(_screen(followed.run, console, HINT), refresh=True)
                if keys.wait_for_quit(interval):
                    break
                followed.poll()
    except KeyboardInterrupt:
        console.print(_screen(followed.run, console, ""))
        raise
    console.print(_screen(followed.run, console, ""))


def _screen(run: LiveRun, console: Console, hint: str) -> Any:
    return screen(
        run,
        _now_us(),
        width=console.width,
        # Keep the last line of the window free for the cursor.
        height=console.height - 1,
        hint=hint,
        unicode=console.encoding.lower().startswith("utf"),
    )


def _watch_lines(followed: FollowedRun, console: Console, interval: float) -> None:
    run = followed.run
    printed: EventText | None = None
    step = -1
    followed.poll()
    while True:
        for event in _events_after(run, printed):
            _print(console, event_line(event))
            printed = event
        if run.step != step:
            step = run.step
            _print(console, progress_line(run, _now_us()))
        if followed.ended:
            break
        time.sleep(min(interval, SETTLED_SECONDS) if run.over else interval)
        followed.poll()
    for line in text_lines(run, _now_us()):
        _print(console, line)


def _events_after(run: LiveRun, printed: EventText | None) -> list[EventText]:
    """Events after the one printed last (by identity); at first only the last few."""
    shown = list(run.events)
    if printed is None:
        return shown[-FIRST_EVENTS:]
    places = [place for place, one in enumerate(shown) if one is printed]
    return shown[places[-1] + 1 :] if places else shown


def _print(console: Console, line: str) -> None:
    """Print a line without wrapping and colours."""
    console.file.write(line + "\n")
    console.file.flush()


class _Keys:
    """Single key presses from a terminal, without echo; none if standard input is no terminal."""

    def __init__(self) -> None:
        self._before: list[Any] | None = None

    def __enter__(self) -> _Keys:
        if sys.stdin.isatty():
            import termios
            import tty

            self._before = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._before is not None:
            import termios

            with contextlib.suppress(termios.error):
                termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)

    def wait_for_quit(self, seconds: float) -> bool:
        """Wait for so long; return True at once when q is pressed."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._before is None:
                time.sleep(left)
            elif select.select([sys.stdin], [], [], left)[0] and sys.stdin.read(1) in (
                "q",
                "Q",
                "",
            ):
                return True
        return False


def _now_us() -> int:
    return time.time_ns() // 1000
