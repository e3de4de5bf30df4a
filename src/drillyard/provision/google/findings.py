"""A check of a project by Google's APIs, which may not answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from drillyard.provision.google.api import ApiError
from drillyard.provision.project_findings import ProjectFinding


def known(what: str, check: Callable[[], Iterator[ProjectFinding]]) -> Iterator[ProjectFinding]:
    """The findings of a check; where the cloud does not answer it, that `what` is unknown."""
    try:
        yield from check()
    except ApiError as error:
        yield ProjectFinding("unknown", f"{what}: {error}")
