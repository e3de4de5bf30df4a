"""Plans as files and as explanations, for launches and clusters: a directory that holds a plan and
nothing else, the charts that come with the package, and why each field is as it is."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from drillyard.errors import UserError


@dataclass(frozen=True)
class PlanFile:
    """A generated file; `path` is relative to the launch directory."""

    path: str
    content: str
    mode: int = 0o644


@dataclass(frozen=True)
class ExplainedField:
    """One generated field, and why it has its value: what `--explain` prints."""

    place: str
    """Such as `job.sbatch: --requeue`, `environment: NCCL_NET`."""
    value: str
    reason: str
    source: str
    """The setting (`cluster.yaml: slurm.partition`), the fact with its origin, or `drillyard` for a
    choice of ours."""


def explained(place: str, value: Any, reason: str, source: str) -> ExplainedField:
    """A field whose value may be any JSON: text as it is, a number without needless digits."""
    shown = (
        value
        if isinstance(value, str)
        else f"{value:g}"
        if isinstance(value, float)
        else json.dumps(value)
    )
    return ExplainedField(place, shown, reason, source)


def explanation(title: str, fields: Iterable[ExplainedField]) -> str:
    """Every field as `--explain` prints it: where it is, its value, reason and source."""
    lines = [f"# {title}: why every generated field is as it is"]
    for field in fields:
        first, *more = field.value.splitlines() or [""]
        lines += ["", f"{field.place} = {first}", *(f"    | {line}" for line in more)]
        lines += [f"    why:    {field.reason}", f"    source: {field.source}"]
    return "\n".join(lines) + "\n"


def packaged_chart(name: str) -> dict[str, str]:
    """The text files of a Helm chart of ours by their paths in it, in the order of paths."""
    packaged: Traversable = files("drillyard").joinpath(f"charts/{name}")
    found = packaged if packaged.is_dir() else Path(__file__).parents[2] / f"charts/{name}"
    return dict(sorted(_below(found, "")))


def _below(directory: Traversable, path: str) -> Iterator[tuple[str, str]]:
    for each in directory.iterdir():
        if each.is_dir():
            yield from _below(each, f"{path}{each.name}/")
        else:
            yield f"{path}{each.name}", each.read_text(encoding="utf-8")


def write_plan_files(
    directory: Path,
    contents: Mapping[str, tuple[str, int]],
    *,
    script: str,
    made_by: str,
    overwrite: bool = False,
) -> list[Path]:
    """Write the files of a plan, each path below `directory` with its text and mode; returns their
    paths.

    `script` is the file whose line `made_by` shows that the directory has a plan. Raises UserError,
    with nothing written, where `directory` contains anything else, or, unless `overwrite`, a file
    with other content.
    """
    wanted = {directory / path: each for path, each in contents.items()}
    for each in (directory, *directory.parents):
        if each.exists() and not each.is_dir():
            raise UserError(
                f"{each}: is a file, and a plan is a directory of files; name a new one, such as"
                f" {each}-plan"
            )
    try:
        mark = directory / script
        is_plan = mark.is_file() and made_by in mark.read_text(encoding="utf-8", errors="replace")
        if not is_plan and directory.exists() and any(directory.iterdir()):
            raise UserError(f"{directory}: is not empty and contains no plan; name a new directory")
        changed = [
            path
            for path, (content, _) in wanted.items()
            if path.exists() and path.read_bytes() != content.encode()
        ]
    except OSError as error:
        raise UserError(
            f"{error.filename}: cannot be read ({error.strerror}); name a new directory"
        ) from None
    if changed and not overwrite:
        raise UserError(
            f"{changed[0]}: exists with other content; give --overwrite to replace this plan, or"
            " name a new directory"
        )
    for path, (content, mode) in wanted.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # A new file, so that the umask applies and a link is replaced.
            path.unlink(missing_ok=True)
            with open(
                os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8"
            ) as file:
                file.write(content)
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror})") from None
    return list(wanted)
