"""`drillyard report RUN_DIR | PATH...`: what a run achieved, as one HTML file that needs no network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from drillyard.cli.options import find_runs

LOGS = "For the logs of other frameworks, where these do not say it"


def register(app: typer.Typer) -> None:
    """Add the command to the app."""

    @app.command()
    def report(
        paths: Annotated[
            list[str],
            typer.Argument(
                metavar="RUN_DIR | PATH...", help="Directory of a run, or logs of one run of any framework."
            ),
        ],
        output: Annotated[
            Path | None,
            typer.Option("--output", "-o", metavar="FILE", help="Default: RUN_DIR/report.html, or ./report.html."),
        ] = None,
        overwrite: Annotated[
            bool, typer.Option("--overwrite", help="Replace FILE if it is no report, or edited.")
        ] = False,
        price_per_gpu_hour: Annotated[
            float | None,
            typer.Option(metavar="DOLLARS", help="For the cost; default: the price of cluster.yaml's machine."),
        ] = None,
        accelerator: Annotated[
            str | None, typer.Option(help="GPU, such as b200, for MFU.", rich_help_panel=LOGS)
        ] = None,
        num_gpus: Annotated[int | None, typer.Option(help="GPUs of the whole run.", rich_help_panel=LOGS)] = None,
        params: Annotated[
            str | None, typer.Option(help="Parameters of the model, such as 70.55B.", rich_help_panel=LOGS)
        ] = None,
        active_params: Annotated[
            str | None, typer.Option(help="Of these, what one token uses.", rich_help_panel=LOGS)
        ] = None,
        config: Annotated[
            Path | None, typer.Option(metavar="FILE", help="config.json of the model.", rich_help_panel=LOGS)
        ] = None,
        batch_size_per_gpu: Annotated[
            int | None, typer.Option(help="Sequences of a step on one GPU.", rich_help_panel=LOGS)
        ] = None,
        global_batch_size: Annotated[
            int | None, typer.Option(help="Sequences of a step on all GPUs.", rich_help_panel=LOGS)
        ] = None,
        sequence_length: Annotated[int | None, typer.Option(help="Tokens of a sequence.", rich_help_panel=LOGS)] = None,
        precision: Annotated[
            str | None, typer.Option(help="Of the peak: bf16 (default), fp8, ...", rich_help_panel=LOGS)
        ] = None,
        formula: Annotated[
            str | None, typer.Option(help="FLOPs per token: 6N (default), palm, ...", rich_help_panel=LOGS)
        ] = None,
        price_per_node_hour: Annotated[
            float | None, typer.Option(metavar="DOLLARS", help="Instead of a price per GPU.", rich_help_panel=LOGS)
        ] = None,
        gpus_per_node: Annotated[int | None, typer.Option(help="For a price per node.", rich_help_panel=LOGS)] = None,
        start_step: Annotated[
            int | None,
            typer.Option(help="First step that counts; default: warm-up is detected.", rich_help_panel=LOGS),
        ] = None,
        end_step: Annotated[int | None, typer.Option(help="Last step that counts.", rich_help_panel=LOGS)] = None,
        hardware: Annotated[
            Path | None,
            typer.Option(metavar="FILE", help="Your own hardware, laid over what is known.", rich_help_panel=LOGS),
        ] = None,
        timezone: Annotated[str | None, typer.Option(help="Of time stamps without one.", rich_help_panel=LOGS)] = None,
        framework: Annotated[
            str | None, typer.Option(help="Read as this format only; default: detected.", rich_help_panel=LOGS)
        ] = None,
    ) -> None:
        """Write a report of a run as one HTML file: curves, goodput, evaluation, events, configuration.

        The run may still be going, and it may be any framework's whose logs `drillyard metrics` reads. The file needs
        no network, follows light and dark mode, and shows its charts as tables where there is no JavaScript.
        """
        from drillyard import api, formatting

        target = api.report(
            find_runs(paths),
            output,
            overwrite=overwrite,
            price_per_gpu_hour=price_per_gpu_hour,
            accelerator=accelerator,
            num_gpus=num_gpus,
            params=params,
            active_params=active_params,
            config=config,
            batch_size_per_gpu=batch_size_per_gpu,
            global_batch_size=global_batch_size,
            sequence_length=sequence_length,
            precision=precision,
            formula=formula,
            price_per_node_hour=price_per_node_hour,
            gpus_per_node=gpus_per_node,
            start_step=start_step,
            end_step=end_step,
            hardware=hardware,
            timezone=timezone,
            framework=framework,
        )
        typer.echo(f"{target} ({formatting.size(target.stat().st_size)})")
