"""The verdicts of a campaign as a table of at most 100 columns, and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from drillyard.faults.campaign import CampaignResult

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 100
ON_GPUS = (
    "Deterministic kernels were on (training.deterministic) for all runs, and the verdict holds for"
    " them only. A difference is a fault of the recovery, or a kernel that is not deterministic in"
    " spite of the setting: compare two undisturbed runs with `drillyard diff` to find out which."
)


def print_campaign(result: CampaignResult, console: Console) -> None:
    """Print the table, the problems and the totals."""
    from rich.table import Column, Table
    from rich.text import Text

    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    columns = (
        Column("#", justify="right", style="dim"),
        Column("fault", no_wrap=True),
        Column("moment", max_width=30),
        Column("what happened", max_width=32),
        Column("redone", justify="right"),
        Column("lost", justify="right", no_wrap=True),
        Column("verdict", no_wrap=True),
    )
    table = Table(
        *columns, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", expand=False
    )
    for verdict in result.verdicts:
        fault, lost = verdict.fault, verdict.seconds_lost
        table.add_row(
            str(fault.number),
            fault.name.replace("flip, kill", "flip,"),
            verdict.moment,
            verdict.reaction,
            str(verdict.steps_redone),
            "-" if lost is None else f"{lost:.1f} s",
            Text("pass", style="green") if verdict.passed else Text("FAIL", style="bold red"),
        )
    console.print(table)
    for verdict in result.verdicts:
        for problem in verdict.problems:
            console.print(Text(f"{verdict.fault.number}: {problem}", style="red"), soft_wrap=True)
    console.print()
    for line in summary_lines(result):
        console.print(Text(line))
    if result.on_gpus:
        console.print(Text(ON_GPUS, style="dim"))


def summary_lines(result: CampaignResult) -> Iterator[str]:
    """The totals of the campaign."""
    verdicts = result.verdicts
    passed = sum(verdict.passed for verdict in verdicts)
    hit = sum(verdict.hit for verdict in verdicts)
    yield (
        f"{len(verdicts)} faults in {result.runs} runs of {result.steps} steps: {passed} passed, "
        f"{len(verdicts) - passed} failed; {hit} of {len(verdicts)} struck at their place"
    )
    lost = [
        v.seconds_lost
        for v in verdicts
        if v.seconds_lost is not None and v.hit and v.fault.kind != "stop"
    ]
    per_restart = (
        f", {statistics.median(lost):.1f} s lost per fault (median, stops left out)" if lost else ""
    )
    duration = timedelta(seconds=round(result.seconds))
    yield (
        f"{sum(verdict.steps_redone for verdict in verdicts)} steps redone{per_restart}; {duration}"
        " in all"
    )


def as_json(result: CampaignResult) -> dict[str, Any]:
    """The campaign as JSON values."""
    return {
        "version": 1,
        "passed": result.passed,
        "runs": result.runs,
        "steps": result.steps,
        "seconds": round(result.seconds, 3),
        "reference_seconds": round(result.reference_seconds, 3),
        "faults": [
            {
                "number": verdict.fault.number,
                "kind": verdict.fault.kind,
                "place": verdict.fault.place,
                "target": "supervisor" if verdict.fault.target is None else verdict.fault.target,
                "moment": verdict.moment,
                "happened": verdict.reaction,
                "hit": verdict.hit,
                "steps_redone": verdict.steps_redone,
                "seconds_lost": verdict.seconds_lost,
                "passed": verdict.passed,
                "problems": verdict.problems,
            }
            for verdict in result.verdicts
        ],
    }
