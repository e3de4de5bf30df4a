"""Where predictions are written: never over a file that holds none."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from drillyard.config.run import EvaluationConfig
from drillyard.evaluation.held_out import HeldOut
from drillyard.evaluation.sql import Verdict


def write(directory: Path, predicted: str) -> list[str]:
    """Write one prediction of the part `test`; returns the warnings."""
    warnings: list[str] = []
    config = SimpleNamespace(evaluation=EvaluationConfig())
    held_out: Any = SimpleNamespace(directory=directory, warn=warnings.append, config=config)
    held_out._write_lines = functools.partial(HeldOut._write_lines, held_out)
    HeldOut.write_predictions(held_out, "test", "final", [{}], ["?"], [predicted], [Verdict("wrong", "rows differ")])
    return warnings


def test_predictions_replace_earlier_ones_and_no_data(tmp_path: Path) -> None:
    path = tmp_path / "final" / "test.jsonl"
    for predicted in ("one", "two"):
        assert write(tmp_path, predicted) == []
        assert [json.loads(line)["predicted"] for line in path.read_text().splitlines()] == [predicted]
    path.write_text('{"question": "?", "sql": "SELECT 1"}\n')
    assert str(path) in write(tmp_path, "three")[0]
    assert path.read_text() == '{"question": "?", "sql": "SELECT 1"}\n'
