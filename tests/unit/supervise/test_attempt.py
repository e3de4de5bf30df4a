"""One attempt of real processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from drillyard.supervise import attempt
from drillyard.supervise.supervisor import supervise


def test_the_loop_never_sleeps_over_the_exit_of_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which rank ended first is known only while each exit wakes the loop, also after rank 0 has printed."""
    clock = {name: getattr(attempt.time, name) for name in ("monotonic", "time")}
    monkeypatch.setattr(attempt, "time", SimpleNamespace(**clock))
    code = "import os, time; print('saved', flush=True); time.sleep(0.1); print('done', flush=True); os._exit(3)"
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        status = supervise(
            [sys.executable, "-I", "-S", "-c", code],
            num_ranks=1,
            run_directory=tmp_path / "run",
            max_restarts=0,
            environment={},
            on_event=lambda name, **fields: None,
            console=Console(file=nowhere),
        )
    assert status == 3
