"""Where predictions are written: never over a file that holds none."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drillyard.evaluation.evaluator import HeldOutEvaluator


def write(directory: Path, predicted: str) -> list[str]:
    """Write one prediction of the part `test`; returns the warnings."""
    warnings: list[str] = []
    held_out: Any = SimpleNamespace(warn=warnings.append)
    line = {"predicted": predicted, "verdict": "wrong", "reason": "rows differ"}
    HeldOutEvaluator.write_predictions(held_out, directory / "final" / "test.jsonl", [line])
    return warnings


def test_predictions_replace_earlier_ones_and_no_data(tmp_path: Path) -> None:
    path = tmp_path / "final" / "test.jsonl"
    for predicted in ("one", "two"):
        assert write(tmp_path, predicted) == []
        assert [json.loads(line)["predicted"] for line in path.read_text().splitlines()] == [
            predicted
        ]
    path.write_text('{"question": "?", "sql": "SELECT 1"}\n')
    assert str(path) in write(tmp_path, "three")[0]
    assert path.read_text() == '{"question": "?", "sql": "SELECT 1"}\n'


def test_a_path_that_cannot_be_looked_at_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only rank 0 writes: an error there would end the run, with the other ranks waiting for it."""
    real = os.stat

    def stat(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if str(path).endswith("test.jsonl"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", stat)
    assert write(tmp_path, "one") == []
