"""What was found about a project before a cluster is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from drillyard.provision.google.api import ApiError

Level = Literal["error", "warning", "unknown"]


@dataclass(frozen=True)
class ProjectFinding:
    """`error`: `up` would fail. `unknown`: it could not be found out. `fix` is a command or a
    setting."""

    level: Level
    what: str
    fix: str = ""


def known(what: str, check: Callable[[], Iterator[ProjectFinding]]) -> Iterator[ProjectFinding]:
    """The findings of a check; where the cloud does not answer it, that `what` is unknown."""
    try:
        yield from check()
    except ApiError as error:
        yield ProjectFinding("unknown", f"{what}: {error}")
