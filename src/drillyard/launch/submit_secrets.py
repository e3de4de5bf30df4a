"""Secrets at submission, and Ctrl-C during it.

Plans contain `${env:NAME}` as text and no secret. Submission reads the values from this machine's environment and
writes them into the launch directory as secrets.json, which only its owner may read.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence

from drillyard import redaction
from drillyard.config.environment import REFERENCE
from drillyard.errors import UserError
from drillyard.launch.plan import PlanFile

CONFIG_FILES = ("run.yaml", "cluster.yaml", "job.json")
"""Files of a launch directory that may refer to secrets; the workload's own are below files/."""


def _is_config(path: str) -> bool:
    *parents, name = path.split("/")
    return name in CONFIG_FILES and "files" not in parents[-1:]


def secret_names(files: Sequence[PlanFile]) -> tuple[str, ...]:
    """The environment variables that the configs of a plan refer to, those of a sweep's other runs included."""
    return names_in([file.content for file in files if _is_config(file.path)])


def names_in(texts: Sequence[str]) -> tuple[str, ...]:
    """The environment variables that texts refer to by ${env:NAME}."""
    return tuple(sorted({name for text in texts for name in REFERENCE.findall(text)}))


def secrets_file(names: Sequence[str]) -> PlanFile:
    """secrets.json from this machine's environment. Raises UserError for a variable that is not set."""
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise UserError(
            f"the run's configs refer to ${{env:{missing[0]}}}, and {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set on this machine; nothing was sent: export {missing[0]}=..."
        )
    for name in names:
        redaction.add_secret(name, os.environ[name])
    return PlanFile("secrets.json", json.dumps({name: os.environ[name] for name in names}) + "\n", 0o600)


@contextlib.contextmanager
def defer_interrupt(handle: str) -> Iterator[None]:
    """Defer Ctrl-C until the block ends, also for programs started in it. Does nothing outside the main thread.

    Programs inherit the mask; the handler is for a signal that another thread of this process takes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if received:
        print(f"drillyard: {handle} is submitted already; drillyard runs cancel {handle}", file=sys.stderr)
