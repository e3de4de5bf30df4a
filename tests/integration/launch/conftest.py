"""Runs of agents, in directories whose names need quotes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.launch.agents import Agents, Make


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes runs, and ends what is left of them."""
    made: list[Agents] = []

    def agents(script: str, nodes: int = 1, **settings: Any) -> Agents:
        made.append(Agents(tmp_path / f"run {len(made)}", script, nodes, **settings))
        return made[-1]

    yield agents
    for each in made:
        each.close()
