"""Modules that the agent shares with other rooms: one copy in the source tree, siblings of this file on the nodes.

They are of the standard library only as well. `shipped_files` is what a plan carries as its agent/ directory.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

_HERE = Path(__file__).resolve().parent

if TYPE_CHECKING or not (_HERE / "guardian.py").exists():
    from drillyard import redaction
    from drillyard.supervise import cause, guardian, launched, ports, process_identity, rules, signals
else:
    from . import cause, guardian, launched, ports, process_identity, redaction, rules, signals

__all__ = [
    "cause",
    "guardian",
    "launched",
    "ports",
    "process_identity",
    "redaction",
    "rules",
    "shipped_files",
    "signals",
]
_MODULES = (cause, guardian, launched, ports, process_identity, redaction, rules, signals)


def shipped_files() -> dict[str, str]:
    """The agent as it travels: the text of each of its files, by name, in order of names.

    Read as resources of the package, so that a zipped one has them too.
    """
    found = {each.name: each for each in files(__package__).iterdir() if each.name.endswith(".py")}
    for module in _MODULES:
        package, _, name = module.__name__.rpartition(".")
        found[f"{name}.py"] = files(package).joinpath(f"{name}.py")
    return {name: found[name].read_text(encoding="utf-8") for name in sorted(found)}
