"""What every launcher does when it sends a plan: secrets come from this machine's environment, and Ctrl-C waits.

Configs are planned with `${env:NAME}` as it stands, so a plan holds no secret; the values are gathered when it is sent
and reach the launch directory as secrets.json, which only its owner reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence

from drillyard import redaction
from drillyard.config.environment import REFERENCE
from drillyard.errors import UserError
from drillyard.launch.plan import PlanFile


def secret_names(files: Sequence[PlanFile]) -> tuple[str, ...]:
    """The environment variables that files of a plan refer to; carried files are the workload's own."""
    return names_in([file.content for file in files if "/" not in file.path])


def names_in(texts: Sequence[str]) -> tuple[str, ...]:
    """The environment variables that texts refer to as ${env:NAME}."""
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
    """Have Ctrl-C wait, also for the programs that are started meanwhile. To be used in the main thread.

    The mask is what programs inherit; the handler is for a signal that another thread of this process takes.
    """
    asked: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if asked:
        print(f"drillyard: {handle} is submitted already; drillyard runs cancel {handle}", file=sys.stderr)
