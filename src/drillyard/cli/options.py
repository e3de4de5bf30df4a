"""Options that several commands share: declared once, with one name, type and help text."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, get_args, get_type_hints

import typer

from drillyard.cli.process_exit import is_rank
from drillyard.errors import NotFoundError

if TYPE_CHECKING:
    from drillyard.config.fetch_limits import FetchLimits
    from drillyard.config.run import RunConfig

RUN, RANGE, MONEY = (
    "What the run was, if its log does not say",
    "Which steps and which time",
    "Money",
)
OUTPUT = "Output"
_RUNS: Final = Path("runs")
_MOST_SHOWN: Final = 8

POOL: Final = typer.Option(
    metavar="NAME", help="A further pool of the cluster config (cluster.pools), not the first."
)
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a setting, such as training.steps=100; repeatable.",
    ),
]
PricePerGpuHour = Annotated[
    float | None,
    typer.Option(
        "--price-per-gpu-hour",
        metavar="DOLLARS",
        help="For the cost; default: the machine's price.",
    ),
]
Interval = Annotated[
    float | None,
    typer.Option(
        "--interval",
        min=0.05,
        metavar="SECONDS",
        help="Between updates; default: 1 on a terminal, else 10.",
    ),
]
TRUST_CONFIG: Final = (
    "Fetch what the config of a run directory names (addresses, hub ids) and fill in its"
    " variables; prints them first. Only for a run that you trust."
)
TrustConfig = Annotated[bool, typer.Option("--trust-config", help=TRUST_CONFIG)]
RunDirectory = Annotated[
    Path, typer.Argument(metavar="RUN_DIR", help="The directory of a run, or its name in runs/.")
]


def complete_run(incomplete: str) -> list[str]:
    """Handles and names of runs with this prefix, from the cache: completion contacts no
    cluster."""
    from drillyard.launch.completion_cache import remembered_runs

    handles = remembered_runs()
    names = [*dict.fromkeys(handle.run for handle in handles), *map(str, handles)]
    return [name for name in names if name.startswith(incomplete)]


_RUN = typer.Argument(
    metavar="RUN",
    help="Handle platform://cluster/run, or the run's name.",
    autocompletion=complete_run,
)
RunArgument = Annotated[str, _RUN]
RunsArgument = Annotated[list[str], _RUN]
Cluster = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Search this cluster only; default: those launched on, else ./cluster.yaml.",
    ),
]


SHOW_PLAN: Final = "Show the plan"
SHOW_PLAN_FLAGS: Final = {
    "dry_run": typer.Option(
        "--dry-run", help="Print exactly what would be executed.", rich_help_panel=SHOW_PLAN
    ),
    "files": typer.Option(
        "--files", help="With --dry-run: print every file whole.", rich_help_panel=SHOW_PLAN
    ),
    "explain": typer.Option(
        "--explain",
        help="Print the reason of each generated field, and stop.",
        rich_help_panel=SHOW_PLAN,
    ),
}


def require_dry_run(files: bool, dry_run: bool) -> None:
    """Raise ConfigError where --files would show nothing."""
    from drillyard.errors import ConfigError

    if files and not dry_run:
        raise ConfigError("--files: goes with --dry-run, which is not given; give both or neither")


def node_flags(exclude_panel: str, drain_panel: str) -> dict[str, Any]:
    """Options of commands that submit a job and may take nodes out of the scheduler's hands."""
    return {
        "exclude": typer.Option(
            metavar="NODE",
            help="Do not use this node, by the scheduler's name; repeatable.",
            rich_help_panel=exclude_panel,
        ),
        "drain": typer.Option(
            "--drain",
            help="Have the scheduler start nothing on nodes proven to be bad.",
            rich_help_panel=drain_panel,
        ),
        "max_share": typer.Option(
            min=0.0,
            max=1.0,
            metavar="SHARE",
            help="Drain nothing if more of the checked nodes are bad; default: 0.1.",
            rich_help_panel=drain_panel,
        ),
    }


