"""`--fail-if`: what trips a gate, and what one means that asks for a figure that is not known."""

from __future__ import annotations

import pytest
from tests.facts import says
from tests.unit.measurement.made import run_log, stamps
from tests.unit.measurement.published import EXAMPLE

from drillyard.errors import UserError
from drillyard.measurement.gates import parse_gate
from drillyard.measurement.run_result import measure


@pytest.mark.parametrize(
    ("text", "trips"),
    [
        ("mfu<0.38", False),
        ("mfu < 50%", True),
        ("step_seconds.p95>=14.5", True),
        ("restarts!=0", False),
        ("mfu>0.9", False),
    ],
)
def test_gates(text, trips):
    log = run_log(seconds=[14.54] * 10, time_us=stamps([14.54] * 10))
    assert (parse_gate(text).trips(measure(log, EXAMPLE).as_json()) is not None) == trips


def test_a_gate_on_what_is_not_known_is_closed_and_names_the_flag():
    why = parse_gate("mfu<0.38").trips(measure(run_log(seconds=[1.0] * 10)).as_json())
    assert why is not None and says(why, "mfu ... not known") and "--accelerator" in why
    why = parse_gate("seconds_by_category.stalled>5").trips(
        measure(run_log(seconds=[1.0] * 10)).as_json()
    )
    # No flag gives it: the reason is that of goodput.
    assert why is not None and says(why, "no time stamps") and "()" not in why


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mfu", "write it as"),
        ("mfu<abc", "write it as"),
        ("mfu<nan", "write it as"),
        ("mfuu<1", "mean mfu"),
        ("formula<1", "no number|not a number"),
    ],
)
def test_gates_that_mean_nothing_are_errors(text, words):
    with pytest.raises(UserError, match=words):
        parse_gate(text).trips(measure(run_log(seconds=[14.54] * 10), EXAMPLE).as_json())
