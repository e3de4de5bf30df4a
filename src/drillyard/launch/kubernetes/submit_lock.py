"""Locks of a namespace: ConfigMaps, by the rule of launch/submit_lock.py.

Helm's release cannot decide which of several launches submits: the one of an earlier run is removed
before the new one is made, and Helm removes by name, also a release that another launch has made
meanwhile. The API server makes one object of a name, and deletes it by its uid.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from drillyard.errors import UserError
from drillyard.launch.agent.submit import SUBMIT_LOCK_SECONDS
from drillyard.launch.run_status import Handle
from drillyard.launch.submit_lock import FoundLock, being_launched_error, held

if TYPE_CHECKING:
    from drillyard.launch.kubernetes.cluster_api import ClusterApi

_KIND = "configmaps"
_CLIENT = "client"


@contextlib.contextmanager
def submit_lock(api: ClusterApi, handle: Handle, grace_seconds: float) -> Iterator[None]:
    """Keep other launches of a run out; `grace_seconds`: the time that a run which is replaced has
    to save. Raises UserError where another launch has the lock."""
    seconds = SUBMIT_LOCK_SECONDS + grace_seconds
    with config_map_lock(
        api, f"{handle.run}.submit-lock", seconds, lambda whose: being_launched_error(handle, whose)
    ):
        yield


@contextlib.contextmanager
def config_map_lock(
    api: ClusterApi, name: str, seconds: float, taken: Callable[[str], UserError]
) -> Iterator[None]:
    """Hold the lock `name` of a namespace, as `submit_lock.held`."""
    with held(_ConfigMap(api, name), seconds, taken):
        yield


@dataclass(frozen=True)
class _ConfigMap:
    """A lock; its tag is the uid."""

    api: ClusterApi
    name: str

    @property
    def title(self) -> str:
        return f"configmap {self.name}"

    @property
    def removal(self) -> str:
        return f"kubectl -n {self.api.namespace} delete configmap {self.name}"

    def create(self, client: str) -> str | None:
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": self.name},
            "data": {_CLIENT: client},
        }
        made = self.api.created(_KIND, body)
        return None if made is None else str(made["metadata"]["uid"])

    def read(self) -> FoundLock | None:
        found = self.api.one(f"{self.api.place(_KIND)}/{self.name}")
        if found is None:
            return None
        metadata = found["metadata"]
        created_at = datetime.fromisoformat(metadata["creationTimestamp"]).timestamp()
        return FoundLock(str(metadata["uid"]), found.get("data", {}).get(_CLIENT, ""), created_at)

    def delete(self, tag: str) -> None:
        self.api.delete(_KIND, self.name, tag)
