"""Fence that keeps two starts of a run from writing to its directory at the same time.

A scheduler can lose a node whose processes keep running, and start the run elsewhere. So each start
of a leader takes the next number in epochs/ (O_EXCL), and

- a node's agent renews `NNNN.node-K.alive` many times per `lease_seconds`, as long as a command of
  it may run;
- when it cannot renew for half of `lease_seconds`, its reaper kills the command: another process,
  which also works when the agent is stopped or waits for a disk that does not answer;
- an agent whose launch directory was deleted `lease_seconds` ago, or was replaced, ends its command
  and itself;
- an agent that sees a newer epoch kills its command at once and removes its lease;
- a leader starts nothing before every lease of earlier epochs is removed, was not renewed for
  `lease_seconds` on the leader's own clock, or belongs to an agent of this machine that is dead
  together with everything it started.

Clocks of two hosts are never compared. An agent claims its lease and then looks for the next epoch;
a leader takes its epoch and then looks for leases: so one of the two sees the other. Replacing the
lease by rename makes an NFS client read the directory again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drillyard.supervise.process_identity import Process, process_of
from drillyard.supervise.reaper import AGENT_MARK, kill_marked_processes

from .state_file import json_object, make_directory, read_file, read_json_object

_ALIVE = re.compile(r"(\d{4,})\.node-\d+\.alive")
_EPOCH = re.compile(r"\d{4,}")
_LEASE_BYTES = 511


class Epochs:
    """The directory epochs/ of a launch directory."""

    def __init__(self, launch_directory: Path) -> None:
        self.directory = launch_directory / "epochs"

    def open(self, leader: dict[str, Any]) -> int:
        """Take the next epoch, with this description of its leader. Raises OSError."""
        make_directory(self.directory)
        number = self.newest()
        # The file is complete when it appears: an epoch that a full disk left empty would end a
        # healthy leader.
        draft = self.directory / f"draft-{leader['leader']['pid']}-{time.time_ns()}"
        try:
            draft.write_text(json.dumps(leader) + "\n", encoding="utf-8")
            while True:
                number += 1
                try:
                    os.link(draft, self._path(number))
                    return number
                except FileExistsError:
                    continue
                except OSError:
                    # A file system without links (object storage).
                    if _made_first(self._path(number), draft.read_text(encoding="utf-8")):
                        return number
        finally:
            draft.unlink(missing_ok=True)

    def newest(self) -> int:
        """The number of the newest epoch; 0 without any."""
        names = os.listdir(self.directory) if self.directory.is_dir() else []
        return max((int(name) for name in names if _EPOCH.fullmatch(name)), default=0)

    def has(self, number: int) -> bool:
        return self._path(number).exists()

    def leader_of(self, number: int) -> dict[str, Any]:
        """The description of an epoch's leader; empty where it cannot be read (yet)."""
        return read_json_object(self._path(number))

    def content(self, number: int) -> bytes | None:
        """The content of an epoch's file, which never changes: it differs from that of the same
        number in a directory that was deleted and made again. None while it is not complete. Raises
        OSError."""
        content = read_file(self._path(number))
        return content if content.endswith(b"\n") else None

    def lease(self, number: int, node: int) -> Path:
        """The file that a node renews while it belongs to an epoch, and removes once nothing of it
        runs there."""
        return self.directory / f"{number:04d}.node-{node}.alive"

    def leases_before(self, epoch: int) -> list[Path]:
        paths = [self.directory / name for name in sorted(os.listdir(self.directory))]
        earlier = [
            path for path in paths if (part := _ALIVE.fullmatch(path.name)) and int(part[1]) < epoch
        ]
        # An earlier version marked a released lease in this way.
        return [path for path in earlier if not path.with_suffix(".gone").exists()]

    def tidy(self, epoch: int) -> None:
        """Remove the leases before an epoch, which all have ended; the epochs' own files stay as a
        history."""
        for name in os.listdir(self.directory):
            number = name.split(".")[0]
            if "." in name and number.isdigit() and int(number) < epoch:
                (self.directory / name).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self.directory / f"{number:04d}"


def _made_first(path: Path, text: str) -> bool:
    """Create a file; False where it exists. Raises OSError.

    A mounted bucket lets two hosts create it at once, and the second one fails when it closes it
    (ESTALE).
    """
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ESTALE):
            raise
        return False
    return True


@dataclass
class Predecessors:
    """Leases that must have ended before something is started."""

    _leases: Callable[[], list[Path]]
    _lease_seconds: float
    _seen: dict[Path, tuple[bytes, float]] = field(default_factory=dict)

    def waiting_for(self, now: float) -> list[str]:
        """List the leases with commands that may run, in words; `now` is monotonic. Call it until
        the list is empty."""
        return [words for path in self._leases() if (words := self._look(path, now))]

    def _look(self, path: Path, now: float) -> str | None:
        try:
            content = read_file(path)
        except FileNotFoundError:
            return None
        except OSError:
            # Replaced on another NFS client while it was read: read again the next time.
            content = b""
        before, since = self._seen.get(path, (None, now))
        if content != before:
            since = now
            self._seen[path] = content, now
        lease = json_object(content)
        holder = process_of(lease.get("agent"))
        is_dead = holder is not None and holder.here and not holder.alive
        # Kill what is found of it now; a later look finds nothing.
        if is_dead and not kill_marked_processes(str(lease.get("token")), AGENT_MARK):
            return None
        if now - since >= self._lease_seconds:
            return None
        return f"{path.name.rsplit('.', 1)[0]} on {holder.host if holder else 'an unknown host'}"


