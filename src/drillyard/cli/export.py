"""`drillyard export`: a checkpoint as a Hugging Face model directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from drillyard.cli.leaving import is_rank, leave


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("export")(export)


def export(
    checkpoint: Annotated[Path, typer.Argument(help="RUN_DIR/checkpoints/step-N.")],
    directory: Annotated[Path, typer.Argument(help="The directory to write.")],
) -> None:
    """Write CHECKPOINT to DIRECTORY in Hugging Face format: safetensors, config, generation config, tokenizer.

    transformers loads it: AutoModelForCausalLM.from_pretrained(DIRECTORY). Under torchrun the files are spread over the
    ranks.
    """
    from drillyard.training.locate import find_checkpoint_to_export

    find_checkpoint_to_export(checkpoint, directory)
    from drillyard.training.saved import export_checkpoint

    export_checkpoint(checkpoint, directory)
    typer.echo(f"wrote {directory}: AutoModelForCausalLM.from_pretrained({str(directory)!r}) loads it")
    if is_rank():
        leave(0)
