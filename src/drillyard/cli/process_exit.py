"""How a process of a run leaves: a rank at once, without the interpreter's shutdown; a supervisor before its run."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn


def is_rank() -> bool:
    """Whether this process was started as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def exit_process(code: int) -> NoReturn:
    """End this process with `code`, what it has printed included.

    gloo's threads may abort a process that is done while the interpreter shuts down, and a rank that failed must not
    wait for the others in a collective on its way out: this does neither.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def exit_on_signal() -> None:
    """Until a supervisor has started its ranks there is nothing to stop: a stop signal means exit code 85, come again.

    Holds until other handlers take its place. What comes before, the interpreter's own start, ends by the signal.
    """
    from drillyard.supervise.launch_contract import EXIT_CHECKPOINTED
    from drillyard.supervise.stop_requests import RANK_STOP_SIGNALS

    for number in RANK_STOP_SIGNALS:
        signal.signal(number, lambda *_: os._exit(EXIT_CHECKPOINTED))