@dataclass(eq=False, repr=False)
class Lease:
    """Lease of this node: a thread renews it in the epoch that the node belongs to, and looks for a
    newer epoch.

    `renewed` is called after each renewal: it keeps the reaper from killing the command.
    """

    _epochs: Epochs
    _node: int
    _me: Process
    _token: str
    seconds: float
    _renewed: Callable[[], None]
    epoch: int | None = None
    """The epoch that this agent belongs to."""
    fenced_by: int | None = None
    """A newer epoch than the one that was claimed."""
    _renewed_at: float = 0.0
    _count: int = 0
    _missing_since: float | None = None
    _claimed: tuple[int, bytes] | None = None
    """The epoch that was claimed, and the content of its file (Epochs.content)."""
    _replaced: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None

    @property
    def fresh(self) -> bool:
        """Whether a command may be started: at least half of the time until the reaper kills it is
        left."""
        return (
            self.epoch is not None
            and self.fenced_by is None
            and self.silent_seconds < self.seconds / 4
        )

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last renewal."""
        return time.monotonic() - self._renewed_at

    @property
    def directory_gone(self) -> bool:
        """Whether the launch directory was deleted `seconds` ago, or replaced; one that does not
        answer is not gone."""
        since = self._missing_since
        return self._replaced or (since is not None and time.monotonic() - since >= self.seconds)

    @property
    def superseded(self) -> bool:
        """Whether the launch directory belongs to another start now; reads the disk."""
        epoch = self.epoch
        return epoch is not None and (self._epochs.has(epoch + 1) or not self._is_ours(epoch))

    def claim(self, epoch: int) -> None:
        """Join an epoch. The lease is written when this returns. Raises OSError."""
        with self._lock:
            if self.epoch != epoch:
                self._remove()
            self.epoch, self.fenced_by, self._missing_since = epoch, None, None
            self._renew()
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()

    def release(self) -> None:
        """Leave the epoch, once nothing of this node runs."""
        with self._lock:
            self._remove()
            self.epoch = None

    def _remove(self) -> None:
        # Otherwise the file belongs to a node of another start.
        if self.epoch is not None and self._is_ours(self.epoch):
            # A lease that is not renewed has the same effect, only later.
            with contextlib.suppress(OSError):
                self._epochs.lease(self.epoch, self._node).unlink()

    def _watch(self) -> None:
        while True:
            time.sleep(min(1.0, self.seconds / 8))
            # The reaper acts if the directory cannot be written for long.
            with contextlib.suppress(OSError):
                self._look_for_directory()
            with self._lock, contextlib.suppress(OSError):
                self._look()

    def _look_for_directory(self) -> None:
        try:
            os.stat(self._epochs.directory.parent)
            epoch = self.epoch
            # Without any epochs there is no other start, and a lease that cannot be renewed ends
            # the command.
            there = epoch is None or self._is_ours(epoch) or not self._epochs.directory.exists()
        except FileNotFoundError:
            there = False
        self._missing_since = None if there else self._missing_since or time.monotonic()

    def _is_ours(self, epoch: int) -> bool:
        """Whether the epoch's file is the one that was claimed; True until it was read once."""
        known = (
            self._claimed[1] if self._claimed is not None and self._claimed[0] == epoch else None
        )
        try:
            content = self._epochs.content(epoch)
        except FileNotFoundError:
            return known is None
        except OSError:
            content = None
        if content is not None and known is None:
            self._claimed = (epoch, content)
        elif content is not None and known != content:
            self._replaced = True
        return not self._replaced

    def _look(self) -> None:
        if self.epoch is None or self._replaced or self._missing_since is not None:
            return
        if time.monotonic() - self._renewed_at >= self.seconds / 8 - 0.01:
            self._renew()
        if self.fenced_by is None and self._epochs.has(self.epoch + 1):
            self.fenced_by = self._epochs.newest()

    def _renew(self) -> None:
        assert self.epoch is not None
        begun = time.monotonic()
        lease = self._epochs.lease(self.epoch, self._node)
        self._require_ours(self.epoch, lease)
        self._count += 1
        content = {"agent": self._me.as_json(), "token": self._token, "count": self._count}
        text = json.dumps(content).encode().ljust(_LEASE_BYTES) + b"\n"
        draft = lease.with_suffix(".draft")
        try:
            draft.write_bytes(text)
            os.replace(draft, lease)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # A full disk must not end the run: all leases have one length, so the old one can be
            # overwritten in place.
            with open(lease, "r+b", buffering=0) as file:
                file.write(text)
        # Check again before the lease counts as renewed: an agent that was frozen must not start
        # anything in between.
        self._require_ours(self.epoch, lease)
        if self._epochs.has(self.epoch + 1):
            self.fenced_by = self._epochs.newest()
        # A renewal that took long counts from its beginning: another host may have seen it since
        # then.
        self._renewed_at = begun
        self._renewed()

    def _require_ours(self, epoch: int, lease: Path) -> None:
        """Raise OSError if a lease of this name belongs to a node of another start."""
        if not self._is_ours(epoch):
            raise OSError(
                errno.ESTALE, "the launch directory was deleted and made again", str(lease)
            )
