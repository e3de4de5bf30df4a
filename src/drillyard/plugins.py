"""Plug-ins: classes that other distributions register as entry points.

    [project.entry-points."drillyard.launchers"]
    fake = "fake_launcher:FakeLauncher"

A plug-in whose import fails, that lacks a method, or that takes the name of a built-in is left out:
one line on standard error names it and its distribution, once per process, and the command
continues.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pkgutil import resolve_name
from typing import Any


@cache
def load_plugins(
    group: str,
    base: str,
    built_in: Collection[str],
    why_unusable: Callable[[str, Any], str | None] | None = None,
) -> dict[str, Any]:
    """The usable classes of an entry point group by name. `base`: `module:Class` that each must
    extend.

    `why_unusable`: given a name and a class, what else is wrong with them, or None.
    """
    classes: dict[str, Any] = {}
    for entry in entry_points(group=group):
        try:
            found = _load(entry, base, {*built_in, *classes})
            if why_unusable is not None and (why := why_unusable(entry.name, found)) is not None:
                raise _Unusable(why)
            classes[entry.name] = found
        except (Exception, SystemExit) as error:
            why = (
                f"{type(error).__name__}: {error}"
                if not isinstance(error, _Unusable)
                else str(error)
            )
            line = " ".join(f"{_title(entry)} is left out: {why}".split())
            print(f"drillyard: {line}", file=sys.stderr)
    return classes


def plugin_title(group: str, name: str) -> str:
    """A loaded plug-in and its distribution, for errors: `drillyard.launchers 'fake' of
    fake-launcher 1.2`."""
    return _title(next(iter(entry_points(group=group, name=name))))


def _title(entry: EntryPoint) -> str:
    of = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown distribution"
    return f"{entry.group} '{entry.name}' of {of}"


class _Unusable(Exception):
    """A plug-in that was imported and cannot be used."""


def _load(entry: EntryPoint, base: str, taken: Collection[str]) -> Any:
    if entry.name in taken:
        raise _Unusable("the name is taken")
    found = entry.load()
    parent = resolve_name(base)
    if not (isinstance(found, type) and issubclass(found, parent)):
        raise _Unusable(f"{entry.value} does not extend {base.replace(':', '.')}")
    declared = [
        name for name, kind in parent.__annotations__.items() if str(kind).startswith("ClassVar")
    ]
    unset = [name for name in declared if not hasattr(found, name)]
    if missing := [*sorted(getattr(found, "__abstractmethods__", ())), *unset]:
        raise _Unusable(f"{entry.value} lacks {', '.join(missing)}")
    return found
