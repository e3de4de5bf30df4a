"""`drillyard schema run|cluster`: the JSON Schema of a config, for editors that complete and check YAML."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class ConfigKind(StrEnum):
    """The two files a user writes."""

    run = "run"
    cluster = "cluster"


def register(app: typer.Typer) -> None:
    """Add the command `schema`."""

    @app.command()
    def schema(which: Annotated[ConfigKind, typer.Argument(help="Which file's schema: run or cluster.")]) -> None:
        """Print the JSON Schema of run.yaml or cluster.yaml.

        In an editor with the YAML language server: save it as run.schema.json and begin run.yaml with
        `# yaml-language-server: $schema=run.schema.json`.
        """
        import json

        from drillyard.config.schema import json_schema

        print(json.dumps(json_schema(which.value), indent=2))
