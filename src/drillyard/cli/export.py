"""`drillyard export`: a checkpoint as a Hugging Face model directory."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from drillyard.cli.options import find_run
from drillyard.cli.process_exit import exit_process, is_rank


class Dtype(StrEnum):
    """In which the weights can be written."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("export")(export)


def export(
    checkpoint: Annotated[Path, typer.Argument(help="RUN_DIR/checkpoints/step-N.")],
    directory: Annotated[Path, typer.Argument(help="The directory to write: a new or empty one.")],
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Of all weights.", show_default="what each has in the base model"),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier export; nothing else is ever replaced.")
    ] = False,
) -> None:
    """Write CHECKPOINT to DIRECTORY in Hugging Face format: safetensors, config, generation config, tokenizer.

    transformers loads it: AutoModelForCausalLM.from_pretrained(DIRECTORY). Weights have the dtype of the base model; of
    a model that began with random weights, the one that its config declares, or else that of training (fp32 under
    bf16). Needs the run directory and not the base model. Under torchrun the files are spread over the ranks.
    """
    from drillyard.training.saved_model import find_checkpoint_to_export

    checkpoint = find_run(checkpoint)
    find_checkpoint_to_export(checkpoint, directory, overwrite=overwrite)
    import torch

    from drillyard.training.saved_weights import export_checkpoint

    wanted = None if dtype is None else getattr(torch, dtype.value)
    export_checkpoint(checkpoint, directory, dtype=wanted, overwrite=overwrite)
    typer.echo(f"wrote {directory}: AutoModelForCausalLM.from_pretrained({str(directory)!r}) loads it")
    if is_rank():
        exit_process(0)
