"""Where the files that a config names are: relative paths begin at the config, so that it works
from every directory.

One walk over all settings that are marked as files (`strict_model.FileMark`). A cluster config's
are beside it. Those of a run config are looked for beside it, then in the working directory; what
is in neither and does not look like a path is a name (an id of the hub, a built-in source). What
`--set` gives begins in the working directory, as any path that is typed. Texts with a reference to
the environment stay: they name a path that is known only where it is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from drillyard.config.environment import OPENING, EnvironmentText
from drillyard.config.problems import Path as KeyPath
from drillyard.config.problems import location_of, looks_like_file
from drillyard.config.strict_model import FileMark, StrictModel, file_mark

Config = TypeVar("Config", bound=StrictModel)
_TOKENS, _INDEX = ".bin", ".idx"
"""Megatron data may be named by what both files begin with."""


def with_files_beside(config: Config, file: str | os.PathLike[str]) -> Config:
    """`config`, read from `file`, with every file that it names absolute and beside it."""
    directory = Path(file).absolute().parent
    return _mapped(
        config, (), lambda text, mark, _: _beside(os.path.expanduser(text), [directory], mark)
    )


def with_found_files(
    config: Config,
    file: str | os.PathLike[str],
    is_override: Callable[[KeyPath], bool],
    *,
    for_launch: bool = False,
) -> Config:
    """`config`, read from `file`, with every file that it names absolute: beside it where it is
    there, else in the working directory. `is_override`: whether `--set` gave a setting.

    `for_launch`: those below the working directory are relative to it, as they are to the project's
    directory on the nodes. What is not here stays, as the nodes may have it; `~`, too, as they have
    another home.
    """
    here = Path.cwd()
    beside = Path(file).absolute().parent

    def found(text: str, mark: FileMark, path: KeyPath) -> str:
        if for_launch and (text.startswith(("/", "~")) or beside == here or is_override(path)):
            return text
        if mark.may_be_name and "://" in text:
            return text
        directories = [here] if is_override(path) else [beside, here]
        made = _beside(os.path.expanduser(text), directories, mark)
        if not for_launch or made == text:
            return made
        if not _exists(Path(made)):
            return text
        return os.path.relpath(made, here) if Path(made).is_relative_to(here) else made

    return _mapped(config, (), found)


def _beside(text: str, directories: Sequence[Path], mark: FileMark) -> str:
    """The path in the first of the directories that has it. What none has is in the first one, or
    stays where it may be a name."""
    if text in mark.words or os.path.isabs(text) or not text.strip():
        return text
    is_there = [directory for directory in directories if _exists(directory / text)]
    if not is_there and mark.may_be_name and not looks_like_file(text):
        return text
    return _normal([*is_there, *directories][0] / text)


def _exists(path: Path) -> bool:
    """Whether there is such a file, or a pair of Megatron data whose names begin so."""
    return os.path.lexists(path) or all(os.path.exists(f"{path}{end}") for end in (_TOKENS, _INDEX))


def _normal(path: Path) -> str:
    """`path` without `..`, unless that would be another file, behind a link."""
    shorter = os.path.normpath(path)
    return shorter if os.path.realpath(shorter) == os.path.realpath(path) else str(path)


def _mapped(
    config: Config, path: KeyPath, change: Callable[[str, FileMark, KeyPath], str]
) -> Config:
    """`config` with `change` applied to each text that is a file, in all sections."""

    def mapped(value: Any, mark: FileMark | None, path: KeyPath) -> Any:
        if isinstance(value, StrictModel):
            return _mapped(value, path, change)
        if mark is None:
            return value
        if isinstance(value, list):
            return [mapped(item, mark, (*path, number)) for number, item in enumerate(value)]
        if isinstance(value, dict):
            return {key: mapped(item, mark, (*path, key)) for key, item in value.items()}
        if not isinstance(value, str) or isinstance(value, EnvironmentText) or OPENING in value:
            return value
        return change(value, mark, path)

    update = {}
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if (new := mapped(value, file_mark(field), (*path, name))) != value:
            update[name] = new
    if not update:
        return config
    copied = config.model_copy(update=update)
    copied._origin = config._origin
    return copied


def is_set_by_option(config: StrictModel, first_order: int) -> Callable[[KeyPath], bool]:
    """Whether an override gave the setting at a path: its location's order is `first_order` or
    more."""
    places = config._origin.places
    return lambda path: places is not None and location_of(path, places).order >= first_order
