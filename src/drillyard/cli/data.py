"""`drillyard data`: the first packed sequences in colour and a report on the documents; the batch
of any step."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from drillyard.cli.options import TrustConfig, config_to_read, find_run, print_trusted
from drillyard.console import SafeConsole
from drillyard.errors import UserError

if TYPE_CHECKING:
    from drillyard.config.run import RunConfig
    from drillyard.data.prepared_data import PreparedData


def register(app: typer.Typer) -> None:
    """Add the commands on data to the app."""
    group = typer.Typer(help="Show the data as the model sees it.", no_args_is_help=True)
    app.add_typer(group, name="data")

    group.command()(show)
    group.command()(build)

    @group.command()
    def preview(
        run: Annotated[Path, typer.Argument(metavar="run.yaml", help="The run config.")],
        overrides: Annotated[
            list[str] | None,
            typer.Option(
                "--set", metavar="KEY=VALUE", help="Change a setting, such as data.packing=false."
            ),
        ] = None,
        samples: Annotated[int, typer.Option(min=1, help="Sequences to show.")] = 3,
        everything: Annotated[
            bool,
            typer.Option("--all", help="Tokenize all rows, into the cache that training reads."),
        ] = False,
        trust_config: TrustConfig = False,
    ) -> None:
        """Show the first packed sequences: green tokens carry loss, dim ones are context only.

        Reads the first rows of each source, whatever its size; figures are of these, and --all
        counts all rows. Exit code 2 if all (with loss on completions) or no tokens of a document
        carry loss.
        """
        from drillyard.data.prepared_data import prepare, prepare_sample

        console = SafeConsole(highlight=False)
        with ExitStack() as stack:
            status = stack.enter_context(console.status("preparing the data"))
            config = stack.enter_context(
                config_to_read(run, overrides or [], trust_config=trust_config)
            )
            if everything:
                prepared = prepare(
                    config,
                    on_progress=lambda what, done, total: status.update(
                        f"{what}: {_share(done, total)}"
                    ),
                )
            else:
                prepared = stack.enter_context(prepare_sample(config, samples))
            status.stop()
            _print_preview(console, config, prepared, samples)


def _print_preview(
    console: SafeConsole, config: RunConfig, prepared: PreparedData, samples: int
) -> None:
    """The first sequences of each source, counts, and notes. UserError where the loss of a document
    cannot be what was meant."""
    from rich.markup import escape
    from tokenizers import Tokenizer

    from drillyard.config.run_checks import smallest_global_batch
    from drillyard.data.data_report import coloured_tokens, loss_problems
    from drillyard.data.row_formats import row_format

    tokenizer = Tokenizer.from_str(prepared.text_tokenizer.json)
    # In a piece of a split completion, all tokens but the first carry loss.
    completions_only = row_format(config.data).loss_on != "all" and config.data.too_long != "split"
    wrong = []
    for source in prepared.train.sources:
        shown = min(samples, len(source))
        batch = source.read(range(shown))
        for number in range(shown):
            valid = int(source.valid_tokens[number])
            of = "" if source.name in prepared.read_shares else f" of {len(source):,}"
            console.rule(
                f"{escape(source.name)}, sequence {number + 1}{of}: {valid} tokens carry loss"
            )
            console.print(coloured_tokens(batch, number, tokenizer), soft_wrap=True)
            found = loss_problems(batch, number, completions_only)
            wrong += [f"{source.name}, sequence {number + 1}, {fault}" for fault in found]
    console.rule()
    if prepared.read_shares:
        notes = [
            f"these are figures of the first rows of {', '.join(prepared.read_shares)}; --all"
            " counts all rows"
        ]
    else:
        notes = prepared.before_training(config, smallest_global_batch(config))
    for line in [*prepared.report.lines(), *notes]:
        console.print(line, markup=False, soft_wrap=True)
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise UserError(f"{wrong[0]}{more}. Check data.format, data.columns and data.loss_on.")


def show(
    run_directory: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="The directory of a run, runs/NAME.")
    ],
    step: Annotated[
        int, typer.Option(help="The step, counted from 1 as in metrics.jsonl.", metavar="N")
    ],
    rank: Annotated[int | None, typer.Option(help="Only what this rank read.", metavar="R")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Sequences to show.", metavar="K")] = 8,
    trust_config: TrustConfig = False,
) -> None:
    """Show the batch that a step trained on: where each document comes from, and its text as in
    `data preview`.

    Works for any step, also a future one. Exit code 2 if the data has changed since the run.
    """
    from rich.markup import escape
    from tokenizers import Tokenizer

    from drillyard.data.data_report import coloured_tokens
    from drillyard.data.mapped_sequences import DamagedSequence
    from drillyard.training.batch_lookup import batch_of_step, limits_of_run

    run_directory = find_run(run_directory)
    if trust_config:
        print_trusted(limits_of_run(run_directory))
    console = SafeConsole(highlight=False)
    with console.status("opening the data") as status:
        batch = batch_of_step(
            run_directory,
            step,
            lambda what, done, total: status.update(f"{what}: {_share(done, total)}"),
            trust_config=trust_config,
        )
    samples = batch.samples if rank is None else batch.of_rank(rank)
    mixture, tokenizer = batch.data.train, Tokenizer.from_str(batch.data.text_tokenizer.json)
    for sample in samples[:limit]:
        number_of_source, index = sample.ref
        source = mixture.sources[number_of_source]
        console.rule(
            f"step {step}, sample {sample.number} (rank {sample.rank}, micro-batch"
            f" {sample.micro_batch}): {escape(source.name)}, sequence {index}:"
            f" {int(source.valid_tokens[index])} tokens carry loss"
        )
        for number, place in enumerate(batch.places(sample), 1):
            console.print(f"document {number}: {place}", style="cyan", markup=False, soft_wrap=True)
        try:
            console.print(coloured_tokens(mixture.read([sample.ref]), 0, tokenizer), soft_wrap=True)
        except DamagedSequence as damage:
            raise UserError(str(damage)) from None
    console.rule()
    shown = min(limit, len(samples))
    console.print(
        f"{shown} of {len(samples)} sequences of step {step}"
        + ("" if rank is None else f" on rank {rank}")
    )
    for note in batch.data.report.notes:
        console.print(note, markup=False, soft_wrap=True)


def build(
    run: Annotated[Path, typer.Argument(metavar="run.yaml", help="The run config.")],
    to: Annotated[
        str,
        typer.Option(
            help=(
                "`cache`: the tokenised cache, which training reads; `megatron`: .bin and .idx"
                " files."
            )
        ),
    ] = "cache",
    output: Annotated[
        Path | None, typer.Option(help="With --to megatron: the directory for the files.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a setting, such as data.sequence_length=4096.",
        ),
    ] = None,
    trust_config: TrustConfig = False,
) -> None:
    """Tokenize the training data: into the cache, ahead of a run, or into files that Megatron-LM
    and NeMo read.

    Megatron files have each document with the tokens that training puts around it (BOS if the
    tokenizer has one, EOS), in the order of the source: `OUTPUT/NAME.bin` and `.idx` for each
    source, and `OUTPUT/tokenizer` if it is trained from them. Existing files are not replaced.
    """
    from drillyard.data.megatron.export import write_megatron
    from drillyard.data.prepared_data import prepare

    if to not in ("cache", "megatron"):
        raise UserError(f"--to {to}: unknown; give cache or megatron")
    if (output is None) == (to == "megatron"):
        raise UserError("--output DIRECTORY goes with --to megatron, and only with it")
    console = SafeConsole(highlight=False)
    with (
        config_to_read(run, overrides or [], trust_config=trust_config) as config,
        console.status("preparing the data") as status,
    ):

        def show_progress(what: str, done: int, total: int | None) -> None:
            status.update(f"{what}: {_share(done, total)}")

        if output is None:
            lines = prepare(config, on_progress=show_progress).report.lines()
        else:
            lines = write_megatron(config, output, show_progress)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _share(done: int, total: int | None) -> str:
    return f"{100 * done / total:.0f} %" if total else f"{done / 1e6:,.0f} MB"
