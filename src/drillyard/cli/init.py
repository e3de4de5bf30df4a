"""`drillyard init [DIR]`: a run.yaml that trains on a laptop and a cluster.yaml, with a comment on every setting."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command `init`."""

    @app.command()
    def init(
        directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where to write; made if need be.")] = Path(
            "."
        ),
    ) -> None:
        """Write a commented run.yaml and cluster.yaml to start from. Never overwrites a file."""
        from drillyard.config.starter import write_starters

        for path in write_starters(directory):
            print(f"wrote {path}")
        run, cluster = directory / "run.yaml", directory / "cluster.yaml"
        print(f"next: drillyard train {run}")
        print(f"or, to go on when the terminal is closed: drillyard launch {run} --cluster {cluster}")
