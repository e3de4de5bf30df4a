"""Options that several commands have, called and explained alike."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PricePerGpuHour = Annotated[
    float | None,
    typer.Option("--price-per-gpu-hour", metavar="DOLLARS", help="For the cost; default: the machine's price."),
]
Interval = Annotated[
    float | None,
    typer.Option("--interval", min=0.05, metavar="SECONDS", help="Default: 1 on a terminal, 10 elsewhere."),
]
"""Of commands that follow a run live."""


def find_run(path: Path) -> Path:
    """`path`, or runs/`path` where there is only that: a run may be given by its name."""
    named = Path("runs") / path
    return named if not path.exists() and named.exists() else path


def find_runs(paths: list[str]) -> list[str]:
    """The same for paths that may also be `-` or URLs."""
    return [path if path == "-" or "://" in path else str(find_run(Path(path))) for path in paths]
