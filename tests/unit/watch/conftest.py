"""A finished run directory to watch."""

from __future__ import annotations

from tests.unit.reporting.conftest import run_directory

__all__ = ["run_directory"]
