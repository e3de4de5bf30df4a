"""Which lines of metrics.jsonl are steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drillyard.telemetry.metrics import is_step, read_steps

STEP: dict[str, Any] = {
    "time": "2026-01-31T12:00:00.000001Z",
    "step": 3,
    "step_seconds": 0.5,
    "tokens": 4096,
    "tokens_per_second_per_gpu": 8192.0,
    "tflops_per_gpu": 1.5,
}
DAMAGE: list[dict[str, Any]] = [
    *({name: None} for name in STEP),
    {"step": "3"},
    {"step": True},
    {"step": 3.0},
    {"time": "yesterday"},
    {"step_seconds": "fast"},
]


def test_a_line_with_all_figures_is_a_step() -> None:
    assert is_step(STEP) and is_step({**STEP, "loss": None, "more": 1})


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_line_that_lacks_one_is_none(damage: dict[str, Any]) -> None:
    assert not is_step({**STEP, **damage})
    missing = next(iter(damage))
    assert not is_step({name: value for name, value in STEP.items() if name != missing})


def test_other_lines_of_the_file_are_passed_over(tmp_path: Path) -> None:
    lines = [
        json.dumps(STEP),
        json.dumps({**STEP, "step": None}),
        '{"torn',
        json.dumps({**STEP, "step": 4}),
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert [record["step"] for record in read_steps(tmp_path)] == [3, 4]
