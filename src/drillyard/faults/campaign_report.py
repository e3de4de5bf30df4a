"""A campaign's findings for people (a table of at most 100 columns), for programs (JSON) and for a document (Markdown).

The sentence on GPUs belongs to the verdict: bits can only be compared where the same sums give the same bits.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from drillyard.faults.campaign import CampaignResult
from drillyard.faults.fault_verdicts import FaultVerdict
from drillyard.faults.plan import FAULT_KINDS, INJECTION_POINTS, FaultKind, InjectionPoint

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 100
ON_GPUS = (
    "Deterministic kernels were switched on (training.deterministic) for the undisturbed run and all others; the "
    "verdict holds for them. A difference is a fault of the recovery, or of a kernel that is not deterministic all the "
    "same: `drillyard diff` of two undisturbed runs tells which."
)


def print_campaign(outcome: CampaignResult, console: Console) -> None:
    """Print the table, what was wrong, and the sums."""
    from rich.table import Table
    from rich.text import Text

    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", expand=False)
    table.add_column("#", justify="right", style="dim")
    table.add_column("fault", no_wrap=True)
    table.add_column("moment", max_width=30)
    table.add_column("what happened", max_width=32)
    table.add_column("redone", justify="right")
    table.add_column("lost", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for finding in outcome.findings:
        verdict = Text("pass", style="green") if finding.passed else Text("FAIL", style="bold red")
        fault = finding.fault
        table.add_row(
            str(fault.number), fault.name.replace("flip, kill", "flip,"), finding.moment, finding.happened,
            str(finding.steps_redone), _lost(finding), verdict,
        )  # fmt: skip
    console.print(table)
    for finding in outcome.findings:
        for problem in finding.problems:
            console.print(Text(f"{finding.fault.number}: {problem}", style="red"), soft_wrap=True)
    console.print()
    for line in summary_lines(outcome):
        console.print(Text(line))
    if outcome.on_gpus:
        console.print(Text(ON_GPUS, style="dim"))


def _lost(finding: FaultVerdict) -> str:
    return "-" if finding.seconds_lost is None else f"{finding.seconds_lost:.1f} s"


def summary_lines(outcome: CampaignResult) -> Iterator[str]:
    """The campaign in a few lines."""
    findings = outcome.findings
    passed = sum(finding.passed for finding in findings)
    hit = sum(finding.hit for finding in findings)
    yield (
        f"{len(findings)} faults in {outcome.runs} runs of {outcome.steps} steps: {passed} passed, "
        f"{len(findings) - passed} failed; {hit} of {len(findings)} struck at their place"
    )
    lost = [f.seconds_lost for f in findings if f.seconds_lost is not None and f.hit and f.fault.kind != "stop"]
    redone = sum(finding.steps_redone for finding in findings)
    per_restart = f", {statistics.median(lost):.1f} s lost per fault (median, stops left out)" if lost else ""
    yield f"{redone} steps redone{per_restart}; {timedelta(seconds=round(outcome.seconds))} in all"


def as_json(outcome: CampaignResult) -> dict[str, Any]:
    """The campaign as JSON values."""
    return {
        "version": 1,
        "passed": outcome.passed,
        "runs": outcome.runs,
        "steps": outcome.steps,
        "seconds": round(outcome.seconds, 3),
        "reference_seconds": round(outcome.reference_seconds, 3),
        "faults": [
            {
                "number": finding.fault.number,
                "kind": finding.fault.kind,
                "place": finding.fault.place,
                "target": "supervisor" if finding.fault.target is None else finding.fault.target,
                "moment": finding.moment,
                "happened": finding.happened,
                "hit": finding.hit,
                "steps_redone": finding.steps_redone,
                "seconds_lost": finding.seconds_lost,
                "passed": finding.passed,
                "problems": finding.problems,
            }
            for finding in outcome.findings
        ],
    }


def as_markdown(outcome: CampaignResult) -> str:
    """For a document: one row per kind and place, the sums, then what failed."""
    rows: dict[tuple[FaultKind, InjectionPoint], list[FaultVerdict]] = {}
    for finding in outcome.findings:
        rows.setdefault((finding.fault.kind, finding.fault.place), []).append(finding)
    lines = [
        "| fault | place | struck | times | hit | passed | steps redone | seconds lost, median |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (kind, place), found in sorted(rows.items(), key=_in_order):
        lost = [finding.seconds_lost for finding in found if finding.seconds_lost is not None and finding.hit]
        seconds = f"{statistics.median(lost):.1f}" if lost else "-"
        lines.append(
            f"| {kind} | {INJECTION_POINTS[place]} | {_targets(found)} | {len(found)} | {sum(f.hit for f in found)} "
            f"| {sum(f.passed for f in found)} | {sum(f.steps_redone for f in found)} | {seconds} |"
        )
    failed = [
        f"- fault {f.fault.number} ({f.fault.name}, {f.moment}): {p}" for f in outcome.findings for p in f.problems
    ]
    return "\n".join([*lines, "", *summary_lines(outcome), *([""] if failed else []), *failed]) + "\n"


def _in_order(row: tuple[tuple[FaultKind, InjectionPoint], list[FaultVerdict]]) -> tuple[int, int]:
    (kind, place), _ = row
    return FAULT_KINDS.index(kind), list(INJECTION_POINTS).index(place)


def _targets(found: Sequence[FaultVerdict]) -> str:
    """`rank 0: 5, rank 1: 4, supervisor: 5`; a full disk strikes nobody."""
    counts = Counter(finding.fault.target for finding in found if finding.fault.kind != "disk-full")
    known = sorted(counts, key=lambda target: (target is None, target or 0))
    return ", ".join(f"{'supervisor' if t is None else f'rank {t}'}: {counts[t]}" for t in known) or "-"
