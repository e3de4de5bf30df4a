"""What every launcher does when it cancels a run: it waits for as long as the run may take to save, and says so.

A run that is told to stop has its job's `stop_seconds` until what is left of it is killed. To be told once more, a
while later, means at once: that is how the agents understand a second signal.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Final

from drillyard.launch.handles import Handle
from drillyard.launch.remote_files import print_notice

QUIET_SECONDS: Final = 3.0
"""How long a person looks at a terminal that says nothing; most runs have ended by then."""


@contextlib.contextmanager
def cancel_notice(handle: Handle, stop_seconds: float) -> Iterator[None]:
    """Say what is waited for, where it takes a while."""
    words = f"{handle}: is told to stop, and has {stop_seconds:.0f} s to save; cancel it once more to end it at once"
    timer = threading.Timer(QUIET_SECONDS, print_notice, [words])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
