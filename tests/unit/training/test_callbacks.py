"""What evaluations between steps tell the checkpoints."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from drillyard.evaluation.evaluator import EvaluationResults, MetricFailure
from drillyard.training.callbacks import StepCallbacks, mean_loss

PARTS = {"easy": {"loss": 1.0, "tokens": 30}, "hard": {"loss": 5.0, "tokens": 10}}


def test_the_loss_is_the_mean_over_the_tokens_of_all_parts() -> None:
    assert mean_loss(EvaluationResults(PARTS, [])) == pytest.approx(2.0)
    assert mean_loss(EvaluationResults({"easy": {"sql_execution": 0.5}}, [])) is None


def test_a_loss_without_one_of_the_parts_is_none() -> None:
    """With keep_best, the step at which the hard part failed would look like the best one."""
    easy = {"easy": PARTS["easy"]}
    assert (
        mean_loss(EvaluationResults(easy, [MetricFailure("hard", "loss", "out of memory", None)]))
        is None
    )
    answers = MetricFailure("hard", "sql-execution", "KeyError", None)
    assert mean_loss(EvaluationResults(PARTS, [answers])) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("step", "stopping", "expected"),
    [
        (1, False, []),
        (2, False, ["figures", "save"]),
        (3, False, ["figures", "evaluate"]),
        (5, True, ["figures", "save"]),
    ],
)
def test_figures_are_read_before_what_must_come_after_them(
    step: int, stopping: bool, expected: list[str]
) -> None:
    done: list[str] = []
    callbacks: Any = object.__new__(StepCallbacks)
    vars(callbacks).update(
        config=SimpleNamespace(
            checkpoint=SimpleNamespace(every_steps=2), evaluation=SimpleNamespace(every_steps=3)
        ),
        trainer=SimpleNamespace(
            total_steps=9,
            deliver_figures=lambda: done.append("figures"),
            in_nonfinite_row=lambda: False,
        ),
        stop=SimpleNamespace(agreed=lambda: stopping, received=None),
        side=SimpleNamespace(
            signs=SimpleNamespace(step=lambda *_: None), during=lambda _: nullcontext()
        ),
        log=SimpleNamespace(event=lambda *_, **__: None),
        save=lambda *_, **__: done.append("save"),
        evaluate=lambda _: done.append("evaluate"),
    )
    assert callbacks.after_step(step)[1] == stopping
    assert done == expected
