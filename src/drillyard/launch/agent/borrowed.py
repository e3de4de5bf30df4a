"""Modules that the agent shares with other rooms: one copy in the source tree, siblings of this file on the nodes.

They are of the standard library only as well. `shipped_files` is what a plan carries as its agent/ directory.
"""

from __future__ import annotations

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
    """The agent as it travels: the text of each of its files, by name, in order of names."""
    paths = {path.name: path for path in _HERE.glob("*.py")}
    paths.update({Path(str(each.__file__)).name: Path(str(each.__file__)) for each in _MODULES})
    return {name: paths[name].read_text(encoding="utf-8") for name in sorted(paths)}
