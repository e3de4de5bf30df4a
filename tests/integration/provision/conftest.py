"""Projects of tests, each with its own servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.provision.project import Project


@pytest.fixture
def make_project(tmp_path: Path) -> Iterator[Callable[..., Project]]:
    """Makes projects, by settings of cluster.yaml, and ends what they have started."""
    made: list[Project] = []

    def make(**settings: Any) -> Project:
        made.append(Project(tmp_path / str(len(made)), **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def project(make_project: Callable[..., Project]) -> Project:
    """A small cluster, that does not exist yet."""
    return make_project()
