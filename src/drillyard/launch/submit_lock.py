"""The submit lock of a run: which of several launches of its name submits.

One rule for every platform whose submission takes more than one call. The lock is an object that
only one launch can create: a ConfigMap of the API server, an object of a bucket, and on hosts a
file of the launch directory (agent/submit.py). The launch that has created it submits, the others
are refused. It ends with its launch; when its launching process, on the machine that looks, has
died; else after some minutes (`has_expired`). An expired lock is deleted only as the very object
that was read, so of several launches that find it one goes on.

Slurm needs none: one program on the head host submits, and compares the job (agent/submit.py).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from drillyard.errors import UserError
from drillyard.launch.agent.state_file import json_object
from drillyard.launch.agent.submit import has_expired
from drillyard.launch.remote_files import print_notice
from drillyard.launch.run_status import Handle
from drillyard.supervise.process_identity import process_of, this_process

_TRIES = 10
"""A lock that is released while it is looked at is tried again, this often."""


@dataclass(frozen=True)
class FoundLock:
    """A lock that exists."""

    tag: str
    """Identifies it: a later lock of the same name has another one."""
    client: str
    """The launching process, as JSON; whatever is there."""
    created_at: float
    """Unix seconds."""


class LockPlace(Protocol):
    """Where one lock is kept. Each method raises UserError where the service does not answer."""

    @property
    def title(self) -> str:
        """The lock, for messages."""

    @property
    def removal(self) -> str:
        """The command that deletes it."""

    def create(self, client: str) -> str | None:
        """Create it; returns its tag, None where there is one."""

    def read(self) -> FoundLock | None:
        """The lock that is there."""

    def delete(self, tag: str) -> None:
        """Delete the lock with this tag, where it is still there, and no other."""


@contextlib.contextmanager
def held(place: LockPlace, seconds: float, taken: Callable[[str], UserError]) -> Iterator[None]:
    """Hold a lock, which lasts `seconds` where its process cannot be looked at. Raises the error
    that `taken` makes of whose it is, where another process has it."""
    tag = _taken(place, seconds, taken)
    try:
        yield
    finally:
        try:
            place.delete(tag)
        except UserError as error:
            print_notice(f"warning: {place.title}, the lock, was not deleted: {error}")


def being_launched_error(handle: Handle, whose: str) -> UserError:
    """The error where another launch, described by `whose`, has the run."""
    return UserError(
        f"{handle}: is being launched by another drillyard ({whose}); nothing was submitted\n"
        f"see drillyard runs status {handle}; give this run another name, or launch it again later"
    )


def _taken(place: LockPlace, seconds: float, taken: Callable[[str], UserError]) -> str:
    """The tag of the lock, once this process has it."""
    whose, advice = "its lock changes hands", ""
    for _ in range(_TRIES):
        if (tag := place.create(json.dumps(this_process().as_json()))) is not None:
            return tag
        if (other := place.read()) is None:
            continue
        client, age = process_of(json_object(other.client)), time.time() - other.created_at
        if not has_expired(client, age, seconds):
            who = "" if client is None else f"process {client.pid} on {client.host}, "
            whose = f"{who}{age:.0f} s ago; its lock ends after {seconds:.0f} s"
            if client is None or not client.here:
                advice = f"\nwhere that process is gone, end its lock: {place.removal}"
            break
        place.delete(other.tag)
    raise UserError(f"{taken(whose)}{advice}")
