"""Options that several commands of `drillyard cluster` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ClusterFile = Annotated[Path, typer.Argument(metavar="CLUSTER", help="The cluster config.")]
ClusterOverrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a setting of the cluster config; repeatable."
    ),
]
Hardware = Annotated[
    Path | None,
    typer.Option(
        "--hardware",
        metavar="FILE",
        help="Your own hardware and prices, which win over the built-in ones.",
    ),
]
NodePrices = Annotated[
    list[str] | None,
    typer.Option(
        "--price",
        metavar="[POOL=]USD",
        help="Dollars of a node-hour of the pool; repeatable. Default: the known price.",
    ),
]
