"""What the tests of acceptance jobs share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.acceptance.namespaces import NodeNetwork
from tests.integration.acceptance.node_jobs import NodeJob


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., NodeJob]]:
    """Start the programs of a job; what still runs at the test's end is killed."""
    started: list[NodeJob] = []

    def begin(*given: Any, **more: Any) -> NodeJob:
        started.append(NodeJob(tmp_path / f"run-{len(started)}", *given, **more))
        return started[-1]

    yield begin
    for job in started:
        job.end()


@pytest.fixture
def network() -> Iterator[Callable[[int], NodeNetwork]]:
    """Make a network of nodes; it is removed at the test's end."""
    made: list[NodeNetwork] = []

    def make(nodes: int) -> NodeNetwork:
        made.append(NodeNetwork(nodes))
        return made[-1]

    yield make
    for each in made:
        each.remove()
