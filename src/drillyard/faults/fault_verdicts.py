"""The verdict on each fault, from the logs of the run, the phases that were reached and the end of
each start. Pure.

The time of a fault reaches from its hit to that of the next fault. A fault passes if

- it struck at its injection point, and the run reacted as that kind of fault requires, and for no
  other reason;
- the ranks were started again exactly as often as it requires;
- no checkpoint that was complete when it struck was lost: the run resumed from that one or a newer
  one (after a flip: from the one before, with an event that names the damaged one);
- every loss and gradient norm logged in its time, redone steps included, equals the undisturbed
  run's to the bit.

Problems that only the end shows fail the last fault of the run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drillyard.faults.plan import INJECTION_POINTS, Fault, PlannedRun
from drillyard.telemetry.events import event_microseconds

Records = Sequence[Mapping[str, Any]]
LossAndNorm = tuple[Any, Any]


@dataclass
class FaultVerdict:
    """One fault: when it struck, the reaction of the run, its cost, and what was wrong (nothing: it
    passed)."""

    fault: Fault
    moment: str
    reaction: str
    hit: bool
    steps_redone: int = 0
    seconds_lost: float | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing was wrong."""
        return not self.problems


@dataclass(frozen=True)
class Evidence:
    """The traces of a disturbed run: its logs, the phases by (fault number, phase), and its end.

    `stopped`: why the run was given up; empty if it ended well. `problems`: what the end shows
    (other weights, damaged checkpoints, processes left running). `end`: when it ended, in
    microseconds.
    """

    events: Records
    metrics: Records
    phases: Mapping[tuple[int, str], Mapping[str, Any]]
    stopped: str
    problems: Sequence[str]
    end: int


def losses_and_norms(metrics: Records) -> dict[int, LossAndNorm]:
    """Step to (loss, gradient norm), from the last record of each step."""
    return {int(record["step"]): (record["loss"], record["grad_norm"]) for record in metrics}


def judge_faults(
    planned: PlannedRun, reference: Mapping[int, LossAndNorm], evidence: Evidence
) -> list[FaultVerdict]:
    """One verdict per fault of `planned`, in order."""
    hits = {
        number: event_microseconds(hit)
        for (number, phase), hit in evidence.phases.items()
        if phase == "hit"
    }
    verdicts = []
    for index, fault in enumerate(planned.faults):
        if fault.number in hits:
            later = [
                hits[other.number] for other in planned.faults[index + 1 :] if other.number in hits
            ]
            time = (hits[fault.number], later[0] if later else evidence.end + 1)
            verdicts.append(_StruckFault(fault, reference, evidence, *time).verdict())
        else:
            why = (
                "the run had ended before"
                if evidence.stopped
                else "the run passed this point without a strike"
            )
            moment = f"{INJECTION_POINTS[fault.place]}, from step {fault.step}"
            verdicts.append(FaultVerdict(fault, moment, "not hit", False, problems=[why]))
    _judge_end(verdicts, reference, evidence)
    return verdicts


