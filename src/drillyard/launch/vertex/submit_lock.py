"""Submit lock of a run on Vertex AI: an object of the cluster's bucket, by the rule of
launch/submit_lock.py.

The service makes any number of jobs with one name. A bucket creates an object only where there is
none (generation 0), for one of several at once, and deletes it only where it is still that one.
Jobs are found by cluster and run, whatever their run directory, so the lock has its place by these.

https://cloud.google.com/storage/docs/request-preconditions
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from drillyard.config.cluster import ClusterConfig
from drillyard.launch.agent.submit import SUBMIT_LOCK_SECONDS
from drillyard.launch.run_status import Handle
from drillyard.launch.submit_lock import FoundLock, being_launched_error, held
from drillyard.launch.vertex.config import bucket_of, mounted, uri_of

if TYPE_CHECKING:
    from drillyard.launch.vertex.bucket_files import BucketFiles

DIRECTORY = ".drillyard"
"""Of locks, in the bucket; empty but for launches that go on."""


@contextmanager
def submit_lock(
    files: BucketFiles, cluster: ClusterConfig, handle: Handle, more_seconds: float
) -> Iterator[None]:
    """Keep other launches of a run out; `more_seconds`: the longest that the service may take to
    end a run which is replaced. Raises UserError where another launch has the lock."""
    name = f"{DIRECTORY}/{handle.cluster}/{handle.run}.submit-lock"
    place = _LockObject(files, f"{mounted(bucket_of(cluster))}/{name}")
    seconds = SUBMIT_LOCK_SECONDS + more_seconds
    with held(place, seconds, lambda whose: being_launched_error(handle, whose)):
        yield


@dataclass(frozen=True)
class _LockObject:
    """A lock; its tag is the generation. After the launching process, its content has a random
    number on a line of its own: by it `create` knows its own object again."""

    files: BucketFiles
    path: str

    @property
    def title(self) -> str:
        return uri_of(self.path)

    @property
    def removal(self) -> str:
        return f"gcloud storage rm {self.title}"

    def create(self, client: str) -> str | None:
        made = self.files.create(self.path, f"{client}\n{secrets.token_hex(16)}\n".encode())
        return None if made is None else str(made)

    def read(self) -> FoundLock | None:
        found = self.files.stored(self.path)
        if found is None:
            return None
        client = found.content.decode(errors="replace").partition("\n")[0]
        return FoundLock(str(found.generation), client, found.created_at)

    def delete(self, tag: str) -> None:
        self.files.remove(self.path, int(tag))
