"""`drillyard init [DIR]` writes commented configs to start from; `drillyard schema` prints JSON
Schemas.

The schemas of configs are for editors that complete and check YAML, those of estimates and plans
for programs that read them.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from drillyard.cli.options import print_json
from drillyard.errors import UserError


class SchemaKind(StrEnum):
    """The files a user writes, acceptance.json, and the output of `drillyard estimate --json`,
    `drillyard bench --json` and `drillyard cluster plan --json`."""

    run = "run"
    cluster = "cluster"
    workload = "workload"
    estimate = "estimate"
    cluster_plan = "cluster-plan"
    acceptance = "acceptance"
    bench = "bench"


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command()(init)
    app.command()(schema)


def init(
    directory: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="Where to write; created if it is missing.")
    ] = Path("."),
    from_deepspeed: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take over the settings of a DeepSpeed config (JSON)."),
    ] = None,
    from_trl: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take over the settings of `trl sft --config FILE`."),
    ] = None,
    from_axolotl: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take over the settings of an Axolotl config."),
    ] = None,
    from_llamafactory: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Take over the settings of `llamafactory-cli train FILE`."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="PATH|ID", help="Fine-tune this model: needs --data."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The rows to train on: a file, directory or address."),
    ] = None,
    lora: Annotated[
        bool, typer.Option("--lora", help="With --model: train adapters, not all weights.")
    ] = False,
    column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OWN=NAME",
            help="With --data: a format's column by its name there, such as prompt=question.",
        ),
    ] = None,
) -> None:
    """Write a commented run.yaml and cluster.yaml to start from. Never overwrites a file.

    With --model and --data it looks at both, and at this machine's memory, and writes a run.yaml of
    some fifteen lines that trains; the run is named after the directory.

    Of another trainer's config, each key that has no counterpart here is named with the reason.
    """
    from drillyard.config.other_trainers import convert
    from drillyard.config.starter import completed, refuse_existing, starter, write_starters

    given = {
        "deepspeed": from_deepspeed,
        "trl": from_trl,
        "axolotl": from_axolotl,
        "llamafactory": from_llamafactory,
    }
    chosen = [(tool, file) for tool, file in given.items() if file is not None]
    if len(chosen) > 1:
        raise UserError(f"--from-{chosen[0][0]}, --from-{chosen[1][0]}: give one of them")
    found = [convert(tool, file) for tool, file in chosen]
    if model is not None or data is not None or lora or column:
        if model is None or data is None or chosen:
            raise UserError(
                "--model and --data belong together, and --lora and --column to them; leave out"
                " --from-..."
            )
        refuse_existing(directory)
        text = _proposed(directory, model, data, column or [], lora=lora)
    else:
        text = starter("run", completed(found[0]) if found else None)
    for path in write_starters(directory, text):
        print(f"wrote {path}")
    for key, reason in found[0].left_out if found else []:
        print(f"not taken over: {key}: {reason}", file=sys.stderr)
    run, cluster = directory / "run.yaml", directory / "cluster.yaml"
    print(f"next: drillyard train {run}")
    print(
        f"or, to keep it running when the terminal closes: drillyard launch {run} --cluster"
        f" {cluster}"
    )


def _proposed(directory: Path, model: str, data: str, columns: list[str], *, lora: bool) -> str:
    """The run.yaml that `training/proposed_config.py` proposes, with paths that hold in any
    directory."""
    from drillyard.cli.process_exit import require_training
    from drillyard.cli.torch_import import import_without_collection

    mapping = dict(each.partition("=")[::2] for each in columns)
    if not all(mapping.values()):
        raise UserError("--column: write OWN=NAME, such as prompt=question")
    require_training()
    import_without_collection("drillyard.training.proposed_config")
    from drillyard.config.kernel_rules import num_gpus
    from drillyard.parallel.ranks import choose_device
    from drillyard.training.model_setup import GIB, memory_of_device
    from drillyard.training.proposed_config import propose

    device = choose_device("auto", 0)
    ranks = num_gpus() if device.type == "cuda" else 1
    return propose(
        directory.absolute().name,
        _absolute(model),
        _absolute(data),
        lora=lora,
        columns=mapping,
        device=device.type,
        memory_gib=memory_of_device(device, ranks) / GIB,
        num_gpus=ranks,
    ).text()


def _absolute(path: str) -> str:
    """An existing path absolute, an id or address as it is."""
    return str(Path(path).expanduser().absolute()) if Path(path).expanduser().exists() else path


def schema(
    which: Annotated[
        SchemaKind,
        typer.Argument(help="run, cluster, workload, estimate, cluster-plan, acceptance or bench."),
    ],
) -> None:
    """Print the JSON Schema of run.yaml, cluster.yaml, a run.yaml with `workload:`, `drillyard
    estimate --json`, `drillyard cluster plan --json`, acceptance.json, or `drillyard bench --json`.

    In an editor with the YAML language server: save it as run.schema.json and begin run.yaml with
    `# yaml-language-server: $schema=run.schema.json`.
    """
    if which is SchemaKind.estimate:
        from drillyard.estimation.document import estimate_schema

        document = estimate_schema()
    elif which is SchemaKind.cluster_plan:
        from drillyard.provision.plan_document import plan_schema

        document = plan_schema()
    elif which is SchemaKind.acceptance:
        from drillyard.acceptance.acceptance_document import acceptance_schema

        document = acceptance_schema()
    elif which is SchemaKind.bench:
        from drillyard.training.bench_document import bench_schema

        document = bench_schema()
    else:
        from drillyard.config.load import json_schema

        document = json_schema(which.value)
    print_json(document)
