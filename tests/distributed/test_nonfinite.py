"""A step with a non-finite loss or gradient changes nothing, is counted, and a row of them ends the
run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.ranks import run_ranks
from tests.distributed.training_case import build, make_config, write_documents
from tests.facts import says

from drillyard.errors import UserError
from drillyard.training.trainer import StepWindow


def poison(model: Any, bad: bool, value: float) -> None:
    """Multiply the loss of one rank's next forward."""
    forward = type(model.root).forward

    def poisoned(*args: Any, **inputs: Any) -> torch.Tensor:
        return forward(model.root, *args, **inputs) * (value if bad else 1.0)

    model.root.forward = poisoned


def snapshot(trainer: Any) -> list[torch.Tensor]:
    state = trainer.optimizer.optimizer.state
    return [
        tensor.clone()
        for shard in trainer.optimizer.shards
        for tensor in (
            shard.local,
            *(state[shard.local][key] for key in ("exp_avg", "exp_avg_sq", "step")),
        )
    ]


def bad_steps(directory: str, value: float) -> dict[str, Any]:
    config = make_config(
        Path(directory), training__precision="fp32", training__max_nonfinite_steps=3
    )
    trainer, model = build(config)
    bad_rank = trainer.ranks.rank == trainer.ranks.world_size - 1
    facts: dict[str, Any] = {"unchanged": [], "rows": []}
    for step in range(8):
        poison(model, bad_rank and step in (2, 5, 6, 7), value)
        before = snapshot(trainer)
        loss, norm = trainer.train_step(step, StepWindow(0.0))
        after = snapshot(trainer)
        facts["unchanged"].append(
            all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        )
        facts["rows"].append(trainer.optimizer.skipped.tolist())
        facts.setdefault("in row", []).append(trainer.in_nonfinite_row())
        window = StepWindow(0.0, steps=1)
        try:
            figures = trainer.queue_figures(step, loss, norm, window).read()
            figures.require_finite(config.training.max_nonfinite_steps)
        except UserError as error:
            facts["error"] = (step, str(error))
    return facts


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_steps_are_skipped_counted_and_end_the_run(tmp_path: Path, value: float) -> None:
    write_documents(tmp_path)
    for facts in run_ranks(bad_steps, 2, str(tmp_path), value):
        assert facts["unchanged"] == [False, False, True, False, False, True, True, True]
        assert facts["in row"] == facts["unchanged"]
        assert [row[0] for row in facts["rows"]] == [0, 0, 1, 1, 1, 2, 3, 4]
        assert facts["rows"][-1] == [4, 3, 3]
        step, text = facts["error"]
        assert step == 7
        assert says(text, "3 steps ... training.max_nonfinite_steps")
