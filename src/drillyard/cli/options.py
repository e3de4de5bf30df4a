"""Options and arguments that several commands share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from drillyard.errors import NotFoundError

_RUNS = Path("runs")
_MOST_SHOWN = 8

PricePerGpuHour = Annotated[
    float | None,
    typer.Option("--price-per-gpu-hour", metavar="DOLLARS", help="For the cost; default: the machine's price."),
]
Interval = Annotated[
    float | None,
    typer.Option("--interval", min=0.05, metavar="SECONDS", help="Default: 1 on a terminal, 10 elsewhere."),
]
"""Of commands that follow a run live."""


def complete_run(incomplete: str) -> list[str]:
    """Handles and names of runs with this prefix, from the cache: completion contacts no cluster."""
    from drillyard.launch.completion_cache import remembered_runs

    handles = remembered_runs()
    names = [*dict.fromkeys(handle.run for handle in handles), *map(str, handles)]
    return [name for name in names if name.startswith(incomplete)]


_RUN = typer.Argument(
    metavar="RUN", help="Handle platform://cluster/run, or the run's name.", autocompletion=complete_run
)
RunArgument = Annotated[str, _RUN]
RunsArgument = Annotated[list[str], _RUN]
Cluster = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Search this cluster only; default: those launched on, else ./cluster.yaml."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def find_run(path: Path, *, is_model: bool = False) -> Path:
    """`path`, or runs/`path` where there is only that: a run may be given by its name.

    Raises UserError for a name that neither has, with the runs that there are. `is_model`: it may be an id instead.
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
    there = f"{_RUNS}/ has: {', '.join(found[:_MOST_SHOWN])}{more}" if found else f"{_RUNS}/ has no run"
    raise NotFoundError(f"there is neither {path} nor {named} in {Path.cwd()}; {there}")


def find_runs(paths: list[str]) -> list[str]:
    """The same for paths that may also be `-` or URLs."""
    return [path if path == "-" or "://" in path else str(find_run(Path(path))) for path in paths]


def with_options(options: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command whose first parameter is `options`, a dataclass, one parameter for each of its fields.

    A field is annotated with its help (`estimation/request.py`, Flag); one without a default is an argument.
    """
    hints = get_type_hints(options, include_extras=True)
    flags = []
    for name, parameter in inspect.signature(options).parameters.items():
        kind, flag = get_args(hints[name])
        shown = {"help": flag.help, "metavar": flag.metavar}
        info = typer.Argument(**shown)
        if parameter.default is not inspect.Parameter.empty:
            info = typer.Option(*([flag.name] if flag.name else []), **shown, rich_help_panel=flag.panel)
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
