"""Hugging Face's trainer_state.json is read as it streams in, whatever its entries hold."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.measurement.lines import write

from drillyard.measurement.formats import hf_trainer_state
from drillyard.measurement.parsed_log import NONFINITE
from drillyard.measurement.read_logs import read_logs


def trainer_state(steps: int, **entry: Any) -> dict[str, Any]:
    history = [
        {"epoch": step / 10, "loss": 2 / step, "learning_rate": 1e-5, "step": step} | entry
        for step in range(1, steps + 1)
    ]
    history.append({"eval_loss": 0.5, "eval_runtime": 1.0, "step": steps})
    history.append({"train_runtime": 12.5, "train_loss": 1.0, "total_flos": 1e15, "step": steps})
    return {
        "best_metric": None,
        "best_model_checkpoint": None,
        "global_step": steps,
        "log_history": history,
        "logging_steps": 1,
        "max_steps": steps,
        "stateful_callbacks": {"TrainerControl": {"args": {"should_log": True}, "attributes": {}}},
        "train_batch_size": 4,
    }


@pytest.mark.parametrize("indent", [None, 2])
def test_trainer_state(indent: int | None, tmp_path: Path) -> None:
    log = read_logs(
        [write(tmp_path / "trainer_state.json", json.dumps(trainer_state(50), indent=indent))]
    )
    assert log.format == "hf_trainer_state"
    np.testing.assert_array_equal(log.steps.loss, [2 / step for step in range(1, 51)])
    assert (log.facts.micro_batch_size, log.facts.train_runtime_seconds, log.facts.total_steps) == (
        4,
        12.5,
        50,
    )
    assert [(event.kind, dict(event.values)) for event in log.events] == [
        ("evaluation", {"loss": 0.5})
    ]


def test_trainer_state_of_many_pieces_with_nested_objects(tmp_path: Path) -> None:
    state = trainer_state(30_000, rewards={"mean": [{"x": 1.0}, {"x": 2.0}], "text": "}, {"})
    state["log_history"][7]["loss"] = math.nan
    log = read_logs([write(tmp_path / "trainer_state.json", json.dumps(state, indent=2))])
    assert len(log.steps) == 30_000
    assert log.steps.flags[7] == NONFINITE
    assert log.facts.total_steps == 30_000


@pytest.mark.parametrize("blanks", [0, 1, 63, 64, 65, 700])
def test_the_end_of_the_list_is_found_wherever_a_piece_ends(
    blanks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_trainer_state, "_PIECE", 200)
    text = json.dumps(trainer_state(9, note="a] b ]"))
    text = text.replace('}], "logging_steps"', "}" + " " * blanks + '], "logging_steps"')
    log = read_logs([write(tmp_path / "trainer_state.json", text)])
    assert log.steps.step.tolist() == list(range(1, 10))
    assert (
        log.facts.total_steps,
        log.facts.train_runtime_seconds,
        log.sources[0].unfinished_lines,
    ) == (9, 12.5, 0)


@pytest.mark.parametrize(
    ("text", "since", "closing"),
    [
        (b"[{}]", 0, 3),
        (b"[]", 0, 1),
        (b"[{} \n\t ]", 0, 7),
        (b"[{" + b" " * 999 + b"}" + b" " * 999 + b"]", 2000, 2001),
        (b'[{"x": "a] b ]"}]', 0, 16),
        (b'[{"x": [1, 2]}', 0, -1),
        (b"] ", 0, -1),
        (b"[{}] [{}]", 4, 8),
    ],
)
def test_the_end_of_a_list_of_objects(text: bytes, since: int, closing: int) -> None:
    # What is missed here costs speed, not steps: entries are then read one by one.
    assert hf_trainer_state._closing(text, since) == closing


def test_trainer_state_that_is_cut_off_gives_whole_entries(tmp_path: Path) -> None:
    text = json.dumps(trainer_state(50), indent=2)
    log = read_logs([write(tmp_path / "trainer_state.json", text[: text.index('"step": 20')])])
    assert log.steps.step.tolist() == list(range(1, 20))
    assert log.sources[0].unfinished_lines == 1
