"""Options that several commands have, called and explained alike."""

from __future__ import annotations

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
