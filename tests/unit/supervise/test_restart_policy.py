"""What follows an attempt, of a launched run and of one host."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drillyard.supervise import restart_policy
from drillyard.supervise.restart_policy import (
    AGAIN,
    DONE,
    LEAVE,
    MAX_FAILED_STARTS,
    AttemptEnd,
    AttemptFailure,
    FollowUp,
    LeaderEnd,
    RestartCounts,
    RestartDecision,
    RestartLimits,
    after_failure,
    counts_in,
    decide,
    follow_up,
)

LIMITS = RestartLimits(max_failures=3, join_seconds=60)
CODES = st.dictionaries(st.integers(0, 4), st.sampled_from([0, 1, 2, 85, 137, 143]), min_size=1)


def after(
    codes: dict[int, int],
    counts: RestartCounts | None = None,
    limits: RestartLimits = LIMITS,
    **known: object,
) -> RestartDecision:
    return decide(
        AttemptEnd(codes=codes, lost=known.pop("lost", {}), **known),
        counts or RestartCounts(),
        limits,
    )  # type: ignore[arg-type]


def first(exit_code: int, **known: Any) -> AttemptFailure:
    return AttemptFailure(exit_code, **{"knows_step": False, **known})


def test_all_nodes_with_0_are_done() -> None:
    assert after({0: 0, 1: 0}).what == DONE


def test_a_completed_summary_outweighs_how_other_nodes_ended() -> None:
    assert after({0: 0, 1: 134}, completed=True).what == DONE
    assert after({0: 0}, completed=True, lost={1: "b"}).what == DONE
    assert after({0: 1, 1: 0}, completed=True).what == AGAIN
    assert after({0: 0, 1: 134}).what == AGAIN


def test_a_lost_node_is_not_done() -> None:
    assert after({0: 0}, lost={1: "b"}).what == AGAIN


@given(CODES, st.booleans(), st.sampled_from([None, "SIGTERM"]))
def test_refused_is_never_started_again(
    codes: dict[int, int], newer: bool, asked: str | None
) -> None:
    decision = after({**codes, 5: 2}, newer_checkpoint=newer, asked=asked)
    assert (decision.what, decision.code) == (LEAVE, 2)


def test_a_final_failure_is_never_started_again() -> None:
    """A run with evaluation.required that is complete, say: no start measures what could not be
    measured."""
    decision = after(
        {0: 1, 1: 0}, failure=first(1, final=True, cause="evaluation.required"), completed=True
    )
    assert (decision.what, decision.code, decision.counts.failures) == (LEAVE, 1, 0)
    assert decision.counted and decision.reason == "evaluation.required"


def test_other_codes_are_counted_up_to_the_limit() -> None:
    counts = RestartCounts()
    for number in (1, 2, 3):
        decision = after({0: 0, 1: 9}, counts)
        assert (decision.what, decision.counted, decision.counts.failures) == (AGAIN, True, number)
        counts = decision.counts
    last = after({0: 0, 1: 9}, counts)
    assert (last.what, last.code, last.counts.failures) == (LEAVE, 1, 3)
    assert last.reason == "exit code 9; all 3 restarts are used"


@pytest.mark.parametrize("code", [126, 127])
def test_a_command_that_is_not_there_is_not_started_again(code: int) -> None:
    cause = f"exit code {code}; error: cannot start the command: nosuch"
    decision = after({0: code}, failure=first(code, cause=cause))
    assert (decision.what, decision.code, decision.counts.failures) == (LEAVE, 1, 0)
    assert decision.reason.startswith(
        f"exit code {code}; error: cannot start the command: nosuch; "
    )
    assert decision.reason.count(f"exit code {code}") == 1 and decision.reason.endswith(
        "not started again"
    )
    # The code of a node that was stopped because another had failed decides nothing.
    assert after({0: 1, 1: code}, failure=first(1)).what == AGAIN
    assert after({0: 143, 1: code}, failure=first(code)).what == LEAVE
    assert after({0: code}, lost={1: "b"}).what == AGAIN


def test_no_restarts_where_they_are_off() -> None:
    decision = after({0: 9}, limits=RestartLimits(0, 60))
    assert (decision.what, decision.code, decision.reason) == (
        LEAVE,
        1,
        "exit code 9; restarts are off",
    )


def test_85_is_not_counted_with_a_newer_checkpoint_however_often() -> None:
    counts = RestartCounts()
    for _ in range(20):
        decision = after({0: 85, 1: 85}, counts, newer_checkpoint=True)
        assert (decision.what, decision.counted) == (AGAIN, False)
        counts = decision.counts
    assert counts == RestartCounts()


def test_85_twice_in_a_row_without_a_newer_checkpoint_is_a_failure() -> None:
    first = after({0: 85}, newer_checkpoint=False)
    assert (first.what, first.counted) == (AGAIN, False)
    second = after({0: 85}, first.counts, newer_checkpoint=False)
    assert (second.what, second.counted, second.counts.failures) == (AGAIN, True, 1)
    between = after({0: 85}, first.counts, newer_checkpoint=True)
    assert after({0: 85}, between.counts, newer_checkpoint=False).counted is False


def test_85_that_nobody_asked_for_and_that_cannot_be_seen_comes_to_an_end() -> None:
    counts, attempts = RestartCounts(), 0
    while (decision := after({0: 85}, counts)).what == AGAIN:
        counts, attempts = decision.counts, attempts + 1
    assert (attempts, decision.code) == (4, 1)


def test_a_stop_from_outside_leaves_with_85_for_the_scheduler() -> None:
    decision = after({0: 85, 1: 143}, asked="SIGUSR1", newer_checkpoint=True)
    assert (decision.what, decision.code, decision.counted) == (LEAVE, 85, False)


def test_stops_from_outside_without_a_newer_checkpoint_count_over_requeues() -> None:
    first = after({0: 85}, asked="SIGTERM", newer_checkpoint=False)
    assert (first.code, first.counted) == (85, False)
    second = after({0: 85}, first.counts, asked="SIGTERM", newer_checkpoint=False)
    assert (second.code, second.counts.failures) == (85, 1)
    last = after({0: 85}, RestartCounts(3, 1), asked="SIGTERM", newer_checkpoint=False)
    assert (last.code, last.counts.failures) == (1, 3)


def test_preemptions_whose_checkpoints_cannot_be_seen_are_never_counted() -> None:
    counts = RestartCounts()
    for _ in range(10):
        decision = after({0: 85}, counts, asked="SIGTERM")
        assert (decision.code, decision.counts) == (85, RestartCounts())


def test_a_foreign_command_has_stopped_when_its_checkpoint_is_there() -> None:
    assert after({0: 1}, asked="SIGTERM", newer_checkpoint=True).code == 85
    for newer in (False, None):
        decision = after({0: 143}, asked="SIGTERM", newer_checkpoint=newer)
        assert (decision.code, decision.reason) == (
            1,
            "stopped by SIGTERM without a checkpoint of this moment",
        )


def test_a_lost_node_is_waited_for_and_not_counted() -> None:
    decision = after({0: 143}, lost={1: "b"})
    assert (decision.what, decision.counted, decision.counts) == (
        AGAIN,
        False,
        RestartCounts(0, 1, {"b": 1}),
    )
    assert decision.reason == "lost node 1 (b); waits for it to come back"


@pytest.mark.parametrize("join_seconds", [0, 60])
def test_losses_in_a_row_without_a_newer_checkpoint_come_to_an_end(join_seconds: float) -> None:
    counts, limits = RestartCounts(), RestartLimits(3, join_seconds)
    codes = []
    for number in range(5):
        decision = after(
            {0: 143}, counts, limits, lost={1: f"host{number}"}, newer_checkpoint=False
        )
        counts = decision.counts
        codes.append(decision.code)
    assert (codes, decision.what, counts.failures) == ([75, 75, 75, 75, 1], LEAVE, 3)
    assert "lost node 1 (host4)" in decision.reason and "all 3 restarts are used" in decision.reason
    assert counts.excluded == []


def test_losses_after_newer_checkpoints_are_never_counted_but_exclude_their_host_the_second_time() -> (  # noqa: E501
    None
):
    counts = RestartCounts()
    for number in range(1, 20):
        decision = after(
            {0: 143}, counts, RestartLimits(3, 0), lost={1: "b"}, newer_checkpoint=True
        )
        assert (decision.code, decision.counted) == (75, False)
        counts = decision.counts
        assert counts.excluded == (["b"] if number > 1 else [])
    assert counts.failures == 0


def test_hosts_whose_agents_never_start_are_excluded_at_once_and_only_so_often() -> None:
    limits = RestartLimits(1, 0)
    first = restart_policy.never_joined(
        {1: "b", 2: ""}, "node 1 (b), node 2 cannot start: no such file", RestartCounts(), limits
    )
    assert (first.what, first.code, first.counted, first.counts.excluded) == (
        LEAVE,
        75,
        False,
        ["b"],
    )
    assert first.reason == "lost capacity: node 1 (b), node 2 cannot start: no such file"
    second = restart_policy.never_joined({1: "c"}, "", first.counts, limits)
    assert (second.code, second.counted, second.counts.excluded) == (75, True, ["b", "c"])
    third = restart_policy.never_joined({1: "d"}, "node 1 (d) did not come", second.counts, limits)
    assert (third.code, third.what) == (1, LEAVE) and "node 1 (d) did not come" in third.reason


def test_a_killed_leader_is_a_loss_of_its_host_unless_it_was_stopping() -> None:
    limits = RestartLimits(1, 60)
    first = restart_policy.leader_killed("a", False, False, RestartCounts(), limits)
    assert (first.what, first.counted, first.counts) == (
        AGAIN,
        False,
        RestartCounts(0, 1, {"a": 1}),
    )
    saved = restart_policy.leader_killed("a", False, True, first.counts, limits)
    assert (saved.what, saved.counts.failures, saved.counts.excluded) == (AGAIN, 0, ["a"])
    asked = restart_policy.leader_killed("a", True, None, first.counts, limits)
    assert (asked.what, asked.counts.failures, asked.counts.losses) == (AGAIN, 1, {"a": 1})
    assert restart_policy.leader_killed("a", False, False, asked.counts, limits).code == 1


def test_a_lost_node_ends_the_start_where_none_is_waited_for() -> None:
    decision = after({0: 143}, lost={1: "b"}, limits=RestartLimits(3, 0))
    assert (decision.what, decision.code) == (LEAVE, 75)


@given(
    CODES, st.booleans(), st.sampled_from([True, False, None]), st.integers(0, 3), st.integers(0, 5)
)
def test_counts_never_shrink_nor_pass_the_limit(
    codes: dict[int, int], asked: bool, newer: bool | None, failures: int, unsaved: int
) -> None:
    decision = after(
        codes,
        RestartCounts(failures, unsaved),
        asked="SIGTERM" if asked else None,
        newer_checkpoint=newer,
    )
    assert failures <= decision.counts.failures <= 3
    assert decision.what != AGAIN or not asked
    if decision.what == LEAVE:
        assert decision.code in (1, 2, 75, 85)


def decisions(max_failures: int, *failures: AttemptFailure) -> list[RestartDecision]:
    """What follows each of the failures, up to the one that is refused."""
    counts, made = RestartCounts(), []
    for failure in failures:
        made.append(after_failure(failure, counts, RestartLimits(max_failures)))
        counts = made[-1].counts
        if made[-1].what == LEAVE:
            break
    return made


def failed(step: int | None, error: str = "a") -> AttemptFailure:
    return AttemptFailure(step=step, error=error)


def test_restarts_are_used_up_by_attempts_that_made_progress() -> None:
    made = decisions(2, failed(10), failed(20), failed(30))
    assert [each.what for each in made] == [AGAIN, AGAIN, LEAVE] and "2 restarts" in made[-1].reason
    assert [each.counts.failures for each in made] == [1, 2, 2]


def test_failures_before_the_first_step_use_up_a_limit_of_their_own() -> None:
    made = decisions(1, *[failed(None)] * 3)
    assert [each.what for each in made] == [AGAIN, AGAIN, LEAVE] and "first step" in made[-1].reason
    assert made[-1].counts.failures == 0 and not made[0].counted


def test_an_attempt_that_reaches_a_step_resets_failed_starts() -> None:
    made = decisions(10, *(failed(each) for step in range(5) for each in (None, None, step)))
    assert len(made) == 15 and made[-1].what == AGAIN


@pytest.mark.parametrize(
    "between", [{"codes": {0: 85}, "asked": "SIGTERM"}, {"codes": {}, "lost": {0: "a"}}]
)
def test_failed_starts_between_stops_or_losses_that_saved_nothing_come_to_an_end(
    between: dict[str, Any],
) -> None:
    failed_start = AttemptEnd({0: 1}, {}, failure=AttemptFailure())
    counts, made = RestartCounts(), []
    for number in range(40):
        end = (
            failed_start
            if number % 2 == 0
            else AttemptEnd(**{"lost": {}, "newer_checkpoint": False, **between})
        )
        made.append(decide(end, counts, LIMITS))
        counts = made[-1].counts
    assert made[4].what == LEAVE and made[4].code == 1


@pytest.mark.parametrize("launched", [False, True])
def test_the_same_error_at_the_same_step_is_tried_twice_again(launched: bool) -> None:
    errors = [
        f"RuntimeError: bad block at 0x{address} after {seconds} s"
        for address, seconds in (("7f00", 1.5), ("7fee", 1.7), ("8000", 1.6))
    ]
    if not launched:
        made = decisions(10, *(failed(7, error) for error in errors))
    else:
        made, counts = [], RestartCounts()
        for error in errors:
            # The counts are those of state.json, as after a requeue.
            end = AttemptEnd({0: 1}, {}, failure=AttemptFailure(1, 7, error, cause="rank 3"))
            made.append(
                decide(
                    end,
                    counts_in({"state": "running", **counts.as_fields()}),
                    RestartLimits(10, 60),
                )
            )
            counts = made[-1].counts
    assert [(each.what, each.code) for each in made] == [(AGAIN, 1), (AGAIN, 1), (LEAVE, 1)]
    assert "step 7" in made[-1].reason and made[-1].counted


def test_a_command_that_does_not_report_its_steps_has_only_the_count() -> None:
    ends = [AttemptEnd({0: 1}, {}, failure=first(1, error="ValueError: same"))] * 5
    counts, made = RestartCounts(), []
    for end in ends:
        made.append(decide(end, counts, RestartLimits(4, 60)))
        counts = made[-1].counts
    assert [each.what for each in made] == [AGAIN] * 4 + [LEAVE]


def test_another_error_or_another_step_counts_as_progress() -> None:
    made = decisions(10, failed(7), failed(7, "b"), failed(7), failed(8), failed(7))
    assert [each.what for each in made] == [AGAIN] * 5


@pytest.mark.parametrize("step", [None, 5])
def test_no_restarts_means_none_whatever_the_failure(step: int | None) -> None:
    decision = after_failure(
        failed(step), RestartCounts(), RestartLimits(0, option="--max-restarts")
    )
    assert decision.what == LEAVE and "--max-restarts 0" in decision.reason


@pytest.mark.parametrize("exit_code", [2, 126, 127])
@pytest.mark.parametrize("step", [None, 7])
def test_a_host_does_not_start_a_missing_command_again(exit_code: int, step: int | None) -> None:
    (decision,) = decisions(3, AttemptFailure(exit_code, step))
    assert decision.what == LEAVE and f"exit code {exit_code} " in decision.reason


@pytest.mark.parametrize(
    ("failures", "seconds"), [(1, 1), (2, 2), (3, 4), (5, 16), (6, 30), (2000, 30)]
)
def test_each_counted_restart_waits_longer(failures: int, seconds: float) -> None:
    limits = RestartLimits(3000)
    decision = after_failure(failed(failures), RestartCounts(failures - 1), limits)
    assert (decision.counted, decision.pause_seconds) == (True, seconds)
    assert after({0: 85}, limits=limits).pause_seconds == 0
    assert after_failure(failed(1), RestartCounts(3000), limits).pause_seconds == 0


@given(
    st.integers(0, 5),
    st.lists(
        st.tuples(st.none() | st.integers(0, 3), st.sampled_from("ab")), min_size=40, max_size=40
    ),
)
def test_every_run_of_failures_ends(
    max_restarts: int, failures: list[tuple[int | None, str]]
) -> None:
    made = decisions(max_restarts, *(failed(step, error) for step, error in failures))
    assert made[-1].what == LEAVE and made[-1].counts.failures <= max_restarts
    assert len(made) - 1 <= (max_restarts + 1) * MAX_FAILED_STARTS


def start_ended(code: int | None, state: dict[str, Any] | None = None, **known: Any) -> FollowUp:
    return follow_up(state or {}, LeaderEnd("n1", code, **known), False)


@pytest.mark.parametrize("code", [0, 1, 2, 126, 127, 130, 137])
def test_a_start_that_ended_with_another_code_than_85_or_75_is_the_last(code: int) -> None:
    assert (start_ended(code).again, start_ended(code).code) == (False, code)


def test_a_start_that_has_saved_or_lost_a_node_is_followed_by_another() -> None:
    assert start_ended(85).again and start_ended(85).without == ()
    lost = start_ended(75, {"reason": "lost node 1 (n2); to be started again", "exclude": "n2,n3"})
    assert (lost.again, lost.reason, lost.without) == (True, "lost node 1 (n2)", ["n2", "n3"])


@pytest.mark.parametrize(
    ("state", "without"),
    [
        ({"losses": {"n1": 1}}, ["n1"]),
        ({"losses": {"n1": 1}, "asked": "SIGTERM"}, []),
        ({"losses": {"n2": 2}}, ["n2"]),
        ({"losses": {}}, []),
    ],
)
def test_a_killed_leader_leaves_its_host_as_the_next_leader_will_count(
    state: dict[str, Any], without: list[str]
) -> None:
    followed = start_ended(None, {"submission": "1", **state})
    assert (followed.again, followed.without, followed.unled) == (True, without, "")


def test_hosts_that_cannot_start_an_agent_are_left_at_once() -> None:
    assert start_ended(None).without == ["n1"] and start_ended(None).unled == "n1"
    followed = start_ended(None, unstarted=["n2", "n3"], last_line="no such file")
    assert followed.without == ["n2", "n3"]
    assert followed.unled == "n2,n3: node 0 (n1): no such file"
    followed = start_ended(None, {"losses": {"n4": 2}}, unstarted=["n2"])
    assert (followed.without, followed.unled) == (["n2", "n4"], "")
