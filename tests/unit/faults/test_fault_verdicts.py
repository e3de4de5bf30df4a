"""When a fault passes, and which problems are reported if it does not: from logs and phases
alone."""

from __future__ import annotations

from typing import Any

import pytest
from tests.facts import each_says, says

from drillyard.faults.fault_verdicts import Evidence, FaultVerdict, judge_faults
from drillyard.faults.plan import Fault, PlannedRun
from drillyard.telemetry.events import event_microseconds

REFERENCE = {step: (3.0 - step / 100, 1.0 + step / 1000) for step in range(1, 13)}
KILL = Fault(1, "kill", "step", 1, 1, 6, 0.5)


def at(second: float) -> str:
    return f"2026-01-01T00:00:{second:09.6f}Z"


def event(second: float, name: str, **fields: Any) -> dict[str, Any]:
    return {"time": at(second), "event": name, **fields}


def steps(second: float, first: int, last: int) -> list[dict[str, Any]]:
    """Logged steps, ten a second."""
    times = [at(second + number / 10) for number in range(last - first + 1)]
    return [
        {"time": time, "step": step, "loss": REFERENCE[step][0], "grad_norm": REFERENCE[step][1]}
        for step, time in enumerate(times, start=first)
    ]


def hit(second: float, step: int, complete: list[int]) -> dict[str, Any]:
    return {"time": at(second), "step": step, "complete": complete}


KILLED = [
    event(0, "run_start"),
    event(5, "failure", failed_rank=1, reason="rank 1: killed by SIGKILL"),
    event(5.1, "restart"),
    event(9, "resume", step=4),
]


def judged(fault: Fault = KILL, **changes: Any) -> FaultVerdict:
    """One fault: rank 1 killed at second 5 in step 7, resumed at step 4; `changes` to the evidence
    of that."""
    evidence: dict[str, Any] = {
        "events": KILLED,
        "metrics": [*steps(3, 1, 6), *steps(10, 5, 12)],
        "phases": {(1, "hit"): hit(4.9, 7, [4])},
        "stopped": "",
        "problems": [],
        "end": event_microseconds({"time": at(20)}),
    }
    (verdict,) = judge_faults(
        PlannedRun("chaos-01", (fault,)), REFERENCE, Evidence(**{**evidence, **changes})
    )
    return verdict


def test_a_kill_that_costs_one_restart_and_no_bit_passes() -> None:
    verdict = judged()
    assert verdict.passed, verdict.problems
    assert (verdict.moment, verdict.reaction) == ("50% into step 7", "restarted, resumed at step 4")
    assert verdict.steps_redone == 2
    # Killed at 4.9 after step 6; step 6 is done again at 10.1.
    assert verdict.seconds_lost == pytest.approx(5.2)


@pytest.mark.parametrize("number", [4, 6, 9, 13])
def test_another_loss_fails_wherever_it_is(number: int) -> None:
    records = [*steps(3, 1, 6), *steps(10, 5, 12)]
    records[number] = {**records[number], "loss": records[number]["loss"] + 1e-12}
    verdict = judged(metrics=records)
    assert len(verdict.problems) == 1 and f"step {records[number]['step']}" in verdict.problems[0]


def test_another_gradient_norm_fails() -> None:
    records = [*steps(3, 1, 6), *steps(10, 5, 12)]
    records[7]["grad_norm"] += 1e-12
    assert not judged(metrics=records).passed


def test_an_extra_restart_fails() -> None:
    verdict = judged(events=[*KILLED, event(12, "restart"), event(13, "resume", step=8)])
    assert each_says(verdict.problems, ["2 new starts ... instead of 1"])


def test_a_kill_reported_for_another_rank_fails() -> None:
    events = [*KILLED[:1], {**KILLED[1], "failed_rank": 0}, *KILLED[2:]]
    assert says(judged(events=events).problems[0], "1 failures of rank 1")


def test_a_complete_checkpoint_that_was_passed_over_fails() -> None:
    events = [*KILLED[:3], event(9, "resume", step=2)]
    assert each_says(judged(events=events).problems, ["resumed at step 2 ... step 4"])


def test_a_step_that_was_never_logged_fails() -> None:
    metrics = [*steps(3, 1, 6), *steps(10, 8, 12)]
    assert each_says(judged(metrics=metrics).problems, ["1 steps ... never logged ... 7"])


def test_what_the_end_shows_fails_the_last_fault() -> None:
    assert each_says(
        judged(problems=["final/ is not the undisturbed run's"]).problems, ["final/ is not"]
    )


def test_a_place_that_was_not_hit_fails() -> None:
    verdict = judged(events=KILLED[:1], metrics=steps(3, 1, 12), phases={})
    assert not verdict.hit and each_says(verdict.problems, ["... passed this point"])


def test_a_run_that_did_not_continue_fails() -> None:
    verdict = judged(
        events=KILLED[:2], metrics=steps(3, 1, 6), stopped="the command ended with exit code 1"
    )
    assert says(verdict.reaction, "not continue")
    assert each_says(verdict.problems, ["0 new starts ... instead of 1", "... exit code 1"])


