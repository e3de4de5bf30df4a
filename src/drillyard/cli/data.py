"""`drillyard data preview run.yaml`: the first packed samples in colour, and what became of the documents."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the commands on data to the app."""
    group = typer.Typer(help="Look at the data as the model will see it.", no_args_is_help=True)
    app.add_typer(group, name="data")

    @group.callback()
    def data() -> None:
        """Look at the data as the model will see it."""

    @group.command()
    def preview(
        run: Annotated[Path, typer.Argument(metavar="run.yaml", help="The run config.")],
        overrides: Annotated[
            list[str] | None,
            typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, such as data.packing=false."),
        ] = None,
        samples: Annotated[int, typer.Option(min=1, help="Sequences to show.")] = 3,
    ) -> None:
        """Show the first packed sequences: green tokens carry loss, dim ones are context only.

        Tokenises the data if it is not cached yet; a later run uses that. Exit code 2 when all (with loss on
        completions) or no tokens of a document carry loss.
        """
        from rich.console import Console
        from rich.markup import escape
        from tokenizers import Tokenizer

        from drillyard.config.loading import load_run_config
        from drillyard.data.formats import row_format
        from drillyard.data.prepare import prepare
        from drillyard.data.preview import coloured, faults
        from drillyard.errors import UserError

        config = load_run_config(run, overrides or [])
        console = Console(highlight=False)
        with console.status("preparing the data") as status:
            prepared = prepare(
                config, on_progress=lambda what, done, total: status.update(f"{what}: {_share(done, total)}")
            )
        tokenizer = Tokenizer.from_str(prepared.text_tokenizer.json)
        form = row_format(config.data)
        # A piece of a split completion is learnt from its second token on, and rightly so.
        completions_only = form.loss_on == "completion" and config.data.too_long != "split"
        wrong = []
        for source in prepared.train.sources:
            shown = min(samples, len(source))
            batch = source.read(range(shown))
            for number in range(shown):
                valid = int(source.valid_tokens[number])
                console.rule(
                    f"{escape(source.name)}, sequence {number + 1} of {len(source):,}: {valid} tokens carry loss"
                )
                console.print(coloured(batch, number, tokenizer), soft_wrap=True)
                found = faults(batch, number, completions_only)
                wrong += [f"{source.name}, sequence {number + 1}, {fault}" for fault in found]
        console.rule()
        for line in prepared.report.lines():
            console.print(line, markup=False, soft_wrap=True)
        if wrong:
            more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            raise UserError(f"{wrong[0]}{more}. Check data.format, data.columns and data.loss_on.")


def _share(done: int, total: int | None) -> str:
    return f"{100 * done / total:.0f} %" if total else f"{done / 1e6:,.0f} MB"
