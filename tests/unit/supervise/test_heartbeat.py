"""Signs of life: what a rank shows is what its supervisor sees."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drillyard.errors import UserError
from drillyard.supervise.heartbeat import BOARD, HeartbeatBoard, heartbeat_writer


def test_each_rank_has_its_place_on_the_board() -> None:
    with HeartbeatBoard(3) as board:
        assert [sign.at for sign in board.read()] == [0.0, 0.0, 0.0]
        before = time.monotonic()
        heartbeat_writer({**board.environment, "LOCAL_RANK": "1"}).step(7, 40)
        first, second, third = board.read()
        assert before <= second.at <= time.monotonic()
        assert (second.step, second.total_steps, second.phase) == (7, 40, "start")
        assert (first.at, third.at, first.step, third.total_steps) == (0.0, 0.0, None, None)


@given(
    st.integers(0, 10**12), st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=32)
)
def test_what_is_shown_is_what_is_read(step: int, phase: str) -> None:
    with HeartbeatBoard(1) as board:
        signs = heartbeat_writer({**board.environment, "LOCAL_RANK": "0"})
        signs.begin(phase)
        signs.step(step, step + 1)
        assert board.read() == [signs.last()]
        assert (signs.last().step, signs.last().total_steps, signs.last().phase) == (
            step,
            step + 1,
            phase,
        )


def test_a_new_phase_and_a_new_step_are_later_signs() -> None:
    signs = heartbeat_writer({})
    moments = [signs.last().at]
    for show in (signs.show, lambda: signs.begin("data"), lambda: signs.step(1, 2)):
        show()
        moments.append(signs.last().at)
    assert moments == sorted(moments) and moments[0] < moments[-1]


def test_a_rank_whose_board_cannot_be_opened_does_not_start() -> None:
    """Its supervisor would take it for hung."""
    with pytest.raises(UserError, match="/proc/1/no-such-board"):
        heartbeat_writer({BOARD: "/proc/1/no-such-board", "LOCAL_RANK": "0"})


def test_a_step_of_an_earlier_attempt_is_not_one_of_this() -> None:
    signs = heartbeat_writer({})
    signs.step(50, 100, trained=False)
    signs.begin("data")
    assert (signs.last().step, signs.last().trained) == (50, False)
    signs.step(51, 100)
    signs.begin("between steps")
    assert (signs.last().step, signs.last().trained) == (51, True)