class _StruckFault:
    """A fault that struck, with the events and metrics of its time."""

    def __init__(
        self,
        fault: Fault,
        reference: Mapping[int, LossAndNorm],
        evidence: Evidence,
        begin: int,
        end: int,
    ) -> None:
        self.fault = fault
        self.reference = reference
        self.evidence = evidence
        self.begin = begin
        self.hit = evidence.phases[(fault.number, "hit")]
        self.newest = max(self.hit["complete"], default=0)
        self.events = [
            event for event in evidence.events if begin <= event_microseconds(event) < end
        ]
        self.records = [
            record for record in evidence.metrics if begin <= event_microseconds(record) < end
        ]
        self.reached = max(
            (int(r["step"]) for r in evidence.metrics if event_microseconds(r) < begin), default=0
        )
        resumes = self.named("resume")
        self.resume_step = int(resumes[-1]["step"]) if resumes else 0
        self.resumed = (
            f"resumed at step {self.resume_step}" if self.resume_step else "restarted at step 0"
        )
        self.problems: list[str] = []

    def named(self, *names: str) -> list[Mapping[str, Any]]:
        """The events with these names."""
        return [event for event in self.events if event["event"] in names]

    def verdict(self) -> FaultVerdict:
        restarts = self.fault.restarts
        starts = len(self.named("run_start", "restart"))
        if starts != restarts:
            self.problems.append(f"{starts} new starts of the ranks instead of {restarts}")
        for phase in self.fault.phases[1:]:
            if (self.fault.number, phase) not in self.evidence.phases:
                self.problems.append(f"the second part ({phase}) did not take place")
        judge = getattr(self, "after_" + self.fault.kind.replace("-", "_"))
        reaction = judge() if starts or not restarts else "the run did not continue"
        self.problems += _first_difference(self.records, self.reference)
        seconds_lost = self.seconds_lost() if restarts else None
        return FaultVerdict(
            self.fault,
            self.moment(),
            reaction,
            True,
            self.steps_redone(),
            seconds_lost,
            self.problems,
        )

    def after_kill(self) -> str:
        failures = self.named("failure")
        expected = 0 if self.fault.target is None else self.fault.restarts
        killed = [event for event in failures if event.get("failed_rank") == self.fault.target]
        if len(failures) != expected or len(killed) != expected:
            found = "; ".join(str(event.get("reason")) for event in failures) or "none"
            victim = self.fault.name.removeprefix("kill ")
            self.problems.append(f"{expected} failures of {victim} expected, reported: {found}")
        self.require_newest(self.newest)
        return f"{'started again' if self.fault.target is None else 'restarted'}, {self.resumed}"

    def after_stop(self) -> str:
        failures = self.named("failure")
        if len(failures) != 1:
            self.problems.append(f"{len(failures)} failures reported instead of one hang")
            return self.resumed
        self.require_newest(self.newest)
        return (
            f"given up after {(event_microseconds(failures[0]) - self.begin) / 1e6:.0f} s,"
            f" {self.resumed}"
        )

    def after_term(self) -> str:
        if failures := self.named("failure"):
            self.problems.append(f"reported as a failure: {failures[0].get('reason')}")
        stopped = [event for event in self.named("signal") if isinstance(event.get("step"), int)]
        if not stopped and not self.in_training():
            # Nothing to save yet, so the ranks exit at once.
            self.require_newest(self.newest)
            return f"exit at once with code 85, {self.resumed}"
        if len(stopped) != 1:
            self.problems.append(
                "no event reports the signal and the step at which the run stopped"
            )
            return self.resumed
        step = stopped[0]["step"]
        self.require_newest(step)
        return (
            f"saved step {step}, exit code 85, resumed there"
            if self.resume_step == step
            else self.resumed
        )

    def after_disk_full(self) -> str:
        failed, after = (
            self.named("checkpoint_failed"),
            self.evidence.phases.get((self.fault.number, "after")),
        )
        if not failed or after is None:
            self.problems.append("no event reports a failed save")
            return "the save did not fail"
        if after["damaged"]:
            self.problems.append(
                f"checkpoint {after['newest']} was damaged: {', '.join(after['damaged'])}"
            )
        if failures := self.named("failure"):
            self.problems.append(f"the run failed: {failures[0].get('reason')}")
        reason = str(failed[0].get("reason", ""))
        system_error = re.search(r"\[Errno \d+\] ([^:;]+)", reason)
        short = system_error[1] if system_error else reason
        return (
            f"save of step {failed[0].get('step')} failed ({short}); continued, step"
            f" {after['newest']} intact"
        )

    def after_flip(self) -> str:
        flipped = self.evidence.phases.get((self.fault.number, "flipped"))
        if flipped is None:
            return "no bit was flipped"
        step, file = flipped["checkpoint"], flipped["file"]
        reported = [
            event for event in self.named("checkpoint_damaged") if event.get("step") == step
        ]
        if not reported or file not in str(reported[0].get("reason")):
            self.problems.append(f"no warning names the damaged file {file} of checkpoint {step}")
        older = max((saved for saved in self.hit["complete"] if saved < step), default=0)
        if self.resume_step != older:
            self.problems.append(
                f"resumed at step {self.resume_step} instead of the older checkpoint {older}"
            )
        return f"byte {flipped['offset']} of {file} ({step}) flipped: reported, {self.resumed}"

    def in_training(self) -> bool:
        """Whether the attempt that was struck had completed its first step."""
        before = [
            event["event"]
            for event in self.evidence.events
            if event_microseconds(event) < self.begin
        ]
        return [name for name in before if name in ("first_step", "run_start", "restart")][-1:] == [
            "first_step"
        ]

    def require_newest(self, step: int) -> None:
        """The run must resume from the complete checkpoint of `step` or a newer one."""
        if self.resume_step < step:
            self.problems.append(
                f"{self.resumed}, though the checkpoint of step {step} was complete"
            )

    def steps_redone(self) -> int:
        """Steps logged in this fault's time that had been logged before."""
        highest, redone = self.reached, 0
        for record in self.records:
            step = int(record["step"])
            redone += step <= highest
            highest = max(highest, step)
        return redone

    def seconds_lost(self) -> float:
        """From the strike until the run is back where it was, or else until its last event of this
        time."""
        if self.fault.place in ("cache", "export"):
            back = self.named("round_start" if self.fault.place == "cache" else "export_begin")
        else:
            starts = [event_microseconds(event) for event in self.named("run_start", "restart")]
            redone = [
                record for record in self.records if int(record["step"]) >= max(1, self.reached)
            ]
            back = [
                record for record in redone if starts and event_microseconds(record) > starts[0]
            ]
        times = [event_microseconds(event) for event in back[:1] or self.events]
        return (max(times, default=self.begin) - self.begin) / 1e6

    def moment(self) -> str:
        """Place and time of the strike, for people."""
        step, place = self.hit["step"], self.fault.place
        if place == "cache":
            return INJECTION_POINTS[place]
        if place == "resume":
            again = self.evidence.phases.get((self.fault.number, "again"))
            return (
                f"step {step}, and {self.fault.fraction:.2f} s into the next attempt"
                if again
                else f"step {step}"
            )
        if place == "step":
            return f"{self.fault.fraction:.0%} into step {step}"
        saved = (self.hit.get("detail") or {}).get("save")
        return (
            f"step {max(step, self.reached) if saved is None else saved}, {INJECTION_POINTS[place]}"
        )


