"""A finished run directory to report on."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.reporting.runs import write_run


@pytest.fixture(scope="session")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 160 steps with one failure, two stalls and a step that was not finite."""
    return write_run(tmp_path_factory.mktemp("runs") / "trial")
