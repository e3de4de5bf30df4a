"""Submit lock of a run: a ConfigMap, which decides which of several launches of a name submits.

Helm's release cannot decide it: the one of an earlier run is removed before the new one is made,
and Helm removes by name, also a release that another launch has made meanwhile. The API server
makes one object of a name: the launch that has made the ConfigMap submits, the others are refused.
The lock ends with its launch; when its launching process of this machine has died; else after
`SUBMIT_LOCK_SECONDS` and the time that a run which is replaced has to save. An expired lock is
deleted by its uid, so of several launches that find it only one goes on.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

from drillyard.errors import UserError
from drillyard.launch.agent.state_file import json_object
from drillyard.launch.agent.submit import SUBMIT_LOCK_SECONDS
from drillyard.launch.launcher import being_launched_error
from drillyard.launch.remote_files import print_notice
from drillyard.launch.run_status import Handle
from drillyard.supervise.process_identity import process_of, this_process

if TYPE_CHECKING:
    from drillyard.launch.kubernetes.cluster_api import ClusterApi

_KIND = "configmaps"
_CLIENT = "client"
_TRIES = 10
"""A lock that is released while it is looked at is tried again, this often."""


@contextlib.contextmanager
def submit_lock(api: ClusterApi, handle: Handle, grace_seconds: float) -> Iterator[None]:
    """Keep other launches of a run out. Raises UserError where another one has the lock."""
    seconds = SUBMIT_LOCK_SECONDS + grace_seconds
    with config_map_lock(
        api, f"{handle.run}.submit-lock", seconds, lambda whose: being_launched_error(handle, whose)
    ):
        yield


@contextlib.contextmanager
def config_map_lock(
    api: ClusterApi, name: str, seconds: float, taken: Callable[[str], UserError]
) -> Iterator[None]:
    """Hold the lock `name` of a namespace, which lasts `seconds` where its holder cannot be asked.
    Raises the error that `taken` makes of whose it is, where another process has it."""
    uid = _taken(api, name, seconds, taken)
    try:
        yield
    finally:
        try:
            api.delete(_KIND, name, uid)
        except UserError as error:
            print_notice(f"warning: configmap {name}, the lock, was not deleted: {error}")


def _taken(api: ClusterApi, name: str, seconds: float, taken: Callable[[str], UserError]) -> str:
    """The uid of the lock, once this process has it."""
    body = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name},
        "data": {_CLIENT: json.dumps(this_process().as_json())},
    }
    whose, advice = "its lock changes hands", ""
    for _ in range(_TRIES):
        made = api.created(_KIND, body)
        if made is not None:
            return str(made["metadata"]["uid"])
        other = api.one(f"{api.place(_KIND)}/{name}")
        if other is None:
            continue
        client = process_of(json_object(other.get("data", {}).get(_CLIENT, "")))
        age = time.time() - _created_at(other)
        is_here = client is not None and client.here
        if age < seconds and (client is None or not is_here or client.alive):
            who = "" if client is None else f"process {client.pid} on {client.host}, "
            whose = f"{who}{age:.0f} s ago; its lock ends after {seconds:.0f} s"
            if not is_here:
                command = f"kubectl -n {api.namespace} delete configmap {name}"
                advice = f"\nwhere that process is gone, end its lock: {command}"
            break
        api.delete(_KIND, name, str(other["metadata"]["uid"]))
    raise UserError(f"{taken(whose)}{advice}")


def _created_at(found: dict[str, Any]) -> float:
    return datetime.fromisoformat(found["metadata"]["creationTimestamp"]).timestamp()
