"""`drillyard eval` measures a saved model on held-out data; `drillyard export` writes it in Hugging
Face's format."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drillyard.cli.options import TrustConfig, find_run, print_trusted
from drillyard.cli.process_exit import exit_process, is_rank
from drillyard.cli.torch_import import import_without_collection
from drillyard.telemetry.console import ACCURACIES

if TYPE_CHECKING:
    from drillyard.training.saved_evaluation import EvaluationRequest


_TAKEN = "DRILLYARD_EVALUATED_MODEL"
"""Environment variable: the model that the ranks of `eval` measure, where its argument is a run."""


class Metric(StrEnum):
    """The metrics of `eval`."""

    loss = "loss"
    sql_execution = "sql-execution"
    function_call = "function-call"


class Dtype(StrEnum):
    """The dtypes of exported weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command("eval")(evaluate)
    app.command("export")(export)


def evaluate(
    model: Annotated[
        Path,
        typer.Argument(help="A checkpoint, a final/ directory, or a run: its directory or name."),
    ],
    data: Annotated[
        str | None,
        typer.Option(help="A run.yaml, or a source of held-out documents; default: the run's own."),
    ] = None,
    format_: Annotated[
        str | None, typer.Option("--format", help="Format of the source's rows.")
    ] = None,
    metric: Annotated[
        list[Metric] | None, typer.Option(help="What to measure; repeatable.")
    ] = None,
    part: Annotated[
        list[str] | None, typer.Option(help="Held-out part to measure; repeatable.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Questions per part for generated answers.")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(min=8, help="Tokens per sequence for the loss.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Directory for predictions; default: evaluations/ in the run."),
    ] = None,
    nproc_per_node: Annotated[
        int, typer.Option(min=1, help="Ranks on this host.", metavar="N")
    ] = 1,
    trust_config: TrustConfig = False,
) -> None:
    """Measure MODEL: loss, perplexity, bits per byte, or the share of questions answered by right
    SQL or right calls.

    Prints a table and writes every prediction to a file.
    """
    from drillyard.errors import UserError
    from drillyard.training.saved_evaluation import (
        EvaluationRequest,
        check_request,
        evaluate_saved,
        flags_for,
        limits_of_request,
    )
    from drillyard.training.saved_model import find_saved_model, run_directory_above

    model = _in_run(find_run(model, is_model=True))
    try:
        folder = output or (run_directory_above(model) or Path()) / "evaluations"
    except OSError as error:
        raise UserError(f"{model}: {error.strerror}") from None
    request = EvaluationRequest(
        model=model,
        output=folder,
        data=data,
        format=format_,
        metrics=tuple(m.value for m in metric or ()),
        parts=tuple(part or ()),
        samples=samples,
        sequence_length=sequence_length,
        trust_config=trust_config,
    )
    try:
        check_request(request)
    except UserError as error:
        raise UserError(f"{error}{flags_for(str(error), request)}") from error
    if trust_config:
        print_trusted(limits_of_request(request, find_saved_model(model)))
    if nproc_per_node > 1 and not is_rank():
        raise typer.Exit(_on_many_ranks(nproc_per_node, request))
    import_without_collection("drillyard.training.model_setup")
    try:
        results = evaluate_saved(request, lambda note: typer.echo(note, err=True))
    except UserError as error:
        raise UserError(f"{error}{flags_for(str(error), request)}") from error
    if results is not None:
        _print_table(results)
        if any(name in result for result in results.values() for name in ACCURACIES):
            typer.echo(f"predictions: {folder / model.name}")
    if is_rank():
        exit_process(0)