def test_a_killed_supervisor_is_no_failure_of_a_rank() -> None:
    fault = Fault(1, "kill", "manifest", None, 0, 6, 0.5)
    events = [event(0, "run_start"), event(6, "run_start"), event(9, "resume", step=4)]
    verdict = judged(fault, events=events)
    assert verdict.passed and says(verdict.reaction, "resumed at step 4")
    assert not judged(fault).passed


def test_sigterm_must_lose_no_step() -> None:
    fault = Fault(1, "term", "step", 0, 0, 6, 0.5)
    signalled = [event(0, "run_start"), event(5, "signal", step=6), event(6, "run_start")]
    assert judged(
        fault,
        events=[*signalled, event(9, "resume", step=6)],
        metrics=[*steps(3, 1, 6), *steps(10, 7, 12)],
    ).passed
    verdict = judged(fault, events=[*signalled, event(9, "resume", step=4)])
    assert each_says(verdict.problems, ["resumed at step 4 ... step 6"])


def test_sigterm_before_the_first_step_of_an_attempt_needs_no_save_and_after_it_does() -> None:
    fault = Fault(1, "term", "step", 0, 0, 6, 0.5)
    resumed = [event(6, "run_start"), event(9, "resume", step=4)]
    early = judged(fault, events=[event(0, "run_start"), *resumed])
    assert early.passed and says(early.reaction, "code 85, resumed at step 4")
    late = judged(fault, events=[event(0, "run_start"), event(3, "first_step", step=1), *resumed])
    assert each_says(late.problems, ["no event ... signal"])


def test_a_flip_must_be_reported_and_the_older_checkpoint_used() -> None:
    fault = Fault(1, "flip", "step", 1, 1, 6, 0.5)
    flipped = {"checkpoint": 4, "file": "__0_0.distcp", "offset": 77, "time": at(8)}
    phases = {(1, "hit"): hit(4.9, 7, [2, 4]), (1, "flipped"): flipped}
    damaged = event(8.5, "checkpoint_damaged", step=4, reason="step-4/__0_0.distcp: wrong checksum")
    metrics = [*steps(3, 1, 6), *steps(10, 3, 12)]
    older = [*KILLED[:3], damaged, event(9, "resume", step=2)]
    verdict = judged(fault, phases=phases, events=older, metrics=metrics)
    assert verdict.passed, verdict.problems
    silent = judged(
        fault, phases=phases, events=[*KILLED[:3], event(9, "resume", step=2)], metrics=metrics
    )
    assert each_says(silent.problems, ["no warning ... __0_0.distcp of checkpoint 4"])
    used = judged(
        fault,
        phases=phases,
        events=[*KILLED[:3], damaged, event(9, "resume", step=4)],
        metrics=metrics,
    )
    assert each_says(used.problems, ["resumed at step 4 ... checkpoint 2"])
    never = judged(fault, phases={(1, "hit"): hit(4.9, 7, [2, 4])}, events=older, metrics=metrics)
    assert each_says(never.problems, ["... second part (flipped)"])


def test_a_full_disk_must_be_reported_and_leave_the_earlier_checkpoint_intact() -> None:
    fault = Fault(1, "disk-full", "manifest", 0, 0, 6, 0.5)
    failed = event(
        5, "checkpoint_failed", step=6, reason="rank 0: OSError: [Errno 28] No space left on device"
    )
    phases = {
        (1, "hit"): hit(4.9, 7, [4]),
        (1, "after"): {"newest": 4, "damaged": [], "time": at(5)},
    }
    undisturbed = {"events": [event(0, "run_start"), failed], "metrics": steps(3, 1, 12)}
    verdict = judged(fault, phases=phases, **undisturbed)
    assert verdict.passed and verdict.seconds_lost is None
    assert says(
        verdict.reaction, "save of step 6 failed (No space left on device) ... step 4 intact"
    )
    broken = {**phases, (1, "after"): {"newest": 4, "damaged": ["__1_0.distcp"], "time": at(5)}}
    assert judged(fault, phases=broken, **undisturbed).problems == [
        "checkpoint 4 was damaged: __1_0.distcp"
    ]
    silent = judged(fault, phases=phases, events=[event(0, "run_start")], metrics=steps(3, 1, 12))
    assert each_says(silent.problems, ["no event ... failed save"])


def test_a_problem_belongs_to_the_fault_in_whose_time_it_is() -> None:
    second = Fault(2, "kill", "step", 0, 0, 10, 0.5)
    metrics = [*steps(3, 1, 6), *steps(10, 5, 10), *steps(20, 9, 12)]
    metrics[-1] = {**metrics[-1], "loss": 0.0}
    events = [
        *KILLED,
        event(12, "failure", failed_rank=0),
        event(12.1, "restart"),
        event(19, "resume", step=8),
    ]
    phases = {(1, "hit"): hit(4.9, 7, [4]), (2, "hit"): hit(11.9, 11, [4, 8])}
    evidence = Evidence(events, metrics, phases, "", [], event_microseconds({"time": at(30)}))
    first, other = judge_faults(PlannedRun("chaos-01", (KILL, second)), REFERENCE, evidence)
    assert first.passed and not other.passed
    assert (first.steps_redone, other.steps_redone) == (2, 2)
