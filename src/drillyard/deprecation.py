"""Old names of flags and config keys: they work for one minor release, with a warning that names the new one.

To rename a flag or a key, add a row here. Both tables are applied before anything is parsed, so that no command and no
config model knows an old name.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final

RENAMED_FLAGS: Final[dict[str, dict[str, str]]] = {}
"""By command ("estimate", "runs logs"): the old flag and the new one, each with its dashes."""
RENAMED_KEYS: Final[dict[str, str]] = {}
"""Old and new dotted keys of run.yaml and cluster.yaml."""


class RenamedWarning(FutureWarning):
    """An old name was used; the message has the new one."""


def warn_renamed(old: str, new: str) -> None:
    """Warn that `old` is now called `new`."""
    warnings.warn(f"{old} is now {new}; the old name works until the next minor release", RenamedWarning, stacklevel=3)


def rename_flags(
    command: str, arguments: Sequence[str], renamed: Mapping[str, Mapping[str, str]] = RENAMED_FLAGS
) -> list[str]:
    """`arguments` of a command with old flags replaced, `--old=value` too; what follows `--` is left alone."""
    flags = renamed.get(command, {})
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


def rename_keys(values: dict[str, Any], renamed: Mapping[str, str] = RENAMED_KEYS) -> None:
    """Move the values of old keys in a nested config to their new keys; a new key that is there too wins."""
    for old, new in renamed.items():
        *path, last = old.split(".")
        section: Any = values
        for key in path:
            section = section.get(key) if isinstance(section, dict) else None
        if not isinstance(section, dict) or last not in section:
            continue
        *path, new_last = new.split(".")
        target: Any = values
        for key in path:
            target = target.setdefault(key, {}) if isinstance(target, dict) else None
        if isinstance(target, dict):
            warn_renamed(old, new)
            target.setdefault(new_last, section.pop(last))


def rename_override(override: str, renamed: Mapping[str, str] = RENAMED_KEYS) -> str:
    """A KEY=VALUE of --set with its old key replaced."""
    key, equals, value = override.partition("=")
    if key.strip() not in renamed:
        return override
    warn_renamed(key.strip(), renamed[key.strip()])
    return f"{renamed[key.strip()]}{equals}{value}"
