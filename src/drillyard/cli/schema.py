"""`drillyard schema run|cluster|workload|estimate`: the JSON Schema of what is read and of what is printed as JSON.

Those of the configs are for editors that complete and check YAML, that of estimates for programs that read them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class SchemaKind(StrEnum):
    """The files a user writes, and the output of `drillyard estimate --json`."""

    run = "run"
    cluster = "cluster"
    workload = "workload"
    estimate = "estimate"


def register(app: typer.Typer) -> None:
    """Add the command `schema`."""

    @app.command()
    def schema(which: Annotated[SchemaKind, typer.Argument(help="run, cluster, workload or estimate.")]) -> None:
        """Print the JSON Schema of run.yaml, cluster.yaml, a run.yaml with `workload:`, or `drillyard estimate --json`.

        In an editor with the YAML language server: save it as run.schema.json and begin run.yaml with
        `# yaml-language-server: $schema=run.schema.json`.
        """
        import json

        if which is SchemaKind.estimate:
            from drillyard.estimation.document import estimate_schema

            print(json.dumps(estimate_schema(), indent=2))
            return
        from drillyard.config.load import json_schema

        print(json.dumps(json_schema(which.value), indent=2))
