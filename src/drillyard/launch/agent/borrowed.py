"""Modules that the agent shares with the supervisor: one copy in the source tree, siblings of this file on the nodes.

They are of the standard library only as well. `shipped_files` is what a plan carries as its agent/ directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

_HERE = Path(__file__).resolve().parent

if TYPE_CHECKING or not (_HERE / "guardian.py").exists():
    from drillyard.supervise import cause, guardian, signals
else:
    from . import cause, guardian, signals

__all__ = ["cause", "guardian", "shipped_files", "signals"]


def shipped_files() -> dict[str, str]:
    """The agent as it travels: the text of each of its files, by name, in order of names."""
    paths = {path.name: path for path in _HERE.glob("*.py")}
    paths.update({Path(each).name: Path(each) for each in (cause.__file__, guardian.__file__, signals.__file__)})
    return {name: paths[name].read_text(encoding="utf-8") for name in sorted(paths)}
