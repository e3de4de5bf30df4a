"""`drillyard bench`: measure the training step of a run config on this machine, by its parts."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from drillyard.cli.options import AsJson, Overrides, TrustConfig, config_to_read
from drillyard.cli.process_exit import (
    exit_process,
    is_rank,
    missing_extra,
    require_training,
)
from drillyard.cli.torch_import import import_without_collection
from drillyard.errors import UserError
from drillyard.safe_files import describe_os_error

if TYPE_CHECKING:
    from drillyard.config.run import RunConfig
    from drillyard.training.bench_document import BenchDocument

RESULT = "DRILLYARD_BENCH_RESULT"
"""Variable with the file that rank 0 writes the document into, for the process that started it."""


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(bench)


def bench(
    config: Annotated[Path, typer.Argument(help="The run config, run.yaml.", metavar="RUN.YAML")],
    steps: Annotated[int, typer.Option(min=1, help="Steps that are measured.", metavar="N")] = 10,
    warmup: Annotated[
        int, typer.Option(min=0, help="Steps before them, which do not count.", metavar="N")
    ] = 3,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Write a trace of one more step of rank 0, for Perfetto.", metavar="FILE"
        ),
    ] = None,
    nproc_per_node: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks on this host; default: one per GPU, or one.", metavar="N"),
    ] = None,
    set_: Overrides = None,
    as_json: AsJson = False,
    trust_config: TrustConfig = False,
) -> None:
    """Measure the training step of RUN.YAML here: tokens/s, MFU, memory, and the time of each part
    of the step beside the least that this device could take.

    It trains on the first rows of the data, saves nothing and has no run directory. Without a GPU
    it measures the CPU, and says so. Under torchrun it is one rank.

    Exit code 2: something to fix, or memory ran out: in which part, and what would fit.
    """
    overrides = set_ or []
    require_training()
    if trace is not None:
        trace = trace.expanduser().absolute()
        if not is_rank() or os.environ["RANK"] == "0":
            require_new_file(trace)
    with config_to_read(config, overrides, trust_config=trust_config, everything=True) as run:
        if is_rank():
            _be_a_rank(run, steps, warmup, trace, as_json=as_json)
        command = [sys.executable, "-m", "drillyard", "bench", str(config.absolute())]
        command += ["--steps", str(steps), "--warmup", str(warmup)]
        command += [word for override in overrides for word in ("--set", override)]
        command += [] if trace is None else ["--trace", str(trace)]
        command += ["--trust-config"] if trust_config else []
        _print_document(_supervised(command, run, nproc_per_node), as_json=as_json)


def require_new_file(trace: Path) -> None:
    """Raise UserError where `trace` exists or cannot be made."""
    if trace.exists():
        raise UserError(f"--trace: {trace} exists; name another file, or remove it")
    if not trace.parent.is_dir():
        directory = shlex.quote(str(trace.parent))
        raise UserError(f"--trace: the directory does not exist; make it: mkdir -p {directory}")
    try:
        trace.touch(exist_ok=False)
        trace.unlink()
    except OSError as error:
        raise UserError(
            f"--trace: {trace}: cannot be written: {describe_os_error(error)}; name another file"
        ) from None


def _supervised(command: list[str], run: RunConfig, nproc_per_node: int | None) -> BenchDocument:
    """Start the ranks in a directory for temporary files, and read what they measured."""
    from drillyard.config.kernel_rules import num_gpus
    from drillyard.config.run_checks import require_valid
    from drillyard.console import SafeConsole
    from drillyard.supervise.run_lock import open_logs
    from drillyard.supervise.supervisor import supervise, threads_per_rank
    from drillyard.training.bench_document import BenchDocument

    gpus = 0 if run.training.device == "cpu" else num_gpus()
    num_ranks = nproc_per_node or gpus or 1
    require_valid(run, num_ranks, has_gpu=num_gpus() > 0)
    with tempfile.TemporaryDirectory(prefix="drillyard-bench-") as directory:
        result = Path(directory, "bench.json")
        with open_logs(Path(directory)) as logs:
            code = supervise(
                command,
                num_ranks=num_ranks,
                run_directory=Path(directory),
                lock=logs,
                max_restarts=0,
                environment={
                    "OMP_NUM_THREADS": str(threads_per_rank(run, num_ranks)),
                    RESULT: str(result),
                },
                console=SafeConsole(stderr=True),
                trains=False,
            )
        if code != 0:
            raise typer.Exit(code)
        return BenchDocument.model_validate_json(result.read_text())


def _be_a_rank(
    run: RunConfig, steps: int, warmup: int, trace: Path | None, *, as_json: bool
) -> NoReturn:
    from drillyard.cli.main import error_text

    code = 0
    try:
        import_without_collection("drillyard.training.bench")
        from drillyard.training.bench import BenchRequest, bench_on_ranks

        document = bench_on_ranks(BenchRequest(run, steps, warmup, trace))
        if os.environ["RANK"] == "0":
            if RESULT in os.environ:
                Path(os.environ[RESULT]).write_text(document.as_text())
            else:
                _print_document(document, as_json=as_json)
    except UserError as error:
        sys.stderr.write(f"{error_text(str(error))}\n\n")
        code = 2
    except BaseException as error:
        if (missing := missing_extra(error)) is not None:
            sys.stderr.write(f"{error_text(missing)}\n\n")
            code = 2
        else:
            traceback.print_exc()
            code = 1
    exit_process(code)


def _print_document(document: BenchDocument, *, as_json: bool) -> None:
    for line in [document.as_text()] if as_json else document.text():
        typer.echo(line)
