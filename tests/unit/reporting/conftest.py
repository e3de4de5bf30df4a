"""A finished run directory to report on."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tests.unit.reporting.runs import write_run


@pytest.fixture(scope="session")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 160 steps with one failure, two stalls and a step that was not finite."""
    return write_run(tmp_path_factory.mktemp("runs") / "trial")


# A slow machine must not fail a property: no timing decides a test.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
