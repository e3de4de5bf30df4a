"""Which failures are followed by another round."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drillyard.supervise.rules import MAX_FAILED_STARTS, Failure, RestartRules


def test_restarts_are_used_up_by_rounds_that_made_progress() -> None:
    rules = RestartRules(2)
    assert rules.refusal(Failure(10, "a")) is None
    assert rules.refusal(Failure(20, "a")) is None
    refusal = rules.refusal(Failure(30, "a"))
    assert refusal is not None and "all 2 restarts are used" in refusal


def test_failures_before_the_first_step_use_up_a_limit_of_their_own() -> None:
    rules = RestartRules(1)
    assert [rules.refusal(Failure(None, "a")) for _ in range(2)] == [None, None]
    assert rules.restarts == 0
    refusal = rules.refusal(Failure(None, "a"))
    assert refusal is not None and "3 rounds in a row failed before their first step" in refusal


def test_a_round_that_reaches_a_step_forgives_failed_starts() -> None:
    rules = RestartRules(10)
    for step in range(5):
        assert rules.refusal(Failure(None, "a")) is None
        assert rules.refusal(Failure(None, "a")) is None
        assert rules.refusal(Failure(step, "a")) is None


def test_the_same_error_at_the_same_step_is_tried_twice_again() -> None:
    rules = RestartRules(10)
    assert rules.refusal(Failure(7, "1 RuntimeError: bad block at 0x7f00 after 1.5 s")) is None
    assert rules.refusal(Failure(7, "1 RuntimeError: bad block at 0x7fee after 1.7 s")) is None
    refusal = rules.refusal(Failure(7, "1 RuntimeError: bad block at 0x8000 after 1.6 s"))
    assert refusal is not None and "same step 7" in refusal


def test_another_error_or_another_step_counts_as_progress() -> None:
    rules = RestartRules(10)
    for failure in [Failure(7, "a"), Failure(7, "b"), Failure(7, "a"), Failure(8, "a"), Failure(7, "a")]:
        assert rules.refusal(failure) is None


def test_no_restarts_asked_for_means_none_whatever_the_failure() -> None:
    assert RestartRules(0).refusal(Failure(None, "a")) is not None
    assert RestartRules(0).refusal(Failure(5, "a")) is not None


@pytest.mark.parametrize("exit_code", [2, 126, 127])
@pytest.mark.parametrize("step", [None, 7])
def test_a_command_that_is_not_there_is_not_started_again(exit_code: int, step: int | None) -> None:
    refusal = RestartRules(3).refusal(Failure(step, "a", exit_code))
    assert refusal is not None and f"exit code {exit_code} " in refusal
    assert RestartRules(3).refusal(Failure(step, "a", 1)) is None


@given(
    st.integers(0, 5),
    st.lists(st.tuples(st.none() | st.integers(0, 3), st.sampled_from("ab")), min_size=40, max_size=40),
)
def test_every_run_of_failures_ends(max_restarts: int, failures: list[tuple[int | None, str]]) -> None:
    rules = RestartRules(max_restarts)
    granted = 0
    for step, error in failures:
        if rules.refusal(Failure(step, error)) is not None:
            break
        granted += 1
    assert rules.restarts <= max_restarts
    assert granted <= (max_restarts + 1) * MAX_FAILED_STARTS
