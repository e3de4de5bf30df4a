"""Old names of flags and config keys: they work for one minor release, with a warning that names
the new one.

To rename a flag or a key, add a row here. Both tables are applied before anything is parsed, so
that no command and no config model knows an old name.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from itertools import takewhile
from traceback import walk_stack
from typing import Any, Final

RENAMED_FLAGS: Final[dict[str, dict[str, str]]] = {}
"""By command ("estimate", "runs logs"): the old flag and the new one, each with its dashes."""
RENAMED_KEYS: Final[dict[str, str]] = {}
"""Old and new dotted keys of run.yaml and cluster.yaml."""


class RenamedWarning(FutureWarning):
    """An old name was used; the message has the new one."""


def warn_renamed(old: str, new: str) -> None:
    """Warn, at the line that called into this package, that `old` is now written `new`."""
    frames = (frame for frame, _ in walk_stack(sys._getframe()))
    ours = takewhile(
        lambda frame: frame.f_globals.get("__name__", "").partition(".")[0] == "drillyard", frames
    )
    level = 1 + len(list(ours))
    warnings.warn(
        f"{old} is now {new}; the old form works until the next minor release",
        RenamedWarning,
        level,
    )


def rename_flags(arguments: Sequence[str], flags: Mapping[str, str]) -> list[str]:
    """`arguments` with the old flags of `flags` replaced, `--old=value` too; what follows `--` is
    left alone."""
    result: list[str] = []
    for position, argument in enumerate(arguments):
        if argument == "--":
            return [*result, *arguments[position:]]
        flag, equals, value = argument.partition("=")
        if flag in flags:
            warn_renamed(flag, flags[flag])
            flag = flags[flag]
        result.append(f"{flag}{equals}{value}")
    return result


def rename_key(old: str, new: str, values: dict[str, Any]) -> None:
    """Move the value of the key `old` in a nested config to `new`; a new key that is there too
    wins."""
    *path, last = old.split(".")
    section: Any = values
    for key in path:
        section = section.get(key) if isinstance(section, dict) else None
    if not isinstance(section, dict) or last not in section:
        return
    *path, new_last = new.split(".")
    target: Any = values
    for key in path:
        target = target.setdefault(key, {}) if isinstance(target, dict) else None
    if isinstance(target, dict):
        warn_renamed(old, new)
        target.setdefault(new_last, section.pop(last))


def rename_override(old: str, new: str, override: str) -> str:
    """A KEY=VALUE of --set with the key `old` replaced by `new`."""
    key, equals, value = override.partition("=")
    if key.strip() != old:
        return override
    warn_renamed(old, new)
    return f"{new}{equals}{value}"