class SharedOption(NamedTuple):
    """An option of several commands. `names` are its flags where they do not follow from the
    parameter's name."""

    type: Any
    help: str
    panel: str
    metavar: str | None = None
    names: tuple[str, ...] = ()

    def option(self, panel: str | None = None, help: str | None = None) -> Any:
        """The option for typer, in another panel or with another help text where a command needs
        that."""
        return typer.Option(
            *self.names,
            help=help or self.help,
            metavar=self.metavar,
            rich_help_panel=panel or self.panel,
        )


RUN_FACTS: Final = {
    "accelerator": SharedOption(str, "Accelerator, such as b200, for MFU.", RUN),
    "num_gpus": SharedOption(int, "GPUs of the whole run.", RUN),
    "params": SharedOption(str, "Parameters of the model, such as 70.55e9 or 70.55B.", RUN),
    "active_params": SharedOption(str, "Parameters that one token uses (mixture of experts).", RUN),
    "config": SharedOption(Path, "config.json of the model, for any formula.", RUN, "FILE"),
    "batch_size_per_gpu": SharedOption(int, "Sequences of a step on one GPU.", RUN),
    "global_batch_size": SharedOption(int, "Sequences of a step on all GPUs.", RUN),
    "sequence_length": SharedOption(int, "Tokens of a sequence.", RUN),
    "precision": SharedOption(str, "Precision of the peak: bf16 (default), fp8, ...", RUN),
    "formula": SharedOption(
        str,
        "FLOPs per token: 6N (default), palm, causal, torchtitan, megatron, hfu-full,"
        " hfu-attention.",
        RUN,
    ),
    "hardware": SharedOption(
        Path, "Your own hardware and prices, added to the built-in ones.", RUN, "FILE"
    ),
    "gpus_per_node": SharedOption(int, "GPUs in a node, for a price per node.", MONEY),
    "price_per_gpu_hour": SharedOption(
        float,
        "Price of a GPU; the report of a run directory has that of cluster.yaml's machine.",
        MONEY,
        "DOLLARS",
    ),
    "price_per_node_hour": SharedOption(
        float, "Price of a node, instead of a GPU.", MONEY, "DOLLARS"
    ),
    "framework": SharedOption(
        str, "Read as this format only, such as megatron; default: detected.", RANGE
    ),
    "start_step": SharedOption(
        int,
        "First step that counts; default: warm-up is detected.",
        RANGE,
        None,
        ("--start-step", "--start_step"),
    ),
    "end_step": SharedOption(
        int, "Last step that counts.", RANGE, None, ("--end-step", "--end_step")
    ),
    "logging_steps": SharedOption(
        int, "Steps between two logged lines, for a log whose lines carry no step.", RANGE
    ),
    "timezone": SharedOption(
        str, "Zone of time stamps without one, such as Europe/Zurich; default: UTC.", RANGE
    ),
}
"""Facts of a run that its log may not contain and the user knows: options of `metrics` and
`report`."""


def with_flags(function: Callable[..., None], flags: Mapping[str, Any]) -> Callable[..., None]:
    """Give parameters of a command what a table has for them: typer's options and arguments by
    parameter name."""
    hints = get_type_hints(function)
    function.__annotations__ |= {name: Annotated[hints[name], flag] for name, flag in flags.items()}
    return function


def add_options(
    function: Callable[..., None], options: Mapping[str, SharedOption], panel: str | None = None
) -> Callable[..., None]:
    """Give a command these options: it receives them as keyword arguments, None where not given."""
    signature = inspect.signature(function, eval_str=True)
    own = [
        each
        for each in signature.parameters.values()
        if each.kind is not inspect.Parameter.VAR_KEYWORD and each.name not in options
    ]
    added = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[row.type | None, row.option(panel)],
        )
        for name, row in options.items()
    ]
    vars(function)["__signature__"] = signature.replace(parameters=[*own, *added])
    return function


