"""Waiting for the end of a run, and the exit code that says how it ended."""

from __future__ import annotations

import time
from typing import Any

from drillyard.errors import UserError
from drillyard.launch.launcher import Launcher
from drillyard.launch.remote_files import print_notice
from drillyard.launch.run_status import RunStatus, State
from drillyard.launch.status_text import headline

PAUSES = (1.0, 15.0)
"""Seconds between two status requests of `wait`: the first pause, and the longest."""


def wait_for(launcher: Launcher[Any], run: str) -> int:
    """Wait until a run is over, printing each state to standard error; returns its exit code.

    Asks again when the cluster does not answer. Raises UserError where the run is not known.
    """
    status = launcher.status(run)
    pause, longest = PAUSES
    printed = None
    while True:
        if status.state is not printed:
            print_notice(f"{status.handle}: {headline(status, time.time())}")
            printed = status.state
        if status.state.over:
            return exit_code(status)
        time.sleep(pause)
        pause = min(1.5 * pause, longest)
        try:
            status = launcher.status(run)
        except UserError as error:
            print_notice(f"{str(error).splitlines()[0]}; asking again")


def exit_code(status: RunStatus) -> int:
    """0 succeeded, 1 failed, 2 refused its config, 130 cancelled."""
    if status.state is State.failed:
        return 2 if status.failure is not None and status.failure.exit_code == 2 else 1
    return 0 if status.state is State.succeeded else 130
