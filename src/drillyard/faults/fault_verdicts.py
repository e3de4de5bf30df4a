"""What became of each fault: from what the run wrote about itself, the marks and the end of each start. Pure.

A fault owns the time from its mark to the next fault's. It has passed when

- it struck at its place, and the run ended as that kind of fault must make it end, and for no other reason;
- the ranks were started again exactly as often as it asked for;
- no checkpoint that was complete when it struck was lost: the run went on from that one or a newer one (after a flip:
  from the one before, with an event that names the damaged one);
- every loss and gradient norm logged in its time, redone steps included, is the undisturbed run's to the bit.

What only the end shows (missing steps, other weights, damaged checkpoints, a process left behind) is told of the run,
and its last fault counts as failed.
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
    """One fault: when it struck, what happened, what it cost, and what was wrong (nothing: it passed)."""

    fault: Fault
    moment: str
    happened: str
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
    """What a disturbed run left: its logs, the marks by (fault number, phase), what was seen from outside."""

    events: Records
    metrics: Records
    marks: Mapping[tuple[int, str], Mapping[str, Any]]
    stopped: str
    """Why the run was given up; empty: it ended well."""
    problems: Sequence[str]
    """What its end shows: other weights, damaged checkpoints, processes left running."""
    end: int
    """When it ended, in microseconds."""


def losses_and_norms(metrics: Records) -> dict[int, LossAndNorm]:
    """Step to (loss, gradient norm), the last record of each step."""
    return {int(record["step"]): (record["loss"], record["grad_norm"]) for record in metrics}


def judge_faults(case: PlannedRun, reference: Mapping[int, LossAndNorm], evidence: Evidence) -> list[FaultVerdict]:
    """One finding per fault of `case`, in order."""
    times = [_microseconds(evidence, fault) for fault in case.faults]
    findings = []
    for index, (fault, began) in enumerate(zip(case.faults, times, strict=True)):
        if began is None:
            findings.append(_not_hit(fault, evidence))
            continue
        ended = next((time for time in times[index + 1 :] if time is not None), evidence.end + 1)
        findings.append(_Judged(fault, reference, evidence, began, ended).finding())
    _judge_end(findings, case, reference, evidence)
    return findings


def _microseconds(evidence: Evidence, fault: Fault) -> int | None:
    mark = evidence.marks.get((fault.number, "hit"))
    return None if mark is None else event_microseconds(mark)


def _not_hit(fault: Fault, evidence: Evidence) -> FaultVerdict:
    why = "the run had ended before" if evidence.stopped else "the run went past the place without being struck"
    return FaultVerdict(
        fault, f"{INJECTION_POINTS[fault.place]}, from step {fault.step}", "not hit", False, problems=[why]
    )


class _Judged:
    """One fault that struck, and what lies between its mark and the next."""

    def __init__(
        self, fault: Fault, reference: Mapping[int, LossAndNorm], evidence: Evidence, began: int, ended: int
    ) -> None:
        self.fault = fault
        self.reference = reference
        self.evidence = evidence
        self.began = began
        self.mark = evidence.marks[(fault.number, "hit")]
        self.events = [event for event in evidence.events if began <= event_microseconds(event) < ended]
        self.records = [record for record in evidence.metrics if began <= event_microseconds(record) < ended]
        self.reached = max((int(r["step"]) for r in evidence.metrics if event_microseconds(r) < began), default=0)
        self.problems: list[str] = []

    def named(self, *names: str) -> list[Mapping[str, Any]]:
        return [event for event in self.events if event["event"] in names]

    def finding(self) -> FaultVerdict:
        starts = len(self.named("run_start", "restart"))
        if starts != self.fault.restarts:
            self.problems.append(f"{starts} new starts of the ranks instead of {self.fault.restarts}")
        for phase in self.fault.phases[1:]:
            if (self.fault.number, phase) not in self.evidence.marks:
                self.problems.append(f"the second part ({phase}) did not take place")
        if self.fault.restarts and not starts:
            happened = "the run did not go on"
        else:
            happened = getattr(self, "after_" + self.fault.kind.replace("-", "_"))()
        self.compare_figures()
        return FaultVerdict(
            self.fault,
            self.moment(),
            happened,
            True,
            self.steps_redone(),
            self.seconds_lost() if self.fault.restarts else None,
            self.problems,
        )

    # -- what must follow each kind ------------------------------------------------------------------------------------

    def after_kill(self) -> str:
        failures = self.named("failure")
        wanted = 0 if self.fault.target is None else self.fault.restarts
        killed = [event for event in failures if event.get("failed_rank") == self.fault.target]
        if len(failures) != wanted or len(killed) != wanted:
            told = "; ".join(str(event.get("reason")) for event in failures) or "none"
            self.problems.append(f"{wanted} failures of {self.fault.name.removeprefix('kill ')} expected, told: {told}")
        self.require_newest(max(self.mark["complete"], default=0))
        return f"{'started again' if self.fault.target is None else 'restarted'}, {self.resumed()}"

    def after_stop(self) -> str:
        failures = self.named("failure")
        if len(failures) != 1:
            self.problems.append(f"{len(failures)} failures told instead of one hang")
            return self.resumed()
        self.require_newest(max(self.mark["complete"], default=0))
        seconds = (event_microseconds(failures[0]) - self.began) / 1e6
        return f"given up after {seconds:.0f} s, {self.resumed()}"

    def after_term(self) -> str:
        if self.named("failure"):
            self.problems.append(f"told as a failure: {self.named('failure')[0].get('reason')}")
        stopped = [event for event in self.named("signal") if isinstance(event.get("step"), int)]
        if not stopped and not self.in_training():
            # There was nothing to save yet, so the ranks leave at once.
            self.require_newest(max(self.mark["complete"], default=0))
            return f"left at once, exit code 85, {self.resumed()}"
        if len(stopped) != 1:
            self.problems.append("no event tells of the signal and the step at which the run stopped")
            return self.resumed()
        step = stopped[0]["step"]
        self.require_newest(step)
        return f"saved step {step}, exit code 85, resumed there" if self.resume_step() == step else self.resumed()

    def after_disk_full(self) -> str:
        failed, after = self.named("checkpoint_failed"), self.evidence.marks.get((self.fault.number, "after"))
        if not failed or after is None:
            self.problems.append("no event tells of a failed save")
            return "the save did not fail"
        if after["damaged"]:
            self.problems.append(f"checkpoint {after['newest']} was damaged: {', '.join(after['damaged'])}")
        if self.named("failure"):
            self.problems.append(f"the run failed: {self.named('failure')[0].get('reason')}")
        reason = str(failed[0].get("reason", ""))
        system_error = re.search(r"\[Errno \d+\] ([^:;]+)", reason)
        short = system_error[1] if system_error else reason
        return f"save of step {failed[0].get('step')} failed ({short}); went on, step {after['newest']} whole"

    def after_flip(self) -> str:
        flipped = self.evidence.marks.get((self.fault.number, "flipped"))
        if flipped is None:
            return "nothing was flipped"
        step, file = flipped["checkpoint"], flipped["file"]
        told = [event for event in self.named("checkpoint_damaged") if event.get("step") == step]
        if not told or file not in str(told[0].get("reason")):
            self.problems.append(f"no warning names the damaged file {file} of checkpoint {step}")
        older = max((saved for saved in self.mark["complete"] if saved < step), default=0)
        if self.resume_step() != older:
            self.problems.append(f"resumed at step {self.resume_step()} instead of the older checkpoint {older}")
        return f"byte {flipped['offset']} of {file} ({step}) flipped: told, {self.resumed()}"

    # -- parts ---------------------------------------------------------------------------------------------------------

    def in_training(self) -> bool:
        """Whether the round that was struck had done its first step."""
        before = [event["event"] for event in self.evidence.events if event_microseconds(event) < self.began]
        told = [name for name in before if name in ("first_step", "run_start", "restart")]
        return bool(told) and told[-1] == "first_step"

    def resume_step(self) -> int:
        """The step from which the run went on at last; 0: from the beginning."""
        resumes = self.named("resume")
        return int(resumes[-1]["step"]) if resumes else 0

    def resumed(self) -> str:
        return f"resumed at step {self.resume_step()}" if self.resume_step() else "began again at step 0"

    def require_newest(self, step: int) -> None:
        """The run went on from the checkpoint of `step`, which was complete, or a newer one."""
        if self.resume_step() < step:
            self.problems.append(f"{self.resumed()}, though the checkpoint of step {step} was complete")

    def compare_figures(self) -> None:
        for record in self.records:
            step, found = int(record["step"]), (record["loss"], record["grad_norm"])
            wanted = self.reference.get(step)
            if wanted is None or repr(found) != repr(wanted):
                self.problems.append(f"step {step}: loss and gradient norm {found}, undisturbed {wanted}")
                return

    def steps_redone(self) -> int:
        """Steps logged in this fault's time that had been logged before."""
        highest, redone = self.reached, 0
        for record in self.records:
            step = int(record["step"])
            redone += step <= highest
            highest = max(highest, step)
        return redone

    def seconds_lost(self) -> float:
        """From the fault until the run stood again where it was, or until the next fault, or the end."""
        if self.fault.place == "cache":
            back = [event_microseconds(event) for event in self.named("round_start")]
        elif self.fault.place == "export":
            back = [event_microseconds(event) for event in self.named("export_begin")]
        else:
            back = [event_microseconds(r) for r in self.records if int(r["step"]) >= max(1, self.reached)]
            starts = [event_microseconds(event) for event in self.named("run_start", "restart")]
            back = [moment for moment in back if starts and moment > starts[0]]
        last = max((event_microseconds(event) for event in self.events), default=self.began)
        return ((back[0] if back else last) - self.began) / 1e6

    def moment(self) -> str:
        """Where and when it struck, in words."""
        step, place = self.mark["step"], self.fault.place
        if place == "cache":
            return INJECTION_POINTS[place]
        if place == "resume":
            again = self.evidence.marks.get((self.fault.number, "again"))
            return f"step {step}, and {self.fault.fraction:.2f} s into the next round" if again else f"step {step}"
        if place == "step":
            return f"{self.fault.fraction:.0%} into step {step}"
        saved = (self.mark.get("detail") or {}).get("save")
        return f"step {max(step, self.reached) if saved is None else saved}, {INJECTION_POINTS[place]}"


def _judge_end(
    findings: Sequence[FaultVerdict], case: PlannedRun, reference: Mapping[int, LossAndNorm], evidence: Evidence
) -> None:
    """Tell the run's last fault that struck what only its end shows."""
    last = next((finding for finding in reversed(findings) if finding.hit), findings[-1])
    last.problems += evidence.problems
    if evidence.stopped:
        last.problems.append(evidence.stopped)
        return
    found = losses_and_norms(evidence.metrics)
    missing = sorted(reference.keys() - found.keys())
    if missing:
        last.problems.append(f"{len(missing)} steps were never logged, the first of them {missing[0]}")
    # Before the first fault nothing owns a record.
    first_mark = min((event_microseconds(mark) for mark in evidence.marks.values()), default=evidence.end)
    for record in evidence.metrics:
        step = int(record["step"])
        if event_microseconds(record) < first_mark and repr((record["loss"], record["grad_norm"])) != repr(
            reference.get(step)
        ):
            findings[0].problems.append(f"step {step} differs from the undisturbed run before any fault struck")
            break
