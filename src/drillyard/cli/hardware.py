"""`drillyard hardware [NAME]`: facts about accelerators, machines and network stacks, with sources
and dates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from drillyard.cli.options import AsJson, print_json


def register(app: typer.Typer) -> None:
    """Add the command to the app."""

    @app.command()
    def hardware(
        name: Annotated[
            str | None,
            typer.Argument(
                help=(
                    "Accelerator, machine, network stack, or a GPU by its driver's name. Default:"
                    " list all."
                )
            ),
        ] = None,
        own: Annotated[
            Path | None,
            typer.Option(
                "--hardware", metavar="FILE", help="Your own hardware, added to the built-in one."
            ),
        ] = None,
        as_json: AsJson = False,
    ) -> None:
        """Show the facts behind estimates and plans; `?` and `unverified` mark unconfirmed ones.

        A hardware FILE is YAML with lists of accelerators, machines, network_stacks, bandwidths,
        prices, cpu_machines, part_prices and regions, such as

        machines: [{name: my-node, accelerator: h100, num_accelerators: 8, network_stack:
        infiniband}]

        Its fields are those that `drillyard hardware NAME` shows; a row with a known name changes
        only what it gives.
        """
        from drillyard.hardware import load_catalog
        from drillyard.hardware.catalog_output import (
            entry_json,
            entry_text,
            find_entry,
            list_json,
            list_text,
        )

        catalog = load_catalog(own)
        entry = None if name is None else find_entry(catalog, name)
        if as_json:
            print_json(list_json(catalog) if entry is None else entry_json(catalog, entry))
        else:
            typer.echo(list_text(catalog) if entry is None else entry_text(catalog, entry))
