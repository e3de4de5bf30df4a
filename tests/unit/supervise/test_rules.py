"""Which failures are followed by another round."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drillyard.supervise.rules import MAX_FAILED_STARTS, AttemptFailure, RestartPolicy


def test_restarts_are_used_up_by_rounds_that_made_progress() -> None:
    rules = RestartPolicy(2)
    assert rules.refusal(AttemptFailure(10, "a")) is None
    assert rules.refusal(AttemptFailure(20, "a")) is None
    refusal = rules.refusal(AttemptFailure(30, "a"))
    assert refusal is not None and "all 2 restarts are used" in refusal


def test_failures_before_the_first_step_use_up_a_limit_of_their_own() -> None:
    rules = RestartPolicy(1)
    assert [rules.refusal(AttemptFailure(None, "a")) for _ in range(2)] == [None, None]
    assert rules.restarts == 0
    refusal = rules.refusal(AttemptFailure(None, "a"))
    assert refusal is not None and "3 rounds in a row failed before their first step" in refusal


def test_a_round_that_reaches_a_step_forgives_failed_starts() -> None:
    rules = RestartPolicy(10)
    for step in range(5):
        assert rules.refusal(AttemptFailure(None, "a")) is None
        assert rules.refusal(AttemptFailure(None, "a")) is None
        assert rules.refusal(AttemptFailure(step, "a")) is None


def test_the_same_error_at_the_same_step_is_tried_twice_again() -> None:
    rules = RestartPolicy(10)
    assert rules.refusal(AttemptFailure(7, "1 RuntimeError: bad block at 0x7f00 after 1.5 s")) is None
    assert rules.refusal(AttemptFailure(7, "1 RuntimeError: bad block at 0x7fee after 1.7 s")) is None
    refusal = rules.refusal(AttemptFailure(7, "1 RuntimeError: bad block at 0x8000 after 1.6 s"))
    assert refusal is not None and "same step 7" in refusal


def test_another_error_or_another_step_counts_as_progress() -> None:
    rules = RestartPolicy(10)
    for failure in [
        AttemptFailure(7, "a"),
        AttemptFailure(7, "b"),
        AttemptFailure(7, "a"),
        AttemptFailure(8, "a"),
        AttemptFailure(7, "a"),
    ]:
        assert rules.refusal(failure) is None


def test_no_restarts_asked_for_means_none_whatever_the_failure() -> None:
    assert RestartPolicy(0).refusal(AttemptFailure(None, "a")) is not None
    assert RestartPolicy(0).refusal(AttemptFailure(5, "a")) is not None


@pytest.mark.parametrize("exit_code", [2, 126, 127])
@pytest.mark.parametrize("step", [None, 7])
def test_a_command_that_is_not_there_is_not_started_again(exit_code: int, step: int | None) -> None:
    refusal = RestartPolicy(3).refusal(AttemptFailure(step, "a", exit_code))
    assert refusal is not None and f"exit code {exit_code} " in refusal
    assert RestartPolicy(3).refusal(AttemptFailure(step, "a", 1)) is None


@given(
    st.integers(0, 5),
    st.lists(st.tuples(st.none() | st.integers(0, 3), st.sampled_from("ab")), min_size=40, max_size=40),
)
def test_every_run_of_failures_ends(max_restarts: int, failures: list[tuple[int | None, str]]) -> None:
    rules = RestartPolicy(max_restarts)
    granted = 0
    for step, error in failures:
        if rules.refusal(AttemptFailure(step, error)) is not None:
            break
        granted += 1
    assert rules.restarts <= max_restarts
    assert granted <= (max_restarts + 1) * MAX_FAILED_STARTS
