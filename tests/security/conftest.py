"""What attacks aim at."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory that nothing may write to or read from."""
    place = tmp_path / "outside"
    (place / "deeper").mkdir(parents=True)
    (place / "escaped.txt").write_text("mine")
    return place


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """What an attack makes when it runs."""
    return tmp_path / "ran"