def print_trusted(limits: FetchLimits) -> None:
    """Print on standard error what --trust-config lets a command fetch and fill in; ranks print
    nothing."""
    if limits.settings and not is_rank():
        lines = ["fetched and filled in, as --trust-config says:", *limits.settings]
        typer.echo("\n  ".join(lines), err=True)


@contextmanager
def config_to_read(
    file: Path, overrides: list[str], *, trust_config: bool, everything: bool = False
) -> Iterator[RunConfig]:
    """The run config at `file`, and limits to fetching where it is one of a run directory.

    `overrides` were typed by the user, so they have no limits. `everything`: the command uses all
    of the config, in processes of its own that have no limits, so it is refused here. Raises
    UserError, and WithheldError for what may not be fetched (`fetch_limits.py`).
    """
    from drillyard.config.fetch_limits import FetchLimits, limited, withheld_error
    from drillyard.config.load import load_run_config
    from drillyard.config.run import RunConfig
    from drillyard.config.saved_config import (
        FETCHED_SECTIONS,
        is_saved_config,
        load_saved_config,
        settings_to_fetch,
        typed_texts,
    )

    if not is_saved_config(file):
        yield load_run_config(file, overrides)
        return
    config = load_saved_config(file, overrides)
    typed = typed_texts(config) - typed_texts(load_saved_config(file)) if overrides else frozenset()
    sections = list(RunConfig.model_fields) if everything else FETCHED_SECTIONS
    settings = settings_to_fetch(config, file, sections=sections, typed=typed)
    limits = FetchLimits(settings, typed)
    if trust_config:
        print_trusted(limits)
        yield load_run_config(file, overrides)
        return
    with limited(limits):
        if everything and settings:
            raise withheld_error(str(file))
        yield config


def find_run(path: Path, *, is_model: bool = False) -> Path:
    """`path`, or runs/`path` if only that exists. With `is_model` a missing path may be a model id.

    Raises NotFoundError for a name that neither has, with the runs that exist.
    """
    named = _RUNS / path
    if path.exists():
        return path
    if named.exists():
        return named
    if is_model or len(path.parts) > 1:
        return path
    found = sorted(each.parent.name for each in _RUNS.glob("*/events.jsonl"))
    more = f" and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
    there = (
        f"{_RUNS}/ has: {', '.join(found[:_MOST_SHOWN])}{more}" if found else f"{_RUNS}/ has no run"
    )
    raise NotFoundError(f"there is neither {path} nor {named} in {Path.cwd()}; {there}")


def find_runs(paths: list[str]) -> list[str]:
    """`find_run` for paths that may also be `-` or URLs."""
    return [path if path == "-" or "://" in path else str(find_run(Path(path))) for path in paths]


def print_json(document: Any, *, indent: int | None = 2, allow_nan: bool = False) -> None:
    """Print a JSON document on standard output, in one line without `indent`. `allow_nan`: it has
    numbers of others."""
    typer.echo(json.dumps(document, indent=indent, ensure_ascii=False, allow_nan=allow_nan))


def with_options(options: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command whose first parameter is `options`, a dataclass, one parameter for each of its
    fields.

    A field is annotated with its help (`estimation/request.py`, Flag); one without a default is an
    argument.
    """
    hints = get_type_hints(options, include_extras=True)
    flags = []
    for name, parameter in inspect.signature(options).parameters.items():
        kind, flag = get_args(hints[name])
        shown = {"help": flag.help, "metavar": flag.metavar}
        info = typer.Argument(**shown)
        if parameter.default is not inspect.Parameter.empty:
            info = typer.Option(
                *([flag.name] if flag.name else []), **shown, rich_help_panel=flag.panel
            )
        flags.append(parameter.replace(annotation=Annotated[kind, info]))

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        _, *own = signature.parameters.values()
        own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]

        @functools.wraps(function)
        def command(**values: Any) -> None:
            function(options(**{flag.name: values.pop(flag.name) for flag in flags}), **values)

        command.__dict__["__signature__"] = signature.replace(parameters=[*flags, *own])
        return command

    return decorate
