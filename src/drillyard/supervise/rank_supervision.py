"""A rank's side of supervision, in one value: what it shows, what it hears, and how its stacks are asked for.

Made before anything that takes long is imported, so that a signal in the first seconds is answered too.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from drillyard.errors import UserError
from drillyard.supervise.heartbeat import heartbeat_writer
from drillyard.supervise.launched import failure_elsewhere
from drillyard.supervise.progress_monitor import ProgressMonitor, stacks_file, tick_seconds
from drillyard.supervise.signals import INSISTING_STACKS_SIGNAL
from drillyard.supervise.stopping import StopSignals
from drillyard.telemetry.events import EventName, append_event


@dataclass
class RankSupervision:
    """`watch` is told what this rank does, `stops` hears what it is asked. `owns_directory`: whether the run directory
    is known to be this run's, so that events may be written there; `round_number`: the round that they tell."""

    watch: ProgressMonitor
    owns_directory: bool
    round_number: int
    stops: StopSignals = field(init=False)


def start_supervision(
    run_directory: Path, watchdog_seconds: float, *, round_number: int, is_claimed: bool
) -> RankSupervision:
    """Begin to show signs of life and to hear stop signals; call it first thing in a rank's main thread.

    Under a supervisor (DRILLYARD_SUPERVISED) the rank does not judge itself. `is_claimed`: see `owns_directory`.
    """
    # A crash tells where it was. The handler walks frames without the interpreter's lock: only when nothing else helps.
    faulthandler.enable()
    faulthandler.register(INSISTING_STACKS_SIGNAL, all_threads=True)
    rank = int(os.environ["RANK"])

    def tell(event: EventName, **fields: object) -> None:
        if rank == 0 and side.owns_directory:
            # Nothing can be told on a disk that takes no more; the exit code still says it.
            with contextlib.suppress(UserError):
                append_event(run_directory, event, round=side.round_number, rank=0, **fields)

    def on_leave(number: signal.Signals) -> None:
        if failure_elsewhere() is None:
            # Else nobody has asked the run to stop, and the supervisor tells what happened.
            tell("signal", signal=number.name)
            tell("end", status="interrupted")
        sys.stderr.write(f"drillyard: {number.name}: nothing of this round to save; start again (exit code 85)\n")

    def on_hang(message: str, ends: bool) -> IO[str]:
        if ends:
            tell("failure", reason=message, failed_rank=rank, exit_code=1)
        return stacks_file(run_directory, rank, message)

    judge = 0.0 if os.environ.get("DRILLYARD_SUPERVISED") == "1" else watchdog_seconds
    watch = ProgressMonitor(heartbeat_writer(os.environ), tick_seconds(watchdog_seconds), judge, on_hang)
    side = RankSupervision(watch, owns_directory=is_claimed or round_number > 0, round_number=round_number)
    # Last, as a signal may be heard at once, and `tell` asks `side`.
    side.stops = StopSignals(on_leave, watch.asked_to_stop)
    return side
