"""How large src/drillyard is against its bounds, package by package, and public class names that
stand twice.

    python tools/size.py

A report, not a gate. Statements are `ast.stmt` nodes, docstrings included; lines are all lines of a
file; a small file has fewer than 60. Raise a bound in the commit that adds a feature, by what the
feature needs.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "src/drillyard"
SMALL_LINES = 60
TOP = "(top)"
LINE_BOUNDS = {
    ("launch", "supervise"): 13_399
    + 1_530
    + 110  # launch/kubernetes and its reading pods, supervise/scheduler_restarts
    + 340  # network profiles and GKE
    + 30  # logs of pods by rank and time
    + 30  # rights that only tell more, many runs in a queue
    # plain Jobs, lists as plain text, hosts that do not answer, the time that a stopped run has
    + 110
    + 25,  # runs whose disk has lost their newest files
    ("estimation",): 7_586 + 50 + 60,  # DoRA and stacked experts, nf4
    ("measurement", "reporting", "telemetry", "goodput", "watch"): 11_141,
    ("config", "hardware", "modelspec"): 6_504
    + 80
    + 20
    + 15
    + 25
    + 40
    # config/other_trainers, network profiles, nf4, finite numbers, DeepSpeed's schedules, adapters
    # of peft
    + 55,
    ("training", "data", "cli"): 13_092
    + 780
    + 160
    + 880
    + 20
    + 5
    + 16
    + 45
    + 40
    + 20
    + 40
    # data/megatron, adapters, function calling, init --from, launch --nodes, nf4, tokenizers,
    # imports, memory
    + 45,
    ("evaluation", "faults", "loglines", "models", "parallel", TOP): 7_831
    + 400
    + 60
    + 330
    + 55
    + 20
    # adapters, hub_access, nf4, weights in mapped files and merged one by one, nf4's levels chosen
    # by bits
    + 20,
}
"""The largest number of lines of each group of packages; a package in no group counts as top
level."""
ALL_BOUNDS = {
    "lines": 59_431
    + 1_170
    + 780
    + 610
    + 840
    + 120
    + 60
    + 440
    + 365
    + 30
    + 510
    + 10
    + 120
    + 90
    + 310,
    "statements": 36_520
    + 1_000
    + 520
    + 190
    + 420
    + 800
    + 80
    + 40
    + 260
    + 235
    + 22
    + 325
    + 10
    + 65
    + 60
    + 175,
    "files": 343 + 2 + 7 + 1 + 4 + 6 + 1 + 1 + 2 + 2 + 1,
}


def main() -> None:
    sizes, classes = measure(ROOT)
    columns = ("lines", "statements", "files", "small")
    print_table(
        ("package", *columns),
        ([name, *(sizes[name][column] for column in columns)] for name in sorted(sizes)),
    )
    total = sum(sizes.values(), Counter())
    grouped = [", ".join(group).replace(TOP, "top") for group in LINE_BOUNDS]
    bounds = [
        *(
            (f"lines of {title}", sum(sizes[name]["lines"] for name in group), bound)
            for title, (group, bound) in zip(grouped, LINE_BOUNDS.items(), strict=True)
        ),
        *((f"all {name}", total[name], bound) for name, bound in ALL_BOUNDS.items()),
    ]
    print()
    print_table(
        ("", "now", "bound", "over"), ([*row, max(0, row[1] - row[2]) or "-"] for row in bounds)
    )
    repeated = {name: paths for name, paths in sorted(classes.items()) if len(paths) > 1}
    print(f"\npublic class names that stand more than once: {len(repeated)}")
    for name, paths in repeated.items():
        print(f"  {name}: {', '.join(paths)}")


def measure(root: Path) -> tuple[dict[str, Counter[str]], dict[str, list[str]]]:
    """Sizes by package, and the files of each public class name."""
    sizes: dict[str, Counter[str]] = defaultdict(Counter)
    classes: dict[str, list[str]] = defaultdict(list)
    grouped = {name for group in LINE_BOUNDS for name in group}
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        lines = text.count("\n")
        package = path.relative_to(root).parts[0].removesuffix(".py")
        sizes[package if package in grouped else TOP] += Counter(
            lines=lines,
            statements=sum(isinstance(node, ast.stmt) for node in ast.walk(tree)),
            files=1,
            small=int(lines < SMALL_LINES),
        )
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(str(path.relative_to(root)))
    return sizes, classes


def print_table(header: Sequence[str], rows: Iterable[Sequence[str | int]]) -> None:
    """Print the rows with their first column to the left and numbers to the right."""
    shown = [
        list(header),
        *([f"{cell:,}" if isinstance(cell, int) else cell for cell in row] for row in rows),
    ]
    width = max(len(row[0]) for row in shown)
    for first, *cells in shown:
        print(f"{first:{width}}" + "".join(f"{cell:>12}" for cell in cells))


if __name__ == "__main__":
    main()
