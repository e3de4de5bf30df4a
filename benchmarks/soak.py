"""At least 100 faults on a small model and two ranks, with real processes, and a table of the
verdicts.

`make soak` runs it: kills of any rank and of the supervisor in steps, in saves, in the cache build,
in the export and in the first second of a resumed attempt, stopped ranks, SIGTERM, full disks and
flipped bits, drawn from a seed. Every loss and gradient norm, redone steps included, and the final
weights must equal the undisturbed run's to the bit.

    python benchmarks/soak.py [--count 100] [--seed 0] [--markdown build/soak.md] [--directory DIR]

Cost: about a start of two ranks per fault, so 15 to 20 minutes on two quiet cores. Exit code 0 when
every fault passed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from tests.integration.tiny_run import write_config, write_rows

from drillyard.config.load import load_run_config
from drillyard.faults.campaign import Campaign, CampaignResult, run_campaign
from drillyard.faults.campaign_report import print_campaign, summary_lines
from drillyard.faults.fault_verdicts import FaultVerdict
from drillyard.faults.plan import FAULT_KINDS, INJECTION_POINTS, FaultKind, InjectionPoint

STEPS = 60
SAVE_EVERY = 4


def main() -> None:
    """Run the campaign, print its table and write it as Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", type=Path, default=Path("build/soak.md"))
    parser.add_argument(
        "--directory", type=Path, help="where to work, kept afterwards; default: a temporary one"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="drillyard-soak-") as temporary:
        inputs = Path(temporary)
        write_rows(inputs / "rows.jsonl")
        config = write_config(
            inputs, "soak", training__steps=STEPS, checkpoint={"every_steps": SAVE_EVERY}
        )
        campaign = Campaign(
            config=config,
            directory=(arguments.directory or inputs / "campaign").resolve(),
            kinds=FAULT_KINDS,
            count=arguments.count,
            seed=arguments.seed,
            num_ranks=2,
            keep=arguments.directory is not None,
        )
        result = run_campaign(campaign, load_run_config(config), print_progress)
    arguments.markdown.parent.mkdir(parents=True, exist_ok=True)
    arguments.markdown.write_text(as_markdown(result), encoding="utf-8")
    print_campaign(result, Console(highlight=False))
    print(f"written: {arguments.markdown}")
    sys.exit(0 if result.passed else 1)


def print_progress(text: str) -> None:
    """Progress, with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def as_markdown(result: CampaignResult) -> str:
    """One row per kind and injection point, the totals, then the problems."""
    rows: dict[tuple[FaultKind, InjectionPoint], list[FaultVerdict]] = {}
    for verdict in result.verdicts:
        rows.setdefault((verdict.fault.kind, verdict.fault.place), []).append(verdict)
    lines = [
        "| fault | place | struck | times | hit | passed | steps redone | seconds lost, median |",
        "|---|---|---|---|---|---|---|---|",
    ]
    order = [(kind, place) for kind in FAULT_KINDS for place in INJECTION_POINTS]
    for kind, place in sorted(rows, key=order.index):
        found = rows[kind, place]
        lost = [
            verdict.seconds_lost
            for verdict in found
            if verdict.seconds_lost is not None and verdict.hit
        ]
        lines.append(
            f"| {kind} | {INJECTION_POINTS[place]} | {_targets(found)} | {len(found)} |"
            f" {sum(v.hit for v in found)} | {sum(v.passed for v in found)} |"
            f" {sum(v.steps_redone for v in found)} |"
            f" {f'{statistics.median(lost):.1f}' if lost else '-'} |"
        )
    failed = [
        f"- fault {v.fault.number} ({v.fault.name}, {v.moment}): {problem}"
        for v in result.verdicts
        for problem in v.problems
    ]
    return (
        "\n".join([*lines, "", *summary_lines(result), *([""] if failed else []), *failed]) + "\n"
    )


def _targets(found: Sequence[FaultVerdict]) -> str:
    """`rank 0: 5, rank 1: 4, supervisor: 5`; a full disk has no target."""
    counts = Counter(verdict.fault.target for verdict in found if verdict.fault.kind != "disk-full")
    targets = sorted(counts, key=lambda target: (target is None, target or 0))
    return (
        ", ".join(f"{'supervisor' if t is None else f'rank {t}'}: {counts[t]}" for t in targets)
        or "-"
    )


if __name__ == "__main__":
    main()
