"""A launched run's handle, `platform://cluster/run`, and its status, in the same terms for every
scheduler."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from drillyard.errors import ConfigError

_HANDLE = re.compile(
    r"(?P<platform>[a-z][a-z0-9_-]*)://(?P<cluster>[a-z][a-z0-9-]*)/(?P<run>[a-z0-9][a-z0-9._-]*)"
)


@dataclass(frozen=True, order=True)
class Handle:
    """A run's address, the same on every machine."""

    platform: str
    cluster: str
    run: str

    def __str__(self) -> str:
        return f"{self.platform}://{self.cluster}/{self.run}"


def parse_handle(text: str) -> Handle:
    """Parse a handle. Raises ConfigError for other text."""
    found = _HANDLE.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"'{text}' is not a run's handle; one looks like slurm://my-cluster/my-run (drillyard"
            " runs list)"
        )
    return Handle(**found.groupdict())


class State(StrEnum):
    """State of a run."""

    queued = "queued"
    starting = "starting"
    running = "running"
    restarting = "restarting"
    succeeded = "succeeded"
    failed = "failed"
    cancelled = "cancelled"

    @property
    def over(self) -> bool:
        """Whether the run has ended: only a new submission continues it."""
        return self in (State.succeeded, State.failed, State.cancelled)


@dataclass(frozen=True)
class RunFailure:
    """Failure of a run, or of its last attempt: the rank that failed first, where known."""

    reason: str
    """In words: `time limit`, `lost capacity`, `refused`, `exit code 1`, `killed by SIGKILL (exit
    code 137)`, ..."""
    rank: int | None = None
    node: str | None = None
    exit_code: int | None = None
    lines: tuple[str, ...] = ()
    """The last lines of its log that show why."""


def beyond_failure(reason: str | None, failure: RunFailure | None) -> str:
    """A run's reason without its failure, which has rank and host in fields: `all 3 restarts are
    used`."""
    if not reason or failure is None:
        return reason or ""
    before, found, after = reason.partition(failure.reason)
    if not found:
        return reason
    # As agents name a node where there are several (agent/exit_report.py).
    parts = (re.sub(r"node \d+ \([^)]*\): $", "", before), after)
    return "; ".join(part for part in (each.strip("; ") for each in parts) if part)


def failure_of(state: Mapping[str, Any]) -> RunFailure | None:
    """The failure in a run's state.json, which its leader wrote; None where it has none."""
    found = state.get("failure")
    if not isinstance(found, Mapping):
        return None
    return RunFailure(
        reason=str(found.get("reason") or "unknown"),
        rank=found.get("rank"),
        node=found.get("node"),
        exit_code=found.get("exit_code"),
        lines=tuple(found.get("lines") or ()),
    )


@dataclass(frozen=True)
class RunStatus:
    """A run by its scheduler and its own files. Times are Unix seconds, None where not known."""

    handle: Handle
    state: State
    nodes: int
    reason: str | None = None
    """Reason why it waits, restarts or ended."""
    since: float | None = None
    """Time at which this state began."""
    submitted_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    attempt: int | None = None
    """Its number, from 0; `round` in JSON."""
    failures: int = 0
    """Restarts that counted against the limit."""
    failure: RunFailure | None = None
    run_directory: str | None = None
    hosts: tuple[str, ...] = ()
    native: dict[str, Any] = field(default_factory=dict)
    """The scheduler's own names: job id, state, ..."""


def reported_status(
    handle: Handle, state: State, own: Mapping[str, Any], **known: Any
) -> RunStatus:
    """The status of a run by its state.json `own`, empty where no agent has reported; `known`:
    fields of RunStatus that the scheduler knows, or knows better."""
    plain = ("nodes", "reason", "since", "started_at", "ended_at", "run_directory")
    fields: dict[str, Any] = {name: own.get(name) for name in plain}
    fields |= {"attempt": own.get("round"), "failures": int(own.get("failures") or 0)}
    fields["hosts"] = tuple(own.get("hosts") or ())
    return RunStatus(handle, state, **{**fields, "failure": failure_of(own), **known})