def _judge_end(
    verdicts: Sequence[FaultVerdict], reference: Mapping[int, LossAndNorm], evidence: Evidence
) -> None:
    """Add the problems that only the end shows to the last fault that struck."""
    last = next((verdict for verdict in reversed(verdicts) if verdict.hit), verdicts[-1])
    last.problems += evidence.problems
    if evidence.stopped:
        last.problems.append(evidence.stopped)
        return
    if missing := sorted(reference.keys() - losses_and_norms(evidence.metrics).keys()):
        last.problems.append(
            f"{len(missing)} steps were never logged, the first of them {missing[0]}"
        )
    # Records before the first phase belong to no fault.
    first_phase = min(map(event_microseconds, evidence.phases.values()), default=evidence.end)
    early = [record for record in evidence.metrics if event_microseconds(record) < first_phase]
    verdicts[0].problems += [
        f"before any fault struck, {problem}" for problem in _first_difference(early, reference)
    ]


def _first_difference(records: Records, reference: Mapping[int, LossAndNorm]) -> list[str]:
    """The first record that differs from the undisturbed run, as a problem; none if all are equal
    to the bit."""
    for record in records:
        found, expected = (record["loss"], record["grad_norm"]), reference.get(int(record["step"]))
        if repr(found) != repr(expected):
            return [
                f"step {record['step']}: loss and gradient norm {found}, undisturbed {expected}"
            ]
    return []
