"""`drillyard hardware [NAME]`: what is known of accelerators, machines and network stacks, with sources and dates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the app."""

    @app.command()
    def hardware(
        name: Annotated[
            str | None,
            typer.Argument(
                help="Accelerator, machine, network stack, or a GPU as its driver names it. Default: the list."
            ),
        ] = None,
        own: Annotated[
            Path | None, typer.Option("--hardware", metavar="FILE", help="Your own hardware, laid over what is known.")
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    ) -> None:
        """Show the facts that estimates, acceptance and plans rest on; `?` and `unverified` mark what none confirms.

        A hardware FILE is YAML with lists of accelerators, machines, network_stacks, bandwidths and prices, such as

        machines: [{name: my-node, accelerator: h100, num_accelerators: 8, network_stack: infiniband}]

        Its fields are those that `drillyard hardware NAME` shows; a row with a known name changes only what it gives.
        """
        from drillyard.hardware import load_catalog
        from drillyard.hardware.catalog_output import entry_json, entry_text, find_entry, list_json, list_text

        catalog = load_catalog(own)
        entry = None if name is None else find_entry(catalog, name)
        if as_json:
            import json

            value = list_json(catalog) if entry is None else entry_json(catalog, entry)
            typer.echo(json.dumps(value, indent=2, ensure_ascii=False))
        else:
            typer.echo(list_text(catalog) if entry is None else entry_text(catalog, entry))
