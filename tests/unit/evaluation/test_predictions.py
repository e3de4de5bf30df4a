"""Where predictions are written: never over a file that holds none."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drillyard.data.held_out_parts import RowsAtFault
from drillyard.errors import UserError
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


def test_a_question_that_the_template_refuses_is_not_asked() -> None:
    def prompt_of(row: dict[str, Any]) -> str:
        if row["at_fault"]:
            raise UserError(f"row {row['n']}")
        return f"prompt {row['n']}"

    at_fault = RowsAtFault()

    def asked(on_error: str, *faults: bool) -> Any:
        held_out: Any = SimpleNamespace(
            config=SimpleNamespace(data=SimpleNamespace(on_error=on_error))
        )
        rows = [{"n": n, "at_fault": at_fault} for n, at_fault in enumerate(faults)]
        return HeldOutEvaluator._asked(held_out, rows, prompt_of, at_fault)

    rows, prompts = asked("skip", False, True, False)
    assert [row["n"] for row in rows] == [0, 2] and prompts == ["prompt 0", "prompt 2"]
    assert (at_fault.count, at_fault.first) == (1, "row 1")
    for on_error, faults in (("refuse", (False, True)), ("skip", (True, True))):
        with pytest.raises(UserError, match=f"row {faults.index(True)}"):
            asked(on_error, *faults)
