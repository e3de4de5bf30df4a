"""What happened, in sentences."""

from __future__ import annotations

from typing import get_args

import pytest
from tests.facts import says

from drillyard.reporting.event_text import describe_event, evaluation_figures
from drillyard.telemetry.events import EventName

TIME = "2026-01-31T12:00:00.000001Z"
SHOWN_OTHERWISE = {
    *("step", "first_step", "order"),
    *(
        f"{name}_{end}"
        for name in ("checkpoint", "evaluation", "export")
        for end in ("begin", "end")
    ),
}


@pytest.mark.parametrize("name", sorted(set(get_args(EventName)) - SHOWN_OTHERWISE))
def test_every_event_that_concerns_people_has_a_sentence_even_without_its_details(name):
    minimal = {"time": TIME, "event": name, **({"count": 7} if name == "parameters" else {})}
    found = describe_event(minimal)
    assert found is not None and len(found.text) > 5
    assert found.time_us % 1_000_000 == 1


@pytest.mark.parametrize("name", [*sorted(SHOWN_OTHERWISE), "an_event_of_somebody_else"])
def test_steps_and_pauses_have_none(name):
    assert describe_event({"time": TIME, "event": name, "step": 3}) is None


def test_a_failure_names_rank_and_reason():
    event = {
        "time": TIME,
        "event": "failure",
        "step": 7,
        "failed_rank": 3,
        "reason": "killed by SIGKILL",
    }
    found = describe_event(event)
    assert (found.text, found.level, found.step) == (
        "Rank 3 failed: killed by SIGKILL",
        "failure",
        7,
    )


def test_a_spike_tells_how_far_it_is_out():
    event = {
        "time": TIME,
        "event": "loss_spike",
        "step": 7,
        "loss": 7.12,
        "median": 2.31,
        "limit": 2.63,
    }
    assert describe_event(event).text == "Loss spike: 7.120 (recent median 2.310, limit 2.630)"


@pytest.mark.parametrize(
    ("status", "level"),
    [("completed", "good"), ("interrupted", "warning"), ("failed", "failure"), ("other", "note")],
)
def test_an_end_has_the_colour_of_its_status(status, level):
    assert describe_event({"time": TIME, "event": "end", "status": status}).level == level


def test_an_evaluation_says_its_headline_figures_or_all_it_has():
    results = {"rows": {"loss": 3.0362, "perplexity": 20.8, "sql_execution": 0.914}}
    assert evaluation_figures(results) == ["rows: loss 3.036", "rows: SQL execution accuracy 91.4%"]
    assert evaluation_figures({"f1": 0.25}) == ["f1 0.2500"]


def test_what_a_log_quotes_stays_on_one_line_and_moves_no_cursor():
    event = {"time": TIME, "event": "failure", "reason": "RuntimeError:\n  \x1b[2Jshape\tmismatch"}
    assert describe_event(event).text == "Failure: RuntimeError: [2Jshape mismatch"


@pytest.mark.parametrize("changed", [None, {}, {"training.compile": ["auto", True]}])
def test_settings_that_were_resolved_differently_are_named(changed):
    text = describe_event({"time": TIME, "event": "resolved", "changed": changed}).text
    assert says(text, "training.compile auto -> True") == bool(changed)