def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="RUN_DIR/checkpoints/step-N, or a run, for its newest one.")
    ],
    directory: Annotated[Path, typer.Argument(help="The directory to write: a new or empty one.")],
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Of all weights.", show_default="that of each in the base model"),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier export, and nothing else.")
    ] = False,
    merge: Annotated[
        bool,
        typer.Option(
            "--merge", help="Add the trained adapters to the base model's weights, and write those."
        ),
    ] = False,
    trust_config: TrustConfig = False,
) -> None:
    """Write CHECKPOINT to DIRECTORY in Hugging Face format: safetensors, config, generation config,
    tokenizer.

    transformers loads it: AutoModelForCausalLM.from_pretrained(DIRECTORY). Weights have the dtype
    of the base model; without one, that of the model's config, or else that of training (fp32 under
    bf16). Needs the run directory, not the base model. Under torchrun the ranks share the files.

    Of a run with adapters (model.lora) those alone are written, for PeftModel.from_pretrained(BASE,
    DIRECTORY), or with --merge a model that needs no peft; both read the base model, which without
    a GPU may exceed the memory.
    """
    from drillyard.training.checkpoint_export import export_checkpoint, find_checkpoint_to_export
    from drillyard.training.saved_model import fetch_limits_of

    checkpoint = _in_run(find_run(checkpoint), checkpoint_only=True)
    saved = find_checkpoint_to_export(checkpoint, directory, overwrite=overwrite, merge=merge)
    if trust_config:
        print_trusted(fetch_limits_of(saved))
    import_without_collection("drillyard.training.model_setup")
    import torch

    wanted = None if dtype is None else getattr(torch, dtype.value)
    export_checkpoint(
        checkpoint,
        directory,
        dtype=wanted,
        overwrite=overwrite,
        merge=merge,
        trust_config=trust_config,
    )
    loader = f"AutoModelForCausalLM.from_pretrained({str(directory)!r})"
    if saved.config is not None and saved.config.model.lora is not None and not merge:
        loader = f"PeftModel.from_pretrained(model, {str(directory)!r})"
    typer.echo(f"wrote {directory}: {loader} loads it")
    if is_rank():
        exit_process(0)


def _in_run(path: Path, *, checkpoint_only: bool = False) -> Path:
    """The model to take of a run directory, which is said; any other path as it is.

    All ranks must take the same one, while the run may save another: those of `eval` get what was
    taken for them.
    """
    from drillyard.errors import UserError
    from drillyard.training.saved_model import find_in_run

    if is_rank() and (taken := os.environ.get(_TAKEN)):
        return Path(taken)
    try:
        found = find_in_run(path, checkpoint_only=checkpoint_only)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if found == path or (is_rank() and found.name == "final"):
        return found
    if is_rank():
        raise UserError(
            f"{path}: is a run, whose newest checkpoint may change while the ranks start; name what"
            f" all of them take, such as {found}"
        )
    typer.echo(f"{path} is a run; taking {found}", err=True)
    return found


def _on_many_ranks(num_ranks: int, request: EvaluationRequest) -> int:
    from drillyard.console import SafeConsole
    from drillyard.supervise.run_lock import exclusive_run_lock
    from drillyard.supervise.supervisor import supervise

    run_directory = request.output / f"{request.model.name}-ranks"
    with exclusive_run_lock(run_directory) as lock:
        return supervise(
            [sys.executable, "-m", "drillyard", *sys.argv[1:]],
            num_ranks=num_ranks,
            run_directory=run_directory,
            lock=lock,
            max_restarts=0,
            environment={
                "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_ranks)),
                _TAKEN: str(request.model),
            },
            console=SafeConsole(),
            trains=False,
        )


def _print_table(results: dict[str, dict[str, Any]]) -> None:
    from rich.table import Column, Table

    from drillyard.console import SafeConsole

    columns: list[str] = []
    for result in results.values():
        columns += [
            key for key, value in result.items() if value is not None and key not in columns
        ]
    table = Table(*(Column(name, overflow="fold") for name in ["held-out part", *columns]))
    for name, result in results.items():
        table.add_row(name, *(_cell(key, result.get(key)) for key in columns))
    # Not on a terminal: all figures of a part on one line.
    (SafeConsole() if sys.stdout.isatty() else SafeConsole(width=1000)).print(table)


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key in ACCURACIES:
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
