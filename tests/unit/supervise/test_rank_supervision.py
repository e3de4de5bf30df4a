"""A rank's side of supervision is ready to answer from its first moment on."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from drillyard.supervise import rank_supervision
from drillyard.supervise.launch_contract import EXIT_RECORD, FailureElsewhere, write_failure_elsewhere
from drillyard.telemetry.events import read_events


@pytest.mark.parametrize("another_failed", [False, True])
def test_a_stop_signal_is_answered_however_early_it_comes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, another_failed: bool
) -> None:
    class HeardAtOnce:
        """Stop signals of which one is waiting already."""

        def __init__(self, on_leave: Callable[[signal.Signals], None], on_note: Callable[[], None]) -> None:
            on_leave(signal.SIGTERM)

    monkeypatch.setattr(rank_supervision, "StopSignals", HeardAtOnce)
    monkeypatch.setattr(rank_supervision, "faulthandler", Mock())  # that of this process stays as it is
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv(EXIT_RECORD, str(tmp_path / "record.json"))
    if another_failed:
        write_failure_elsewhere(tmp_path / "record.json", FailureElsewhere("lost node 1", None, None))
    side = rank_supervision.start_supervision(tmp_path, 0, attempt=3, is_claimed=True)
    side.watch.close()
    # That the run is interrupted is said only where somebody has asked it to stop.
    message = [] if another_failed else [("signal", 3), ("end", 3)]
    assert [(event["event"], event["round"]) for event in read_events(tmp_path)] == message
