"""Where a run was launched: the proof that a bare name means the run of this project.

Names of runs are per user and cluster, so two projects whose configs say the same name mean one
run. A launch records its directory when it is executed, in the run's launch directory (on
Kubernetes in an annotation), never in the plan, which is the same from everywhere. A command that
ends, replaces or deletes a run by its bare name is then refused outside of that directory; a handle
is never refused.

What counts is the directory: the recorded path, or one below it, and on another host the recorded
inode as well. Login nodes that share a home directory have two host names and one inode, as have a
laptop that changes its name and containers that mount one directory; two machines with a
/workspace of their own have different inodes. On one host the path is enough: a project that is
cloned again is the same project.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath

from drillyard.errors import UserError
from drillyard.launch.agent.job import LAUNCHED_FROM
from drillyard.launch.agent.state_file import json_object
from drillyard.launch.run_status import Handle
from drillyard.plan_files import PlanFile


@dataclass(frozen=True)
class LaunchedFrom:
    """A directory in which commands are given."""

    directory: str
    """Absolute; empty where it is not known: no command is given there."""
    host: str = ""
    inode: int | None = None

    def covers(self, here: LaunchedFrom) -> bool:
        """Whether `here` is this directory, or one below it."""
        if not self.directory or not here.directory:
            return False
        if not PurePosixPath(here.directory).is_relative_to(self.directory):
            return False
        return self.host == here.host or self.inode in (None, _inode_of(self.directory))

    def seen_from(self, here: LaunchedFrom) -> str:
        """In words, for somebody `here`; the host only where it is another one."""
        if not self.directory:
            return f"an unknown directory, as its {LAUNCHED_FROM} cannot be read"
        text = self.directory + (f" on {self.host}" if self.host != here.host else "")
        return " ".join(text.splitlines())

    def as_json(self) -> str:
        return json.dumps(asdict(self))


UNKNOWN = LaunchedFrom("")
"""Of a record that is there and cannot be read: the directory of no command."""


@dataclass(frozen=True)
class NameGiven:
    """A command that names a run by its bare name: the directory in which it is given, and its
    options that find the cluster, such as ` --cluster FILE`."""

    here: LaunchedFrom
    options: str = ""


def this_directory() -> LaunchedFrom:
    """The working directory; without one where it was removed."""
    try:
        directory = os.getcwd()
    except FileNotFoundError:
        return UNKNOWN
    # A path that is not UTF-8 could not be an annotation.
    text = os.fsencode(directory).decode("utf-8", "backslashreplace")
    return LaunchedFrom(text, socket.gethostname(), _inode_of(directory))


def record_of(here: LaunchedFrom) -> PlanFile:
    """The record for a launch directory."""
    return PlanFile(LAUNCHED_FROM, here.as_json() + "\n")


def recorded(text: str | bytes) -> LaunchedFrom | None:
    """What a record says; None for an empty one: the run has none."""
    if not text:
        return None
    found = json_object(text)
    directory, host, inode = (found.get(name) for name in ("directory", "host", "inode"))
    if not (isinstance(directory, str) and isinstance(host, str) and isinstance(inode, int | None)):
        return UNKNOWN
    return LaunchedFrom(directory, host, inode)


def require_launched_here(
    handle: Handle, origin: LaunchedFrom | None, given: NameGiven, command: str
) -> None:
    """Raise UserError where a run that is named by its bare name was launched from another
    directory."""
    if origin is not None and not origin.covers(given.here):
        raise UserError(
            f"{handle}: was launched from {origin.seen_from(given.here)}, not from this directory:"
            f" nothing was done\nif you mean that run: drillyard runs {command}"
            f" {handle}{given.options}"
        )


def _inode_of(directory: str) -> int | None:
    with suppress(OSError, ValueError):
        return os.stat(directory).st_ino
    return None
