"""A rank's side of supervision is ready to answer from its first moment on."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from drillyard.supervise import rank
from drillyard.telemetry.events import read_events


def test_a_stop_signal_is_answered_however_early_it_comes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class HeardAtOnce:
        """Stop signals of which one is waiting already."""

        def __init__(self, on_leave: Callable[[signal.Signals], None], on_note: Callable[[], None]) -> None:
            on_leave(signal.SIGTERM)

    monkeypatch.setattr(rank, "StopSignals", HeardAtOnce)
    monkeypatch.setattr(rank, "faulthandler", Mock())  # that of this process stays as it is
    monkeypatch.setenv("RANK", "0")
    side = rank.attend(tmp_path, 0, round_number=3, is_claimed=True)
    side.watch.close()
    assert [(event["event"], event["round"]) for event in read_events(tmp_path)] == [("signal", 3), ("end", 3)]
