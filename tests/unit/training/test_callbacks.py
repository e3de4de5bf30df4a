"""What evaluations between steps tell the checkpoints."""

from __future__ import annotations

import pytest

from drillyard.evaluation.evaluator import EvaluationResults, MetricFailure
from drillyard.training.callbacks import mean_loss

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
