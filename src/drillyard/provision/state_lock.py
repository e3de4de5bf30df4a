"""The lock of a cluster's state, held by one `up` or `down` from its first to its last step.

It is the object that Terraform's backend locks with (NAME/default.tflock in Cloud Storage,
NAME/default.tfstate.tflock in S3), made with the condition that it does not exist, in Terraform's
own format: a terraform that somebody runs by hand respects it and says who holds it. Terraform
itself records user, host and time; this lock also has the process, with its start and its machine's
boot, in the field Info. So a lock whose process died on this machine is recognised, whatever
process has its id now, and another machine of the same host name is not taken for this one.

https://github.com/hashicorp/terraform/blob/v1.11.4/internal/backend/remote-state/gcs/client.go
and .../s3/client.go
"""

from __future__ import annotations

import contextlib
import getpass
import json
import socket
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from drillyard.errors import UserError
from drillyard.launch.agent.state_file import json_object
from drillyard.provision.progress import print_progress
from drillyard.provision.state_bucket import StateBucket
from drillyard.supervise.process_identity import Process, process_of, this_process

_TRIES = 10


@dataclass(frozen=True)
class HeldLock:
    """A lock that is there. `id`: what releases it, the version of its object."""

    id: str
    who: str
    created: str
    process: Process | None
    command: str

    @property
    def is_dead(self) -> bool:
        """Whether its process was one of this machine and has ended."""
        return self.process is not None and self.process.here and not self.process.alive

    @property
    def text(self) -> str:
        """Who holds it, with what, and since when."""
        what = f", {self.command}" if self.command else ""
        where = f", process {self.process.pid} on {self.process.host}" if self.process else ""
        return f"{self.who}{what}{where}, since {self.created}"


def read_lock(bucket: StateBucket, name: str = "") -> HeldLock | None:
    """The lock of the cluster's state, or of another one below its name; None: nobody holds it."""
    found = bucket.read(name or bucket.lock)
    if found is None:
        return None
    content: dict[str, Any] = json_object(found[0].decode(errors="replace"))
    own = json_object(str(content.get("Info", "")))
    return HeldLock(
        found[1],
        str(content.get("Who") or "unknown"),
        str(content.get("Created") or "an unknown time"),
        process_of(own),
        str(own.get("command") or content.get("Operation") or ""),
    )


@contextlib.contextmanager
def state_lock(
    bucket: StateBucket,
    command: str,
    *,
    unlock: str | None,
    release_dead: Callable[[HeldLock], bool],
) -> Iterator[Callable[[], None]]:
    """Hold the lock; gives a function that raises UserError where somebody has released it since.

    `unlock`: id of another's lock that the user wants released. `release_dead`: whether to release
    the lock of a process that died on this machine. Raises UserError where another process holds
    it.
    """
    version = _taken(bucket, command, unlock, release_dead)

    def require() -> None:
        held = read_lock(bucket)
        if held is None or held.id != version:
            now = f"; now held by {held.text}" if held else ""
            raise UserError(f"{bucket.title}: the lock of this command was released{now}")

    try:
        yield require
    finally:
        try:
            bucket.delete(bucket.lock, version)
        except UserError as error:
            print_progress(f"warning: the lock {version} of {bucket.title} stays: {error}")


def _taken(
    bucket: StateBucket,
    command: str,
    unlock: str | None,
    release_dead: Callable[[HeldLock], bool],
) -> str:
    for _ in range(_TRIES):
        version = bucket.write(bucket.lock, _content(bucket, command), new=True)
        if version is not None:
            return version
        held = read_lock(bucket)
        if held is None:
            continue
        if held.id != unlock and not (held.is_dead and release_dead(held)):
            died = ", which has died" if held.is_dead else ""
            option = "--yes" if held.is_dead else f"--unlock {held.id}"
            advice = "" if held.is_dead else "Where that process is gone, release its lock: "
            place = f"{bucket.title}/{bucket.prefix}/{bucket.lock}"
            raise UserError(
                f"{place}: the state is locked by {held.text}{died}\n{advice}{command} {option}"
            )
        # By its version, so of several that release it only one goes on.
        bucket.delete(bucket.lock, held.id)
    raise UserError(f"{bucket.title}: its lock changes hands; repeat {command}")


def _content(bucket: StateBucket, command: str) -> bytes:
    created = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    info = {"command": command, **this_process().as_json()}
    return json.dumps(
        {
            "ID": str(uuid.uuid4()),
            "Operation": "drillyard",
            "Info": json.dumps(info),
            "Who": f"{_user()}@{socket.gethostname()}",
            "Version": "",
            "Created": created,
            "Path": f"{bucket.title}/{bucket.prefix}/{bucket.lock}",
        }
    ).encode()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"
